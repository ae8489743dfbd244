"""Pure: average pooling. Every value of a square receives the same part of its error gradient."""

import numpy as np

from adam_async.model.layer import Array, ScratchSpec, Slots, Weights
from adam_async.model.layers.pool import Pool, Views


class AveragePool(Pool):
    """Mean over squares.

    Options: kernel, stride (0: the kernel's size). Rows and columns that fill no square are left out.
    """

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Sums over columns only, their error gradient, and each square's part."""
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
        """Hand each part to the whole row, then to the whole column."""
        views, scratch = slots.views, slots.scratch
        input_error = slots.input_errors[0]
        assert input_error is not None
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
