"""Pure: the passes of a recipe, and their kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.transforms.resample import ONE, Spline
from adam_async.data_server.transforms.resample import resample as numpy_resample
from adam_async.errors import ConfigError, install_command
from adam_async.model.keyed_random import philox_words

Shape = tuple[int, int, int]
Pixels = NDArray[np.uint8]
Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Longs = NDArray[np.int64]

KERNELS = ("auto", "numpy", "numba")
"""Known sets of kernels; `auto` is `numba` if numba is installed."""

_FARTHEST = 2.0**40


@dataclass(frozen=True, slots=True)
class Kernels:
    """The most expensive loops. Both sets make equal bytes."""

    name: str
    philox: Callable[[Words, Words], Words]
    displaced: Callable[[Words, float, Floats, int], Longs]
    resample: Callable[..., None]
    levelled: Callable[[Pixels, Longs, Longs], Pixels]
    noisy: Callable[[Pixels, Words, int], Pixels]


class ImagePass(ABC):
    """One pass over the images: several steps that move pixels, or one step of another kind."""

    words: list[int]
    """Number of random words that each step draws for an image."""
    shape: Shape
    """(C, H, W) of the new images."""

    @abstractmethod
    def apply(self, images: Pixels, words: Sequence[Words]) -> Pixels:
        """Make new images.

        Args:
            images: Shape (n, C, H, W), contiguous.
            words: For each step, random words of each image, shape (n, `words`).
        """


def uniform(words: Words) -> Floats:
    """Convert random words to values in [0, 1), of 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def signed(words: Words) -> Floats:
    """Convert random words to values in [-1, 1)."""
    return uniform(words) * 2.0 - 1.0


def units(pixels: Floats) -> Longs:
    """Convert pixels to whole units of positions, clipped at limits far outside of every image."""
    return np.floor(np.clip(pixels * ONE, -_FARTHEST, _FARTHEST) + 0.5).astype(np.int64)


def numpy_displaced(words: Words, pixels: float, linear: Floats, points: int) -> Longs:
    """Displace the control points of elastic fields, each uniformly at random.

    Args:
        words: Shape (n, 2 * points * points): of all points across, then of all down.
        pixels: Maximum displacement, in pixels.
        linear: Shape (n, 4): the map of the displacements, row by row.
        points: Number of grid points along each side.

    Returns:
        Shape (n, 2, points, points), in position units.
    """
    moves = (signed(words) * pixels).reshape(len(words), 2, points, points)
    a, b, d, e = linear.T[:, :, np.newaxis, np.newaxis]
    across, down = moves[:, 0], moves[:, 1]
    return units(np.stack([a * across + b * down, d * across + e * down], axis=1))


def numpy_levelled(images: Pixels, gains: Longs, offsets: Longs) -> Pixels:
    """Change levels to ``value * gain + offset``, in units of 1/65536, rounded and clipped.

    Args:
        images: Shape (n, C, pixels).
        gains: Shape (n, C).
        offsets: Shape (n, C).
    """
    changed = images * gains[:, :, np.newaxis] + offsets[:, :, np.newaxis]
    levels: Longs = (changed + 32768) >> 16
    return np.clip(levels, 0, 255).astype(np.uint8)


def numpy_noisy(images: Pixels, words: Words, factor: int) -> Pixels:
    """Add noise to each pixel: the sum of four random bytes, less its mean of 510, times a factor.

    Args:
        images: Shape (n, pixels).
        words: Shape (n, half as many, rounded up): one word for two pixels, its lower half for the first.
        factor: Factor in units of 1/65536.
    """
    n, size = images.shape
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], axis=-1)
    halves = halves.reshape(n, 2 * words.shape[1])[:, :size]
    total = np.full((n, size), -510, np.int64)
    for byte in range(4):
        total += ((halves >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.int64)
    return np.clip(images + ((total * factor + 32768) >> 16), 0, 255).astype(np.uint8)


def kernels_of(kernels: str) -> Kernels:
    """Choose a set of kernels; Numba's are compiled here, or read from the disk.

    Raises:
        ConfigError: The set is unknown, or not installed.
    """
    if kernels not in KERNELS:
        raise ConfigError(f"unknown kernels {kernels!r}; known: {', '.join(KERNELS)}")
    if kernels == "numpy" or (kernels == "auto" and find_spec("numba") is None):
        return Kernels("numpy", philox_words, numpy_displaced, numpy_resample, numpy_levelled, numpy_noisy)
    if find_spec("numba") is None:
        raise ConfigError(
            "kernels 'numba' need the package numba, which is not installed; install the extra `fast`: "
            f"{install_command('fast')}, or choose kernels 'numpy'"
        )
    from adam_async.model.fast.memory import compile_kept  # importing numba is slow

    compiled = _compiled()
    compile_kept(partial(_call_each, compiled))
    return compiled


def first_kernels(kernels: str) -> tuple[str, bool]:
    """Choose a run's first kernels; `auto` waits for no compilation that a child process can do.

    Returns:
        The set, and whether it replaces Numba kernels that the disk can keep but lacks.
    """
    if kernels != "auto" or find_spec("numba") is None:
        return kernels, False
    from adam_async.model.fast.memory import CACHE, only_read  # importing numba is slow

    if not CACHE.is_kept:
        return "numba", False
    try:
        with only_read():
            _call_each(_compiled())
    except Exception:  # kernels that are not on the disk, or damaged there: the unpickler raises many types
        return "numpy", True
    return "numba", False


def _call_each(compiled: Kernels) -> None:
    """Call each kernel with arrays of its types, which compiles it."""
    words = np.zeros((0, 1, 4), np.uint64)
    compiled.philox(np.zeros((1, 2), np.uint64), words[:, :, 0].copy())
    compiled.noisy(np.zeros((0, 1), np.uint8), words[:, :, 0].copy(), 1)
    nothing, spline = np.zeros((0, 1, 1, 1), np.uint8), Spline.of(1, 1)
    controls = np.zeros((0, 2, 4, 4), np.int64)
    compiled.displaced(words[:, 0, :2].copy(), 1.0, np.zeros((0, 4)), 1)
    compiled.levelled(nothing[:, :, 0], controls[:, :, 0, 0].copy(), controls[:, :, 0, 0].copy())
    compiled.resample(nothing, np.zeros((0, 6), np.int64), controls, spline, spline, False, nothing.copy())


def _compiled() -> Kernels:
    from adam_async.data_server.transforms import kernels  # importing numba is slow

    def philox(keys: Words, blocks: Words) -> Words:
        out = np.empty((*blocks.shape, 4), np.uint64)
        kernels.philox(keys, blocks, out)
        return out

    def displaced(words: Words, pixels: float, linear: Floats, points: int) -> Longs:
        out = np.empty((len(words), 2, points, points), np.int64)
        kernels.displaced(words, pixels, linear, out)
        return out

    def resample(
        images: Pixels, maps: Any, controls: Any, down: Spline, across: Spline, repeat: bool, out: Pixels
    ) -> None:
        kernels.resample(
            images, maps, controls, down.at, down.weights, across.at, across.weights, repeat, out
        )

    def levelled(images: Pixels, gains: Longs, offsets: Longs) -> Pixels:
        out = np.empty_like(images)
        kernels.levelled(images, gains, offsets, out)
        return out

    def noisy(images: Pixels, words: Words, factor: int) -> Pixels:
        out = np.empty_like(images)
        kernels.noisy(images, words, factor, out)
        return out

    return Kernels("numba", philox, displaced, resample, levelled, noisy)
