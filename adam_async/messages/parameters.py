"""Pure: worker and parameter server: pushes of gradients, reports of steps, pulls of values.

Clients push, tick and pull as workers do; drivers and readers only pull.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import (
    MOST_IN_A_META,
    ArrayName,
    Body,
    Clock,
    DrawnId,
    Epoch,
    Finite,
    Index,
    Indices,
    Loss,
    NamedGroups,
    PushNumber,
    PushNumberOfEach,
    Rate,
    ReplicaNumber,
    Rows,
    Seconds,
    Shards,
    Staleness,
    StoreId,
    VectorNumber,
    Version,
    VersionOfEach,
    Weight,
)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Form of the gradient of some shards in a push."""

    factors: bool
    """Whether the part is two tensors: activations (I, K) and error gradients (R, K), where R is the number
    of rows of these shards of one array. Otherwise the part is one flat tensor with all deltas."""
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_IN_A_META)]
    """Number of shards that this part covers."""


MOST_TERMS = 64
"""Maximum number of terms in a command, of commands in a step, and of its dot products."""


class Command(msgspec.Struct, frozen=True, array_like=True):
    """Sum of scaled vectors, which replaces a vector on the shards that have it."""

    into: VectorNumber
    terms: Annotated[tuple[tuple[Finite, VectorNumber], ...], msgspec.Meta(max_length=MOST_TERMS)]
    """Coefficient and vector of each term, in the order of the sum."""
    array: ArrayName = ""
    """The only array whose shards the command changes; empty for all arrays of the vector."""


class DotProduct(msgspec.Struct, frozen=True, array_like=True):
    """Sum of the products of two vectors, on the shards that have both."""

    first: VectorNumber
    second: VectorNumber
    array: ArrayName = ""
    """The only array whose shards count; empty for all arrays of both vectors."""


class Commands(msgspec.Struct, frozen=True, array_like=True):
    """Commands on the vectors of a store, applied in their order, and dot products of the outcome."""

    combine: Annotated[tuple[Command, ...], msgspec.Meta(max_length=MOST_TERMS)]
    dots: Annotated[tuple[DotProduct, ...], msgspec.Meta(max_length=MOST_TERMS)]

    def vectors(self) -> set[int]:
        """Return the numbers of all vectors in the step."""
        operands = {number for each in self.combine for _, number in (*each.terms, (0.0, each.into))}
        return operands.union(*((each.first, each.second) for each in self.dots)) - {0}


class Push(Body, frozen=True, kw_only=True):
    """Gradients of one step, values to assign, or commands on vectors, for shards of one server.

    `shards` has one entry per shard, in the order of `parts`. `numbers`, `versions` and `own_applied` are one
    number for all shards, or have one entry per shard.
    """

    store: StoreId
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    clock: Clock
    """Step of the replica, from 1, that ends with these gradients."""
    weight: Weight
    """Weight of the contribution in a sum's mean; in training its number of images."""
    rate: Rate
    generation: Version
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    shards: Shards
    numbers: PushNumberOfEach
    """Number of the push on each shard, from 1 without gaps per (session, shard)."""
    versions: VersionOfEach
    """Oldest version of each shard that the step's groups read."""
    own_applied: PushNumberOfEach
    """For each shard, number of the worker's own pushes that are newer than the version in `versions` and
    that local steps had already applied to the copy when the groups read it."""
    pull: bool = False
    """Whether the answer has the values of these shards after this push."""
    epoch: Epoch = 0
    """Epoch of the groups in ssp and bsp: the server orders the push once it knows the epoch, and so the
    epoch's replicas. 0 in asp: the server orders the push at once."""
    assign: bool = False
    """Whether the tensors are values to replace those of the shards, instead of gradients."""
    groups: NamedGroups = ()
    """Groups whose gradients the step sums, all of one epoch; none from clients."""
    loss_sum: Loss | None = None
    """Sum of the losses over the images of `groups`, which are `weight` images; None from clients, and from
    parts of a cut replica that do not compute the loss."""
    recorded: bool = False
    """Whether the last tensor has the reads of the step's groups, as bytes, for a record of the run."""
    vector: VectorNumber = 0
    """Vector to which the gradients are added, or whose values are assigned; 0 for the values."""
    commands: Commands | None = None
    """Commands instead of tensors, for all shards of a bundle that are pushed to: `shards` names the first
    shard, and `numbers` has one number for all or one for each. An assignment: `assign` is set."""

    def named_vectors(self) -> set[int]:
        """Return the numbers of all vectors that the push names."""
        return {self.vector} - {0} if self.commands is None else self.commands.vectors()


MOST_PARTIALS = 48
"""Maximum number of float64 that do not overlap: the range of their exponents has 2,098 bits, each has 53."""

