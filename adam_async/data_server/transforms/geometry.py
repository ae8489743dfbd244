"""Pure: steps that move pixels, joined into one map per image, so that each image is resampled only once.

A map gives, for each position in the new image, the old position. Positions are (x, y) from the image's
centre, x to the right and y down. Neighbouring steps are composed as maps, so a later shift restores pixels
that an earlier shift moved beyond the edge. A crop, a pad, a step with another `edge`, or a second elastic
step begins a new resampling.

Maps are computed in float64 by sums, products and quotients only, because their results are equal on every
machine (the sines of libraries differ). The maps are rounded once, to whole numbers of 1/65536 pixel.

The elastic step moves pixels by a cubic B-spline over a coarse grid of control points. Each point moves
uniformly at random by at most `pixels` in x and y; Simard et al. (2003) instead blur a displacement of each
pixel. Cells of 7 pixels are about as smooth as their Gaussian of 4 pixels. The grid covers the new image.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.transforms.pipeline import (
    Floats,
    ImagePass,
    Kernels,
    Pixels,
    Shape,
    Words,
    signed,
    uniform,
    units,
)
from adam_async.data_server.transforms.resample import Spline
from adam_async.data_server.transforms.steps import Step

KINDS = ("shift", "flip", "rotate", "scale", "shear", "elastic", "crop", "pad")

_ALONE = ("crop", "pad")
_HALF_PI = 1.5707963267948966
_COS_TERMS = (1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0)
_SIN_TERMS = (1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0)


def joins(step: Step, others: Sequence[Step]) -> bool:
    """Return whether a step can join the previous steps' resampling."""
    if step.kind in _ALONE or any(other.kind in _ALONE for other in others):
        return False
    if step.kind == "elastic" and any(other.kind == "elastic" for other in others):
        return False
    edges = {other.options["edge"] for other in (step, *others) if "edge" in other.options}
    return len(edges) <= 1


class Movement(ImagePass):
    """Steps that are resampled together.

    Args:
        steps: One or more steps that `joins` allows.

    Raises:
        ConfigError: A crop is larger than the padded image.
    """

    def __init__(self, steps: Sequence[Step], shape: Shape, kernels: Kernels) -> None:
        self.shape = new_shape(steps[0], shape)
        self.words = [_WORDS.get(step.kind, 1) for step in steps]
        self._steps = steps
        self._centre = (shape[2] - 1) / 2, (shape[1] - 1) / 2
        self._new_centre = (self.shape[2] - 1) / 2, (self.shape[1] - 1) / 2
        self._room = self.shape[2] - shape[2], self.shape[1] - shape[1]
        self._displaced, self._resample = kernels.displaced, kernels.resample
        self._repeat = any(step.options.get("edge") == "repeat" for step in steps)
        cells = 1
        self._points = 0
        for at, step in enumerate(steps):
            if step.kind == "elastic":
                cells = step.options["grid"]
                self._points = cells + 3
                self.words[at] = 2 * self._points**2
        self._down, self._across = Spline.of(self.shape[1], cells), Spline.of(self.shape[2], cells)

    def apply(self, images: Pixels, words: Sequence[Words]) -> Pixels:
        """Draw the maps of these images, and resample the images."""
        n = len(images)
        one, zero = np.ones(n), np.zeros(n)
        linear, offset = (one, zero, zero, one), (zero, zero)
        controls = np.zeros((n, 2, self._points, self._points), np.int64)
        for step, drawn in zip(self._steps, words, strict=True):
            if step.kind == "elastic":
                controls = self._displaced(
                    np.ascontiguousarray(drawn),
                    float(step.options["pixels"]),
                    np.stack(linear, axis=1),
                    self._points,
                )
                continue
            (p, q, s, t), (x, y) = self._inverse(step, drawn)
            a, b, d, e = linear
            offset = offset[0] + a * x + b * y, offset[1] + d * x + e * y
            linear = a * p + b * s, a * q + b * t, d * p + e * s, d * q + e * t
        out = np.empty((n, *self.shape), np.uint8)
        self._resample(
            images, self._maps(linear, offset), controls, self._down, self._across, self._repeat, out
        )
        return out

    def _maps(self, linear: Sequence[Floats], offset: Sequence[Floats]) -> NDArray[np.int64]:
        """Convert maps of positions from the centre into maps of columns and rows, in position units."""
        a, b, d, e = linear
        x, y = self._new_centre
        column = offset[0] + self._centre[0] - a * x - b * y
        row = offset[1] + self._centre[1] - d * x - e * y
        return units(np.stack([a, b, column, d, e, row], axis=1))

    def _inverse(self, step: Step, words: Words) -> tuple[Sequence[Floats], tuple[Floats, Floats]]:
        """Return the map to the old position of (x, y): four factors, row by row, and an offset."""
        one, zero = np.ones(len(words)), np.zeros(len(words))
        options, nowhere = step.options, (zero, zero)
        if step.kind == "flip":
            turned = np.where(uniform(words[:, 0]) < options["chance"], -1.0, 1.0)
            across = options["direction"] == "horizontal"
            return ((turned, zero, zero, one) if across else (one, zero, zero, turned)), nowhere
        if step.kind == "rotate":
            cosine, sine = _circle(signed(words[:, 0]) * options["degrees"])
            return (cosine, -sine, sine, cosine), nowhere
        if step.kind == "scale":
            smaller = 1.0 / (1.0 + signed(words[:, 0]) * options["by"])
            return (smaller, zero, zero, smaller), nowhere
        if step.kind == "shear":
            return (one, -signed(words[:, 0]) * options["by"], zero, one), nowhere
        if step.kind == "shift":
            right, down = (_shift(words[:, at], options["pixels"], options["whole"]) for at in (0, 1))
            return (one, zero, zero, one), (-right, -down)
        if step.kind == "crop":
            right, down = (self._window(words[:, at], at, options["padding"]) for at in (0, 1))
            return (one, zero, zero, one), (right, down)
        return (one, zero, zero, one), nowhere  # a pad leaves the image in the middle

    def _window(self, words: Words, axis: int, padding: int) -> Floats:
        """Return the distance of a random window's centre from the centre of the image."""
        places = 2 * padding - self._room[axis]
        middle = self._new_centre[axis] - self._centre[axis]
        return np.floor(uniform(words) * (places + 1)) - padding + middle


