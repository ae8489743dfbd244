"""Pure: worker and parameter server: gradients that are pushed or recorded, values that are pulled.

A driver pulls too.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    MOST_IN_A_META,
    Clock,
    DrawnId,
    Epoch,
    Images,
    Place,
    Places,
    PushNumber,
    PushNumbers,
    Rate,
    ReplicaNumber,
    RunId,
    Seconds,
    Shards,
    Staleness,
    Version,
    Versions,
)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """How the gradient of some shards rides along."""

    factors: bool
    """False: one flat tensor, the shards' deltas one after the other. True: two tensors, activations
    (I, K) and error gradients (R, K) for the R rows of all these shards, which are of one tensor."""
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_IN_A_META)]
    """Shards that this part covers."""


class Push(Body, frozen=True, kw_only=True):
    """One step's gradients for the shards of one server.

    `shards`, `numbers`, `versions`, `own` run in parallel, in the order of `parts`.
    """

    run: RunId
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    clock: Clock
    """Step of the replica, from 1, that these gradients end."""
    images: Images
    rate: Rate
    generation: Version
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    shards: Shards
    numbers: PushNumbers
    """The push's number on each shard, from 1 without gaps per (session, shard)."""
    versions: Versions
    """Oldest version of the shard that the step's groups read."""
    own_applied: PushNumbers
    """Own pushes since that version which a local step had already applied to the copy read."""
    pull: bool = False
    """Whether the answer shall carry the values of these shards, with this push in them."""
    epoch: Epoch = 0
    """In ssp and bsp the epoch of its groups: the server orders it once it has heard of that epoch, and with
    it of all replicas that take part. 0 in asp: at once."""


APPLIED, DUPLICATE, REFUSED, GAP, NOT_PRIMARY = range(5)
"""What became of a push on one shard. REFUSED: not finite, or in bsp too late for the sum of its clock; it
consumed its number and ticked."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a push that was not simply applied."""

    index: Place
    """Position of the shard in the push."""
    status: Place
    expected: PushNumber = 0
    """For GAP: the number that the server wants next."""


class Pushed(Body, frozen=True, kw_only=True):
    """Acknowledgement: the version of each shard after the push, and what was out of order.

    Tensor, if the push asked for it and every shard of it is settled: the values, as in `Values`.
    """

    versions: Versions
    problems: Annotated[tuple[Problem, ...], msgspec.Meta(max_length=MOST_IN_A_META)] = ()
    clock: Clock = 0
    """With values: all pushes of live replicas up to this clock are in them."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step that a compute thread has already applied to the shards' own memory."""

    clock: Clock
    """Step of the replica, from 1."""
    images: Images
    staleness: Staleness
    """Steps that others applied to that memory while this one was computed."""
    refused: Places = ()
    """Positions, among the record's shards, whose gradient was not finite and was not applied."""


class Record(Body, frozen=True, kw_only=True):
    """Steps of a run that trains in place: numbered like pushes, counted and clocked, without payload."""

    run: RunId
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    generation: Version
    shards: Shards
    number: PushNumber
    """Number of the first step, on each of these shards; the others follow it."""
    steps: Annotated[tuple[StepRecord, ...], msgspec.Meta(min_length=1, max_length=MOST_IN_A_META)]


class Recorded(Body, frozen=True, kw_only=True):
    """Acknowledgement of a record."""


class Tick(Body, frozen=True, kw_only=True):
    """The replica's step `clock` ended without a push for these shards."""

    run: RunId
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    clock: Clock
    generation: Version
    shards: Shards
    numbers: PushNumbers = ()
    """The replica's last push on each of these shards: a server that has not seen it refuses the tick with
    code ``gap``, for it would say that the push had been applied."""
    epoch: Epoch = 0
    """As in `Push`."""


class Ticked(Body, frozen=True, kw_only=True):
    """Acknowledgement of a tick."""


class Pull(Body, frozen=True, kw_only=True):
    """Ask for the values of shards; what came before on the same link is in them."""

    run: RunId
    generation: Version
    shards: Shards
    clock: Clock = 0
    """Answer when all pushes of live replicas up to this clock are in the values; 0: at once."""
    wait_s: Seconds = 0.0
    """But answer after this long at the latest, then perhaps without values."""


class Values(Body, frozen=True, kw_only=True):
    """Tensor: the values of the shards asked for, one after the other, flat, copied by the server."""

    versions: Versions
    """Empty, and no tensor, if the clock that was asked for had not come within the time."""
    clock: Clock
    """Slowest clock of these shards: all pushes of live replicas up to it are in the values, and a joining
    replica starts there."""
    behind: Annotated[tuple[ReplicaNumber, ...], msgspec.Meta(max_length=MOST_IN_A_META)] = ()
    """Without values: the replicas that are waited for."""


ROWS: Rows = {
    Push: frozenset({("worker", "ps")}),
    Pushed: frozenset({("ps", "worker")}),
    Record: frozenset({("worker", "ps")}),
    Recorded: frozenset({("ps", "worker")}),
    Tick: frozenset({("worker", "ps")}),
    Ticked: frozenset({("ps", "worker")}),
    Pull: frozenset({("worker", "ps"), ("driver", "ps")}),
    Values: frozenset({("ps", "worker"), ("ps", "driver")}),
}
