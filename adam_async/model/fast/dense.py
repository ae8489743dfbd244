"""Pure: the dense layer with compiled kernels.

With one image, each product is of a matrix and a vector, takes as long as reading the weights, and has a
kernel of its own. Other products read the weights row by row and multiply each value with a vector of images.
"""

from typing import ClassVar

from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.products import BIAS, LINE, PLAIN
from adam_async.model.fast.tape import Field, Op, Ref, Tape
from adam_async.model.fast.tiles import TILE_ROWS
from adam_async.model.fast.updates import COLUMNS
from adam_async.model.layer import Array, ScratchSpec, Slots
from adam_async.model.layers.dense import Dense


class FastDense(Compiled, Dense):
    """Fully connected layer with compiled kernels."""

    KERNELS: ClassVar[tuple[int, ...]] = (
        program.MULTIPLY,
        program.MULTIPLY_ONE,
        program.MULTIPLY_BACK_ONE,
        program.OUTER,
        program.ROW_SUMS,
        program.DESCEND_OUTER,
    )

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.output_shape[0], self.input_shapes[0][0]

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the arrays for updates in place: the input, batch first, and a block of the gradient."""
        inputs = self._sizes[1]
        return {
            # A row `apart` may have a line more: LINE // 4 values of float32, fewer of float64.
            "turned": ((images, inputs + LINE // 4), None),
            # With one image the kernel needs one row of the gradient in place of a block.
            "block": ((max(TILE_ROWS * (COLUMNS + LINE // 4), inputs),), None),
        }

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Multiply and add the bias."""
        outputs, inputs = self._sizes
        ending = (BIAS, self.ref("bias"))
        if slots.images == 1:
            arrays = (slots.output, self.ref("weight"), slots.inputs[0])
            return [Op.of(program.MULTIPLY_ONE, outputs, inputs, *arrays, *ending)]
        return [
            Op.of(
                program.MULTIPLY,
                *(outputs, slots.images, inputs),
                *(slots.output, self.ref("weight"), 0, slots.inputs[0]),
                *ending,
            )
        ]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Multiply by the transposed weights."""
        outputs, inputs = self._sizes
        target = slots.input_error
        # No bias, so no ending; `fuse` may add the backward of a ReLU there.
        if slots.images == 1:
            arrays = (target, self.ref("weight"), slots.error)
            return [Op.of(program.MULTIPLY_BACK_ONE, outputs, inputs, *arrays, PLAIN, 0)]
        # Rows of the transposed weights are columns of the weights: `by_columns` is 1.
        return [
            Op.of(
                program.MULTIPLY,
                *(inputs, slots.images, outputs),
                *(target, self.ref("weight"), 1, slots.error),
                *(PLAIN, 0),
            )
        ]

    def delta_ops(self, slots: Slots, kind: str, out: Field) -> list[Op]:
        """Multiply the factors; for the bias, add the errors up."""
        outputs, inputs = self._sizes
        if kind == "weight":
            arrays = (out, slots.error, slots.inputs[0], slots.scratch["turned"])
            # A tile reads its second factor along the features, so the kernel copies the input to `turned`.
            return [Op.of(program.OUTER, outputs, inputs, slots.images, *arrays)]
        if kind == "bias":
            return [Op.of(program.ROW_SUMS, outputs, slots.images, out, slots.error)]
        return super().delta_ops(slots, kind, out)

    def descent_op(self, slots: Slots, values: Ref, momentum: Field, whole: Op, refused: Array) -> Op:
        """Return the op that applies the gradient of the weights in place.

        `whole` is the op that forms the whole gradient, in case the kernel must check it.
        """
        outputs, inputs = self._sizes
        # A tape of one row finds the addresses; the op below keeps the row, which its kernel may read.
        fields = Tape([whole], slots.output.dtype).rows
        return Op.of(
            program.DESCEND_OUTER,
            *(outputs, inputs, slots.images),
            *(values, slots.error, slots.inputs[0], slots.scratch["turned"]),
            *(momentum, slots.scratch["block"], refused, fields),
        )
