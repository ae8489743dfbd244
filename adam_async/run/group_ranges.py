"""Pure: sets of groups as ranges, and the groups that the gradients of a step sum.

*Ranges* are one flat tuple of ascending numbers: the first group of a range and one past its last, then those
of the next range. Ranges never touch, so equal sets are equal tuples. A step *names* its groups as their
epoch and their ranges:

    name_groups(2, [7, 1, 0])            # (2, 0, 2, 7, 8)

The tables of a shard have the groups that they have counted, by epoch (`GroupSets`). Sets are never changed:
`with_groups` returns new ones, so tables with equal sets share them until one of them counts another push.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

Ranges = tuple[int, ...]

KEPT_EPOCHS = 3
"""Number of the newest named epochs whose sets a shard keeps: the one before, the present and the next."""

MOST_BOUNDS = 1 << 14
"""Length of the ranges of one set above which a server takes no further groups of the epoch; a correct set
has a few ranges for each replica."""

LEAST_BOUNDS = 1 << 9
"""Length of the ranges of a set for each shard that has it, up to `MOST_BOUNDS`, on a server with many
shards."""

MOST_WORK = 1 << 18
"""Length of the ranges of all sets that one message may change: some 80 ms."""


class GroupSet(NamedTuple):
    """Groups of one epoch on one shard."""

    groups: Ranges = ()
    """Groups that the shard has counted."""
    again: Ranges = ()
    """Groups that the shard has counted more than once."""


NO_GROUPS = GroupSet()

GroupSets = Mapping[int, GroupSet]
"""Groups that a shard has counted, by epoch."""


def name_groups(epoch: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the name of some groups of an epoch."""
    ranges: Ranges = ()
    for number in numbers:
        ranges = united(ranges, number, number + 1)
    return (epoch, *ranges)


def groups_fault(named: tuple[int, ...]) -> str:
    """Return why a tuple names no groups; empty if it names some, or is empty."""
    if not named:
        return ""
    if not named[0] or len(named) < 3 or not len(named) % 2:
        return f"groups are an epoch from 1 and ranges of two numbers each, not {named[:8]}"
    for one, other in pairwise(named[1:]):
        if one >= other:
            return f"ranges of groups ascend and do not touch: {other} follows {one}"
    return ""


def united(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return ranges with one more range, which may overlap or touch them."""
    found = [*ranges]
    _add(found, start, stop)
    return tuple(found)


def _add(ranges: list[int], start: int, stop: int) -> None:
    first, last = bisect_left(ranges, start), bisect_right(ranges, stop)
    # An even index lies between two ranges, an odd one within a range.
    begin = () if first % 2 else (start,)
    end = () if last % 2 else (stop,)
    ranges[first:last] = (*begin, *end)


def common(ranges: Sequence[int], start: int, stop: int) -> Ranges:
    """Return the part of ranges within one range."""
    first, last = bisect_right(ranges, start), bisect_left(ranges, stop)
    begin = (start,) if first % 2 else ()
    end = (stop,) if last % 2 else ()
    return (*begin, *ranges[first:last], *end)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the groups of some ranges that are not in other ranges."""
    found: Ranges = ()
    edges = (0, *others, max(ranges[-1:], default=0))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        found += common(ranges, start, stop) if start < stop else ()
    return found


def with_groups(sets: GroupSets, named: tuple[int, ...]) -> GroupSets:
    """Return sets that also have the named groups, counted once more; a set that is full stays as it is."""
    epoch = named[0]
    if epoch not in sets and len(sets) >= KEPT_EPOCHS:
        oldest = min(sets)
        if epoch < oldest:
            return sets  # its set is dropped
        sets = {number: kept for number, kept in sets.items() if number != oldest}
    groups, again = sets.get(epoch, NO_GROUPS)
    if len(groups) + len(again) + len(named) > MOST_BOUNDS:
        return sets  # the pushes before this one waited with it, so that the server saw a shorter set
    start, stop = named[1], named[2]
    if len(named) == 3 and (not groups or start >= groups[-1]):
        # Usually a step has one range, behind all others.
        joined = groups[:-1] if groups and start == groups[-1] else (*groups, start)
        return {**sets, epoch: GroupSet((*joined, stop), again)}
    # In lists, because each further range would copy a tuple.
    every, twice = [*groups], [*again]
    for start, stop in zip(named[1::2], named[2::2], strict=True):
        known = common(every, start, stop)
        for begin, end in zip(known[::2], known[1::2], strict=True):
            _add(twice, begin, end)
        _add(every, start, stop)
    return {**sets, epoch: GroupSet(tuple(every), tuple(twice))}
