"""Pure: a square kernel that slides over an image, and the columns of values under the kernel.

Letters: C input channels, K kernel positions over all input channels (C * kernel * kernel), N output pixels
over all images (height * width * B).

Convolution and the locally connected layer differ only in the weights of each column. Both layers read
`columns`, of shape (C, kernel, kernel, rows, columns, B): the values under the kernel at each output pixel.
The batch is the last axis, so copies of columns have runs of ``width * B`` numbers. Backward folds the
columns' error gradient onto the input pixels in two passes, first over the kernel's rows, then over its
columns. The passes take ``2 * kernel`` long additions instead of ``kernel * kernel`` short ones.

*Convolution*, in two dimensions, is one GEMM over the whole group.

Letters: O filters, K positions in the kernel of all input channels, N output pixels of all images.
Weights are O,C,KH,KW and bias O, both C-contiguous.

    forward     y_ON = weights_OK @ columns_KN + bias_O
    delta       errors_ON @ columns_KN.T              (columns kept from forward)
    backward    weights_OK.T @ errors_ON, folded back onto the input pixels of each column

*The locally connected layer* shares no weights: every output pixel has its own filters.

Letters: O filters, P output pixels, K positions in the kernel of all input channels, B batch. Weights
are O,rows,columns,C,KH,KW and bias O,rows,columns, both C-contiguous; the first axis is the filters', as in
every other layer. Each output pixel is a small dense layer, so all steps are stacks of P matrix products:

    forward     y_POB = weights_POK @ columns_PKB + bias_OP
    delta       errors_POB @ columns_PKB.T            (columns kept from forward)
    backward    weights_POK.T @ errors_POB, folded back onto the input pixels of each column

A cut layer has the weights of all pixels and uses the weights of its rows. The gradient of the other rows is
zero, so the gradients of all cuts add up to the whole layer's gradient.

The stacks are views with the pixels' axis first; BLAS takes each of their matrices without a copy.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from adam_async.model.layer import INITS, Array, Cut, Layer, ScratchSpec, Slots, Weights, uniform_bound
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class SlidingKernel(Layer):
    """Geometry, columns and folding. Options: filters, kernel, stride, padding (zeros), init.

    Subclasses set `parameters`; their forward starts with `gather`, their backward ends with `fold`.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {
        "filters": None,
        "kernel": None,
        "stride": 1,
        "padding": 0,
        "init": "he",
    }
    CUT: ClassVar[Cut] = "rows"

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        channels, height, width = self.image_input()
        self.filters = self.integer("filters", minimum=1)
        self.kernel = self.integer("kernel", minimum=1)
        self.stride = self.integer("stride", minimum=1)
        self.padding = self.integer("padding", minimum=0)
        # Rows of zeros above and below the input, which a cut layer has only at the image's borders.
        self.top = self.bottom = self.padding
        reach = (height + 2 * self.padding, width + 2 * self.padding)
        if min(reach) < self.kernel:
            raise self.refusal(
                f"a kernel of {self.kernel} does not fit an input of {height}x{width} "
                f"padded by {self.padding}"
            )
        rows, columns = ((size - self.kernel) // self.stride + 1 for size in reach)
        self.output_shape = (self.filters, rows, columns)
        self.fan_in = channels * self.kernel * self.kernel
        self.multiply_adds = self.filters * rows * columns * self.fan_in
        self.weight, self.bias = f"{self.name}.weight", f"{self.name}.bias"

    def needs(self, block: range, position: int = 0) -> range:
        """Return the rows under the kernel of the first to the last output row, without the padding."""
        reach = self._reach(block)
        rows = range(max(reach.start, 0), min(reach.stop, self.input_shapes[0][1]))
        return rows or range(0)

    def _reach(self, block: range) -> range:
        """Return the rows under the kernel, including rows of the padding outside the image."""
        if not block:
            return range(0)
        start = block.start * self.stride - self.top
        return range(start, start + (len(block) - 1) * self.stride + self.kernel)

    def limit(self, block: range) -> None:
        """Keep padding only at those borders of the image that the block crosses."""
        reach, height = self._reach(block), self.input_shapes[0][1]
        self.top = min(max(-reach.start, 0), len(reach))
        self.bottom = min(max(reach.stop - height, 0), len(reach))

    def padded_shape(self, images: int) -> Shape:
        """Return the shape of a group's input with its padding."""
        channels, height, width = self.input_shapes[0]
        return (channels, self.top + height + self.bottom, width + 2 * self.padding, images)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name columns, their error gradient and, with padding, padded copies of input and input error."""
        channels = self.input_shapes[0][0]
        columns: Shape = (channels, self.kernel, self.kernel, *self.output_shape[1:], images)
        tall: Shape = (channels, self.kernel, self.padded_shape(images)[1], self.output_shape[2], images)
        specs: dict[str, ScratchSpec] = {
            "columns": (columns, None),
            "column_errors": (columns, None),
            "tall": (tall, None),
        }
        if self.padding:
            specs["padded"] = (self.padded_shape(images), None)
            specs["padded_error"] = (self.padded_shape(images), None)
        return specs

    def _inner(self, padded: Array) -> Array:
        """Return the part of a padded array without the padding."""
        _, height, width = self.input_shapes[0]
        top, left = self.top, self.padding
        return padded[:, top : top + height, left : left + width]

    def prepare(self, slots: Slots) -> None:
        """Make the sliding windows, and the pairs of slices for `fold`."""
        views = slots.views
        source = slots.scratch["padded"] if self.padding else slots.inputs[0]
        if self.padding:
            views["inner"] = self._inner(source)
        windows = sliding_window_view(source, (self.kernel, self.kernel), axis=(1, 2))
        views["windows"] = windows[:, :: self.stride, :: self.stride].transpose(0, 4, 5, 1, 2, 3)
        if slots.input_errors[0] is None:
            return
        target = slots.scratch["padded_error"] if self.padding else slots.input_errors[0]
        views["target"] = target
        if self.padding:
            views["target_inner"] = self._inner(target)
            views["input_error"] = slots.input_errors[0]
        column_errors, tall = slots.scratch["column_errors"], slots.scratch["tall"]
        down, across = (self.stride * (size - 1) + 1 for size in self.output_shape[1:])
        views["fold_rows"] = tuple(
            (tall.swapaxes(1, 2)[:, y : y + down : self.stride], column_errors[:, y].swapaxes(1, 2))
            for y in range(self.kernel)
        )
        views["fold_columns"] = tuple(
            (target[:, :, x : x + across : self.stride], tall[:, x]) for x in range(self.kernel)
        )

    def gather(self, slots: Slots) -> None:
        """Copy the values under the kernel into the columns."""
        if self.padding:
            # The border is cleared each time, because groups of another size use the same memory.
            slots.scratch["padded"].fill(0)
            np.copyto(slots.views["inner"], slots.inputs[0])
        np.copyto(slots.scratch["columns"], slots.views["windows"])

    def fold(self, slots: Slots) -> None:
        """Add up the columns' error gradients at their input pixels."""
        views = slots.views
        for whole, folds in ((slots.scratch["tall"], "fold_rows"), (views["target"], "fold_columns")):
            whole.fill(0)
            for target, part in views[folds]:
                np.add(target, part, out=target)
        if self.padding:
            np.copyto(views["input_error"], views["target_inner"])


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
        # for long sums. These are a network's longest sums.
        if kind == "weight":
            np.dot(slots.views["error"], slots.views["columns"].T, out=out.reshape(self.filters, -1))
        elif kind == "bias":
            # A product with ones is three times as fast as a sum along the last axis.
            np.dot(slots.views["error"], slots.views["ones"], out=out)
        else:
            super().delta(slots, kind, out)


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
        """Return the part of a tensor or its gradient that belongs to the computed rows."""
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
