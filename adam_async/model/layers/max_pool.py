"""Pure: max pooling, one axis after the other.

The maximum over a square is the maximum over its columns' maxima, so two passes of ``kernel`` operands do
the work of ``kernel * kernel``, and the first of them runs over whole rows of memory. Among equal values
the leftmost column wins, and in it the topmost row: exactly one input receives the gradient of an output.

The way back hands each error gradient to the first operand that equals the maximum and subtracts what was
handed out from what is left; values are either passed whole or not at all, so nothing is rounded.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.layer import Array, Cut, Layer, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, OptionValue, Shape

_Views = tuple[Array, ...]


class MaxPool(Layer):
    """Maximum over squares.

    Options: kernel, stride (0: the kernel's size). Rows and columns that fill no square are left out.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"kernel": None, "stride": 0}
    CUT: ClassVar[Cut] = "rows"
    READS_OUTPUT: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        channels, height, width = self.image_input()
        self.kernel = self.integer("kernel", minimum=1)
        self.stride = self.integer("stride", minimum=0) or self.kernel
        if min(height, width) < self.kernel:
            raise self.refusal(f"a kernel of {self.kernel} does not fit an input of {height}x{width}")
        rows, columns = ((size - self.kernel) // self.stride + 1 for size in (height, width))
        self.output_shape = (channels, rows, columns)
        # Where squares neither overlap nor leave gaps, the way back writes every input exactly once.
        self._tiles = self.stride == self.kernel and (rows * self.kernel, columns * self.kernel) == (
            height,
            width,
        )

    def input_rows(self, rows: range) -> range:
        """Rows under the squares of the given output rows."""
        if not rows:
            return range(0)
        return range(rows.start * self.stride, (rows.stop - 1) * self.stride + self.kernel)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Maxima over columns only, their error gradient, and a mask and a rest for each pass back."""
        channels, rows, columns = self.output_shape
        tall: Shape = (channels, rows, self.input_shapes[0][2], images)
        return {
            "tall": (tall, None),
            "tall_error": (tall, None),
            "tall_handed": (tall, None),
            "tall_mask": (tall, np.bool_),
            "rest": ((channels, rows, columns, images), None),
            "handed": ((channels, rows, columns, images), None),
            "mask": ((channels, rows, columns, images), np.bool_),
        }

    def prepare(self, slots: Slots) -> None:
        """Cut input and intermediate maxima into one strided view per kernel position."""
        slots.views["down"] = self._operands(slots.inputs[0], axis=1)
        slots.views["across"] = self._operands(slots.scratch["tall"], axis=2)
        slots.views["across_error"] = self._operands(slots.scratch["tall_error"], axis=2)
        if slots.input_errors[0] is not None:
            slots.views["down_error"] = self._operands(slots.input_errors[0], axis=1)

    def _operands(self, array: Array, axis: int) -> _Views:
        reach = self.stride * (self.output_shape[axis] - 1) + 1
        cuts = (slice(start, start + reach, self.stride) for start in range(self.kernel))
        return tuple(array[:, cut] if axis == 1 else array[:, :, cut] for cut in cuts)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Take maxima down the columns, then across the rows."""
        _maximum(slots.views["down"], slots.scratch["tall"])
        _maximum(slots.views["across"], slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Hand each error gradient back across the row, then down the column, to the value that won."""
        views, scratch = slots.views, slots.scratch
        input_error = slots.input_errors[0]
        assert input_error is not None
        if not self._tiles:
            scratch["tall_error"].fill(0)
            input_error.fill(0)
        np.copyto(scratch["rest"], slots.error)
        self._hand_back(
            views["across"],
            slots.output,
            views["across_error"],
            rest=scratch["rest"],
            handed=scratch["handed"],
            mask=scratch["mask"],
        )
        self._hand_back(
            views["down"],
            scratch["tall"],
            views["down_error"],
            rest=scratch["tall_error"],
            handed=scratch["tall_handed"],
            mask=scratch["tall_mask"],
        )

    def _hand_back(
        self, operands: _Views, maxima: Array, errors: _Views, *, rest: Array, handed: Array, mask: Array
    ) -> None:
        """Divide `rest`, the maxima's error gradient, among the operands' `errors`. Overwrites `rest`."""
        *firsts, last = range(self.kernel)
        for index in firsts:
            np.equal(operands[index], maxima, out=mask)
            target = errors[index] if self._tiles else handed
            np.multiply(rest, mask, out=target)
            np.subtract(rest, target, out=rest)
            if not self._tiles:
                np.add(errors[index], handed, out=errors[index])
        if self._tiles:
            np.copyto(errors[last], rest)
        else:
            np.add(errors[last], rest, out=errors[last])


def _maximum(operands: _Views, out: Array) -> None:
    if len(operands) == 1:
        np.copyto(out, operands[0])
        return
    np.maximum(operands[0], operands[1], out=out)
    for operand in operands[2:]:
        np.maximum(out, operand, out=out)
