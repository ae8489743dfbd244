"""Pure: the state that all roles of a member share: record, log, pieces and effects."""

from dataclasses import dataclass, field
from typing import Any

from adam_async.parameter_server.replication.effects import Effect, Message, ProposeRecord, Send
from adam_async.parameter_server.replication.log import Log
from adam_async.run.bundle_record import BundleRecord, Member


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


@dataclass(slots=True)
class LocalCopy:
    """One member's copy of a bundle."""

    me: Member
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
    def is_whole(self) -> bool:
        """Whether this member has all pieces."""
        return len(self.pieces) == self.bundle.pieces

    def drop(self, start: int = 0, *, pieces: int = 0) -> None:
        """Begin an empty log after a position, with a number of pieces at that position."""
        self.log, self.pieces = Log(start), [start] * pieces

    def send(self, to: Member, message: Message, content: Any = None) -> None:
        """Send a message on the link to a member."""
        self.effects.append(Send(to, message, content))

    def propose(self, record: BundleRecord) -> None:
        """Propose a record to the map, in place of the present one."""
        assert self.proposed is None, f"{self.proposed} is on its way"
        self.proposed = record
        self.repeat_proposal()

    def repeat_proposal(self) -> None:
        """Send the proposal, or send it again: its version lets it take effect only once."""
        if self.proposed is not None:
            self.effects.append(ProposeRecord(self.proposed, self.record.changed))
