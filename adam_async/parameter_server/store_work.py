"""Pure: the batch or the sum that a server applies to a store, piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adam_async.parameter_server.apply import Applier, Work
from adam_async.parameter_server.events import Apply, ApplySum, are_all_places
from adam_async.parameter_server.shard import Shard
from adam_async.run.shard_table import ShardSpec


@dataclass(slots=True, frozen=True)
class StoreWork:
    """A batch or a sum in progress."""

    batch: Apply | ApplySum
    shards: Sequence[Shard]
    work: Work
    begin: float
    """Time of its begin, on the timeline's clock."""
    may_refuse: bool = False
    """Whether the rule may refuse some of the pushes."""

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
        applier_of: Returns the applier of the family of a shard.
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
    shards = batch.shards()
    applier = applier_of(shards[0].spec)
    is_whole = are_all_places(batch.pushes[0].accepted, batch.pushes[0].push)
    gradients = [
        queued.gradients if is_whole else queued.gradients.only(queued.accepted) for queued in batch.pushes
    ]
    if batch.pushes[0].push.assign:
        return StoreWork(batch, shards, applier.work_on_assignment(shards, gradients[0]), begin)
    work = applier.work_on(shards, gradients, batch.rates)
    return StoreWork(batch, shards, work, begin, applier.may_refuse)
