"""Pure: the layers that move values without computing, with compiled kernels."""

from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.tape import Op, same_memory
from adam_async.model.layer import Slots
from adam_async.model.layers import Add, Concatenate, Flatten


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


class FastConcatenate(Compiled, Concatenate):
    """Inputs one after the other."""

    def forward_ops(self, slots: Slots) -> list[Op]:
        """Copy each input to its part."""
        parts = zip(slots.inputs, slots.views["parts"], strict=True)
        return [Op.of(program.COPY, value.size, slots.output[part], value) for value, part in parts]

    def backward_ops(self, slots: Slots) -> list[Op]:
        """Copy each part of the error gradient to its input."""
        parts = zip(slots.input_errors, slots.views["parts"], strict=True)
        return [
            Op.of(program.COPY, target.size, target, slots.error[part])
            for target, part in parts
            if target is not None
        ]
