"""Pure: the lives of replicas that are over, in bounded memory.

A life of a replica is a number; no two lives have the same one.
"""

from collections import deque
from collections.abc import Mapping
from typing import TypeVar

from adam_async.ids import Replica

K = TypeVar("K")
V = TypeVar("V")

REMEMBERED = 8
"""Number of lives of one replica that are over and whose push numbers are kept."""

OVER_KEPT = 1 << 14
"""Number of lives that are known to be over, of all replicas together."""


class LivesOver:
    """The newest lives that are over. `(replica, life) in lives` asks whether one is."""

    def __init__(self) -> None:
        self._over: dict[tuple[Replica, int], None] = {}
        self._newest: dict[Replica, deque[int]] = {}
        self.forgotten = 0
        """Number of lives whose push numbers were dropped."""

    def __contains__(self, life: tuple[Replica, int]) -> bool:
        return life in self._over

    def __len__(self) -> int:
        return len(self._over)

    def end(self, replica: Replica, life: int) -> int | None:
        """Note that a life is over. Returns the life whose push numbers are to be dropped now, if any."""
        self._over[replica, life] = None
        while len(self._over) > OVER_KEPT:
            del self._over[next(iter(self._over))]
        newest = self._newest.setdefault(replica, deque())
        newest.append(life)
        if len(newest) <= REMEMBERED:
            return None
        self.forgotten += 1
        return newest.popleft()

    def is_forgotten(self, replica: Replica, life: int) -> bool:
        """Whether a life is over and its push numbers were dropped."""
        return (replica, life) in self._over and life not in self._newest[replica]

    def begin(self, live: Mapping[Replica, int]) -> None:
        """Take back lives that are live again."""
        for replica, life in live.items():
            if (replica, life) in self._over:
                del self._over[replica, life]
                if life in self._newest[replica]:
                    self._newest[replica].remove(life)

    def __repr__(self) -> str:
        return f"<LivesOver {len(self._over)} known, {self.forgotten} forgotten>"


def keep_newest(table: dict[K, dict[V, int]], key: K, most: int) -> dict[V, int]:
    """The entry of a key, made if it is not there; the oldest entry goes if there are more than `most`."""
    if key not in table:
        table[key] = {}
        if len(table) > most:
            del table[next(iter(table))]
    return table[key]
