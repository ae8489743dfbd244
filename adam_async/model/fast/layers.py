"""Pure: dense and small layers with compiled kernels, and the table of all layers that have them.

A compiled layer differs from the NumPy layer only in its steps: shapes, options, parameters and factors are
the same.

With one image, each product of the dense layer multiplies a matrix by a vector. The product with a vector
takes as long as reading the weights, and has a separate kernel. Other products read the weights row by row
and multiply each weight by a vector of images.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from adam_async.model.fast import program
from adam_async.model.fast.products import BIAS, LINE, PLAIN
from adam_async.model.fast.sliding import FastConv2d, FastLocallyConnected
from adam_async.model.fast.tape import Compiled, Field, Op, Ref, Tape, same_memory
from adam_async.model.fast.tiles import TILE_ROWS
from adam_async.model.fast.updates import COLUMNS
from adam_async.model.layer import Array, Layer, ScratchSpec, Slots
from adam_async.model.layers import (
    Add,
    AveragePool,
    Concatenate,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocallyConnected,
    LocalResponseNorm,
    MaxPool,
    MeanSquaredError,
    Relu,
    Sigmoid,
    SoftmaxCrossEntropy,
    Tanh,
)
from adam_async.model.layers.pool import Pool


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
            # With one image the kernel needs one row of the gradient instead of a block.
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

        `whole` is the op that forms the whole gradient if the kernel must check it.
        """
        outputs, inputs = self._sizes
        # A tape of one row finds the addresses; the op below keeps this row for its kernel.
        fields = Tape([whole], slots.output.dtype).rows
        return Op.of(
            program.DESCEND_OUTER,
            *(outputs, inputs, slots.images),
            *(values, slots.error, slots.inputs[0], slots.scratch["turned"]),
            *(momentum, slots.scratch["block"], refused, fields),
        )


class _ByValue(Compiled):
    """An activation function with one op each way and no scratch: its output gives its derivative."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Apply the function."""
        return [Op.of(self.KERNELS[0], slots.output.size, slots.output, slots.inputs[0])]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Multiply the error gradient by the derivative."""
        target = slots.input_error
        return [Op.of(self.KERNELS[1], target.size, target, slots.error, slots.output)]


class FastRelu(_ByValue, Relu):
    """ReLU with compiled kernels; on most tapes it is the ending of the previous kernel."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.RELU, program.RELU_BACK)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Return no names: the kernel needs no scratch."""
        # The kernel compares value by value, so it needs no mask.
        return {}

    def prepare(self, slots: Slots) -> None:
        """Make no views: the kernel needs none."""


class FastMaxPool(Compiled, MaxPool):
    """Max pooling that stores the position of each maximum."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.MAX_POOL, program.MAX_POOL_BACK)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the positions, in the type of the values, so that vectors of both are equally wide."""
        return {"winners": ((*self.output_shape, images), None)}

    def prepare(self, slots: Slots) -> None:
        """Make the table of a square's positions."""
        slots.views["positions"] = _positions(self, slots)

    def _shape(self, slots: Slots) -> tuple[int, ...]:
        return (*self.input_shapes[0], slots.images, *self.output_shape[1:], self.kernel, self.stride)

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Take maxima."""
        arrays = (slots.output, slots.inputs[0], slots.scratch["winners"], slots.views["positions"])
        return [Op.of(program.MAX_POOL, *self._shape(slots), *arrays)]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Give each error gradient to the position of the maximum."""
        target = slots.input_error
        # `positive` is 0 here; `fuse` sets it to 1 to replace a ReLU's backward.
        arrays = (slots.error, target, slots.scratch["winners"])
        return [
            Op.of(
                program.MAX_POOL_BACK, *self._shape(slots), *arrays, 0, slots.output, slots.views["positions"]
            )
        ]


