"""Pure: max pooling, one axis after the other.

The maximum over a square is the maximum over its columns' maxima. Among equal values the leftmost column
wins, and in it the topmost row: exactly one input receives the gradient of an output.

The way back hands each error gradient to the first operand that equals the maximum and subtracts what was
handed out from what is left; values are either passed whole or not at all, so nothing is rounded.
"""

from typing import ClassVar

import numpy as np

from adam_async.model.layer import Array, ScratchSpec, Slots, Weights
from adam_async.model.layers.pool import Pool, Views


class MaxPool(Pool):
    """Maximum over squares.

    Options: kernel, stride (0: the kernel's size). Rows and columns that fill no square are left out.
    """

    READS_OUTPUT: ClassVar[bool] = True

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Maxima over columns only, their error gradient, and a mask and a rest for each pass back."""
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
