"""Pure: compares the groups that shards have counted with the result of an epoch.

The result names the skipped groups; all other groups are trained. An epoch's first groups have the images
that the previous epoch skipped, and are not skipped again (`no image is skipped twice`). Each trained group
is on every shard that takes gradients (`every group on every shard`), and no skipped group is on any (`no
other group`). A shard applies each group once (`each group once`). A shard has applied or refused at most as
many gradients as it has gained groups; equally many if each group is a step. The result has the losses of all
trained images, each once (`each loss once`).

    found = epoch_groups(epoch, result)
    check_groups("run-1/2", found, {"shard 3": tables.groups[2]}, counts)
    check_steps("shard 3", shard, loaded={}, single=True)
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from adam_async.messages import read_number
from adam_async.messages.group_sets import KEPT_EPOCHS
from adam_async.parameter_server.shard import Shard
from adam_async.run.cluster_map import EpochRecord
from adam_async.run.counts import EpochCounts
from adam_async.run.group_ranges import GroupSets, Ranges, common, without
from tests.simulation.scenario import Violation

COMPARED = "epochs compared with the shards"
"""Name of a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochGroups:
    """The groups of an ended epoch.

    Attributes:
        trained: Groups that were trained, including those that a resumed run began with.
    """

    trained: Ranges


def epoch_groups(epoch: EpochRecord, result: EpochCounts) -> EpochGroups:
    """Return the groups of an epoch with its result.

    Raises:
        Violation: The epoch has skipped images that the epoch before has skipped.
    """
    skipped = _flat(result.skipped_groups)
    if epoch.carried and (twice := common(skipped, 0, epoch.carried)):
        text = f"epoch {epoch.number} has skipped groups {twice}, and the first {epoch.carried} are carried"
        raise Violation("no image is skipped twice", text)
    return EpochGroups(trained=without((0, epoch.groups), skipped))


def check_groups(epoch: str, groups: EpochGroups, sets: Mapping[str, Ranges], counts: Counter[str]) -> None:
    """Compare the sets of shards with an epoch's groups.

    Args:
        epoch: Run and epoch, for texts.
        sets: Groups of this epoch, by name of the shard.

    Raises:
        Violation: A shard lacks a group, or has a group that it may not have.
    """
    for shard, found in sets.items():
        for invariant, problem in (
            ("every group on every shard", without(groups.trained, found)),
            ("no other group", without(found, groups.trained)),
        ):
            if problem:
                raise Violation(invariant, f"{shard} differs from the result of {epoch} in groups {problem}")
    counts[COMPARED] += 1


def check_losses(epoch: str, result: EpochCounts, *, least: float, most: float) -> None:
    """Compare an epoch's loss with its groups' losses.

    Args:
        epoch: Run and epoch, for texts.
        least: Least sum of its images' losses; workers may have trained a group several times.
        most: Largest sum.

    Raises:
        Violation: The loss of an image is missing, or counts twice.
    """
    images, loss = result.loss_images, read_number(result.loss) * result.loss_images
    slack = 1e-9 * most  # a mean and the sum of a step are rounded
    if images != result.images or not least - slack <= loss <= most + slack:
        text = f"not of {least} to {most} over {result.images} images"
        raise Violation("each loss once", f"{epoch} has a loss of {loss} over {images}, {text}")


def check_steps(name: str, shard: Shard, *, loaded: GroupSets, single: bool) -> None:
    """Check that a shard has taken no more gradients than it has gained groups.

    Args:
        loaded: Groups at the begin: a checkpoint's groups.
        single: Whether each step is one group.

    Raises:
        Violation: A gradient counted whose groups the shard had.
    """
    if len(shard.tables.groups) >= KEPT_EPOCHS:
        return  # sets of earlier epochs may be dropped
    waiting = [] if shard.pending is None else shard.pending.waiting.values()
    taken = shard.staleness.total() + shard.tables.refused + sum(map(len, waiting))
    groups = sum(map(_count, shard.tables.groups.values())) - sum(map(_count, loaded.values()))
    if taken > groups or (single and taken < groups):
        raise Violation("each group once", f"{name} has taken {taken} gradients of {groups} groups")


def _count(ranges: Ranges) -> int:
    return sum(ranges[1::2]) - sum(ranges[::2])


def _flat(pairs: Iterable[tuple[int, int]]) -> Ranges:
    return tuple(chain.from_iterable(pairs))
