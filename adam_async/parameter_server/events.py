"""Pure: what comes in at a parameter server, what waits there, and what is to be done about it.

The shell turns messages into events and hands them to `ServerState`, which returns effects. A `Request` is
the shell's handle on a question: it goes in with the event and comes back in the effect that answers it.
The records that every push makes are structs of msgspec, because those are made in compiled code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from adam_async.messages import Problem, Pull, Push, Pushed, ReadShards, Record, Tick
from adam_async.parameter_server.apply import PushGradients
from adam_async.parameter_server.shard import Shard
from adam_async.run.ids import Replica

Request = Any
"""The shell's handle on a question."""


# --- events ----------------------------------------------------------------------------------


class PushArrived(msgspec.Struct, frozen=True, eq=False):
    """A push came in."""

    request: Request
    push: Push
    gradients: PushGradients
    finite: Sequence[bool] | None = None
    """In bsp, shard by shard: whether it may be held. Otherwise whoever applies it looks."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordArrived:
    """Steps were applied to the shards' memory by compute threads of this process."""

    request: Request
    record: Record


@dataclass(frozen=True, slots=True, eq=False)
class TickArrived:
    """A replica ended a step without pushing some shards."""

    request: Request
    tick: Tick


@dataclass(frozen=True, slots=True, eq=False)
class PullArrived:
    """A client wants the values of shards."""

    request: Request
    pull: Pull
    deadline: float = 0.0
    """When to answer at the latest, if it wants a clock that has not come."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadArrived:
    """The driver wants shards with all that travels with them."""

    request: Request
    read: ReadShards
    deadline: float
    """When to answer at the latest, if the sum of a step is not complete."""


class Applied(msgspec.Struct, frozen=True, eq=False):
    """The shell applied a batch; `finite` says, shard by shard, for each push whether it was applied."""

    batch: "Apply"
    finite: Sequence[Sequence[bool]]


@dataclass(frozen=True, slots=True, eq=False)
class SumApplied:
    """The shell applied a sum to some of its shards; `finite` says, shard by shard, whether it was."""

    sum: "ApplySum"
    finite: Sequence[bool]
    first: int = 0
    """Index in the sum of the first shard in `finite`; each is reported once, in order."""


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The controllers decided which replicas are live, and in which incarnation of their workers."""

    live: Mapping[Replica, int]


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """The controllers began an epoch; the replicas that take part in it are known by now."""

    number: int
    first_clock: int
    """Where the clock of every replica stands."""


Event = (
    PushArrived
    | RecordArrived
    | TickArrived
    | PullArrived
    | ReadArrived
    | Applied
    | SumApplied
    | ReplicasChanged
    | EpochBegan
)


# --- what waits ------------------------------------------------------------------------------


class QueuedPush(msgspec.Struct, eq=False):
    """A push that waits to be applied, or is being applied."""

    request: Request
    push: Push
    shards: tuple[Shard | None, ...]
    """Shard of each place of the push; None where it is not ours."""
    gradients: PushGradients
    accepted: Sequence[int]
    """Places whose number was the next one; the others are in `problems`."""
    problems: list[Problem]


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPull:
    """A pull that waits for the pushes before it, then perhaps for a clock."""

    request: Request
    shards: tuple[Shard, ...]
    clock: int = 0
    deadline: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class QueuedRead:
    """A reading of shards that waits for the pushes before it, then perhaps for sums."""

    request: Request
    shards: tuple[Shard, ...]
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class QueuedTick:
    """A tick that waits for the pushes before it."""

    request: Request
    tick: Tick


# --- effects ---------------------------------------------------------------------------------


class Apply(msgspec.Struct, frozen=True, eq=False):
    """Apply these pushes, shard by shard and per shard in this order, then report `Applied`.

    All of them have the same accepted places and the same shards there.
    """

    pushes: tuple[QueuedPush, ...]
    rates: tuple[tuple[float, ...], ...] | None = None
    """For each push its rate on each accepted place, where that is not simply the push's."""

    def shards(self) -> list[Shard]:
        """The shards to apply to, one for each accepted place."""
        first = self.pushes[0]
        found = [first.shards[place] for place in first.accepted]
        return [shard for shard in found if shard is not None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ApplySum:
    """Add up these contributions in this order, multiply by `scale`, apply once, then report `SumApplied`."""

    clock: int
    shards: tuple[Shard, ...]
    pushes: tuple[QueuedPush, ...]
    """By replica."""
    places: tuple[tuple[int, ...], ...]
    """For each push, where in it the shards are."""
    scale: float

    @property
    def rate(self) -> float:
        """The rate of the lowest replica's step, whose images come first in the batch that the step is."""
        return self.pushes[0].push.rate


class Acknowledge(msgspec.Struct, frozen=True, eq=False):
    """Answer a push; with the values of `shards`, if there are any."""

    request: Request
    body: Pushed
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AcknowledgeRecord:
    """Answer a record."""

    request: Request


@dataclass(frozen=True, slots=True, eq=False)
class AcknowledgeTick:
    """Answer a tick."""

    request: Request


@dataclass(frozen=True, slots=True, eq=False)
class SendValues:
    """Answer a pull with a copy of these shards as they are now."""

    request: Request
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SendBehind:
    """Answer a pull without values: the clock that it wants has not come in time."""

    request: Request
    clock: int
    behind: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SendStates:
    """Answer with a copy of these shards and of all that travels with them."""

    request: Request
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Refuse:
    """Answer with an error: code and a sentence."""

    request: Request
    code: str
    text: str


Effect = Acknowledge | AcknowledgeRecord | AcknowledgeTick | SendValues | SendBehind | SendStates | Refuse
