"""Pure: one log on several servers, which survives the loss of all but one member in sync.

`member.py` takes all calls, and passes them to the member's present role, a primary (`primary.py`) or a
secondary (`secondary.py`). Both roles share the record, the log, the pieces and the effects (`local_copy.py`;
it also has the kinds of effects and of refused messages).

Theory of operation
-------------------
A `BundleMember` is one server's copy of a bundle. Calls are its input, and effects its output. The core has
no clock: the shell decides that a member is silent. Only the cluster map decides which member is the primary.
The begin of a session with a newer record waits until the member has that record.

*Commit and apply.* The primary numbers entries and sends them to all members. An entry is committed once all
members in sync, at least `min_in_sync`, hold it. During a change of the record, the members in sync before
and after it count: the map may have the change already. Each member applies committed entries in order.

*Why a later primary has all committed entries.* A primary was in sync before it became primary, so each
earlier commit waited for it. A member drops an uncommitted entry only if the present primary sends another
entry for the same position. By induction over the primaries, a committed entry has no such rival. So a new
primary keeps its whole log. An old primary commits no more entries: it waits for a member that follows the
new primary.

*Why a member drops the entries after a conflicting one.* An entry depends on all entries before it. Position
and generation identify an entry and all entries before it: a primary never changes its log, and takes over
its predecessors' entries unchanged. An entry without its past is meaningless.

*Sessions.* The primary numbers its sessions with a member, one session per link. `Begin` asks the member up
to which position both logs are equal: the committed entries and those from this primary are equal. The
entries after it follow, and `Held` acknowledges them. The member ignores messages of an earlier session.

*Joining.* A joining member drops its copy. A joining member first gets all entries in the log, some of which
other members may still need. Then it gets the state in pieces, each at the position that the primary has
applied. The member applies entries only as far as the primary has, so a piece is never older than the
member's applied entries. For a piece it skips the entries up to the piece's position, and all entries while
it lacks the piece: see `applies_to`. So an entry's effect on a piece must depend on the entry and that piece
alone.

*Dropping entries.* Members drop the entries that all members have applied, also the joining ones with a
session. So each member's log begins at or before the applied position of every other member in sync.

*The shell* carries out `take_effects` after each call, and reports each record of the map. The shell calls
`report` once per iteration of its loop, and applies entries in the order of `Apply`, in any number of rounds.
The shell splits the contents of large messages into parts. A `Violation` ends the link that brought the
message.
"""