class FastAveragePool(Compiled, AveragePool):
    """Average pooling in one pass."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.AVERAGE_POOL, program.AVERAGE_POOL_BACK)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Return no names: the kernel needs no scratch."""
        # One pass handles each square; the NumPy layer has two, with values between them.
        return {}

    def prepare(self, slots: Slots) -> None:
        """Make the table of a square's positions."""
        slots.views["positions"] = _positions(self, slots)

    def _op(self, code: int, slots: Slots, small: Array, large: Array) -> Op:
        shape = (*self.input_shapes[0], slots.images, *self.output_shape[1:], self.kernel, self.stride)
        return Op.of(code, *shape, small, large, slots.views["positions"])

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Take means."""
        return [self._op(program.AVERAGE_POOL, slots, slots.output, slots.inputs[0])]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Give each position its part of the error gradient."""
        target = slots.input_error
        return [self._op(program.AVERAGE_POOL_BACK, slots, slots.error, target)]


class FastTanh(_ByValue, Tanh):
    """Hyperbolic tangent with compiled kernels."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.TANH, program.TANH_BACK)


class FastSigmoid(_ByValue, Sigmoid):
    """Logistic function with compiled kernels."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.SIGMOID, program.SIGMOID_BACK)


class FastDropout(Compiled, Dropout):
    """Dropout: NumPy draws before a pass, kernels apply the factors."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.MULTIPLY_VALUES,)

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Multiply by the factors in training; otherwise copy."""
        # `Dropout.draw` has filled the factors: keyed draws are the same with and without kernels.
        output, source = slots.output, slots.inputs[0]
        if slots.training:
            return [Op.of(program.MULTIPLY_VALUES, output.size, output, source, slots.scratch["factors"])]
        # Evaluation is the identity, so in shared memory no work is left.
        if same_memory(output, source):
            return []
        return [Op.of(program.COPY, output.size, output, source)]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Multiply by the same factors."""
        target = slots.input_error
        return [Op.of(program.MULTIPLY_VALUES, target.size, target, slots.error, slots.scratch["factors"])]


class FastLocalResponseNorm(Compiled, LocalResponseNorm):
    """Local response normalisation with compiled kernels."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.RESPONSE_NORM, program.RESPONSE_NORM_BACK)

    def prepare(self, slots: Slots) -> None:
        """Store the options as numbers of the network's type."""
        # Fields of a row are integers, so the real options go through an array.
        share = self.alpha / self.size
        numbers = (share, self.beta, self.k, -2.0 * share * self.beta)
        slots.views["numbers"] = np.array(numbers, slots.output.dtype)

    def _op(self, code: int, slots: Slots, *arrays: Array) -> Op:
        channels, scratch = self.output_shape[0], slots.scratch
        # Pixels and images are one axis, because the window extends over channels only.
        shape = (channels, slots.output.size // channels, self.size)
        kept = (scratch["scale"], scratch["power"], scratch["terms"], slots.views["numbers"])
        return Op.of(code, *shape, *arrays, *kept)

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Compute scales, powers and products."""
        return [self._op(program.RESPONSE_NORM, slots, slots.output, slots.inputs[0])]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Compute the derivative's two terms."""
        target = slots.input_error
        arrays = (target, slots.error, slots.inputs[0], slots.output)
        return [self._op(program.RESPONSE_NORM_BACK, slots, *arrays)]


class FastSoftmaxCrossEntropy(Compiled, SoftmaxCrossEntropy):
    """Softmax and cross-entropy."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.SOFTMAX, program.SOFTMAX_BACK)

    def _factors(self, slots: Slots) -> Array | int:
        # Address 0 means no factors: the kernel then multiplies nothing.
        return slots.scratch["weights"] if self.class_weights else 0

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Compute shares and losses."""
        scratch = slots.scratch
        arrays = (slots.inputs[0], scratch["shares"], slots.output, scratch["targets"], self._factors(slots))
        return [Op.of(program.SOFTMAX, self.input_shapes[0][0], slots.images, *arrays)]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Subtract one from the right class's share, and scale; see `SoftmaxCrossEntropy.backward`."""
        target = slots.input_error
        arrays = (target, slots.scratch["shares"], slots.scratch["targets"], self._factors(slots))
        return [Op.of(program.SOFTMAX_BACK, self.input_shapes[0][0], slots.images, *arrays)]


class FastMeanSquaredError(Compiled, MeanSquaredError):
    """Mean squared error."""

    KERNELS: ClassVar[tuple[int, ...]] = (program.SQUARED_ERROR, program.SQUARED_ERROR_BACK)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the targets and the differences."""
        # The kernel adds each square to the loss at once, so it needs no array of squares.
        specs = super().scratch(images)
        return {name: specs[name] for name in ("targets", "difference")}

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Compute differences and losses."""
        difference = slots.scratch["difference"]
        arrays = (slots.inputs[0], slots.scratch["targets"], difference, slots.output)
        # Features of any shape form one axis: an image's loss is the sum over all of them.
        return [Op.of(program.SQUARED_ERROR, difference.size // slots.images, slots.images, *arrays)]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Multiply the difference by two, and divide it by features and images."""
        target = slots.input_error
        return [Op.of(program.SQUARED_ERROR_BACK, target.size, target, slots.scratch["difference"])]


class FastFlatten(Compiled, Flatten):
    """Flattening; no kernel if input and output share memory."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Copy, unless the memory is the same."""
        # Only the shape differs, and kernels have no shapes.
        if same_memory(slots.output, slots.inputs[0]):
            return []
        return [Op.of(program.COPY, slots.output.size, slots.output, slots.inputs[0])]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Copy back, unless the memory is the same."""
        target = slots.input_error
        # Error gradients have their own memory, so this case has its own test.
        if same_memory(target, slots.error):
            return []
        return [Op.of(program.COPY, target.size, target, slots.error)]


class FastAdd(Compiled, Add):
    """Sums of inputs."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Add up the inputs, one after the other."""
        output, size = slots.output, slots.output.size
        # The order of `Add.forward`, so both sums have the same bits.
        ops = [Op.of(program.ADD, size, output, slots.inputs[0], slots.inputs[1])]
        return ops + [Op.of(program.ADD, size, output, output, value) for value in slots.inputs[2:]]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Copy the error gradient to every input."""
        # An input before the first parameters to train has no error gradient.
        targets = [target for target in slots.input_errors if target is not None]
        return [Op.of(program.COPY, target.size, target, slots.error) for target in targets]


class FastConcatenate(Compiled, Concatenate):
    """Concatenated inputs."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Copy each input to its part."""
        # Parts are ranges of the first axis, so each is one run of memory.
        parts = zip(slots.inputs, slots.views["parts"], strict=True)
        return [Op.of(program.COPY, value.size, slots.output[part], value) for value, part in parts]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Copy each part of the error gradient to its input."""
        # As in `FastAdd`, some inputs may need no error gradient.
        parts = zip(slots.input_errors, slots.views["parts"], strict=True)
        return [
            Op.of(program.COPY, target.size, target, slots.error[part])
            for target, part in parts
            if target is not None
        ]


FAST_LAYERS: Mapping[type[Layer], type[Layer]] = MappingProxyType(
    {
        Conv2d: FastConv2d,
        MaxPool: FastMaxPool,
        Dense: FastDense,
        Relu: FastRelu,
        Flatten: FastFlatten,
        Add: FastAdd,
        SoftmaxCrossEntropy: FastSoftmaxCrossEntropy,
        AveragePool: FastAveragePool,
        Concatenate: FastConcatenate,
        Sigmoid: FastSigmoid,
        Tanh: FastTanh,
        MeanSquaredError: FastMeanSquaredError,
        Dropout: FastDropout,
        LocalResponseNorm: FastLocalResponseNorm,
        LocallyConnected: FastLocallyConnected,
    }
)
"""Compiled versions of NumPy layers."""


def _positions(pool: Pool, slots: Slots) -> Array:
    """Return the offsets of a square's values: column by column, from the top."""
    # The order decides ties: among equal values it takes the leftmost column and then the topmost row.
    columns, rows = np.indices((pool.kernel, pool.kernel)).reshape(2, -1)
    positions: Array = (rows * pool.input_shapes[0][2] + columns) * slots.images
    return positions
