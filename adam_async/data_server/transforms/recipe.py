"""Pure: transforms of every training image, with another variant in each epoch.

A recipe is a list of steps (adam_async/data_server/transforms/steps.py has the kinds and their options):

    [[transform]]
    kind = "shift"
    pixels = 2

A variant depends on the image and its number, the seed, the epoch and the steps. Server, order, batch and
kernels change no pixel. Each step has its own random streams, keyed by its position in the recipe, and each
image has its own range of elements in these streams. The drawn values are equal on every machine to the last
bit: whole numbers, or float64 from sums, products, quotients and square roots.

A run's recipe comes from a driver, so its sizes have bounds, checked before its passes are made. Otherwise
one step, such as a huge pad, could take all memory of a data server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.transforms import geometry, pixels
from adam_async.data_server.transforms.pipeline import ImagePass, Kernels, Shape, kernels_of
from adam_async.data_server.transforms.steps import KINDS, LARGEST, Step, check_step
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice

MOST_STEPS = 64
"""Maximum number of steps in a recipe."""

MOST_VALUES = 1 << 22
"""Maximum number of values (channels x rows x columns) of an image between two steps, for small images."""

MOST_WORDS = 1 << 20
"""Maximum number of random words that all steps together draw for an image, for small images."""

GROWTH = 4
"""Maximum size of an image between two steps, as a multiple of a data set image's size, for large images."""

VALUE_BYTES = 160
"""Upper bound of a pass's memory for each value of an image, in bytes."""

WORD_BYTES = 96
"""Upper bound on the memory for drawing and using a random word, in bytes."""

