"""Pure: convolution without columns.

A line of output pixels of all images is a product of the weights with runs of the input, one run per
position in the kernel. Where each run starts, counted from the line's own start, stands in a table. With a
stride s the input is first *packed*: columns sorted by their place modulo s, so that the pixels that one
kernel position reads are neighbours; padding is added on the same way.

The way back is the same product with the tables turned round: the error gradient of an input pixel is a
sum over the kernel positions that read it, of runs of the output's error gradient with a border of zeros.
With a stride, pixels of different phase are read by different positions, so each phase has a table of its
own.

The gradient of the weights is a table of dot products of lines of errors with the same runs of the input.
"""

from typing import ClassVar

import numpy as np

from adam_async.model.fast import program
from adam_async.model.fast.products import BIAS, PLAIN
from adam_async.model.fast.sliding import FastSliding
from adam_async.model.fast.tape import Field, Op
from adam_async.model.fast.tiles import DOT_ROWS
from adam_async.model.layer import Array, ScratchSpec, Slots
from adam_async.model.layers.conv2d import Conv2d
from adam_async.model.spec import Shape


class FastConv2d(FastSliding, Conv2d):
    """Convolution with compiled kernels."""

    KERNELS: ClassVar[tuple[int, ...]] = (
        program.PACK,
        program.CONVOLVE,
        program.UNPACK,
        program.CORRELATE,
        program.ROW_SUMS,
    )

    def _bordered_shape(self, images: int) -> Shape:
        columns = self._packed_shape(images)[3]
        return (self.filters, self.output_shape[1], columns + (self.kernel - 1) // self.stride, images)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Packed input and input error, where they differ; the error with its border; a block of sums."""
        return {
            **super().scratch(images),
            "bordered": (self._bordered_shape(images), None),
            "block": ((DOT_ROWS * DOT_ROWS,), None),
        }

    def prepare(self, slots: Slots) -> None:
        """Make the tables of each phase too."""
        super().prepare(slots)
        stride = self.stride
        slots.views["phases"] = {
            (down, across): self._phase(slots.images, down, across)
            for down in range(stride)
            for across in range(stride)
        }

    def _phase(self, images: int, down: int, across: int) -> tuple[Array, Array, Array]:
        """What the input pixels of one phase add up: of weights, of bordered errors, and line by line.

        The third table tells for each line of the phase which entries of the other two do not lie above or
        below the errors.
        """
        channels, stride, size = self.input_shapes[0][0], self.stride, self.kernel
        _, lines, columns, _ = self._bordered_shape(images)
        y, o, x = np.indices((size, self.filters, size)).reshape(3, -1)
        mine = (y % stride == down) & (x % stride == across)
        y, o, x = y[mine], o[mine], x[mine]
        weights = (o * channels * size + y) * size + x
        border = (size - 1) // stride
        errors = ((o * lines - y // stride) * columns + border - x // stride) * images
        steps = y // stride
        own = np.arange(-(-(self._packed_shape(images)[1] - down) // stride))
        first, last = np.searchsorted(steps, own - lines, "right"), np.searchsorted(steps, own, "right")
        ranges = np.stack((first, np.maximum(first, last)), axis=1)
        return np.ascontiguousarray(weights), np.ascontiguousarray(errors), np.ascontiguousarray(ranges)

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Pack where that is needed, and multiply line by line."""
        images, (_, lines, width) = slots.images, self.output_shape
        source, depth = self._source(slots), slots.views["weights"].size
        ops = []
        if self._packed():
            ops.append(self._pack_op(program.PACK, slots, source, slots.inputs[0]))
        ops.append(
            Op.of(
                program.CONVOLVE,
                *(self.filters, lines, width * images, depth),
                *(slots.output, lines * width * images, width * images),
                *(self.ref("weight"), depth, slots.views["weights"]),
                *(source, slots.views["runs"], self._line(images)),
                *(BIAS, self.ref("bias"), 0),
            )
        )
        return ops

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Give the errors a border, multiply phase by phase, unpack."""
        images, (channels, rows, stride, width, _) = slots.images, self._packed_shape(slots.images)
        _, lines, border_columns, _ = self._bordered_shape(images)
        bordered, border = slots.scratch["bordered"], (self.kernel - 1) // stride
        target = slots.scratch["packed_error"] if self._packed() else slots.input_errors[0]
        assert target is not None
        place = (lines, border_columns, 1, 0, border)
        ops = [Op.of(program.PACK, *self.output_shape, images, bordered, slots.error, *place)]
        flat, line = target.reshape(-1), width * images
        for (down, across), (weights, errors, ranges) in slots.views["phases"].items():
            ops.append(
                Op.of(
                    program.CONVOLVE,
                    *(channels, len(ranges), line, weights.size),
                    *(flat[(down * stride + across) * line :], rows * stride * line, stride * stride * line),
                    *(self.ref("weight"), self.kernel * self.kernel, weights),
                    *(bordered, errors, border_columns * images),
                    *(PLAIN, 0, ranges),
                )
            )
        if self._packed():
            assert slots.input_errors[0] is not None
            ops.append(self._pack_op(program.UNPACK, slots, target, slots.input_errors[0]))
        return ops

    def delta_ops(self, slots: Slots, kind: str, out: Field) -> list[Op]:
        """Multiply lines of errors and runs of the input; for the bias, add the errors up."""
        images, (_, lines, width) = slots.images, self.output_shape
        if kind == "weight":
            return [
                Op.of(
                    program.CORRELATE,
                    *(self.filters, slots.views["weights"].size, out),
                    *(slots.error, slots.views["filters"], width * images),
                    *(self._source(slots), slots.views["runs"], self._line(images)),
                    *(lines, width * images, slots.scratch["block"]),
                )
            ]
        if kind == "bias":
            return [Op.of(program.ROW_SUMS, self.filters, lines * width * images, out, slots.error)]
        return super().delta_ops(slots, kind, out)
