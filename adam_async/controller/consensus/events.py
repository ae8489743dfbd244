"""Pure: the events of a consensus node, and the effects that its shell carries out.

A `tag` is the caller's key of its request. Each request gets one answer, unless the process ends first.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from adam_async.controller.consensus.membership import Step
from adam_async.controller.consensus.messages import Entry, Message, Snapshot
from adam_async.controller.consensus.records import LogFileRecord

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived. It may be late, a copy, or for an earlier identity."""

    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline` is reached."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """All records up to those of the `Persist` with this number are synced to disk."""

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
    """Send this message now; it may be lost."""

    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Append these records to the file, in order, sync it, then report `Persisted(number)`.

    One sync may cover several `Persist` effects; `Persisted` with the last number then stands for all.
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
    """The proposal is committed and applied here; or leadership has ended after a request to transfer it."""

    tag: Hashable
    index: int
    """Index of the entry; 0 after a transfer."""


@dataclass(frozen=True, slots=True)
class ReadReady:
    """The present state of this node answers the read."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """The request has no effect; only an expired transfer may still have one. `leader` is None if unknown."""

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
