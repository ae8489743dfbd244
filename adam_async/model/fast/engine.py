"""Pure: a network's passes as tapes: as many layers as possible in one call.

Neighbouring layers with compiled kernels share one tape; a layer without them, such as one that a user
wrote, runs its own steps in between. Tapes are kept in the context whose arrays they name, one set per
number of images.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from adam_async.model.context import Context
from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.dense import FastDense
from adam_async.model.fast.layers import FAST_LAYERS
from adam_async.model.fast.tape import Op, Ref, Tape
from adam_async.model.layer import Array, Layer, ParameterSpec, Weights
from adam_async.model.rules import Sgd
from adam_async.model.topology import Topology

Step = Tape | int
"""A tape, or the number of a layer without compiled kernels."""


def fast_kinds(kinds: Mapping[str, type[Layer]]) -> dict[str, type[Layer]]:
    """Replace the layers that have a compiled version by it."""
    return {kind: FAST_LAYERS.get(layer, layer) for kind, layer in kinds.items()}


class Engine:
    """Runs the passes of one network. Holds no arrays; any number of threads may share it.

    Args:
        topology: Its layers.
        dtype: float32 or float64.
    """

    def __init__(self, topology: Topology, dtype: np.dtype[Any]) -> None:
        self._topology = topology
        self._dtype = dtype

    @property
    def covers_all(self) -> bool:
        """Whether every layer has compiled kernels."""
        return all(isinstance(layer, Compiled) for layer in self._topology.layers)

    def warm_up(self, progress: Callable[[int, int], None] | None) -> None:
        """Compile everything, or read it from the disk."""
        program.compile_kernels(self._dtype, progress)

    def forward(self, weights: Weights, context: Context, layers: range) -> None:
        """Run these layers."""
        key = ("forward", layers)
        steps = context.tapes.get(key)
        if steps is None:
            steps = context.tapes[key] = self._steps(context, layers, self._forward_ops)
        for step in steps:
            if isinstance(step, int):
                self._topology.layers[step].forward(weights, context.slots(step))
            else:
                step.run(weights)

    def backward(self, weights: Weights, context: Context, layers: range) -> None:
        """Run the ways back of these layers, last first."""
        key = ("backward", layers)
        steps = context.tapes.get(key)
        if steps is None:
            steps = context.tapes[key] = self._steps(context, reversed(layers), self._backward_ops)
        for step in steps:
            if isinstance(step, int):
                context.gather_error(step)
                slots = context.slots(step)
                if any(error is not None for error in slots.input_errors):
                    self._topology.layers[step].backward(weights, slots)
            else:
                step.run(weights)

    def descend(
        self,
        weights: Weights,
        state: Mapping[str, Mapping[str, Array]],
        context: Context,
        gradients: Mapping[str, Array],
        rule: Sgd,
        rate: float,
    ) -> tuple[float, tuple[str, ...]]:
        """Forward, backward and rule in place, in one call. Every layer must have compiled kernels.

        Args:
            weights: All tensors, changed.
            state: The rule's, by tensor, changed.
            context: With a group loaded.
            gradients: Memory for the gradient of every tensor.
            rule: What to apply.
            rate: Learning rate.

        Returns:
            The mean loss, and the tensors whose gradient was not finite and that were left alone.
        """
        key = ("descend", rule)
        kept = context.tapes.get(key)
        if kept is None or kept[1] is not gradients:
            refused = np.zeros(sum(len(layer.parameters) for layer in self._topology.layers), np.int64)
            names: list[str] = []
            ops = self._descent(context, gradients, refused, names, rule)
            tape = Tape(ops, self._dtype, (0.0, rule.momentum, rule.weight_decay))
            kept = context.tapes[key] = (tape, gradients, refused, tuple(names))
        tape, _, refused, found = kept
        tape.hyper[0] = rate
        loss = tape.run(weights, state)
        if not refused.any():
            return loss, ()
        names_refused = tuple(name for name, flag in zip(found, refused, strict=True) if flag)
        refused.fill(0)
        return loss, names_refused

    def _steps(
        self,
        context: Context,
        layers: Iterable[int],
        ops_of: Callable[[Context, int, Compiled], list[Op]],
    ) -> tuple[Step, ...]:
        steps: list[Step] = []
        ops: list[Op] = []
        for number in layers:
            layer = self._topology.layers[number]
            if isinstance(layer, Compiled):
                ops += ops_of(context, number, layer)
                continue
            if ops:
                steps.append(Tape(ops, self._dtype))
            steps.append(number)
            ops = []
        if ops:
            steps.append(Tape(ops, self._dtype))
        return tuple(steps)

    def _forward_ops(self, context: Context, number: int, layer: Compiled) -> list[Op]:
        return layer.forward_ops(context.slots(number))

    def _backward_ops(self, context: Context, number: int, layer: Compiled) -> list[Op]:
        slots = context.slots(number)
        ops = []
        parts = context.error_parts(number)
        if parts:
            ops = [Op.of(program.ADD, slots.error.size, slots.error, parts[0], parts[1])]
            ops += [
                Op.of(program.ADD, slots.error.size, slots.error, slots.error, part) for part in parts[2:]
            ]
        if any(error is not None for error in slots.input_errors):
            ops += layer.backward_ops(slots)
        return ops

    def _descent(
        self,
        context: Context,
        gradients: Mapping[str, Array],
        refused: Array,
        names: list[str],
        rule: Sgd,
    ) -> list[Op]:
        layers = self._topology.layers
        ops: list[Op] = []
        for number, layer in enumerate(layers):
            assert isinstance(layer, Compiled)
            ops += self._forward_ops(context, number, layer)
        losses = context.slots(len(layers) - 1).output
        ops.append(Op.of(program.MEAN, losses.size, losses))
        for number, layer in reversed(tuple(enumerate(layers))):
            assert isinstance(layer, Compiled)
            ops += self._backward_ops(context, number, layer)
            for parameter in layer.parameters:
                flag = refused[len(names) :]
                names.append(parameter.name)
                ops += self._update(context, number, layer, parameter, gradients[parameter.name], flag, rule)
        return ops

    def _update(
        self,
        context: Context,
        number: int,
        layer: Compiled,
        parameter: ParameterSpec,
        gradient: Array,
        refused: Array,
        rule: Sgd,
    ) -> list[Op]:
        slots = context.slots(number)
        values = Ref(name=parameter.name, shape=parameter.shape, written=True)
        momentum: Ref | int = 0
        if rule.momentum:
            momentum = Ref(name=parameter.name, shape=parameter.shape, key="momentum", written=True)
        ops = layer.delta_ops(slots, parameter.kind, gradient)
        if isinstance(layer, FastDense) and parameter.kind == "weight":
            return [layer.descent_op(slots, values, momentum, ops[0], refused)]
        return [*ops, Op.of(program.DESCEND, parameter.size, values, gradient, momentum, refused)]
