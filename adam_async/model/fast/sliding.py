"""Pure: convolution without im2col, and the locally connected layer.

A line of output pixels of all images is the weights times runs of the input, with one run per kernel
position. A table has the start of each run, counted from the start of the line. With a stride s the input is
first *packed*: columns are sorted by their *phase*, which is their number modulo s. Then the pixels of one
kernel position are neighbours. Packing also adds the padding.

Backward is the same product with inverse tables. An input pixel's error gradient is a sum of runs of the
output's error gradient, over the kernel positions that read the pixel. With a stride, a pixel's phase decides
which kernel positions read it, so each phase has its own table. Near the edges fewer positions read a pixel.
If the images of one pixel fill a vector, columns with the same kernel positions form a *strip*, which has its
own table. With fewer images the vectors of a strip would be partly empty. Then a whole line is one strip, and
the error gradient gets a border of zeros.

The weight gradient is a table of dot products: lines of errors times the same runs of the input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import numpy as np

from adam_async.model.fast import program
from adam_async.model.fast.products import BIAS, PLAIN
from adam_async.model.fast.tape import Compiled, Field, Op
from adam_async.model.fast.tiles import DOT_ROWS
from adam_async.model.fast.vectors import VECTOR_BYTES
from adam_async.model.layer import Array, Layer, ScratchSpec, Slots
from adam_async.model.layers.sliding import Conv2d, LocallyConnected, SlidingKernel
from adam_async.model.spec import Shape

LANES = VECTOR_BYTES // 4
"""Number of images of one pixel that fill a float32 vector, or two float64 vectors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """Neighbouring columns of the input's error gradient, and the tables for their sums.

    Attributes:
        phase: Number of the columns' phase.
        first: First column of the strip, counted within the phase.
        columns: Number of columns.
        line: Number of columns in a line of the output's error gradient.
        weights: Position of each factor in the weights.
        errors: Start of each factor's run, counted from the line of the same number.
        ranges: For each line, the first entry whose run is inside the error gradient, and the entry after the
            last one.
    """

    phase: int
    first: int
    columns: int
    line: int
    weights: Array
    errors: Array
    ranges: Array


