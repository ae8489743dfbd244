"""Pure: which worker trains which part of which replica.

A replica is of use only with all its workers. So gaps are filled before a replica begins, the lowest first;
who is left over waits as a spare. At most one replica lacks workers: where several do, the highest gives its
own up.
"""

import itertools
from collections.abc import Iterable, Mapping

Place = tuple[int, int]
"""Replica and part; ``(-1, 0)`` for who has none."""


def place_workers(places: Mapping[str, Place], partitions: int) -> dict[str, Place]:
    """Give everybody a place who is needed in one.

    Args:
        places: The live workers, with the places that they have. No two share one.
        partitions: Workers of a replica.

    Returns:
        All of them with their places; who has one in a complete replica keeps it.
    """
    placed = {name: place for name, place in sorted(places.items()) if place[0] >= 0}
    free = sorted(set(places) - set(placed))
    while True:
        gaps = _gaps(placed.values(), partitions)
        while free and gaps:
            placed[free.pop(0)] = gaps.pop(0)
        lacking = sorted({replica for replica, _ in gaps})
        if len(lacking) < 2:
            break
        given_up = [name for name, (replica, _) in placed.items() if replica == lacking[-1]]
        free = sorted(given_up)
        for name in given_up:
            del placed[name]
    taken = {replica for replica, _ in placed.values()}
    unused = (replica for replica in itertools.count() if replica not in taken)
    while len(free) >= partitions:
        replica = next(unused)
        placed.update((free.pop(0), (replica, part)) for part in range(partitions))
    return {**placed, **dict.fromkeys(free, (-1, 0))}


def _gaps(placed: Iterable[Place], partitions: int) -> list[Place]:
    """Places without a worker in replicas that have some, the lowest first."""
    taken = set(placed)
    replicas = sorted({replica for replica, _ in taken})
    everything = ((replica, part) for replica in replicas for part in range(partitions))
    return [place for place in everything if place not in taken]
