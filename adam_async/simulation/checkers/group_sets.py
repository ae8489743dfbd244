"""Pure: compares the groups that shards have counted with the ledger of leases, at the end of an epoch.

The ledger knows exactly which groups it has counted: each of them is on every shard that takes gradients
(`every group on every shard`). A shard has no further group, except skipped ones (`no other group`): a lost
replica pushed such a group before its lease returned and was skipped. A shard has a group twice only if the
lease of this group returned (`trained again`), because the lost replica had pushed the group and not reported
it. The ledger counts returned leases, and does not know which of them left pushes behind.

    found = epoch_groups(state, before=())
    check_groups("run-1/2", found, {"shard 3": tables.groups[2]}, counts)
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from adam_async.data_server.state import DataState
from adam_async.run.group_ranges import GroupSet, Ranges, name_groups, united, without
from adam_async.simulation.scenario import Violation

COMPARED = "epochs compared with the ledger"
TWICE = "groups twice on a shard"
RETURNED = "groups returned"
BEHIND = "skipped groups on a shard"
RAGGED = "skipped groups on some shards"
"""Names of counts; of the groups of an epoch, each counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochGroups:
    """The groups of an ended epoch in the ledger.

    Attributes:
        trained: Groups that this run has trained.
        skipped: Groups that the epoch has skipped.
        returned: Groups whose leases returned, without skipped ones.
    """

    trained: Ranges
    skipped: Ranges
    returned: Ranges


def epoch_groups(state: DataState, *, before: Iterable[tuple[int, int]]) -> EpochGroups | None:
    """Return the groups of the newest epoch of a ledger; None if the epoch has not ended.

    Args:
        before: Ranges of groups that were trained before the run was resumed.
    """
    ended = state.unreported()
    if ended is None:
        return None
    return EpochGroups(
        trained=without(_flat(state.trained().ranges), _flat(before)),
        skipped=_flat(ended.skipped),
        returned=name_groups(ended.number, ended.again)[1:],
    )


def check_groups(epoch: str, ledger: EpochGroups, sets: Mapping[str, GroupSet], counts: Counter[str]) -> None:
    """Compare the sets of shards with the ledger, and count the groups that shards have twice.

    Args:
        epoch: Run and epoch, for texts.
        sets: Groups of this epoch, by name of the shard.

    Raises:
        Violation: A shard lacks a group, or has one that it may not have.
    """
    for shard, found in sets.items():
        for invariant, problem in (
            ("every group on every shard", without(ledger.trained, found.groups)),
            ("no other group", without(without(found.groups, ledger.trained), ledger.skipped)),
            ("trained again", without(without(found.again, ledger.returned), ledger.skipped)),
        ):
            if problem:
                raise Violation(invariant, f"{shard} differs from the ledger of {epoch} in groups {problem}")
    behind = [without(found.groups, ledger.trained) for found in sets.values()]
    ragged = _union(without(_union(behind), each) for each in behind)
    counts[COMPARED] += 1
    counts[TWICE] += _count(_union(found.again for found in sets.values()))
    counts[RETURNED] += _count(ledger.returned)
    counts[BEHIND] += _count(_union(behind))
    counts[RAGGED] += _count(ragged)


def _union(several: Iterable[Ranges]) -> Ranges:
    whole: Ranges = ()
    for ranges in several:
        for start, stop in zip(ranges[::2], ranges[1::2], strict=True):
            whole = united(whole, start, stop)
    return whole


def _count(ranges: Ranges) -> int:
    return sum(ranges[1::2]) - sum(ranges[::2])


def _flat(pairs: Iterable[tuple[int, int]]) -> Ranges:
    return tuple(chain.from_iterable(pairs))
