"""Pure: activation functions, one value at a time."""

from typing import ClassVar

import numpy as np

from adam_async.model.layer import Cut, Layer, ScratchSpec, Slots, Weights


class Relu(Layer):
    """Maximum of x and 0, with derivative 0 at 0.

    Works in the memory of its input if no other layer and no backward reads the input.
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
