"""Pure: max and average pooling.

Both kinds of pooling process one axis of a square after the other: down the columns into intermediate values
("tall"), then across the rows. Two passes with ``kernel`` operands each do the work of ``kernel * kernel``
operands, and the first pass runs over whole rows of memory.

Max pooling: among equal values the leftmost column wins, and in it the topmost row. So exactly one input
receives an output's gradient. Backward compares operand after operand with the maximum. The first equal
operand receives the error gradient; all others receive zero. A value passes whole or not at all, so nothing
is rounded.

Average pooling: every value of a square receives the same part of the square's error gradient.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.layer import Array, Cut, Layer, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, OptionValue, Shape

Views = tuple[Array, ...]


class Pool(Layer):
    """One value per square and channel.

    Options: kernel, stride (0: the kernel's size). The output omits rows and columns that fill no square.
    Subclasses keep intermediate values in the scratch arrays `tall` and `tall_error`, of `tall_shape`.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"kernel": None, "stride": 0}
    CUT: ClassVar[Cut] = "rows"

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        channels, height, width = self.image_input()
        self.kernel = self.integer("kernel", minimum=1)
        self.stride = self.integer("stride", minimum=0) or self.kernel
        if min(height, width) < self.kernel:
            raise self.refusal(f"a kernel of {self.kernel} does not fit an input of {height}x{width}")
        rows, columns = ((size - self.kernel) // self.stride + 1 for size in (height, width))
        self.output_shape = (channels, rows, columns)

    @property
    def _tiles(self) -> bool:
        """Whether squares tile without overlaps or gaps, so that backward writes every input exactly once."""
        _, rows, columns = self.output_shape
        covered = (rows * self.kernel, columns * self.kernel)
        return self.stride == self.kernel and covered == self.input_shapes[0][1:]

    def needs(self, block: range, position: int = 0) -> range:
        """Return the rows under the squares of the given output rows."""
        if not block:
            return range(0)
        return range(block.start * self.stride, (block.stop - 1) * self.stride + self.kernel)

    def tall_shape(self, images: int) -> Shape:
        """Return the shape of the values between the two passes."""
        channels, rows, _ = self.output_shape
        return (channels, rows, self.input_shapes[0][2], images)

    def prepare(self, slots: Slots) -> None:
        """Cut input and intermediate values into one strided view per kernel position."""
        slots.views["down"] = self._operands(slots.inputs[0], axis=1)
        slots.views["across"] = self._operands(slots.scratch["tall"], axis=2)
        slots.views["across_error"] = self._operands(slots.scratch["tall_error"], axis=2)
        if slots.input_errors[0] is not None:
            slots.views["down_error"] = self._operands(slots.input_errors[0], axis=1)

    def _operands(self, array: Array, axis: int) -> Views:
        reach = self.stride * (self.output_shape[axis] - 1) + 1
        cuts = (slice(start, start + reach, self.stride) for start in range(self.kernel))
        return tuple(array[:, cut] if axis == 1 else array[:, :, cut] for cut in cuts)


class MaxPool(Pool):
    """Maximum over squares.

    Options: kernel, stride (0: the kernel's size). Rows and columns that fill no square are left out.
    """

    READS_OUTPUT: ClassVar[bool] = True

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the maxima over columns, their error gradient, and the scratch for both backward passes."""
        tall, whole = self.tall_shape(images), (*self.output_shape, images)
        return {
            "tall": (tall, None),
            "tall_error": (tall, None),
            "tall_handed": (tall, None),
            "tall_mask": (tall, np.bool_),
            "rest": (whole, None),
            "handed": (whole, None),
            "mask": (whole, np.bool_),
        }

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Take maxima down the columns, then across the rows."""
        _maximum(slots.views["down"], slots.scratch["tall"])
        _maximum(slots.views["across"], slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Give each error gradient to the maximum's position: first its column, then its row."""
        views, scratch = slots.views, slots.scratch
        input_error = slots.input_error
        # Squares that tile write every error gradient; others add to it, or leave some out.
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
        self, operands: Views, maxima: Array, errors: Views, *, rest: Array, handed: Array, mask: Array
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


def _maximum(operands: Views, out: Array) -> None:
    if len(operands) == 1:
        np.copyto(out, operands[0])
        return
    np.maximum(operands[0], operands[1], out=out)
    for operand in operands[2:]:
        np.maximum(out, operand, out=out)


class AveragePool(Pool):
    """Mean over squares.

    Options: kernel, stride (0: the kernel's size). Rows and columns that fill no square are left out.
    """

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the sums over columns, their error gradient, and each value's part of the error gradient."""
        tall = self.tall_shape(images)
        return {
            "tall": (tall, None),
            "tall_error": (tall, None),
            "part": ((*self.output_shape, images), None),
        }

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Add up down the columns, then across the rows, and divide."""
        _sum(slots.views["down"], slots.scratch["tall"])
        _sum(slots.views["across"], slots.output)
        np.multiply(slots.output, 1.0 / self.kernel**2, out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Copy each part to the whole row, then to the whole column."""
        views, scratch = slots.views, slots.scratch
        input_error = slots.input_error
        np.multiply(slots.error, 1.0 / self.kernel**2, out=scratch["part"])
        self._spread(scratch["part"], views["across_error"], scratch["tall_error"])
        self._spread(scratch["tall_error"], views["down_error"], input_error)

    def _spread(self, part: Array, targets: Views, whole: Array) -> None:
        if self._tiles:
            for target in targets:
                np.copyto(target, part)
            return
        whole.fill(0)
        for target in targets:
            np.add(target, part, out=target)


def _sum(operands: Views, out: Array) -> None:
    np.copyto(out, operands[0])
    for operand in operands[1:]:
        np.add(out, operand, out=out)
