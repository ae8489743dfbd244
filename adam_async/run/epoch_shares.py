"""Pure: how replicas share an epoch's groups, and the epoch's progress at each group.

The controller gives each replica its share (`share_out`), and a data server makes queues of the shares
(`assign`). The groups *left* in an epoch are all groups except those that the shards have when a dealer
begins it. The first `warm` groups are only for the lowest replica. The epoch's first `carried` groups have
the images that the previous epoch skipped. In ranges these groups come next, in equal shares for the replicas
that skipped none of them, or for all replicas if each skipped some. The rest is shared out

    in a pool   each replica takes the next group
    in ranges   a contiguous range of group numbers per replica, with equally many groups left, or one more
    in rounds   of `round_groups` groups, as many as in one step: rounds are dealt out in order, so that
                step k of all replicas together is one contiguous piece of the epoch's order, like a step of
                one replica with as many images. A dealer that follows another one deals out the rounds of the
                whole epoch, whatever is left of them, so it continues the earlier steps
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adam_async.run.ids import Replica

Ranges = Sequence[tuple[int, int]]
"""Ranges of group numbers, each from its first number to one past its last."""

MOST_LEASES = 256
"""How many leases of each group in an epoch `most_clock` assumes at most."""

LEAST_STEPS = 4096
"""Minimum number of steps per epoch that `most_clock` assumes."""

POOL = Replica(-1)
"""Key of the common pool's queue."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """The queues of the replicas, before any replica is lost or joins."""

    warm: Sequence[int]
    """Groups of the warm start, for the lowest replica alone."""
    queues: Mapping[Replica, Sequence[int]]
    """Groups after the warm start, for each replica in order."""
    progress: Mapping[int, float]
    """Part of the epoch before each group left, from 0 to less than 1: in ranges within the replica's own
    groups, otherwise in the order of the epoch."""


def groups_left(groups: int, finished: Ranges) -> Sequence[int]:
    """Return the numbers below `groups` that are in none of the ranges, in order."""
    if not finished:
        return range(groups)
    done = {number for start, stop in finished for number in range(start, stop)}
    return [number for number in range(groups) if number not in done]


def warm_groups(warm_start: int, *, epoch: int, groups: int, round_groups: int) -> int:
    """Return the number of first groups in an epoch that belong to the run's warm start.

    Args:
        warm_start: Groups of the run that one replica trains alone; rounded up to whole rounds.
        epoch: Number of the epoch, from 1; earlier epochs had as many groups.
        round_groups: Groups of a round; 0 if the epoch is shared out in ranges.
    """
    whole = -(-warm_start // round_groups) * round_groups if round_groups else warm_start
    return min(max(whole - (epoch - 1) * groups, 0), groups)


def share_out(
    replicas: Sequence[int],
    *,
    groups: int,
    round_groups: int,
    warm: int = 0,
    finished: Ranges = (),
    carried: int = 0,
) -> dict[str, tuple[int, int]]:
    """Give each replica (as text) its range of groups; or in rounds its place and the number of replicas.

    Ranges cover all groups. The lowest replica's range begins with the `warm` and the `carried` groups;
    `assign` gives other replicas their part of the carried groups. All ranges have equally many of the other
    groups left, or one more.
    """
    places = len(replicas)
    if round_groups:
        return {str(replica): (place, places) for place, replica in enumerate(sorted(replicas))}
    left = groups_left(groups, finished)
    lead = _lead(left, warm, carried)
    rest = len(left) - lead
    inner = [lead + rest * place // places for place in range(1, places)]
    cuts = [0, *(left[at] if at < len(left) else groups for at in inner), groups]
    return {str(replica): (cuts[place], cuts[place + 1]) for place, replica in enumerate(sorted(replicas))}


def assign(
    shares: Mapping[Replica, tuple[int, int]],
    *,
    groups: int,
    round_groups: int,
    warm: int = 0,
    finished: Ranges = (),
    carried: int = 0,
    behind: Collection[Replica] = (),
    follows: bool = False,
) -> Assignment:
    """Make queues from the shares of `share_out`.

    Args:
        shares: Replica to its range, or to its place and the number of replicas.
        round_groups: Groups of a round; 0: shares are ranges.
        carried: Number of groups, from the first, of images skipped by the epoch before.
        behind: Replicas that skipped these groups, and get none of them if other replicas have shares.
        follows: Whether another dealer has dealt out the epoch.
    """
    left = groups_left(groups, finished)
    rest_at = bisect_left(left, warm)
    if round_groups:
        progress = _in_order(left, groups)
        rest = range(warm, groups) if follows else left[rest_at:]
        rounds = {
            replica: [each for each in _rounds(rest, round_groups, place, places) if each in progress]
            for replica, (place, places) in shares.items()
        }
        return Assignment(warm=left[:rest_at], queues=rounds, progress=progress)
    lead = _lead(left, warm, carried)
    takers = sorted(set(shares).difference(behind)) or sorted(shares)
    cuts = [rest_at + (lead - rest_at) * place // len(takers) for place in range(len(takers) + 1)]
    first = {replica: left[cuts[place] : cuts[place + 1]] for place, replica in enumerate(takers)}
    queues: dict[Replica, Sequence[int]] = {
        replica: (*first.get(replica, ()), *_within(left[lead:], share)) for replica, share in shares.items()
    }
    before = 1 - len(left) / groups
    progress = {}
    for replica, queue in queues.items():
        own = [*left[:rest_at], *queue] if replica == min(shares) else queue
        progress.update((number, before + (1 - before) * at / len(own)) for at, number in enumerate(own))
    return Assignment(warm=left[:rest_at], queues=queues, progress=progress)


def assign_pool(groups: int, *, warm: int = 0, finished: Ranges = ()) -> Assignment:
    """Make one queue of all groups left after the warm start."""
    left = groups_left(groups, finished)
    rest_at = bisect_left(left, warm)
    return Assignment(warm=left[:rest_at], queues={POOL: left[rest_at:]}, progress=_in_order(left, groups))


def _in_order(left: Sequence[int], groups: int) -> dict[int, float]:
    return {number: number / groups for number in left}


def _lead(left: Sequence[int], warm: int, carried: int) -> int:
    """Return the number of groups left that come before the groups of the ranges."""
    return bisect_left(left, max(warm, carried))


def _rounds(numbers: Sequence[int], round_groups: int, place: int, places: int) -> list[int]:
    starts = range(place * round_groups, len(numbers), places * round_groups)
    return [number for start in starts for number in numbers[start : start + round_groups]]


def _within(numbers: Sequence[int], share: tuple[int, int]) -> Sequence[int]:
    """Return those of the ascending numbers that are in a range."""
    start, stop = share
    return numbers[bisect_left(numbers, start) : bisect_left(numbers, stop)]


def covers(shares: Iterable[tuple[int, int]], *, groups: int, round_groups: int) -> bool:
    """Return whether every group is in exactly one share."""
    wanted = sorted(shares)
    if round_groups:
        return wanted == [(place, len(wanted)) for place in range(len(wanted))]
    at = 0
    for start, stop in wanted:
        if start != at:
            return False
        at = stop
    return at == groups


def most_clock(*, stands_at: int, epochs: int, groups: int) -> int:
    """Return a clock, in steps, that no replica can exceed.

    A step has at least one group. So an epoch has at most as many steps as groups, and as many again for each
    time that all groups are leased anew after a loss. The bound is generous: it only limits a replica's clock
    to numbers that a run could reach.

    Args:
        stands_at: Clock of the fastest replica at the start of the epochs, in steps.
    """
    return stands_at + epochs * max(groups, LEAST_STEPS) * MOST_LEASES
