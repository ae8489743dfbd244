"""Pure: two-dimensional convolution, as one GEMM over the whole group.

Letters: O filters, K positions in the kernel of all input channels, N output pixels of all images.
Weights are O,C,KH,KW and bias O, both C-contiguous.

    forward     y_ON = weights_OK @ columns_KN + bias_O
    delta       errors_ON @ columns_KN.T              (columns kept from forward)
    backward    weights_OK.T @ errors_ON, folded back onto the input pixels of each column
"""

import numpy as np

from adam_async.model.layer import INITS, Array, Slots, Weights, uniform_bound
from adam_async.model.layers.sliding import SlidingKernel
from adam_async.model.spec import LayerSpec, Shape


class Conv2d(SlidingKernel):
    """Convolution with a square kernel. Options: filters, kernel, stride, padding (zeros), init."""

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        bound = uniform_bound(self.choice("init", INITS), self.fan_in)
        self.parameters = (
            self.tensor("weight", (self.filters, input_shapes[0][0], self.kernel, self.kernel), bound=bound),
            self.tensor("bias", (self.filters,)),
        )

    def prepare(self, slots: Slots) -> None:
        """Make the matrix views."""
        super().prepare(slots)
        views = slots.views
        views["columns"] = slots.scratch["columns"].reshape(self.fan_in, -1)
        views["output"] = slots.output.reshape(self.filters, -1)
        if slots.output_error is None:
            return
        views["error"] = slots.output_error.reshape(self.filters, -1)
        views["ones"] = np.ones(views["error"].shape[1], slots.output.dtype)
        views["column_errors"] = slots.scratch["column_errors"].reshape(self.fan_in, -1)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the columns, multiply, add the bias."""
        views = slots.views
        self.gather(slots)
        np.matmul(weights[self.weight].reshape(self.filters, -1), views["columns"], out=views["output"])
        np.add(views["output"], weights[self.bias].reshape(-1, 1), out=views["output"])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the transposed weights and fold the columns back."""
        views = slots.views
        np.matmul(
            weights[self.weight].reshape(self.filters, -1).T, views["error"], out=views["column_errors"]
        )
        self.fold(slots)

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Multiply errors and columns; for the bias, add the errors up."""
        # `dot`, because `matmul` keeps the interpreter's lock if the result has fewer than 500 values, even
        # for long sums, and these are the longest sums of a network.
        if kind == "weight":
            np.dot(slots.views["error"], slots.views["columns"].T, out=out.reshape(self.filters, -1))
        elif kind == "bias":
            # A product with ones is three times as fast as a sum along the last axis.
            np.dot(slots.views["error"], slots.views["ones"], out=out)
        else:
            super().delta(slots, kind, out)