class FastSliding(Compiled, SlidingKernel):
    """A layer that packs its input for a sliding kernel. Subclasses list it before the NumPy layer."""

    def _packed(self) -> bool:
        return bool(self.padding) or self.stride > 1

    def _packed_shape(self, images: int) -> Shape:
        channels, rows, columns, _ = self.padded_shape(images)
        return (channels, rows, self.stride, -(-columns // self.stride), images)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the packed input and its error gradient, if the input needs packing."""
        if not self._packed():
            return {}
        shape = self._packed_shape(images)
        return {"packed": (shape, None), "packed_error": (shape, None)}

    def prepare(self, slots: Slots) -> None:
        """Make the tables of the runs under the kernel, of the weights, and of the filters' outputs."""
        channels, rows, stride, width, images = self._packed_shape(slots.images)
        c, y, x = np.indices((channels, self.kernel, self.kernel)).reshape(3, -1)
        # Kernel column x reads columns of phase x % stride, x // stride columns further to the right.
        starts = (((c * rows + y) * stride + x % stride) * width + x // stride) * images
        slots.views["runs"] = _whole_blocks(starts)
        # Forward reads the weights in the order of memory; the strips of backward have other tables.
        slots.views["weights"] = np.arange(starts.size)
        slots.views["filters"] = _whole_blocks(np.arange(self.filters) * slots.output[0].size)

    def _source(self, slots: Slots) -> Array:
        return slots.scratch["packed"] if self._packed() else slots.inputs[0]

    def _line(self, images: int) -> int:
        """Return the distance from one output line's runs to the next line's, in values."""
        # The kernel moves down by `stride` rows, and a packed row has the columns of all phases.
        _, _, stride, width, _ = self._packed_shape(images)
        return stride * stride * width * images

    def _pack_op(self, code: int, slots: Slots, packed: Array, image: Array) -> Op:
        _, rows, stride, width, _ = self._packed_shape(slots.images)
        place = (rows, width, stride, self.top, self.padding)
        return Op.of(code, *self.input_shapes[0], slots.images, packed, image, *place)


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
        # A run is as long as a packed line, and starts at most (kernel - 1) // stride columns from the left.
        columns = self._packed_shape(images)[3]
        return (self.filters, self.output_shape[1], columns + (self.kernel - 1) // self.stride, images)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the arrays for packing, for the error gradient with its border, and for a block of sums."""
        return {
            **super().scratch(images),
            "bordered": (self._bordered_shape(images), None),
            "block": ((DOT_ROWS * DOT_ROWS,), None),
        }

    def prepare(self, slots: Slots) -> None:
        """Make the tables of the forward pass and those of each phase's strips."""
        super().prepare(slots)
        slots.views["strips"] = tuple(self._strips(slots.images))

    def _is_bordered(self, images: int) -> bool:
        return images < LANES

    def _strips(self, images: int) -> Iterator["Strip"]:
        """Cut each phase's lines into strips of columns that the same kernel positions read."""
        stride, width = self.stride, self._packed_shape(images)[3]
        most = (self.kernel - 1) // stride
        if self._is_bordered(images):
            # With a border every position reads every column, some of them zeros: one strip.
            runs = [((0, most), list(range(width)))]
        else:
            # Columns near the edges have a strip for each set of positions that read them.
            last = self.output_shape[2] - 1
            ends = groupby(range(width), lambda column: (max(0, column - last), min(most, column)))
            runs = [(reach, list(columns)) for reach, columns in ends]
        for down in range(stride):
            for across in range(stride):
                for reach, columns in runs:
                    yield self._strip(images, down, across, reach, columns)

    def _strip(
        self, images: int, down: int, across: int, reach: tuple[int, int], own: Sequence[int]
    ) -> "Strip":
        """Make the strip of the columns `own`; kernel column x reads it if `reach` includes x // stride."""
        channels, stride, size = self.input_shapes[0][0], self.stride, self.kernel
        _, lines, columns, _ = self._bordered_shape(images)
        border = (size - 1) // stride
        if not self._is_bordered(images):
            # All runs of a strip lie inside the error gradient itself.
            columns, border = self.output_shape[2], 0
        # Rows of the kernel come first, so the entries for a range of lines are neighbours: see `ranges`.
        y, o, x = np.indices((size, self.filters, size)).reshape(3, -1)
        mine = (y % stride == down) & (x % stride == across)
        mine &= (reach[0] <= x // stride) & (x // stride <= reach[1])
        y, o, x = y[mine], o[mine], x[mine]
        # Positions are within the first input channel; the kernel steps from channel to channel.
        weights = (o * channels * size + y) * size + x
        errors = ((o * lines - y // stride) * columns + own[0] + border - x // stride) * images
        steps = y // stride
        rows = np.arange(-(-(self._packed_shape(images)[1] - down) // stride))
        # An entry reads line `row - step` of the errors, which must be at least 0 and below `lines`.
        first, last = np.searchsorted(steps, rows - lines, "right"), np.searchsorted(steps, rows, "right")
        ranges = np.stack((first, np.maximum(first, last)), axis=1)
        return Strip(
            phase=down * stride + across,
            first=own[0],
            columns=len(own),
            line=columns,
            weights=np.ascontiguousarray(weights),
            errors=np.ascontiguousarray(errors),
            ranges=np.ascontiguousarray(ranges),
        )

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Pack the input if necessary, and multiply line by line."""
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
        """Add a border to the error if necessary, multiply strip by strip, and unpack a packed result."""
        images, (channels, rows, stride, width, _) = slots.images, self._packed_shape(slots.images)
        target = slots.scratch["packed_error"] if self._packed() else slots.input_error
        ops, source = [], slots.error
        if self._is_bordered(images):
            _, lines, columns, _ = self._bordered_shape(images)
            source, border = slots.scratch["bordered"], (self.kernel - 1) // stride
            # With a stride of 1, packing only copies lines into longer ones, with zeros at both ends.
            place = (lines, columns, 1, 0, border)
            ops.append(Op.of(program.PACK, *self.output_shape, images, source, slots.error, *place))
        flat, line = target.reshape(-1), width * images
        # In packed rows the lines of a strip are `stride` rows apart.
        for strip in slots.views["strips"]:
            to = flat[strip.phase * line + strip.first * images :]
            ops.append(
                Op.of(
                    program.CONVOLVE,
                    *(channels, len(strip.ranges), strip.columns * images, strip.weights.size),
                    *(to, rows * stride * line, stride * stride * line),
                    *(self.ref("weight"), self.kernel * self.kernel, strip.weights),
                    *(source, strip.errors, strip.line * images),
                    *(PLAIN, 0, strip.ranges),
                )
            )
        if self._packed():
            ops.append(self._pack_op(program.UNPACK, slots, target, slots.input_error))
        return ops

    def delta_ops(self, slots: Slots, kind: str, out: Field) -> list[Op]:
        """Multiply lines of errors by runs of the input; for the bias, add the errors up."""
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


def _whole_blocks(starts: Array) -> Array:
    """Extend a table to whole blocks of dot products by copies of its last entry."""
    # The kernel reads whole blocks, so a copy must be a valid start; its results are dropped.
    return np.pad(starts, (0, -starts.size % DOT_ROWS), mode="edge")


class FastLocallyConnected(FastSliding, LocallyConnected):
    """Separate filters at every output pixel, with compiled kernels."""

    KERNELS: ClassVar[tuple[int, ...]] = (
        program.PACK,
        program.LOCAL_FORWARD,
        program.LOCAL_BACK,
        program.UNPACK,
        program.LOCAL_DELTA,
        program.ROW_SUMS,
    )

    def cut(self, block: range) -> Layer:
        """Make a NumPy layer for a part of the output, because the kernels use the weights of all pixels."""
        piece = super().cut(block)
        return self if piece is self else LocallyConnected(self.spec, self.input_shapes).cut(block)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the arrays for packing, for one pixel's input errors, and for a block of sums."""
        return {
            **super().scratch(images),
            # Runs of two pixels may overlap, so a pixel's products have their own memory.
            "pixel": ((self.fan_in, images), None),
            # The kernel writes whole blocks, and the last ones reach beyond the gradient.
            "block": ((DOT_ROWS * DOT_ROWS,), None),
        }

    def _shape(self, slots: Slots) -> tuple[int, ...]:
        return (*self.output_shape, self.fan_in, slots.images)

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Pack the input if necessary, and multiply pixel by pixel."""
        source, views = self._source(slots), slots.views
        ops = []
        # Without padding and stride the images themselves have the layout that the runs need.
        if self._packed():
            ops.append(self._pack_op(program.PACK, slots, source, slots.inputs[0]))
        arrays = (slots.output, self.ref("weight"), self.ref("bias"), views["weights"], source, views["runs"])
        ops.append(Op.of(program.LOCAL_FORWARD, *self._shape(slots), *arrays, self._line(slots.images)))
        return ops

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Multiply pixel by pixel, add up, unpack."""
        wanted = slots.input_error
        # Error gradients are packed like the input, so sums have the same layout.
        target = slots.scratch["packed_error"] if self._packed() else wanted
        arrays = (slots.error, self.ref("weight"), target, slots.views["runs"], self._line(slots.images))
        ops = [Op.of(program.LOCAL_BACK, *self._shape(slots), *arrays, target.size, slots.scratch["pixel"])]
        if self._packed():
            ops.append(self._pack_op(program.UNPACK, slots, target, wanted))
        return ops

    def delta_ops(self, slots: Slots, kind: str, out: Field) -> list[Op]:
        """Multiply errors and runs, pixel by pixel; for the bias, add the errors of the images up."""
        if kind == "weight":
            arrays = (out, slots.error, slots.views["filters"], self._source(slots), slots.views["runs"])
            return [
                Op.of(
                    program.LOCAL_DELTA,
                    *self._shape(slots),
                    *arrays,
                    self._line(slots.images),
                    slots.scratch["block"],
                )
            ]
        if kind == "bias":
            # Each pixel of each filter has its own bias, so each sum adds only the images of one pixel.
            rows = self.parameter("bias").size
            return [Op.of(program.ROW_SUMS, rows, slots.images, out, slots.error)]
        return super().delta_ops(slots, kind, out)