WORK_BYTES = 1 << 26
"""Maximum memory for the images transformed at a time, in bytes; a single image may take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBounds:
    """Bounds of a recipe for images of one shape."""

    values: int
    words: int
    side: int
    """Maximum number of rows, and of columns."""

    @classmethod
    def of(cls, image_shape: Shape) -> Self:
        """Return the bounds for images of shape (C, H, W)."""
        values = GROWTH * prod(image_shape)
        return cls(
            values=max(MOST_VALUES, values),
            words=max(MOST_WORDS, values),
            side=max(LARGEST, *image_shape[1:]),
        )

    def check_shape(self, step: Step, shape: Shape) -> None:
        """Check the shape of the images that a step makes.

        Raises:
            ConfigError: The images are too large.
        """
        if prod(shape) > self.values or max(shape[1:]) > self.side:
            raise ConfigError(
                f"{step.where} ({step.kind}) makes images of {shape} (channels, rows, columns), expected at "
                f"most {self.values:,} values and {self.side:,} rows or columns: pad less, or crop before"
            )

    def check_words(self, step: Step, words: int) -> None:
        """Check the number of random words that a recipe draws for an image, up to a step.

        Raises:
            ConfigError: There are too many.
        """
        if words > self.words:
            raise ConfigError(
                f"{step.where} ({step.kind}): the steps up to it draw {words:,} random values for an image, "
                f"expected at most {self.words:,}: take fewer steps, or a smaller grid or draws"
            )


def work_bytes(values: int, words: int) -> int:
    """Return the upper bound of the memory in which an image is transformed, in bytes.

    Args:
        values: Number of values in the largest image between two steps.
        words: Number of random words in all steps.
    """
    return VALUE_BYTES * values + WORD_BYTES * words


PURPOSE = "augment"

_WORDS_PER_BLOCK = 4


class Recipe:
    """Steps that make a variant of every training image.

    Any thread may use a recipe, because only its kernels change, and all sets make equal bytes.
    """

    def __init__(self, passes: Sequence[ImagePass], image_shape: Shape, kernels: Kernels) -> None:
        self._passes = tuple(passes)
        self._kernels = kernels
        self.image_shape = image_shape
        """(C, H, W) of the images that `apply` takes."""
        self.output_shape = passes[-1].shape if passes else image_shape
        """(C', H', W') of the images that `apply` makes."""
        self._words = tuple(count for image_pass in passes for count in image_pass.words)
        self._blocks = tuple(-(-count // _WORDS_PER_BLOCK) for count in self._words)
        image_bytes = work_bytes(
            max([prod(image_shape), *(prod(image_pass.shape) for image_pass in passes)]), sum(self._words)
        )
        self._at_once = max(WORK_BYTES // image_bytes, 1)
        self.work_bytes = self._at_once * image_bytes if passes else 0
        """Upper bound on the memory that `apply` uses in addition to its arguments and result, in bytes."""
        # For every block that an image draws: the number of blocks in its step, and its index among them.
        self._per_image = np.repeat(np.array(self._blocks, np.uint64), self._blocks)
        self._within = np.array([at for blocks in self._blocks for at in range(blocks)], np.uint64)

    @classmethod
    def of(
        cls,
        steps: Sequence[Mapping[str, Any]],
        image_shape: tuple[int, int, int],
        *,
        kernels: str = "auto",
        functions: Mapping[str, Callable[..., Any]] = {},
    ) -> "Recipe":
        """Check the steps and make the recipe.

        Args:
            steps: Kind and options of each step; no steps change no image.
            kernels: "numba", "numpy", or "auto" for numba if it is installed. Numba's kernels are compiled
                here, or read from the disk.
            functions: Further kinds that are user functions; see `pixels.UserFunction`. A recipe imports
                none: `user_code.functions_for` imports those of the user's own steps.

        Raises:
            ConfigError: A step is wrong (the error has its number, key and value), the steps make too large
                images or draw too many random values (`bounds`), or the kernels are not installed.
        """
        if len(steps) > MOST_STEPS:
            raise ConfigError(f"there are {len(steps):,} transforms, expected at most {MOST_STEPS}")
        for name in functions:
            if name in KINDS:
                raise ConfigError(f"a function is named {name!r}, which is a kind of step; choose another")
        checked = [check_step(step, f"step {at}", functions) for at, step in enumerate(steps, 1)]
        chosen = kernels_of(kernels)
        shape: Shape = (int(image_shape[0]), int(image_shape[1]), int(image_shape[2]))
        bounds = RecipeBounds.of(shape)
        passes: list[ImagePass] = []
        last, words = shape, 0
        for joined in _joined(checked):
            bounds.check_shape(joined[0], geometry.new_shape(joined[0], last))
            passes.append(_image_pass(joined, last, chosen, functions))
            last = passes[-1].shape
            words += sum(passes[-1].words)
            bounds.check_words(joined[-1], words)
        return cls(passes, shape, chosen)

    def check_shape_kept(self) -> None:
        """Check that the steps keep the images' shape, which must stay that of test images.

        Raises:
            ConfigError: The steps change it.
        """
        if self.output_shape != self.image_shape:
            raise ConfigError(
                f"the transforms make images of {self.output_shape} (channels, rows, columns) out of "
                f"{self.image_shape}, but test images stay as they are: pad before a crop, or crop to the "
                "same size"
            )

    @property
    def kernels(self) -> str:
        """The set of kernels in use: "numba" or "numpy"."""
        return self._kernels.name

    def change_kernels(self, equal: "Recipe") -> None:
        """Go on with the kernels of an equal recipe, also in calls of `apply` that are in progress."""
        self._passes, self._kernels = equal._passes, equal._kernels

    def apply(
        self, images: NDArray[np.uint8], numbers: NDArray[np.int64], *, dice: Dice, epoch: int
    ) -> NDArray[np.uint8]:
        """Make the variants of some images.

        Args:
            images: Shape (n, C, H, W).
            numbers: Shape (n,): numbers of the images in the data set, from 0.
            epoch: Number of the epoch, from 1.

        Returns:
            New images of shape (n, C', H', W').

        Raises:
            ValueError: Images or numbers have another shape or dtype, or a number is negative.
            TransformFailed: A user's function failed, or returned something else than an image of the same
                shape.
        """
        numbers = np.asarray(numbers)
        if images.dtype != np.uint8 or images.shape != (len(numbers), *self.image_shape):
            raise ValueError(
                f"images are {images.dtype} of shape {images.shape}, expected uint8 of "
                f"{(len(numbers), *self.image_shape)}: {len(numbers)} numbers, one per image"
            )
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or (len(numbers) and numbers.min() < 0):
            raise ValueError(f"numbers must be whole and not negative, in one row, not {numbers!r}")
        if len(images) <= self._at_once:
            return self._apply(images, numbers, dice, epoch)
        out = np.empty((len(images), *self.output_shape), np.uint8)
        for start in range(0, len(images), self._at_once):
            part = slice(start, start + self._at_once)
            out[part] = self._apply(images[part], numbers[part], dice, epoch)
        return out

    def _apply(
        self, images: NDArray[np.uint8], numbers: NDArray[np.int64], dice: Dice, epoch: int
    ) -> NDArray[np.uint8]:
        # Kernels are compiled for contiguous, writable arrays; other arrays would cause a compilation now.
        made = np.require(images, requirements=["C", "W"])
        words = self._draw(numbers.astype(np.uint64), dice, epoch)
        at = 0
        for image_pass in self._passes:
            made = image_pass.apply(made, words[at : at + len(image_pass.words)])
            at += len(image_pass.words)
        return made if self._passes else made.copy()

    def _draw(self, numbers: NDArray[np.uint64], dice: Dice, epoch: int) -> list[NDArray[np.uint64]]:
        """In one call, draw each step's random words, one row per image."""
        places = numbers[:, np.newaxis] * self._per_image + self._within
        drawn = self._kernels.philox(_keys(dice.seed, epoch, self._blocks), places)
        words = drawn.reshape(len(numbers), drawn.shape[1] * _WORDS_PER_BLOCK)
        found, start = [], 0
        for count, blocks in zip(self._words, self._blocks, strict=True):
            found.append(words[:, start : start + count])
            start += blocks * _WORDS_PER_BLOCK
        return found


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int, blocks: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return the key of every block that an image draws. Cached: hashing takes as long as drawing."""
    keys = [Dice(seed).key(PURPOSE, (epoch, at)) for at in range(len(blocks))]
    return np.repeat(np.array(keys, np.uint64).reshape(-1, 2), blocks, axis=0)


def default_steps(image_shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Return the default steps for images of a shape.

    The steps assume that grey images are drawings and letters, and move them a little. The steps assume that
    colour images are photographs, and mirror and light them differently.
    """
    channels, rows, columns = image_shape
    side = min(rows, columns)
    if channels == 1:
        return [
            # Steps twice as strong cost accuracy in runs of eight epochs.
            {"kind": "shift", "pixels": max(1, round(side / 28))},
            {"kind": "rotate", "degrees": 7},
            {"kind": "scale", "by": 0.07},
            {"kind": "shear", "by": 0.07},
            {"kind": "elastic", "pixels": side / 14, "grid": 4},
        ]
    return [
        {"kind": "flip"},
        {"kind": "crop", "padding": side // 8},
        {"kind": "brightness", "by": 0.1},
        {"kind": "contrast", "by": 0.2},
        {"kind": "cutout", "pixels": max(1, side // 4)},
    ]


def _joined(steps: Sequence[Step]) -> list[list[Step]]:
    """Group steps by the pass that applies them."""
    joined: list[list[Step]] = []
    for step in steps:
        last = joined[-1] if joined else []
        if (
            last
            and step.kind in geometry.KINDS
            and last[0].kind in geometry.KINDS
            and geometry.joins(step, last)
        ):
            last.append(step)
        else:
            joined.append([step])
    return joined


def _image_pass(
    steps: Sequence[Step], shape: Shape, kernels: Kernels, functions: Mapping[str, Callable[..., Any]]
) -> ImagePass:
    first = steps[0]
    if first.kind in geometry.KINDS:
        return geometry.Movement(steps, shape, kernels)
    if first.kind in functions:
        return pixels.UserFunction(first, shape, functions[first.kind])
    return pixels.pass_of(first, shape, kernels)
