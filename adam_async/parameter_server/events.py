"""Pure: the events that reach a parameter server, its queued requests, and the effects for its shell.

The shell turns messages into events for `ServerState`, which returns effects. A `Request` is the shell's
handle on a question: it goes in with the event and comes back in the effect that answers it. Types with an
instance for every push are msgspec structs, because compiled code creates those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from adam_async.messages import (
    BundleSets,
    Problem,
    Pull,
    Push,
    Pushed,
    ReadShards,
    ReportSteps,
    ShardsPinned,
    ShardStates,
    StepsReported,
    Tick,
    Ticked,
    Values,
)
from adam_async.messages.body import Clock, DrawnId, Epoch, PinName
from adam_async.parameter_server.apply import PIECE_WORK
from adam_async.parameter_server.gradients import PushGradients
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.run.group_ranges import Ranges
from adam_async.run.ids import Replica
from adam_async.run.store_record import MOST_VECTORS, VectorRecord

Request = Any
"""The shell's handle on a question."""


# --- events ----------------------------------------------------------------------------------


class PushArrived(msgspec.Struct, frozen=True, eq=False):
    """A push arrived."""

    request: Request
    push: Push
    gradients: PushGradients
    finite: Sequence[bool] | None = None
    """Whether each shard's gradient is finite at the push's rate; None if all are."""


@dataclass(frozen=True, slots=True, eq=False)
class StepsArrived:
    """Compute threads applied steps to the shards' memory."""

    request: Request | None
    """The report; None if the server found the steps in an ended worker's notes."""
    report: ReportSteps


@dataclass(frozen=True, slots=True, eq=False)
class TickArrived:
    """A replica ended a step on some shards."""

    request: Request
    tick: Tick


@dataclass(frozen=True, slots=True, eq=False)
class PullArrived:
    """A client pulls the values of shards, or the driver reads shards with their whole state."""

    request: Request
    pull: Pull | ReadShards
    deadline: float = 0.0
    """Latest time of the answer if the clock of the pull is not reached before."""
    link: Any = None
    """Link of the pull; the server limits the waiting requests of each link."""
    until: float = 0.0
    """In bsp, the time until which the server keeps the shards at a reader's clock for its next read."""


@dataclass(frozen=True, slots=True, eq=False)
class SetsAsked:
    """A data server asks for the groups of an epoch that the shards have."""

    request: Request
    generation: int
    """Version of the assignment of buckets to servers."""
    epoch: int


class Applied(msgspec.Struct, frozen=True, eq=False):
    """The shell applied a batch."""

    batch: "Apply"
    outcomes: Sequence[Sequence[bool]] = ()
    """For each shard of the batch, whether the rule took each push; empty if it took all."""


@dataclass(frozen=True, slots=True, eq=False)
class SumApplied:
    """The shell has done some shards of a sum; `finite` tells for each whether the sum was applied."""

    sum: "ApplySum"
    finite: Sequence[bool]
    first: int = 0
    """Index in the sum of the first shard in `finite`; the shell reports each shard once, in order."""


class ReplicasChanged(msgspec.Struct, frozen=True, array_like=True, tag="live"):
    """The controllers changed the live replicas, each with its generation."""

    live: Mapping[Replica, DrawnId]


