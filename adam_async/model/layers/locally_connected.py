"""Pure: a convolution without shared weights: every output pixel has its own filters.

Letters: O filters, P output pixels, K positions in the kernel of all input channels, B batch. Weights
are O,rows,columns,C,KH,KW and bias O,rows,columns, both C-contiguous; the first axis is the filters', as in
every other layer. Each output pixel is a small dense layer, so all steps are stacks of P matrix products:

    forward     y_POB = weights_POK @ columns_PKB + bias_OP
    delta       errors_POB @ columns_PKB.T            (columns kept from forward)
    backward    weights_POK.T @ errors_POB, folded back onto the input pixels of each column

A cut layer has the weights of all pixels and uses the weights of its rows. The gradient of the others is
zero, so the gradients of all cuts add up to the gradient of the whole.

The stacks are views with the pixels' axis first; BLAS takes each of their matrices without a copy.
"""

import numpy as np

from adam_async.model.layer import INITS, Array, Slots, Weights, uniform_bound
from adam_async.model.layers.sliding import SlidingKernel
from adam_async.model.spec import LayerSpec, Shape


class LocallyConnected(SlidingKernel):
    """Separate filters at every output pixel. Options: filters, kernel, stride, padding (zeros), init."""

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        bound = uniform_bound(self.choice("init", INITS), self.fan_in)
        self.parameters = (
            self.tensor(
                "weight", (*self.output_shape, input_shapes[0][0], self.kernel, self.kernel), bound=bound
            ),
            self.tensor("bias", self.output_shape),
        )
        self._own_rows = range(self.output_shape[1])

    def limit(self, block: range) -> None:
        """Store the rows of the weights in use."""
        super().limit(block)
        self._own_rows = self._own_rows[block.start : block.stop]

    def _own(self, tensor: Array) -> Array:
        """Return the part of a tensor, or of its gradient, for the computed rows."""
        return tensor[:, self._own_rows.start : self._own_rows.stop]

    def prepare(self, slots: Slots) -> None:
        """Make the stacks of matrices."""
        super().prepare(slots)
        views = slots.views
        views["columns"] = self._stack(slots.scratch["columns"], self.fan_in, slots.images)
        views["output"] = self._stack(slots.output, self.filters, slots.images)
        if slots.output_error is None:
            return
        views["error"] = self._stack(slots.output_error, self.filters, slots.images)
        views["column_errors"] = self._stack(slots.scratch["column_errors"], self.fan_in, slots.images)

    def _stack(self, array: Array, rows: int, columns: int) -> Array:
        """View ``rows * P * columns`` values as P matrices."""
        return array.reshape(rows, -1, columns).swapaxes(0, 1)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the columns, multiply pixel by pixel, add the bias."""
        self.gather(slots)
        weights_POK = self._stack(self._own(weights[self.weight]), self.filters, self.fan_in)
        np.matmul(weights_POK, slots.views["columns"], out=slots.views["output"])
        np.add(slots.output, self._own(weights[self.bias])[..., None], out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the transposed weights, pixel by pixel, and fold the columns back."""
        weights_POK = self._stack(self._own(weights[self.weight]), self.filters, self.fan_in)
        np.matmul(weights_POK.swapaxes(1, 2), slots.views["error"], out=slots.views["column_errors"])
        self.fold(slots)

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Multiply errors and columns, pixel by pixel; for the bias, add the errors of the images up."""
        # A cut layer's gradient is zero at the pixels of other cuts.
        if kind in ("weight", "bias") and len(self._own_rows) < out.shape[1]:
            out.fill(0)
        if kind == "weight":
            columns_PBK = slots.views["columns"].swapaxes(1, 2)
            # BLAS takes 1.4 times as long for products of a column and a row.
            multiply = np.multiply if slots.images == 1 else np.matmul
            gradient_POK = self._stack(self._own(out), self.filters, self.fan_in)
            multiply(slots.views["error"], columns_PBK, out=gradient_POK)
        elif kind == "bias":
            np.add.reduce(slots.error, axis=-1, out=self._own(out))
        else:
            super().delta(slots, kind, out)
