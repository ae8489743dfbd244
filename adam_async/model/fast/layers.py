"""Pure: the layers with compiled kernels, small ones, and the table of all of them.

Each is the NumPy layer with other steps: shapes, options, parameters and factors are the same.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.conv2d import FastConv2d
from adam_async.model.fast.dense import FastDense
from adam_async.model.fast.tape import Op, same_memory
from adam_async.model.layer import Array, Layer, ScratchSpec, Slots
from adam_async.model.layers import Add, Conv2d, Dense, Flatten, MaxPool, Relu, SoftmaxCrossEntropy


class FastRelu(Compiled, Relu):
    """ReLU with compiled kernels; mostly the ending of the kernel before it."""

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """None."""
        return {}

    def prepare(self, slots: Slots) -> None:
        """Nothing."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Clip at zero."""
        return [Op.of(program.RELU, slots.output.size, slots.output, slots.inputs[0])]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Pass where the output is positive."""
        target = slots.input_errors[0]
        assert target is not None
        return [Op.of(program.RELU_BACK, target.size, target, slots.error, slots.output)]


class FastMaxPool(Compiled, MaxPool):
    """Max pooling that remembers which place won."""

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """The places, as numbers of the network's type, which vectors compare fastest with its values."""
        return {"winners": ((*self.output_shape, images), None)}

    def prepare(self, slots: Slots) -> None:
        """Say where the places of a square lie: column by column, from the top."""
        columns, rows = np.indices((self.kernel, self.kernel)).reshape(2, -1)
        slots.views["places"] = (rows * self.input_shapes[0][2] + columns) * slots.images

    def _shape(self, slots: Slots) -> tuple[int, ...]:
        return (*self.input_shapes[0], slots.images, *self.output_shape[1:], self.kernel, self.stride)

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Take maxima."""
        arrays = (slots.output, slots.inputs[0], slots.scratch["winners"], slots.views["places"])
        return [Op.of(program.MAX_POOL, *self._shape(slots), *arrays)]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Hand each error gradient to the place that won."""
        target = slots.input_errors[0]
        assert target is not None
        arrays = (slots.error, target, slots.scratch["winners"])
        return [
            Op.of(program.MAX_POOL_BACK, *self._shape(slots), *arrays, 0, slots.output, slots.views["places"])
        ]


class FastFlatten(Compiled, Flatten):
    """Flattening; no kernel at all where the memory is shared."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Copy, unless the memory is the same."""
        if same_memory(slots.output, slots.inputs[0]):
            return []
        return [Op.of(program.COPY, slots.output.size, slots.output, slots.inputs[0])]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Copy back, unless the memory is the same."""
        target = slots.input_errors[0]
        assert target is not None
        if same_memory(target, slots.error):
            return []
        return [Op.of(program.COPY, target.size, target, slots.error)]


class FastAdd(Compiled, Add):
    """Sums of inputs."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Add up, one input after the other."""
        output, size = slots.output, slots.output.size
        ops = [Op.of(program.ADD, size, output, slots.inputs[0], slots.inputs[1])]
        return ops + [Op.of(program.ADD, size, output, output, value) for value in slots.inputs[2:]]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Hand the error gradient to every input."""
        targets = [target for target in slots.input_errors if target is not None]
        return [Op.of(program.COPY, target.size, target, slots.error) for target in targets]


class FastSoftmaxCrossEntropy(Compiled, SoftmaxCrossEntropy):
    """Softmax and cross-entropy."""

    def _factors(self, slots: Slots) -> Array | int:
        return slots.scratch["weights"] if self.class_weights else 0

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Shares and losses."""
        scratch = slots.scratch
        arrays = (slots.inputs[0], scratch["shares"], slots.output, scratch["targets"], self._factors(slots))
        return [Op.of(program.SOFTMAX, self.input_shapes[0][0], slots.images, *arrays)]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Shares minus one at the right class."""
        target = slots.input_errors[0]
        assert target is not None
        arrays = (target, slots.scratch["shares"], slots.scratch["targets"], self._factors(slots))
        return [Op.of(program.SOFTMAX_BACK, self.input_shapes[0][0], slots.images, *arrays)]


FAST_LAYERS: Mapping[type[Layer], type[Layer]] = MappingProxyType(
    {
        Conv2d: FastConv2d,
        MaxPool: FastMaxPool,
        Dense: FastDense,
        Relu: FastRelu,
        Flatten: FastFlatten,
        Add: FastAdd,
        SoftmaxCrossEntropy: FastSoftmaxCrossEntropy,
    }
)
"""For each NumPy layer its compiled version, where there is one."""
