"""Pure: the events of a consensus node, and the effects that its shell carries out in order.

A `tag` is the caller's key of its request. Each request gets one answer, unless the process ends first.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from adam_async.controller.consensus.membership import Step
from adam_async.controller.consensus.messages import Entry, Message, Snapshot
from adam_async.controller.consensus.records import LogFileRecord

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived. The message may be late, a copy, or for an earlier identity."""

    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline` is reached."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """All records up to the `Persist` with this number are synced to disk."""

    number: int


@dataclass(frozen=True, slots=True)
class Propose:
    """A request to apply a command on all nodes."""

    tag: Hashable
    command: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A request to change the membership by one step."""

    tag: Hashable
    step: Step


@dataclass(frozen=True, slots=True)
class Read:
    """A request to read a state with all entries committed before now."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Transfer:
    """A request to hand leadership to another voter, such as before this node stops."""

    tag: Hashable
    to: str


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """The shell's state after the entry at `index`."""

    index: int
    state: bytes


Event = Received | Tick | Persisted | Propose | Change | Read | Transfer | Snapshotted

# --- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message now; the network may lose it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Append these records to the file in order, sync it, then report `Persisted(number)`.

    One sync may cover several `Persist` effects; `Persisted` with the last number then covers all.
    """

    number: int
    records: tuple[LogFileRecord, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these committed entries, which follow those applied. Entries without a command change nothing."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Replace the state by this later one."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Done:
    """The proposal is committed and applied here; or leadership has ended, after a transfer request."""

    tag: Hashable
    index: int
    """Index of the entry; 0 after a transfer."""


@dataclass(frozen=True, slots=True)
class ReadReady:
    """The present state of this node answers the read."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """The request has no effect, except perhaps an expired transfer. `leader` is None if unknown."""

    tag: Hashable
    reason: str
    leader: str | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The outcome of the proposal is unknown: a later leader may commit it or not."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Led:
    """The leader of this term; None while this node knows no leader."""

    term: int
    leader: str | None


Effect = Send | Persist | Apply | Restore | Done | ReadReady | Refused | Unknown | Led


# --- order of records and messages ------------------------------------------------------------


class Outbox:
    """A queue that keeps each message until the records made before it are on disk, both in order."""

    def __init__(self) -> None:
        self._records: list[LogFileRecord] = []
        self._written = 0
        """Number of the last `Persist`."""
        self._durable = 0
        self._held: deque[tuple[int, Message]] = deque()
        """Pairs: the number of a `Persist`, and a message that waits for that record."""

    def record(self, record: LogFileRecord) -> None:
        """Put a record into the next `Persist`."""
        self._records.append(record)

    def hold(self, message: Message) -> None:
        """Send a message once all records made so far are on disk."""
        self._held.append((self._written + bool(self._records), message))

    def persist(self) -> Persist | None:
        """Take the new records; None if there are none."""
        if not self._records:
            return None
        self._written += 1
        records, self._records = tuple(self._records), []
        return Persist(self._written, records)

    def persisted(self, number: int) -> None:
        """Note that all records up to this `Persist` are on disk."""
        assert number <= self._written, (number, self._written)
        self._durable = max(self._durable, number)

    def next(self) -> Message | None:
        """Take the first message whose records are on disk; None if there is none."""
        if not self._held or self._held[0][0] > self._durable:
            return None
        return self._held.popleft()[1]

    @property
    def is_settled(self) -> bool:
        """Whether no record and no message is due."""
        return not self._records and (not self._held or self._held[0][0] > self._durable)
