"""Pure: seeded streams of random numbers, one for each concern of a simulated run.

A stream depends only on its name, which begins with the run's seed. So one more draw for the network does not
change the disk's draws. The numbers come from SHAKE-128, so a seed has the same effect on every release of
Python.
"""

import hashlib
import math
import struct
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

BLOCK_BYTES = 1024
"""Size of one draw from SHAKE-128, in bytes: 128 numbers."""

_WORDS = struct.Struct(f"<{BLOCK_BYTES // 8}Q")


class RandomStream:
    """One stream.

    Args:
        name: Seed and concern, such as ``17/network``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._blocks = 0
        self._words: list[int] = []

    def _word(self) -> int:
        """Return 64 random bits."""
        return self._words.pop() if self._words else self._draw_block()

    def _draw_block(self) -> int:
        block = hashlib.shake_128(f"{self.name}/{self._blocks}".encode()).digest(BLOCK_BYTES)
        self._blocks += 1
        self._words = [*_WORDS.unpack(block)]
        return self._words.pop()

    def random(self) -> float:
        """Return a number in [0, 1)."""
        words = self._words
        return ((words.pop() if words else self._draw_block()) >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """Return a whole number in [0, count)."""
        return (self._word() * count) >> 64

    def chance(self, probability: float) -> bool:
        """Return True with this probability. Probability 0 draws no number."""
        return probability > 0 and self.random() < probability

    def between(self, low: float, high: float) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self.random()

    def around(self, mean: float) -> float:
        """Return a number with an exponential distribution of this mean."""
        return -mean * math.log(1.0 - self.random())

    def choose(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Shuffle the items in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]

    def bytes(self, count: int) -> bytes:
        """Return random bytes, instead of those of `clock.system_entropy`."""
        return b"".join(self._word().to_bytes(8, "little") for _ in range(-(-count // 8)))[:count]

    def fork(self, name: str) -> "RandomStream":
        """Return another stream. The new stream depends only on the names, not on draws from this stream."""
        return RandomStream(f"{self.name}/{name}")

    def __repr__(self) -> str:
        return f"<RandomStream {self.name}>"
