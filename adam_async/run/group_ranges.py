"""Pure: sets of groups as ranges, the groups in a step's gradients, and sums of their losses.

*Ranges* are one flat tuple of ascending numbers: the first group of a range and one past its last, then the
same for the next range. Ranges never touch, so equal sets are equal tuples. A step *names* its groups as
their epoch and their ranges:

    name_groups(2, [7, 1, 0])            # (2, 0, 2, 7, 8)

A shard's tables have the groups that they have counted, by epoch (`GroupSets`). Sets never change:
`with_groups` returns new ones. So tables with equal sets share them until one table counts another push.

With each set the tables have the summed losses of its images (`messages/group_sets.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from adam_async.messages.group_sets import (
    KEPT_EPOCHS,
    MOST_BOUNDS,
    MOST_GROUP,
    MOST_IMAGES,
    MOST_LOSS,
    UNITS,
    LossSum,
    LossSums,
)

Ranges = tuple[int, ...]

LEAST_BOUNDS = 1 << 9
"""Number of range bounds in a set for each shard that has it, up to `MOST_BOUNDS`, on a server with many
shards."""

MOST_WORK = 1 << 14
"""Work of one message on different sets: its own bounds times the number of sets, about 15 ms."""

KEPT_PER_WORK = 64
"""Number of range bounds that are copied as fast as one bound is found."""

WINDOW_BOUNDS = 1 << 14
"""Number of range bounds, over all sets, that one piece of a merge covers: a few ms."""

_SAMPLED = 64
"""Distance of the bounds from which a merge takes its windows."""

GroupSets = Mapping[int, Ranges]
"""Groups that a shard has counted, by epoch."""

EVERY: Ranges = (0, MOST_GROUP)
"""All groups that an epoch can have."""


def name_groups(epoch: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the name of some groups in an epoch."""
    ranges: Ranges = ()
    for number in numbers:
        ranges = united(ranges, (number, number + 1))
    return (epoch, *ranges)


def groups_fault(named: tuple[int, ...]) -> str:
    """Return why a tuple names no groups; empty if it names some, or is an empty tuple."""
    if not named:
        return ""
    if not named[0] or len(named) < 3 or not len(named) % 2:
        return f"groups are an epoch from 1 and ranges of two numbers each, not {named[:8]}"
    for one, other in pairwise(named[1:]):
        if one >= other:
            return f"ranges of groups ascend and do not touch: {other} follows {one}"
    return ""


def united(ranges: Ranges, others: Ranges) -> Ranges:
    """Return ranges joined with others, which may overlap or touch them."""
    found: list[int] = []
    at = 0
    for start, stop in zip(others[::2], others[1::2], strict=True):
        first = bisect_left(ranges, start, at)
        last = bisect_right(ranges, stop, first)
        # Copy each bound once, because a peer chooses the number of ranges.
        found += ranges[at:first]
        # An even index lies between two ranges, an odd one within a range.
        if not first % 2:
            found.append(start)
        if not last % 2:
            found.append(stop)
        at = last
    return (*found, *ranges[at:])


def common(ranges: Sequence[int], start: int, stop: int) -> Ranges:
    """Return the part of ranges within one range."""
    first, last = bisect_right(ranges, start), bisect_left(ranges, stop)
    begin = (start,) if first % 2 else ()
    end = (stop,) if last % 2 else ()
    return (*begin, *ranges[first:last], *end)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the groups of some ranges that are not in other ranges."""
    found: list[int] = []
    edges = (0, *others, max(ranges[-1:], default=0))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        found += common(ranges, start, stop) if start < stop else ()
    return tuple(found)


def common_and_others(several: Collection[Ranges]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, as ranges, the groups that all of several sets have, and the others that some have."""
    work = merging(several)
    while True:
        try:
            next(work)
        except StopIteration as done:
            every, some = done.value
            return every, some


