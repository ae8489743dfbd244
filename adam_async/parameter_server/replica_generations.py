"""Pure: the ended generations of replicas, in bounded memory.

A replica generation has a number that is unique over all replicas.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Self

from adam_async.run.ids import Replica

REMEMBERED = 8
"""Maximum number of ended generations of one replica whose push numbers the server keeps."""

OVER_KEPT = 1 << 14
"""Maximum number of ended generations that the server remembers, over all replicas."""


class EndedGenerations:
    """The newest ended generations; ``(replica, replica_generation) in ended`` is true for one of them."""

    def __init__(self) -> None:
        self._over: dict[tuple[Replica, int], None] = {}
        self._newest: dict[Replica, deque[int]] = {}
        self.forgotten = 0
        """Number of generations with dropped push numbers."""

    @classmethod
    def of(
        cls, over: Iterable[tuple[int, int]], newest: Mapping[int, Iterable[int]], *, forgotten: int
    ) -> Self:
        """Return the ended generations of a `state`."""
        ended = cls()
        ended._over = {(Replica(replica), number): None for replica, number in over}
        ended._newest = {Replica(replica): deque(numbers) for replica, numbers in newest.items()}
        ended.forgotten = forgotten
        return ended

    def state(self) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Return the ended generations, and by replica those whose push numbers the server keeps."""
        over = [(int(replica), number) for replica, number in self._over]
        return over, {int(replica): list(numbers) for replica, numbers in self._newest.items()}

    def __contains__(self, replica_generation: tuple[Replica, int]) -> bool:
        return replica_generation in self._over

    def __len__(self) -> int:
        return len(self._over)

    def end(self, replica: Replica, replica_generation: int) -> list[int]:
        """Record the end of a generation.

        Returns the generations whose push numbers the caller must drop.
        """
        self._over[replica, replica_generation] = None
        newest = self._newest.setdefault(replica, deque())
        newest.append(replica_generation)
        dropped = [newest.popleft()] if len(newest) > REMEMBERED else []
        while len(self._over) > OVER_KEPT:
            oldest, number = next(iter(self._over))
            del self._over[oldest, number]
            kept = self._newest.get(oldest, deque())
            if number in kept:  # a replica that has left, and ends no more generations
                kept.remove(number)
                dropped.append(number)
            if not kept:
                self._newest.pop(oldest, None)
        self.forgotten += len(dropped)
        return dropped

    def is_forgotten(self, replica: Replica, replica_generation: int) -> bool:
        """Return whether a generation has ended and its push numbers are dropped."""
        return (replica, replica_generation) in self._over and replica_generation not in self._newest.get(
            replica, ()
        )

    def begin(self, live: Mapping[Replica, int]) -> None:
        """Remove generations that are live again."""
        for replica, replica_generation in live.items():
            if (replica, replica_generation) in self._over:
                del self._over[replica, replica_generation]
                if replica_generation in self._newest.get(replica, ()):
                    self._newest[replica].remove(replica_generation)

    def __repr__(self) -> str:
        return f"<EndedGenerations {len(self._over)} known, {self.forgotten} forgotten>"
