"""Pure: consensus on a log of commands, under faults of network, disks and clocks.

The protocol is Multi-Paxos with a stable leader, as in Raft; `core.py` is one node of it.
docs/explanation/consensus.md has the duties of a shell.

`events.py` has a node's inputs and effects, and `messages.py` the messages between nodes. `log.py` has one
node's entries and snapshot, and `leading.py` a leader's view of the others' logs. `membership.py` has the
voters and learners, with times and sizes, and `roles.py` a node's roles. `records.py` turns the durable state
into bytes and back. `violations.py` detects messages that no correct node sends.

Theory of operation
-------------------
Events are the input of the core, and effects its output. Time and random numbers are arguments. The core
never waits: pending work is a field, and every event examines it again.

*Terms.* Each term has at most one leader: a node votes once in a term, and a leader has a majority's votes.
Index and term name an entry, and a term's leader never puts two entries at one index. A follower takes
entries only after an entry that both logs have. So two logs that share an entry are equal up to it.

*Durable first.* Changes in memory that are not on disk yet are records, which the effect `Persist` writes. A
message waits until all records made before it are on disk. This also holds for messages to the node itself: a
candidate's own vote and a leader's own entries count once they are on disk. So a crash forgets no vote or
acknowledgement that another node has. A leader may send entries before they are on its own disk, because the
term that identifies them was durable before its election. A group of one node, and group commit (one sync for
many records), need no further rule.

*Why a leader has all committed entries.* An entry of the leader's own term is committed once a majority has
it. A later leader has a majority's votes, so one of its voters had the entry when it voted. A node votes only
for a candidate whose log ends at least as late as its own. By induction over the terms between, the later
leader has the entry. A leader never commits an earlier term's entry by counting its copies: a log without the
entry may end at a later term, and its node may then win an election. The first committed entry of the
leader's own term commits the earlier ones too. So each leader begins its term with an empty entry.

*Why reads see all writes.* A read notes the commit index, or the index of the leader's first entry if that is
higher: all entries that earlier leaders committed come before that entry. The read then joins the next round
of messages. If a majority answers the round in this term, no later leader existed when the round began. So
the noted index covers all writes committed by then. The answer waits until that index is applied.

*Why membership may change by one node.* A membership is in force as soon as it is in a log. Majorities of two
memberships one step apart overlap, so their elections and commits exclude each other. A step begins only
after the step before, and an entry of the leader's own term, are committed. Otherwise leaders of two terms
could each have a step unknown to the other, and these memberships are two steps apart.

*Stability.* A node that misses its leader asks the voters whether they would vote for it (*pre-vote*) before
it raises its term. A node that receives messages of a leader does not answer. So a node that returns from a
partition raises no term and deposes no leader. A leader resigns if it has no messages from a majority for an
election time-out (*check-quorum*). Otherwise a leader that can send but not receive would prevent an
election. Safety needs neither check, and no clock.
"""

from adam_async.controller.consensus.core import Core
from adam_async.controller.consensus.events import (
    Apply,
    Change,
    Done,
    Effect,
    Event,
    Led,
    Persist,
    Persisted,
    Propose,
    Read,
    ReadReady,
    Received,
    Refused,
    Restore,
    Send,
    Snapshotted,
    Tick,
    Transfer,
    Unknown,
)
from adam_async.controller.consensus.membership import Members, MembershipError, Settings, Step, identity
from adam_async.controller.consensus.messages import Entry, Message, Snapshot
from adam_async.controller.consensus.records import DamagedLog, Saved, Writer, bootstrapped, recover
from adam_async.controller.consensus.roles import Role
from adam_async.controller.consensus.violations import Contents, Violation
