"""Pure: activation functions, one value at a time.

Dropout. Seed, group and layer determine the dropped values.

Kept values are divided by the share of kept values, so the expected output is the input, and evaluation is
the identity. Draws are made once per group, always in float64. So networks of either precision drop the same
values, and a resumed run does too. A draw belongs to a position in the whole output, so a cut layer drops the
same values as the whole layer.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.keyed_random import Dice, Key
from adam_async.model.layer import Array, Cut, Layer, ScratchSpec, Slots, Weights, extent
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class Relu(Layer):
    """Maximum of x and 0, with derivative 0 at 0.

    Works in its input's memory if no other layer and no backward reads the input.
    """

    CUT: ClassVar[Cut] = "rows"
    SHARES_INPUT: ClassVar[bool] = True
    OVERWRITES: ClassVar[bool] = True
    READS_OUTPUT: ClassVar[bool] = True

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name one mask."""
        return {"mask": ((*self.output_shape, images), np.bool_)}

    def prepare(self, slots: Slots) -> None:
        """Make flat views of input and output, and a row of zeros."""
        # NumPy's maximum with an array of zeros is four times as fast as with a scalar.
        rows = slots.output.shape[0] if slots.output.ndim > 2 else 1
        slots.views["zeros"] = np.zeros(slots.output.size // rows, slots.output.dtype)
        slots.views["input"] = slots.inputs[0].reshape(rows, -1)
        slots.views["output"] = slots.output.reshape(rows, -1)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Clip at zero."""
        np.maximum(slots.views["input"], slots.views["zeros"], out=slots.views["output"])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Pass the error gradient if the output is positive."""
        mask = slots.scratch["mask"]
        np.greater(slots.output, 0, out=mask)
        np.multiply(slots.error, mask, out=slots.input_errors[0])


class Tanh(Layer):
    """Hyperbolic tangent."""

    CUT: ClassVar[Cut] = "rows"
    READS_OUTPUT: ClassVar[bool] = True

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Apply the function."""
        np.tanh(slots.inputs[0], out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by 1 - y * y."""
        slope = slots.input_error
        np.multiply(slots.output, slots.output, out=slope)
        np.subtract(1, slope, out=slope)
        np.multiply(slope, slots.error, out=slope)


class Sigmoid(Layer):
    """Logistic function, computed as (1 + tanh(x / 2)) / 2, which never overflows."""

    CUT: ClassVar[Cut] = "rows"
    READS_OUTPUT: ClassVar[bool] = True

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Apply the function."""
        y = slots.output
        np.multiply(slots.inputs[0], 0.5, out=y)
        np.tanh(y, out=y)
        np.add(y, 1, out=y)
        np.multiply(y, 0.5, out=y)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by y * (1 - y)."""
        slope = slots.input_error
        np.subtract(1, slots.output, out=slope)
        np.multiply(slope, slots.output, out=slope)
        np.multiply(slope, slots.error, out=slope)


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
        """Name the draws, and the factors: 0, or 1 / (share of kept values)."""
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
        """Record whether input and output share memory, so that evaluation needs no copy."""
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
