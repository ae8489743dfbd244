"""Pure: the assignment of workers to replicas and to parts of the model.

A replica works only with all its workers. Free workers therefore fill gaps before they begin a replica, the
lowest gap first; the rest wait as spares. At most one replica lacks workers: if several do, the highest one
gives up its workers.
"""

import itertools
from collections.abc import Iterable, Mapping

Slot = tuple[int, int]
"""Replica and part; ``(-1, 0)`` for a spare worker."""


def assign_workers(slots: Mapping[str, Slot], partitions: int) -> dict[str, Slot]:
    """Assign workers to slots.

    Args:
        slots: The live workers with their present slots; each slot has one worker.

    Returns:
        All workers with their slots; a worker of a complete replica keeps its own.
    """
    placed = {name: slot for name, slot in sorted(slots.items()) if slot[0] >= 0}
    free = sorted(set(slots) - set(placed))
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


def _gaps(placed: Iterable[Slot], partitions: int) -> list[Slot]:
    """Return the empty slots of replicas with workers, the lowest first."""
    taken = set(placed)
    replicas = sorted({replica for replica, _ in taken})
    everything = ((replica, part) for replica in replicas for part in range(partitions))
    return [slot for slot in everything if slot not in taken]
