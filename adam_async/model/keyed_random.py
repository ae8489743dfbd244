"""Pure: keyed random values, which depend only on their purpose and keys.

A draw is a function of (seed, purpose, keys, element index), never of earlier draws. A hash of seed, purpose
and keys (epoch, image or group, layer) is the 128-bit key of a Philox generator. The counter depends on the
element's index in the uncut tensor, so a slice drawn alone equals the slice of the whole:

    Dice(7).normal("init", keys=("fc1.weight",), start=100, count=50)
    == Dice(7).normal("init", keys=("fc1.weight",), count=150)[100:]

Philox gives four 64-bit words per counter value; element ``i`` is word ``i % 4`` of block ``i // 4``.
Uniform values use only shifts and one exact product, so their bits are the same on every machine. Normal
values use `log` and `cos`, so they may differ in the last bit between machines with different mathematics
libraries.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Key = int | str

_WORDS_PER_BLOCK = 4

# The constants of Philox-4x64-10 (Salmon et al. 2011).
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_KEY_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_WORD, _HALF, _SHIFT = (1 << 64) - 1, np.uint64(0xFFFFFFFF), np.uint64(32)


class Dice:
    """Random values for one seed, keyed by purpose.

    Args:
        seed: Any integer; runs with equal seeds draw equal values.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @property
    def seed(self) -> int:
        """The seed of these dice."""
        return self._seed

    def __repr__(self) -> str:
        return f"<Dice seed={self._seed}>"

    def bits(
        self, purpose: str, *, keys: tuple[Key, ...] = (), start: int = 0, count: int
    ) -> NDArray[np.uint64]:
        """Draw ``count`` raw 64-bit words: elements ``start`` to ``start + count``, exclusive.

        Raises:
            ValueError: ``start`` or ``count`` is negative.
        """
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, not start={start}, count={count}")
        words = self._words_from(start, purpose, keys).random_raw(count)
        return np.asarray(words, dtype=np.uint64)

    def uniform(
        self,
        purpose: str,
        *,
        keys: tuple[Key, ...] = (),
        start: int = 0,
        count: int,
        dtype: DTypeLike = np.float32,
    ) -> NDArray[Any]:
        """Draw ``count`` values in [0, 1), of float32 (24 random bits) or float64 (53 random bits).

        The float32 value of an element is its float64 value rounded down to a multiple of 2**-24.
        """
        kind = _float_dtype(dtype)
        kept = 24 if kind == np.float32 else 53
        words = self.bits(purpose, keys=keys, start=start, count=count) >> np.uint64(64 - kept)
        drawn: NDArray[Any] = words.astype(kind)
        drawn *= 2.0**-kept
        return drawn

    def fill_uniform(
        self, purpose: str, out: NDArray[np.float64], *, keys: tuple[Key, ...] = (), start: int = 0
    ) -> None:
        """Fill `out` with the float64 values of `uniform` from element `start` on; allocates no arrays.

        Raises:
            ValueError: `out` is not a C-contiguous float64 array, or `start` is negative.
        """
        if out.dtype != np.float64 or not out.flags.c_contiguous:
            raise ValueError(f"dice fill C-contiguous float64 arrays, not {out.dtype} of {out.strides}")
        if start < 0:
            raise ValueError(f"start must not be negative, not start={start}")
        words = self._words_from(start, purpose, keys)
        # NumPy's doubles are the upper 53 bits of one word, as in `uniform`.
        np.random.Generator(words).random(out=out)

    def normal(
        self, purpose: str, *, keys: tuple[Key, ...] = (), count: int, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """Draw ``count`` standard normal values, by Box and Muller, from the two halves of one word.

        Values are computed in float64, and then rounded to ``dtype``. No value is farther than 6.8 from zero.
        """
        kind = _float_dtype(dtype)
        words = self.bits(purpose, keys=keys, count=count)
        # Add half a step so that the logarithm never gets zero.
        radius = np.sqrt(-2.0 * np.log(((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32))
        angle = (words & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0 * math.pi * 2.0**-32)
        return (radius * np.cos(angle)).astype(kind)

    def permutation(self, purpose: str, n: int, *, keys: tuple[Key, ...] = ()) -> NDArray[np.int64]:
        """Order the numbers 0 to ``n`` - 1 at random."""
        return np.argsort(self.bits(purpose, keys=keys, count=n), kind="stable").astype(np.int64, copy=False)

    def key(self, purpose: str, keys: tuple[Key, ...] = ()) -> tuple[int, int]:
        """Return the two 64-bit halves, lower first, of this purpose's key for `philox_words`."""
        whole = self._key(purpose, keys)
        return whole & _WORD, whole >> 64

    def _words_from(self, start: int, purpose: str, keys: tuple[Key, ...]) -> np.random.Philox:
        """Return the generator of the words from element ``start`` on."""
        block, skip = divmod(start, _WORDS_PER_BLOCK)
        words = np.random.Philox(key=self._key(purpose, keys), counter=block)
        words.random_raw(skip, output=False)
        return words

    def _key(self, purpose: str, keys: tuple[Key, ...]) -> int:
        digest = hashlib.blake2b(digest_size=16)
        for part in (self._seed, purpose, *keys):
            if type(part) not in (int, str):  # a NumPy integer is another key than Python's
                raise TypeError(f"keys of dice are int or str, not {type(part).__name__} ({part!r})")
            # The type and length in front keep (1, 23) apart from (12, 3) and 1 apart from "1".
            text = f"{type(part).__name__}:{part}".encode()
            digest.update(len(text).to_bytes(8, "little") + text)
        return int.from_bytes(digest.digest(), "little")


def philox_words(keys: NDArray[np.uint64], blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Draw with many keys in one call; one call of `Dice.bits` per key would take too long.

    Args:
        keys: Shape (m, 2): the result of `Dice.key` for each column.
        blocks: Shape (n, m): block ``b`` holds the elements ``4 * b`` to ``4 * b + 3``.

    Returns:
        Shape (n, m, 4): those elements, with the bits of `Dice.bits`.
    """
    low, high = keys[:, 0].copy(), keys[:, 1].copy()
    # NumPy's generator counts before a draw.
    c0, c1, c2, c3 = blocks + np.uint64(1), *np.zeros((3, *blocks.shape), np.uint64)
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ low, low1, high0 ^ c3 ^ high, low0
        low += _KEY_STEPS[0]
        high += _KEY_STEPS[1]
    return np.stack([c0, c1, c2, c3], axis=-1)


def _product(a: NDArray[np.uint64], b: np.uint64) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the upper and lower word of a 128-bit product, computed from 32-bit halves."""
    a_low, a_high, b_low, b_high = a & _HALF, a >> _SHIFT, b & _HALF, b >> _SHIFT
    middle = a_high * b_low + (a_low * b_low >> _SHIFT)
    other = a_low * b_high + (middle & _HALF)
    return a_high * b_high + (middle >> _SHIFT) + (other >> _SHIFT), a * b


def _float_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float64):
        raise ValueError(f"dice draw float32 or float64, not {kind}")
    return kind