_WORDS = {"shift": 2, "crop": 2, "pad": 0}
"""Number of a step's random words; other kinds take one, an elastic step as many as its grid needs."""


def new_shape(step: Step, shape: Shape) -> Shape:
    """Return the shape (C, H, W) of the images that a step makes.

    Raises:
        ConfigError: A crop is larger than the padded image.
    """
    channels, *sizes = shape
    if step.kind == "pad":
        rows, columns = (size + 2 * step.options["pixels"] for size in sizes)
        return channels, rows, columns
    if step.kind != "crop":
        return shape
    new = []
    for key, size in zip(("rows", "columns"), sizes, strict=True):
        wanted, padded = step.options[key] or size, size + 2 * step.options["padding"]
        if wanted > padded:
            raise step.error(key, f"expected at most {padded}: the image has {size} {key} and the padding")
        new.append(wanted)
    return channels, new[0], new[1]


def _shift(words: Words, pixels: float, whole: bool) -> Floats:
    if whole:
        return np.floor(uniform(words) * (2 * pixels + 1)) - pixels
    return signed(words) * pixels


def _circle(degrees: Floats) -> tuple[Floats, Floats]:
    """Return cosine and sine, from series around the nearest quarter turn; exact at quarter turns."""
    quarters = np.floor(degrees / 90.0 + 0.5)
    angle = (degrees / 90.0 - quarters) * _HALF_PI
    square = angle * angle
    cosine, sine = np.zeros_like(angle), np.zeros_like(angle)
    for cosine_term, sine_term in zip(_COS_TERMS, _SIN_TERMS, strict=True):
        cosine = cosine * square + cosine_term
        sine = sine * square + sine_term
    sine = sine * angle
    turn = quarters.astype(np.int64) % 4
    swapped = turn % 2 == 1
    return (
        np.where(swapped, sine, cosine) * np.where((turn == 1) | (turn == 2), -1.0, 1.0),
        np.where(swapped, cosine, sine) * np.where(turn >= 2, -1.0, 1.0),
    )
