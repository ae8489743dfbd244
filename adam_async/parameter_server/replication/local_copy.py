"""Pure: the state that all roles of a member share: record, log, pieces and effects.

The shell of the member carries out the effects in their order.
"""

from dataclasses import dataclass, field
from typing import Any

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.run.store_record import BundleRecord, Member


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. Position and generation identify it and all entries before it."""

    position: int
    """Number of the entry, from 1."""
    generation: int
    """Generation of the primary that formed it."""
    content: Any
    """Content of the entry, which the log never reads."""
    nbytes: int
    """Size of the content, in bytes."""


class Log:
    """Entries from `start` + 1 to `last`.

    ``start <= applied <= committed <= last``. The log has dropped the entries up to `start`.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.last = start
        """Position of the last entry."""
        self.committed = start
        """Position of the last entry that may be applied."""
        self.applied = start
        """Position of the last entry that the shell has applied."""
        self.nbytes = 0
        """Size of all entries, in bytes."""
        self._entries: dict[int, Entry] = {}

    def __repr__(self) -> str:
        return f"<Log {self.start} < {self.applied} <= {self.committed} <= {self.last}>"

    def at(self, position: int) -> Entry | None:
        """Return an entry; None outside the log."""
        return self._entries.get(position)

    def after(self, position: int) -> list[Entry]:
        """Return the entries after a position, which is `start` or later."""
        return [self._entries[each] for each in range(position + 1, self.last + 1)]

    def bytes_between(self, start: int, last: int) -> int:
        """Return the size of the entries after `start`, up to `last`, in bytes."""
        return sum(self._entries[each].nbytes for each in range(max(start, self.start) + 1, last + 1))

    def append(self, generation: int, content: Any, nbytes: int) -> Entry:
        """Add an entry of this member, the primary."""
        entry = Entry(self.last + 1, generation, content, nbytes)
        self._add(entry)
        return entry

    def put(self, entry: Entry) -> None:
        """Take an entry of the primary that is not committed here; its position is at most `last` + 1.

        A different entry at this position is dropped, with all later entries, which depend on it.
        """
        known = self._entries.get(entry.position)
        if known is not None and known.generation == entry.generation:
            return
        self._drop_from(entry.position)
        self._add(entry)

    def commit(self, position: int) -> tuple[Entry, ...]:
        """Commit the entries up to a position; return the newly committed ones."""
        new = tuple(self._entries[each] for each in range(self.committed + 1, position + 1))
        self.committed = max(self.committed, position)
        return new

    def truncate(self, position: int) -> None:
        """Drop the entries up to a position, but only those applied here."""
        while self.start < min(position, self.applied):
            self.start += 1
            self.nbytes -= self._entries.pop(self.start).nbytes

    def _add(self, entry: Entry) -> None:
        self._entries[entry.position] = entry
        self.last = entry.position
        self.nbytes += entry.nbytes

    def _drop_from(self, position: int) -> None:
        for each in range(position, self.last + 1):
            self.nbytes -= self._entries.pop(each).nbytes
        self.last = min(self.last, position - 1)


Message = Begin | Begun | Copy | Committed | Held | PieceCopy
"""A message about a bundle, between two of its members."""

MESSAGES = (Begin, Begun, Copy, Committed, Held, PieceCopy)
"""The classes of the union `Message`."""


class Violation(Exception):
    """A message that no correct member sends; it has no effect. The shell ends its link.

    Attributes:
        rule: Short fixed name of the rule.
        detail: The value that breaks the rule.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the present link to a member; without a link, drop the message."""

    to: Member
    message: Message
    content: Any = None
    """Whole content of a `Copy` or `PieceCopy`, which the shell may split into parts."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply entries in their order, and call `applied` after each. An entry may take several rounds."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class ProposeRecord:
    """Set the bundle's record in the cluster map if the record there still has the expected version.

    The shell reports the outcome by the record that the map then has, or calls
    `repeat_proposal`.
    """

    record: BundleRecord
    expected: int


@dataclass(frozen=True, slots=True)
class BecamePrimary:
    """Build the front from the bundle: all earlier entries are applied, and this member takes new ones."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Drop the front: a newer primary exists. The shell refuses unanswered requests."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Drop the copy: the bundle's record no longer has this member."""


@dataclass(frozen=True, slots=True)
class StartAnew:
    """Drop the copy: this member joins, and receives all pieces."""


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Copy a piece of the state for a joining member and call `piece_copied`."""

    to: Member
    session: int
    piece: int


@dataclass(frozen=True, slots=True)
class TakePiece:
    """Take a piece of the state from the primary. The piece contains all entries up to a position."""

    piece: int
    position: int
    content: Any


Effect = Send | Apply | ProposeRecord | BecamePrimary | Stopped | Removed | StartAnew | CopyPiece | TakePiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Constants of a bundle."""

    store: str
    """Id of the store."""
    home: str
    """Node after which the bundle is named."""
    pieces: int
    """Number of pieces in the member's state, such as one per shard and one for the tables."""
    min_in_sync: int = 1
    """Minimum number of members in sync for a commit."""


@dataclass(eq=False)
class LocalCopy:
    """One member's copy of a bundle."""

    me: Member
    """Node and incarnation of this server."""
    bundle: Bundle
    record: BundleRecord
    """The newest record that this member has seen in the cluster map."""
    log: Log = field(default_factory=Log)
    pieces: list[int] = field(default_factory=list)
    """Position of each piece of the state that this member has; it gets the pieces in order."""
    proposed: BundleRecord | None = None
    """Proposed successor of `record`, perhaps already in the map; None without a proposal."""
    effects: list[Effect] = field(default_factory=list)

    @property
    def of_bundle(self) -> dict[str, Any]:
        """Fields that all messages about the bundle have."""
        return {"store": self.bundle.store, "home": self.bundle.home, "generation": self.record.generation}

    @property
    def is_whole(self) -> bool:
        """Whether this member has all pieces."""
        return len(self.pieces) == self.bundle.pieces

    def drop(self, start: int = 0, *, pieces: int = 0) -> None:
        """Begin an empty log after a position, with a number of pieces at that position."""
        self.log, self.pieces = Log(start), [start] * pieces

    def send(self, to: Member, message: Message, content: Any = None) -> None:
        self.effects.append(Send(to, message, content))

    def propose_record(self, record: BundleRecord) -> None:
        """Propose a record to the map, to replace the present record."""
        assert self.proposed is None, f"{self.proposed} is on its way"
        self.proposed = record
        self.repeat_proposal()

    def repeat_proposal(self) -> None:
        """Send the proposal, or send it again: its version lets it take effect only once."""
        if self.proposed is not None:
            self.effects.append(ProposeRecord(self.proposed, self.record.changed))
