"""Pure: what happens to a node of a group, and what its shell is to do about it.

`tag` is whatever the caller wants to find its question by again; every question is answered once, unless
the process ends first.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from adam_async.controller.consensus.membership import Step
from adam_async.controller.consensus.messages import Entry, Message, Snapshot
from adam_async.controller.consensus.records import Record

# --- what happens ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message came. It may be late, come twice, or be meant for an earlier life."""

    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline` has come."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """All records up to those of this `Persist` are on disk, synced."""

    number: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Someone wants a command to be applied everywhere."""

    tag: Hashable
    command: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """Someone wants the membership to change by one step."""

    tag: Hashable
    step: Step


@dataclass(frozen=True, slots=True)
class Read:
    """Someone wants to read a state that has all that was committed before now."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Transfer:
    """Someone wants another voter to lead, such as before this node stops."""

    tag: Hashable
    to: str


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """The shell wrote down its state as it was after the entry at `index`."""

    index: int
    state: bytes


Event = Received | Tick | Persisted | Propose | Change | Read | Transfer | Snapshotted

# --- what to do ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this, now; it may be lost."""

    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Append these records to the file, in order, sync it, then say `Persisted(number)`.

    Several of them may be synced at once: say the last number.
    """

    number: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """These entries are committed, and follow the last ones. Those without a command change nothing."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Forget the state; this is a later one."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Done:
    """What was proposed is committed and has been applied here; or this node leads no more, as wanted."""

    tag: Hashable
    index: int
    """Where it stands; 0 after a transfer."""


@dataclass(frozen=True, slots=True)
class ReadReady:
    """The state as it is here, now, is what may be read."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done, nor will be. `leader` is who may do it, if that is known."""

    tag: Hashable
    reason: str
    leader: str | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """What was proposed may be committed, or may not be, then or later: the leader of its term is gone."""

    tag: Hashable


@dataclass(frozen=True, slots=True)
class Led:
    """In this term the group is led by this node; None: by nobody that is known here."""

    term: int
    leader: str | None


Effect = Send | Persist | Apply | Restore | Done | ReadReady | Refused | Unknown | Led