def merging(
    several: Collection[Ranges],
) -> Generator[None, None, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Do the work of `common_and_others` in pieces of a few ms, and yield between them.

    The groups are cut into windows with about `WINDOW_BOUNDS` bounds of the sets.
    """
    arrays: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    waiting = 0
    for ranges in several:
        arrays.append(np.array(ranges, np.int64))
        waiting += len(ranges)
        if waiting > WINDOW_BOUNDS:
            waiting = 0
            yield
    bounds = np.concatenate(arrays)
    cuts = np.sort(bounds[::_SAMPLED])[WINDOW_BOUNDS // _SAMPLED :: WINDOW_BOUNDS // _SAMPLED]
    found: tuple[list[NDArray[np.int64]], ...] = [], []
    had, before = [False, False], 0
    for low, high in pairwise((-1, *np.unique(cuts).tolist(), MOST_GROUP)):
        places = np.flatnonzero((low < bounds) & (bounds <= high))
        numbers, at = np.unique(bounds[places], return_inverse=True)
        # Bounds alternate in each set: with the first of a range a set begins to have the groups.
        having = before + np.cumsum(np.bincount(at, 1 - places % 2 * 2).astype(np.int64))
        masks = having == len(several), (0 < having) & (having < len(several))
        for each, mask in enumerate(masks if len(numbers) else ()):
            found[each].append(numbers[np.flatnonzero(np.diff(mask, prepend=had[each]))])
            had[each], before = bool(mask[-1]), int(having[-1])
        yield
    every, some = (np.concatenate(each or arrays[:1]) for each in found)
    return every, some


def has_groups(sets: GroupSets, named: tuple[int, ...]) -> bool | None:
    """Return whether sets have all named groups (True) or none (False); None if they have only some.

    If the epoch's set is dropped, the shards have all.
    """
    groups = sets.get(named[0])
    if groups is None:
        return is_dropped(sets, named[0])
    # Usually the groups of a step are behind all others.
    if not groups or named[1] >= groups[-1]:
        return False
    found: bool | None = None
    at = 0
    for start, stop in zip(named[1::2], named[2::2], strict=True):
        at = bisect_right(groups, start, at)
        # An odd index lies within a range.
        is_within = at % 2 == 1
        if bisect_left(groups, stop, at) != at or found not in (None, is_within):
            return None
        found = is_within
    return found


def is_dropped(sets: GroupSets, epoch: int) -> bool:
    """Return whether the set of an epoch is dropped: the epoch is over."""
    return len(sets) >= KEPT_EPOCHS and epoch < min(sets)


def groups_of(sets: GroupSets, epoch: int) -> Ranges:
    """Return the groups of an epoch; if its set is dropped, all groups, whatever their number."""
    return EVERY if is_dropped(sets, epoch) else sets.get(epoch, ())


def with_groups(sets: GroupSets, named: tuple[int, ...]) -> GroupSets:
    """Return sets that also have the named groups; a full set stays as it is."""
    epoch = named[0]
    if epoch not in sets and len(sets) >= KEPT_EPOCHS:
        oldest = min(sets)
        if epoch < oldest:
            return sets  # its set is dropped
        sets = {number: kept for number, kept in sets.items() if number != oldest}
    groups = sets.get(epoch, ())
    if len(groups) + len(named) > MOST_BOUNDS:
        return sets  # earlier pushes waited together with this one, so the server saw a shorter set
    start, stop = named[1], named[2]
    if len(named) == 3 and (not groups or start >= groups[-1]):
        # Usually a step has one range, behind all others.
        joined = groups[:-1] if groups and start == groups[-1] else (*groups, start)
        return {**sets, epoch: (*joined, stop)}
    return {**sets, epoch: united(groups, named[1:])}


def without_groups(sets: GroupSets, named: tuple[int, ...]) -> GroupSets:
    """Return sets without the named groups; the epoch's set stays, even empty.

    Otherwise there would be fewer than `KEPT_EPOCHS` sets, and dropped epochs would look untrained.
    """
    epoch = named[0]
    return {**sets, epoch: without(sets.get(epoch, ()), named[1:])}


def has_groups_each(several: Iterable[GroupSets], named: tuple[int, ...]) -> Iterator[bool | None]:
    """Yield the result of `has_groups` for each of several sets; equal neighbours are searched once."""
    before: GroupSets | None = None
    found: bool | None = False
    for sets in several:
        if sets != before:
            before, found = sets, has_groups(sets, named)
        yield found


def with_groups_each(several: Iterable[GroupSets], named: tuple[int, ...]) -> Iterator[GroupSets]:
    """Yield each of several sets with the named groups added; equal neighbours then share one set."""
    before: GroupSets | None = None
    after: GroupSets = {}
    for sets in several:
        # Not by identity: sets that arrived in pieces are equal, and not shared.
        if sets != before:
            before, after = sets, with_groups(sets, named)
        yield after


def with_losses(sums: LossSums, epoch: int, images: int, loss: float) -> LossSums:
    """Return sums with the losses of more images, whose sum is `loss`, of the newest `KEPT_EPOCHS` epochs."""
    before, units = sums.get(epoch, (0, 0))
    # Not `>`: NaN fails each comparison.
    units = None if units is None or not abs(loss) <= MOST_LOSS else units + round(loss * UNITS)
    kept = {**sums, epoch: LossSum(min(before + images, MOST_IMAGES), units)}
    return kept if len(kept) <= KEPT_EPOCHS else {key: kept[key] for key in sorted(kept)[1:]}


def without_losses(sums: LossSums, epoch: int, images: int, loss: float) -> LossSums:
    """Return sums without the losses of images that `with_losses` has added."""
    if epoch not in sums:
        return sums  # it is dropped
    before, units = sums[epoch]
    # A copy from a peer or a disk may claim a finite sum beside a contribution that is none.
    units = None if units is None or not abs(loss) <= MOST_LOSS else units - round(loss * UNITS)
    return {**sums, epoch: LossSum(max(before - images, 0), units)}
