"""Pure: dropout. Seed, group and layer determine the dropped values.

Kept values are divided by the share of kept values, so the expected output is the input, and evaluation is
the identity. Draws are made once per group, always in float64, so networks of either precision drop the same
values, as does a resumed run. A draw belongs to a position in the whole output, so a cut layer drops the same
values as the whole layer.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.keyed_random import Dice, Key
from adam_async.model.layer import Array, Cut, Layer, ScratchSpec, Slots, Weights, extent
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class Dropout(Layer):
    """Set a share of the values to zero in training. Options: rate, the share of dropped values."""

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"rate": 0.5}
    CUT: ClassVar[Cut] = "rows"
    SHARES_INPUT: ClassVar[bool] = True
    OVERWRITES: ClassVar[bool] = True
    DRAWS: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.rate = self.real("rate", minimum=0, below=1)
        self._whole, self._first = extent(self.output_shape), 0

    def limit(self, block: range) -> None:
        """Store the start of the block in the whole output."""
        self._first += block.start

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the draws, and the factors: 0, or 1 over the share of kept values."""
        shape: Shape = (*self.output_shape, images)
        return {"drawn": (shape, np.float64), "factors": (shape, None)}

    def draw(self, slots: Slots, dice: Dice, keys: tuple[Key, ...]) -> None:
        """Drop the values with a draw below the rate."""
        drawn, factors = slots.scratch["drawn"], slots.scratch["factors"]
        for start, run in self._runs(drawn):
            dice.fill_uniform("dropout", run, keys=(self.name, *keys), start=start)
        np.greater_equal(drawn, self.rate, out=factors, casting="unsafe")
        np.multiply(factors, 1.0 / (1.0 - self.rate), out=factors)

    def _runs(self, drawn: Array) -> Iterator[tuple[int, Array]]:
        """Cut the draws into runs of the whole output's memory, each with its first element's position."""
        if extent(self.output_shape) == self._whole:
            yield 0, drawn
            return
        # A cut layer has some rows of each channel, which are one run in the whole output.
        planes = drawn if len(self.output_shape) == 3 else drawn[np.newaxis]
        row = planes[0, 0].size
        for number, plane in enumerate(planes):
            yield (number * self._whole + self._first) * row, plane

    def prepare(self, slots: Slots) -> None:
        """Note whether input and output share memory, so that evaluation needs no copy."""
        slots.views["shared"] = np.may_share_memory(slots.inputs[0], slots.output)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the factors in training; otherwise copy."""
        if slots.training:
            np.multiply(slots.inputs[0], slots.scratch["factors"], out=slots.output)
        elif not slots.views["shared"]:
            np.copyto(slots.output, slots.inputs[0])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the same factors."""
        np.multiply(slots.error, slots.scratch["factors"], out=slots.input_errors[0])
