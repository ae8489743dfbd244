"""Pure: the batch or the sum that a server applies to a store, piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adam_async.parameter_server.apply import Applier, Work
from adam_async.parameter_server.events import Apply, ApplySum, are_all_places
from adam_async.parameter_server.shard import Shard, leave_lent
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.parameter_server.vector_steps import work_on_step
from adam_async.run.shard_table import ShardSpec

ADDS = -1.0
"""Rate at which plain SGD adds a gradient: subtracting the product with -1 rounds as the sum does."""


@dataclass(slots=True, frozen=True)
class StoreWork:
    """A batch or a sum in progress."""

    batch: Apply | ApplySum
    shards: Sequence[Shard]
    work: Work
    begin: float
    """Begin of the work, on the timeline's clock."""
    may_refuse: bool = False
    """Whether the rule may refuse some of the pushes."""

    def leave_lent(self) -> None:
        """Move values that other processes read before changing them; see `leave_lent`."""
        if isinstance(self.shards, ShardGroup):
            self.shards.leave_lent()
        else:
            leave_lent(self.shards)

    @property
    def outcomes(self) -> Sequence[Sequence[bool]]:
        """See `Applied.outcomes`."""
        finite = self.work.finite
        return finite if self.may_refuse and not all(map(all, finite)) else ()


def begin_work(
    batch: Apply | ApplySum, applier_of: Callable[[ShardSpec], Applier], begin: float
) -> StoreWork:
    """Begin a batch or a sum.

    Args:
        applier_of: Returns the applier for a shard's family.
        begin: Time of the begin, on the timeline's clock.
    """
    if isinstance(batch, ApplySum):
        applier = applier_of(batch.shards[0].spec)
        gradients = [
            queued.gradients if are_all_places(places, queued.push) else queued.gradients.only(places)
            for queued, places in zip(batch.pushes, batch.places, strict=True)
        ]
        work = applier.work_on_sum(batch.shards, gradients, scale=batch.scale, rate=batch.rate)
        return StoreWork(batch, batch.shards, work, begin)
    shards, head = batch.shards(), batch.pushes[0].push
    if head.commands is not None:
        return StoreWork(batch, shards, work_on_step(batch.pushes[0], shards, applier_of), begin, True)
    applier = applier_of(shards[0].spec)
    is_whole = are_all_places(batch.pushes[0].accepted, batch.pushes[0].push)
    gradients = [
        queued.gradients if is_whole else queued.gradients.only(queued.accepted) for queued in batch.pushes
    ]
    targets = shards if not head.vector else _vectors_of(shards, head.vector)
    if len(targets) < len(shards):  # the vector lacks an array: no part of the batch takes effect
        refused: list[Sequence[bool]] = [(False,) * len(gradients)] * len(shards)
        return StoreWork(batch, shards, Work(iter([(0, refused)])), begin, True)
    if head.assign:
        return StoreWork(batch, shards, applier.work_on_assignment(targets, gradients[0]), begin)
    if head.vector:
        work = applier.adding.work_on(targets, gradients, [(ADDS,) * len(shards)] * len(gradients))
        return StoreWork(batch, shards, work, begin)
    work = applier.work_on(shards, gradients, batch.rates)
    return StoreWork(batch, shards, work, begin, applier.may_refuse)


def _vectors_of(shards: Sequence[Shard], number: int) -> Sequence[Shard]:
    """Return a vector of these shards as targets of a push, without the shards that lack it."""
    found = [(shard.spec, shard.vector(number)) for shard in shards]
    return [Shard(spec=spec, values=values, rule_state={}) for spec, values in found if values is not None]
