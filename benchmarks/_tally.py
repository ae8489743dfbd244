"""A layer whose weights count the images of a training, and the files of a run with it."""

from pathlib import Path

import numpy as np

from adam_async.model.layer import Array, Layer, Slots, Weights
from adam_async.model.spec import LayerSpec, Shape

IMAGES = 8000
"""Number of training images: an epoch lasts for seconds, so that audits see the results of all epochs."""

SIDE = 8
"""Rows and columns of an image."""

MODEL = f"""
name = "tally"
input = [1, {SIDE}, {SIDE}]

[[layers]]
name = "tally"
kind = "tally"

[[layers]]
name = "flat"
kind = "flatten"

[[layers]]
name = "fc"
kind = "dense"
outputs = 10
frozen = true

[[layers]]
name = "loss"
kind = "softmax_cross_entropy"
"""


class Tally(Layer):
    """Passes images on; a step of rate 1 adds 1 to the count of each image, whose number is in two pixels."""

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.parameters = (self.tensor("count", (IMAGES,)),)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the images."""
        np.copyto(slots.output, slots.inputs[0])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Do nothing: no layer before this one has parameters."""

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Count the images."""
        high, low = np.rint(slots.inputs[0].reshape(-1, slots.images)[:2] * 255).astype(np.int64)
        numbers = high * 256 + low
        out[:] = 0
        np.subtract.at(out, numbers[numbers < IMAGES], 1)  # others are in the planner's trial


def write_files(folder: Path) -> tuple[Path, Path]:
    """Write the data set and the model; return their paths."""
    data, model = folder / "tally.npz", folder / "tally.toml"
    dice = np.random.default_rng(1)
    parts = []
    for count in (IMAGES, 40):
        images = dice.integers(0, 256, (count, SIDE, SIDE), dtype=np.uint8)
        images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(count), 256)
        parts.append((images, dice.integers(0, 10, count, dtype=np.uint8)))
    (x_train, y_train), (x_test, y_test) = parts
    np.savez(data, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    model.write_text(MODEL)
    return data, model
