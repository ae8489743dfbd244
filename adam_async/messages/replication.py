"""Pure: parameter servers among themselves: a bundle's log, from its primary to the other members.

Most messages belong to the bundle of `store` and `home`, to one of its generations, `generation`, and to a
*session*. The primary numbers its sessions with the other members, and begins a session with each new link.
The contents of entries and pieces travel as tensors.
"""

from adam_async.messages.body import Body, Count, Digest, Index, NodeId, Rows, StoreId, Version


class _OfSession(Body, frozen=True, kw_only=True):
    """A message of a session, or its answer."""

    store: StoreId
    home: NodeId
    generation: Version
    session: Count


class Begin(_OfSession, frozen=True, kw_only=True):
    """A new session, from the primary. The answer is `Begun`; then entries follow."""

    version: Version
    """Version of the bundle's record that the primary has; a member with an older record waits for this
    version."""
    start: Count
    """Position before the first entry that the primary still has."""
    anew: bool = False
    """Whether the member must drop its copy. The primary then sends all entries after `start`, and all
    pieces."""


class Begun(_OfSession, frozen=True, kw_only=True):
    """Answer to `Begin`."""

    position: Count
    """Position up to which the member's log equals the primary's: the primary sends the entries after it."""
    applied: Count
    """Position of the last entry that the member has applied."""


class Copy(_OfSession, frozen=True, kw_only=True):
    """One entry, or a part of it. Tensors: the content."""

    position: Count
    origin: Version
    """Generation of the primary that formed the entry."""
    nbytes: Count
    """Size of the whole content, in bytes."""
    committed: Count
    """Position of the last entry that the member may apply."""
    applied_by_all: Count
    """Position of the last entry that all members have applied: entries up to it may be dropped."""
    part: Index = 0
    parts: Index = 1


class Committed(_OfSession, frozen=True, kw_only=True):
    """The two positions of a `Copy`, without an entry."""

    committed: Count
    applied_by_all: Count


class Held(_OfSession, frozen=True, kw_only=True):
    """Acknowledgement of all entries up to a position, and of pieces."""

    position: Count
    """Position up to which the member's log equals the primary's."""
    applied: Count
    pieces: Index
    """Number of pieces that the member has."""
    offered: Count | None = None
    """Position of the next piece on a joining member's disk; None if the disk lacks it."""


class PieceCopy(_OfSession, frozen=True, kw_only=True):
    """One piece of the state, or a part of a piece, for a joining member. Tensors: the content.

    With a `digest` the content lacks the arrays: those on the disk of the member must have this digest.
    """

    piece: Index
    position: Count
    """Position of the last entry in the piece."""
    origin: Version = 0
    """Generation of the primary that formed this entry."""
    changed: Count = 0
    """Position of the last entry that changed an array of the piece, or a later position."""
    digest: Digest = b""
    """SHA-256 digest of the arrays; empty if the content has them."""
    nbytes: Count
    part: Index = 0
    parts: Index = 1


class Beat(Body, frozen=True, kw_only=True):
    """Heartbeat of one server to another."""


ROWS: Rows = {
    Beat: frozenset({("ps", "ps")}),
    Begin: frozenset({("ps", "ps")}),
    Begun: frozenset({("ps", "ps")}),
    Copy: frozenset({("ps", "ps")}),
    Committed: frozenset({("ps", "ps")}),
    Held: frozenset({("ps", "ps")}),
    PieceCopy: frozenset({("ps", "ps")}),
}
