"""Pure: steps that change the values of pixels, not their positions. Images stay uint8.

Brightness, contrast and normalisation are each ``value * gain + offset`` of a channel, computed in whole
numbers of 1/65536 level and rounded and clipped once. Before clipping, an image normalised by its own mean
and deviation has the mean `to_mean` and the standard deviation `to_std`. With the defaults 128 and 64, values
one deviation from the mean are at 64 and 192, and clipping begins at two deviations. An image without
contrast becomes `to_mean` everywhere.

Noise is the sum of four random bytes, nearly normal and never beyond 3.5 standard deviations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from adam_async.data_server.transforms.pipeline import (
    Floats,
    ImagePass,
    Kernels,
    Pixels,
    Shape,
    Words,
    signed,
    uniform,
)
from adam_async.data_server.transforms.steps import Step
from adam_async.errors import ConfigError, TransformFailed

ONE = 1 << 16
_STD_OF_FOUR_BYTES = (4 * (256**2 - 1) / 12) ** 0.5


class Levels(ImagePass):
    """Brightness, contrast or normalisation.

    Raises:
        ConfigError: A list has another length than the image has channels.
    """

    def __init__(self, step: Step, shape: Shape, kernels: Kernels) -> None:
        self.shape = shape
        self._levelled = kernels.levelled
        self.words = [0 if step.kind == "normalise" else 1]
        self._step = step
        for key in ("mean", "std"):
            value = step.options.get(key)
            if isinstance(value, list) and len(value) != shape[0]:
                raise step.error(key, f"expected as many numbers as the image has channels: {shape[0]}")

    def apply(self, images: Pixels, words: Sequence[Words]) -> Pixels:
        """Change the levels of each image."""
        gain, offset = self._line(images, words[0])
        gains, offsets = (
            np.broadcast_to(np.floor(part * ONE + 0.5).astype(np.int64), images.shape[:2]).copy()
            for part in (gain, offset)
        )
        planes = images.reshape(*images.shape[:2], math.prod(images.shape[2:]))
        return self._levelled(planes, gains, offsets).reshape(images.shape)

    def _line(self, images: Pixels, words: Words) -> tuple[Floats, Floats]:
        """Return gain and offset of each channel, in shapes that broadcast to (n, C)."""
        options = self._step.options
        if self._step.kind == "brightness":
            added = signed(words) * options["by"] * 255.0
            return np.ones_like(added), added
        if self._step.kind == "contrast":
            gain = 1.0 + signed(words) * options["by"]
            return gain, _mean(images) * (1.0 - gain)
        if options["mean"] is None:
            mean, std = _mean(images), _std(images)
            gain = np.where(std > 0, options["to_std"] / np.where(std > 0, std, 1.0), 0.0)
        else:
            mean, std = (np.atleast_2d(np.array(options[key], np.float64)) for key in ("mean", "std"))
            gain = options["to_std"] / std
        return gain, options["to_mean"] - mean * gain


class Noise(ImagePass):
    """Adds a random level to each pixel."""

    def __init__(self, step: Step, shape: Shape, kernels: Kernels) -> None:
        self.shape = shape
        self.words = [-(-shape[0] * shape[1] * shape[2] // 2)]
        self._noisy = kernels.noisy
        self._factor = round(step.options["levels"] / _STD_OF_FOUR_BYTES * ONE)

    def apply(self, images: Pixels, words: Sequence[Words]) -> Pixels:
        """Add the noise."""
        drawn = np.ascontiguousarray(words[0])
        return self._noisy(_flat(images), drawn, self._factor).reshape(images.shape)


class Cutout(ImagePass):
    """Fills a square around a random pixel with one level, as far as the square is in the image."""

    def __init__(self, step: Step, shape: Shape) -> None:
        self.shape = shape
        self.words = [2]
        self._side = step.options["pixels"]
        self._level = step.options["level"]

    def apply(self, images: Pixels, words: Sequence[Words]) -> Pixels:
        """Fill the squares."""
        made = images.copy()
        tops, lefts = (self._first(words[0][:, axis], size) for axis, size in enumerate(self.shape[1:]))
        for image, top, left in zip(made, tops, lefts, strict=True):
            bottom, right = max(top + self._side, 0), max(left + self._side, 0)
            image[:, max(top, 0) : bottom, max(left, 0) : right] = self._level
        return made

    def _first(self, words: Words, size: int) -> list[int]:
        places: list[int] = (np.floor(uniform(words) * size).astype(np.int64) - self._side // 2).tolist()
        return places


class UserFunction(ImagePass):
    """A function of the user, called for one image at a time.

    Args:
        step: Step whose options, except `draws`, are arguments of the function by name.
        function: Takes a copy of an image, and `draws` random values in [0, 1), float64, of shape (draws,).
            Returns an image of the same shape, uint8.

    Raises:
        ConfigError: The function does not take the options.
    """

    def __init__(self, step: Step, shape: Shape, function: Callable[..., Any]) -> None:
        self.shape = shape
        self.words = [step.options["draws"]]
        self._step = step
        self._function = function
        self._options: Mapping[str, Any] = {k: v for k, v in step.options.items() if k != "draws"}
        self._check_options()

    def _check_options(self) -> None:
        try:
            taken = signature(self._function)
        except (TypeError, ValueError):
            return  # a function of C without a signature: its first call shows the error
        try:
            taken.bind(None, None, **self._options)
        except TypeError as error:
            raise ConfigError(
                f"{self._step.where}: the function {self._step.kind!r} is called as f(image, draws, "
                f"**options), and does not take the options {', '.join(self._options) or '(none)'}: {error}"
            ) from error

    def apply(self, images: Pixels, words: Sequence[Words]) -> Pixels:
        """Call the function for each image.

        Raises:
            TransformFailed: The function failed, or returned something else than an image of this shape.
        """
        made = np.empty_like(images)
        for at, values in enumerate(uniform(words[0])):
            try:
                image = np.asarray(self._function(images[at].copy(), values, **self._options))
            except (Exception, SystemExit) as error:  # user code may raise anything
                raise TransformFailed(
                    f"{self._step.where}: the function {self._step.kind!r} failed: {error!r}"
                ) from error
            if image.shape != self.shape or image.dtype != np.uint8:
                raise TransformFailed(
                    f"{self._step.where}: the function {self._step.kind!r} returned {image.dtype} of shape "
                    f"{image.shape}, expected uint8 of shape {self.shape}"
                )
            made[at] = image
        return made


def pass_of(step: Step, shape: Shape, kernels: Kernels) -> ImagePass:
    """Return the pass of a step in this file that is no user function."""
    match step.kind:
        case "noise":
            return Noise(step, shape, kernels)
        case "cutout":
            return Cutout(step, shape)
        case _:
            return Levels(step, shape, kernels)


def _mean(images: Pixels) -> Floats:
    """Return the mean of all pixels of each image; shape (n, 1)."""
    values = _flat(images)
    mean: Floats = values.sum(axis=1, dtype=np.int64)[:, np.newaxis] / values.shape[1]
    return mean


def _std(images: Pixels) -> Floats:
    """Return the standard deviation of each image's pixels, from whole-number sums; shape (n, 1)."""
    values = _flat(images).astype(np.int64)
    count, total, squares = values.shape[1], values.sum(axis=1), (values * values).sum(axis=1)
    std: Floats = np.sqrt((squares * count - total * total)[:, np.newaxis] / float(count * count))
    return std


def _flat(images: Pixels) -> Pixels:
    return images.reshape(len(images), math.prod(images.shape[1:]))
