"""Pure: dropout. Which values are dropped is a function of seed, group and layer.

What is kept is divided by the share that is kept, so the expected output is the input, and evaluation is
the identity. Draws are made once per group, in float64 whatever the network computes in: a network
in either precision drops the same values, and so does a run that starts again in the middle. A draw belongs
to a place in the whole output, so a layer that is cut drops what the whole one would drop there.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.keyed_random import Dice, Key
from adam_async.model.layer import Array, Cut, Layer, ScratchSpec, Slots, Weights, extent
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class Dropout(Layer):
    """Zero a share of the values in training. Options: rate, the share that is dropped."""

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
        """Remember where in the whole output the block begins."""
        self._first += block.start

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """What is drawn, and what values are multiplied by: 0, or 1 over the share that is kept."""
        shape: Shape = (*self.output_shape, images)
        return {"drawn": (shape, np.float64), "factors": (shape, None)}

    def draw(self, slots: Slots, dice: Dice, keys: tuple[Key, ...]) -> None:
        """Drop what draws less than the rate."""
        drawn, factors = slots.scratch["drawn"], slots.scratch["factors"]
        for start, run in self._runs(drawn):
            dice.fill_uniform("dropout", run, keys=(self.name, *keys), start=start)
        np.greater_equal(drawn, self.rate, out=factors, casting="unsafe")
        np.multiply(factors, 1.0 / (1.0 - self.rate), out=factors)

    def _runs(self, drawn: Array) -> Iterator[tuple[int, Array]]:
        """Cut what is drawn into runs of the whole output's memory, each with the element it starts at."""
        if extent(self.output_shape) == self._whole:
            yield 0, drawn
            return
        planes = drawn if len(self.output_shape) == 3 else drawn[np.newaxis]
        row = planes[0, 0].size
        for number, plane in enumerate(planes):
            yield (number * self._whole + self._first) * row, plane

    def prepare(self, slots: Slots) -> None:
        """Find out whether evaluation has anything to copy."""
        slots.views["shared"] = np.may_share_memory(slots.inputs[0], slots.output)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the factors in training; copy otherwise."""
        if slots.training:
            np.multiply(slots.inputs[0], slots.scratch["factors"], out=slots.output)
        elif not slots.views["shared"]:
            np.copyto(slots.output, slots.inputs[0])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the same factors."""
        np.multiply(slots.error, slots.scratch["factors"], out=slots.input_errors[0])