APPLIED, DUPLICATE, REFUSED, GAP, NOT_PRIMARY = range(5)
"""Outcomes of a push on one shard. REFUSED: the gradient is not finite, or in bsp too late for the sum of its
clock; the push still consumed its number and counted as a tick."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a push with another outcome than APPLIED."""

    index: Index
    """Position of the shard in the push."""
    status: Index
    expected: PushNumber = 0
    """Next number that the server expects, if the outcome is GAP."""


class Pushed(Body, frozen=True, kw_only=True):
    """Acknowledgement: the version of each shard after the push, and the exceptional outcomes.

    If the push has `pull` and each of its shards is settled, one tensor: the values, as in `Values`.
    """

    versions: VersionOfEach
    problems: Annotated[tuple[Problem, ...], msgspec.Meta(max_length=MOST_IN_A_META)] = ()
    clock: Clock = 0
    """Clock of the values, if the message has them: the values include all live replicas' pushes up to it."""
    dots: Annotated[
        tuple[Annotated[tuple[Finite, ...], msgspec.Meta(max_length=MOST_PARTIALS)], ...],
        msgspec.Meta(max_length=MOST_TERMS),
    ] = ()
    """For each dot product of a step, numbers whose exact sum is that of the shards; none if a product or a
    sum overflows float64."""
    epoch: Epoch | msgspec.UnsetType = msgspec.UNSET
    """Highest epoch of the groups that the shards have, in the answer to a step."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """One step that a compute thread has already applied to the shards' memory."""

    clock: Clock
    """Step of the replica, from 1."""
    weight: Weight
    staleness: Staleness
    """Number of steps that others applied to that memory while this step was computed."""
    refused: Indices = ()
    """Indices, among the report's shards, of gradients that were not finite and not applied."""
    groups: NamedGroups = ()
    """Groups of the step, as in `Push`."""
    loss_sum: Loss | None = None


class ReportSteps(Body, frozen=True, kw_only=True):
    """Steps of a run that trains in place: numbered, counted and clocked like pushes, without payload."""

    store: StoreId
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    generation: Version
    shards: Shards
    number: PushNumber
    """Number of the first step on each of these shards; the other steps follow it."""
    steps: Annotated[tuple[StepReport, ...], msgspec.Meta(min_length=1, max_length=MOST_IN_A_META)]


class StepsReported(Body, frozen=True, kw_only=True):
    """Acknowledgement of a step report."""


class Tick(Body, frozen=True, kw_only=True):
    """End of the replica's step `clock` without a push for these shards."""

    store: StoreId
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    clock: Clock
    generation: Version
    shards: Shards
    numbers: PushNumberOfEach = 0
    """Number of the replica's last push on each of these shards; 0 for none. A server without that push
    refuses the tick with code ``gap``, because the tick would count the push as applied."""
    epoch: Epoch = 0
    """Epoch, as in `Push`."""


class Ticked(Body, frozen=True, kw_only=True):
    """Acknowledgement of a tick."""


class Pull(Body, frozen=True, kw_only=True):
    """Request for the values of shards, with the effects of all earlier messages on the same link."""

    store: StoreId
    generation: Version
    shards: Shards
    clock: Clock = 0
    """Clock for which the answer waits: the values then contain all pushes of live replicas up to this clock.
    0: no wait."""
    wait_s: Seconds = 0.0
    """Maximum wait, in seconds, after which the answer may have no values."""
    vector: VectorNumber = 0
    """Vector to read; 0 for the values."""


class Values(Body, frozen=True, kw_only=True):
    """Values of shards. Tensor: concatenated flat values of the requested shards, copied by the server."""

    versions: VersionOfEach
    """Versions of the shards; empty, and without a tensor, if the requested clock was not reached in time."""
    clock: Clock
    """Slowest clock of these shards: the values include all live replicas' pushes up to this clock, and a
    joining replica starts at it."""
    behind: Annotated[tuple[ReplicaNumber, ...], msgspec.Meta(max_length=MOST_IN_A_META)] = ()
    """Replicas that the server waits for, if the answer has no values."""
    deleted: bool = False
    """Whether a shard has no such vector; the tensor is then empty."""


PULLERS = ("worker", "driver", "client", "reader")
"""Roles that pull values."""

ROWS: Rows = {
    Push: frozenset({("worker", "ps"), ("client", "ps")}),
    Pushed: frozenset({("ps", "worker"), ("ps", "client")}),
    ReportSteps: frozenset({("worker", "ps")}),
    StepsReported: frozenset({("ps", "worker")}),
    Tick: frozenset({("worker", "ps"), ("client", "ps")}),
    Ticked: frozenset({("ps", "worker"), ("ps", "client")}),
    Pull: frozenset((role, "ps") for role in PULLERS),
    Values: frozenset(("ps", role) for role in PULLERS),
}
