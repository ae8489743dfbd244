"""Pure: the locally connected layer with compiled kernels."""

from typing import ClassVar

from adam_async.model.fast import program
from adam_async.model.fast.conv2d import FastSliding
from adam_async.model.fast.tape import Field, Op
from adam_async.model.fast.tiles import DOT_ROWS
from adam_async.model.layer import Layer, ScratchSpec, Slots
from adam_async.model.layers.sliding import LocallyConnected


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
        """Name the arrays for packing, the input errors of one pixel, and a block of sums."""
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
        # The runs are those of the packed input, so their sums have its layout, too.
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
            # Each pixel of each filter has a bias, so a row to add up has only the images of one pixel.
            rows = self.parameter("bias").size
            return [Op.of(program.ROW_SUMS, rows, slots.images, out, slots.error)]
        return super().delta_ops(slots, kind, out)
