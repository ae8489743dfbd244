"""Pure: two-dimensional convolution, as one GEMM over the whole group.

Letters: C input channels, O filters, K one position in the kernel of all input channels (C * kernel *
kernel), N one output pixel of one image (height * width * B). Weights are O,C,KH,KW and bias O, both
C-contiguous.

    forward     y_ON = weights_OK @ columns_KN + bias_O
    delta       errors_ON @ columns_KN.T              (columns kept from forward)
    backward    weights_OK.T @ errors_ON, folded back onto the input pixels they came from

The batch being the last axis, columns are copied in runs of ``width * B`` numbers. Folding back goes in two
passes, first over the kernel's rows, then over its columns: ``2 * kernel`` long additions instead of
``kernel * kernel`` short ones.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from adam_async.model.initial import INITS, uniform_bound
from adam_async.model.layer import Array, Cut, Layer, ParameterSpec, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class Conv2d(Layer):
    """Convolution with a square kernel. Options: filters, kernel, stride, padding (zeros), init."""

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
        reach = (height + 2 * self.padding, width + 2 * self.padding)
        if min(reach) < self.kernel:
            raise self.refusal(
                f"a kernel of {self.kernel} does not fit an input of {height}x{width} "
                f"padded by {self.padding}"
            )
        rows, columns = ((size - self.kernel) // self.stride + 1 for size in reach)
        self.output_shape = (self.filters, rows, columns)
        fan_in = channels * self.kernel * self.kernel
        self.multiply_adds = self.filters * rows * columns * fan_in
        self.weight, self.bias = f"{self.name}.weight", f"{self.name}.bias"
        self.parameters = (
            ParameterSpec(
                name=self.weight,
                shape=(self.filters, channels, self.kernel, self.kernel),
                layer=self.name,
                kind="weight",
                bound=uniform_bound(self.choice("init", INITS), fan_in),
            ),
            ParameterSpec(name=self.bias, shape=(self.filters,), layer=self.name, kind="bias"),
        )

    def input_rows(self, rows: range) -> range:
        """Rows under the kernel of the first to the last output row, without the padding."""
        if not rows:
            return range(0)
        first = rows.start * self.stride - self.padding
        last = (rows.stop - 1) * self.stride - self.padding + self.kernel
        return range(max(first, 0), min(last, self.input_shapes[0][1]))

    def _padded_shape(self, images: int) -> Shape:
        channels, height, width = self.input_shapes[0]
        return (channels, height + 2 * self.padding, width + 2 * self.padding, images)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Columns and their error gradient; with padding, padded copies of input and input error too."""
        channels = self.input_shapes[0][0]
        columns: Shape = (channels, self.kernel, self.kernel, *self.output_shape[1:], images)
        tall: Shape = (channels, self.kernel, self._padded_shape(images)[1], self.output_shape[2], images)
        specs: dict[str, ScratchSpec] = {
            "columns": (columns, None),
            "column_errors": (columns, None),
            "tall": (tall, None),
        }
        if self.padding:
            specs["padded"] = (self._padded_shape(images), None)
            specs["padded_error"] = (self._padded_shape(images), None)
        return specs

    def _inner(self, padded: Array) -> Array:
        """The part of a padded array that is the image itself."""
        _, height, width = self.input_shapes[0]
        start = self.padding
        return padded[:, start : start + height, start : start + width]

    def prepare(self, slots: Slots) -> None:
        """Make the matrix views, the sliding windows, and the pairs of slices that folding back adds up."""
        views, columns = slots.views, slots.scratch["columns"]
        depth = columns.shape[0] * self.kernel * self.kernel
        source = slots.scratch["padded"] if self.padding else slots.inputs[0]
        if self.padding:
            views["inner"] = self._inner(source)
        windows = sliding_window_view(source, (self.kernel, self.kernel), axis=(1, 2))
        views["windows"] = windows[:, :: self.stride, :: self.stride].transpose(0, 4, 5, 1, 2, 3)
        views["columns"] = columns.reshape(depth, -1)
        views["output"] = slots.output.reshape(self.filters, -1)
        if slots.output_error is None:
            return
        views["error"] = slots.output_error.reshape(self.filters, -1)
        views["ones"] = np.ones(views["error"].shape[1], slots.output.dtype)
        if slots.input_errors[0] is None:
            return
        column_errors = slots.scratch["column_errors"]
        views["column_errors"] = column_errors.reshape(depth, -1)
        target = slots.scratch["padded_error"] if self.padding else slots.input_errors[0]
        views["target"] = target
        if self.padding:
            views["target_inner"] = self._inner(target)
            views["input_error"] = slots.input_errors[0]
        tall = slots.scratch["tall"]
        down, across = (self.stride * (size - 1) + 1 for size in self.output_shape[1:])
        views["fold_rows"] = tuple(
            (tall.swapaxes(1, 2)[:, y : y + down : self.stride], column_errors[:, y].swapaxes(1, 2))
            for y in range(self.kernel)
        )
        views["fold_columns"] = tuple(
            (target[:, :, x : x + across : self.stride], tall[:, x]) for x in range(self.kernel)
        )

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy the columns, multiply, add the bias."""
        views = slots.views
        if self.padding:
            # The border is cleared each time: groups of another size lay their rows over the same memory.
            slots.scratch["padded"].fill(0)
            np.copyto(views["inner"], slots.inputs[0])
        np.copyto(slots.scratch["columns"], views["windows"])
        np.matmul(weights[self.weight].reshape(self.filters, -1), views["columns"], out=views["output"])
        np.add(views["output"], weights[self.bias].reshape(-1, 1), out=views["output"])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the transposed weights and fold the columns back."""
        views = slots.views
        np.matmul(
            weights[self.weight].reshape(self.filters, -1).T, views["error"], out=views["column_errors"]
        )
        for whole, folds in ((slots.scratch["tall"], "fold_rows"), (views["target"], "fold_columns")):
            whole.fill(0)
            for target, part in views[folds]:
                np.add(target, part, out=target)
        if self.padding:
            np.copyto(views["input_error"], views["target_inner"])

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Multiply errors and columns; for the bias, add the errors up.

        With `dot`: `matmul` keeps the interpreter's lock when the result has fewer than 500 values, however
        long the sums are, and these are the longest sums there are.
        """
        if kind == "weight":
            np.dot(slots.views["error"], slots.views["columns"].T, out=out.reshape(self.filters, -1))
        elif kind == "bias":
            # A product with ones is three times as fast as a sum along the last axis.
            np.dot(slots.views["error"], slots.views["ones"], out=out)
        else:
            super().delta(slots, kind, out)
