"""Pure: a network's passes as tapes: as many layers as possible in one call.

Neighbouring layers with compiled kernels share one tape; a layer without them, such as one that a user
wrote, runs its own steps in between. Tapes are kept in the context whose arrays they name, one set per
number of images.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from adam_async.model.context import Context
from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.descent import Descent, can_load
from adam_async.model.fast.layers import FAST_LAYERS
from adam_async.model.fast.tape import Op, Tape
from adam_async.model.layer import Array, Layer, Weights
from adam_async.model.rules import RuleState, Sgd
from adam_async.model.step import StepBuffers, StepInput, StepOutcome
from adam_async.model.topology import Topology

COMMON = (program.ADD, program.COPY, program.CLEAR, program.DESCEND, program.GROUPS)
"""Kernels that any network may need."""

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
        self.topology = topology
        self.dtype = dtype

    @property
    def kernels(self) -> frozenset[int]:
        """Numbers of the kernels that the network needs."""
        own = [layer.KERNELS for layer in self.topology.layers if isinstance(layer, Compiled)]
        return frozenset(chain(COMMON, *own))

    @property
    def is_ready(self) -> bool:
        """Whether these are compiled, here or on the disk."""
        return program.are_ready(self.kernels, self.dtype)

    @property
    def are_kept(self) -> bool:
        """Whether kernels that another process compiles can be read by this one."""
        return program.are_kept()

    def warm_up(self, progress: Callable[[int, int], None] | None) -> None:
        """Compile them, or read them from the disk."""
        program.compile_kernels(self.kernels, self.dtype, progress)

    def forward(self, weights: Weights, context: Context, layers: range) -> None:
        """Run these layers."""
        key = ("forward", layers)
        steps = context.tapes.get(key)
        if steps is None:
            steps = context.tapes[key] = self._steps(context, layers, self.forward_ops)
        for step in steps:
            if isinstance(step, int):
                self.topology.layers[step].run_forward(weights, context.slots(step))
            else:
                step.run(weights)

    def backward(self, weights: Weights, context: Context, layers: range) -> None:
        """Run the ways back of these layers, last first."""
        key = ("backward", layers)
        steps = context.tapes.get(key)
        if steps is None:
            steps = context.tapes[key] = self._steps(context, reversed(layers), self.backward_ops)
        for step in steps:
            if isinstance(step, int):
                self.own_backward(weights, context, step)
            else:
                step.run(weights)

    def own_backward(self, weights: Weights, context: Context, number: int) -> None:
        """Run the way back of a layer without compiled kernels."""
        context.gather_error(number)
        slots = context.slots(number)
        if any(error is not None for error in slots.input_errors):
            self.topology.layers[number].run_backward(weights, slots)

    def descend(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: Context,
        buffers: StepBuffers,
        rule: Sgd,
        rate: float,
    ) -> StepOutcome:
        """Do forward, backward and rule in place: one call, where every layer has compiled kernels."""
        return self._descent(context, buffers, rule).run(weights, state, context, rate)

    def can_descend_groups(self, context: Context, groups: Sequence[StepInput]) -> bool:
        """Whether one call trains all these groups, for as many images as the context is laid out for."""
        return (
            not context.draws
            and bool(context.targets)
            and all(isinstance(layer, Compiled) for layer in self.topology.layers)
            and can_load(context, groups)
        )

    def descend_groups(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: Context,
        buffers: StepBuffers,
        rule: Sgd,
        groups: Sequence[StepInput],
        steps: Array,
    ) -> list[StepOutcome]:
        """Do the same for groups of one size, one after the other, in one call."""
        return self._descent(context, buffers, rule).run_groups(weights, state, context, groups, steps)

    def _descent(self, context: Context, buffers: StepBuffers, rule: Sgd) -> Descent:
        key = ("descend", rule)
        descent = context.tapes.get(key)
        if descent is None or descent.buffers is not buffers:
            descent = context.tapes[key] = Descent(self, context, buffers, rule)
        assert isinstance(descent, Descent)
        return descent

    def _steps(
        self,
        context: Context,
        layers: Iterable[int],
        ops_of: Callable[[Context, int, Compiled], list[Op]],
    ) -> tuple[Step, ...]:
        steps: list[Step] = []
        ops: list[Op] = []
        for number in layers:
            layer = self.topology.layers[number]
            if isinstance(layer, Compiled):
                ops += ops_of(context, number, layer)
                continue
            if ops:
                steps.append(Tape(ops, self.dtype))
            steps.append(number)
            ops = []
        if ops:
            steps.append(Tape(ops, self.dtype))
        return tuple(steps)

    def forward_ops(self, context: Context, number: int, layer: Compiled) -> list[Op]:
        """What a layer does forward."""
        return layer.forward_ops(context.slots(number))

    def backward_ops(self, context: Context, number: int, layer: Compiled) -> list[Op]:
        """What a layer does on the way back, the sum of what its readers handed it before."""
        slots = context.slots(number)
        ops = self.gather_ops(context, number)
        if any(error is not None for error in slots.input_errors):
            ops += layer.backward_ops(slots)
        return ops

    def gather_ops(self, context: Context, number: int) -> list[Op]:
        """Add up what several readers of an output handed it; see `Context.gather_error`."""
        parts = context.error_parts(number)
        if not parts:
            return []
        total = context.slots(number).error
        ops = [Op.of(program.ADD, total.size, total, parts[0], parts[1])]
        return ops + [Op.of(program.ADD, total.size, total, total, part) for part in parts[2:]]