class EpochBegan(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """The controllers began an epoch; `ReplicasChanged` has named the replicas that take part."""

    number: Epoch
    first_clock: Clock
    """Clock of every replica at the beginning of the epoch."""


class Pin(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """Keep the shards as they are at this place of the log under a name, or give that up."""

    name: PinName
    pin: DrawnId
    """Id that the client has drawn."""
    removes: bool = False


class VectorsChanged(msgspec.Struct, frozen=True, array_like=True, tag="vectors"):
    """Clients added vectors to the store, or deleted some."""

    vectors: Annotated[tuple[VectorRecord, ...], msgspec.Meta(max_length=MOST_VECTORS)]
    """All vectors that the store has from now on."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPin:
    """A pin, and the request that is answered when the pin ends."""

    request: Request
    pin: Pin


Event = (
    PushArrived
    | StepsArrived
    | TickArrived
    | PullArrived
    | SetsAsked
    | QueuedPin
    | Applied
    | SumApplied
    | ReplicasChanged
    | EpochBegan
    | VectorsChanged
)


# --- queued requests -------------------------------------------------------------------------


class QueuedPush(msgspec.Struct, eq=False):
    """A push that waits to be applied, or is being applied."""

    request: Request
    push: Push
    shards: tuple[Shard | None, ...]
    """The shard at each place of the push; None if another server has it."""
    gradients: PushGradients
    accepted: Sequence[int]
    """Places with the next number and a finite gradient; `problems` has the other places."""
    problems: list[Problem]
    refused: Sequence[int] = ()
    """Places with the next number but a gradient that is not finite; also in `problems`."""
    known: Sequence[int] = ()
    """Places with the next number whose shard has the groups already; also in `problems`."""

    @property
    def unapplied(self) -> tuple[int, ...]:
        """Places that use up their number without an applied gradient."""
        return (*self.refused, *self.known)

    def shards_at(self, places: Sequence[int]) -> list[Shard]:
        return [shard for place in places if (shard := self.shards[place]) is not None]

    def unapplied_shards(self) -> list[Shard]:
        """Return the shards at the places in `unapplied`."""
        return self.shards_at(self.unapplied)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPull:
    """A pull or reading that waits for the pushes before it, then perhaps for a clock."""

    request: Request
    shards: tuple[Shard, ...]
    clock: int = 0
    deadline: float = 0.0
    link: Any = None
    is_reading: bool = False
    """Whether the answer has the whole state of the shards."""
    vector: int = 0
    """Number of the vector to read; 0 for the values."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedSets:
    """A question for the groups of the shards that waits for the pushes before it."""

    request: Request
    shards: tuple[Shard, ...]
    """The trainable shards."""
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class QueuedTick:
    """A tick that waits for the pushes before it."""

    request: Request
    tick: Tick


class Contribute(msgspec.Struct, frozen=True, eq=False):
    """In bsp, the contributions of one push to the sums of its clock."""

    queued: QueuedPush


class ForgetSessions(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Forget the pushes of sessions without a live generation, to make room for others."""

    sessions: tuple[tuple[DrawnId, DrawnId], ...]


def are_all_places(places: Sequence[int], push: Push) -> bool:
    """Return whether these are all places of a push, in order; a damaged entry may have others."""
    return tuple(places) == tuple(range(len(push.shards)))


# --- effects ---------------------------------------------------------------------------------


class Apply(msgspec.Struct, frozen=True, eq=False):
    """A batch: apply these pushes, shard by shard and per shard in this order, then report `Applied`.

    All pushes accept the same places, with the same shards.
    """

    pushes: tuple[QueuedPush, ...]
    rates: tuple[tuple[float, ...], ...] | None = None
    """Rate of each push at each accepted place; None for the push's own rate."""

    def shards(self) -> Sequence[Shard]:
        """Return the shards to apply to, one for each accepted place."""
        first = self.pushes[0]
        if isinstance(first.shards, ShardGroup) and are_all_places(first.accepted, first.push):
            return first.shards
        found = [first.shards[place] for place in first.accepted]
        return [shard for shard in found if shard is not None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ApplySum:
    """Add up these contributions in this order, multiply by `scale`, apply once, then report `SumApplied`."""

    clock: int
    shards: tuple[Shard, ...]
    pushes: tuple[QueuedPush, ...]
    """Pushes with the contributions, in replica order."""
    places: tuple[tuple[int, ...], ...]
    """Indexes of the shards in each push."""
    scale: float

    @property
    def rate(self) -> float:
        """Rate of the push from the lowest-numbered replica; its images come first in the sum."""
        return self.pushes[0].push.rate

    def split(self, shards: int) -> tuple["ApplySum", "ApplySum | None"]:
        """Split the sum after some shards; the second part is None if no shards are left."""
        if shards >= len(self.shards):
            return self, None
        parts = [
            ApplySum(
                clock=self.clock,
                shards=self.shards[part],
                pushes=self.pushes,
                places=tuple([places[part] for places in self.places]),
                scale=self.scale,
            )
            for part in (slice(0, shards), slice(shards, None))
        ]
        return parts[0], parts[1]


class Answer(msgspec.Struct, frozen=True, eq=False):
    """Answer a request, with the values of `shards` if there are any."""

    request: Request
    body: Pushed | Ticked | StepsReported | Values | ShardStates | ShardsPinned
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SendValues:
    """Answer a pull with a copy of these shards' current values, or of one of their vectors."""

    request: Request
    shards: tuple[Shard, ...]
    vector: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SendStates:
    """Answer with a copy of these shards and their whole state."""

    request: Request
    shards: tuple[Shard, ...]
    clock: int = 0
    """In bsp, the clock of the copies; 0 for the shards as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class SendSets:
    """Answer which of the asked groups all of these sets have, and which some lack."""

    request: Request
    body: BundleSets
    several: tuple[Ranges, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Refuse:
    """Answer with an error: code and a sentence."""

    request: Request
    code: str
    text: str


Entry = (
    Apply
    | Contribute
    | QueuedTick
    | QueuedPin
    | ReplicasChanged
    | EpochBegan
    | VectorsChanged
    | StepsArrived
    | ForgetSessions
)
"""An entry of a bundle's log; the shards are a function of the log."""


def moves_clocks(entry: Entry) -> bool:
    """Return whether an applied entry may move the clock of values.

    A push of a client in asp has no clock.
    """
    if isinstance(entry, QueuedPin | VectorsChanged):
        return False
    return not isinstance(entry, Apply) or any(queued.push.clock for queued in entry.pushes)


def is_torn(batch: Apply | ApplySum | None) -> bool:
    """Return whether a batch in progress has changed values that no version counts yet."""
    # A sum changes and counts each shard at once, and only a very large one in pieces.
    if isinstance(batch, ApplySum):
        return max([len(shard.values) for shard in batch.shards]) > PIECE_WORK
    return batch is not None


def requests_of(entry: Entry) -> list[Request]:
    """Return the requests that the end of an entry answers."""
    match entry:
        case Apply():
            return [queued.request for queued in entry.pushes]
        case Contribute():
            return [entry.queued.request]
        case QueuedTick() | QueuedPin():
            return [entry.request]
        case StepsArrived():
            return [entry.request] if entry.request is not None else []
        case _:
            return []


@dataclass(slots=True, eq=False)
class InFlight:
    """An entry of this primary that is not yet applied, and the requests that wait for it."""

    entry: Entry
    done: bool = False
    behind: list[QueuedPull | QueuedPush | QueuedSets | QueuedTick] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Propose:
    """Put an entry into the log, and report it with `ServerState.committed` once it is committed."""

    entry: Entry


class KeepPin(msgspec.Struct, frozen=True, eq=False):
    """Save the shards that `Bundle.pinning` has for a pin, or remove the pin from the disk."""

    pin: Pin


Effect = Propose | KeepPin | Answer | SendValues | SendStates | SendSets | Refuse
