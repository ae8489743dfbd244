"""Pure: the state that all roles of a member share: record, log, pieces and effects.

The effects of a bundle's member, which its shell carries out in their order.
"""

from dataclasses import dataclass, field
from typing import Any

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.parameter_server.replication.log import Entry, Log
from adam_async.run.bundle_record import BundleRecord, Member

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
    """Number of pieces of its state, such as one for each shard and one for the tables."""
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
    """Position of each piece of the state that this member has; it gets the pieces in their order."""
    proposed: BundleRecord | None = None
    """Proposed successor of `record`, which the map may have already; None without a proposal."""
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
        """Send a message on the link to a member."""
        self.effects.append(Send(to, message, content))

    def propose_record(self, record: BundleRecord) -> None:
        """Propose a record to the map, in place of the present one."""
        assert self.proposed is None, f"{self.proposed} is on its way"
        self.proposed = record
        self.repeat_proposal()

    def repeat_proposal(self) -> None:
        """Send the proposal, or send it again: its version lets it take effect only once."""
        if self.proposed is not None:
            self.effects.append(ProposeRecord(self.proposed, self.record.changed))
