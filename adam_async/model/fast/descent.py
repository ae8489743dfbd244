"""Pure: forward, backward and gradient descent in place, as one tape where every layer has compiled kernels.

Each tensor is updated right after its layer's way back; no layer before it reads it again. A layer without
compiled kernels runs its own steps between two tapes, and its tensors are checked and updated by the rule.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from adam_async.model.context import Context
from adam_async.model.fast import program
from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.dense import FastDense
from adam_async.model.fast.tape import Op, Ref, Tape
from adam_async.model.finite import is_finite
from adam_async.model.layer import Array, ParameterSpec, Slots, Weights
from adam_async.model.rules import RuleState, Sgd
from adam_async.model.step import StepBuffers, StepInput, StepOutcome

if TYPE_CHECKING:
    from adam_async.model.fast.engine import Engine

Step = Tape | tuple[str, int]
"""A tape, or ``("forward", number)`` or ``("backward", number)`` of a layer without compiled kernels."""


_WORD = 4
"""Bytes in which targets are copied."""

STALENESS, REFUSED = 2, 3
"""Where the row of a group holds the steps of others, and its first refused tensor."""


def can_load(context: Context, groups: Sequence[StepInput]) -> bool:
    """Whether a kernel can read all these images as they lie; others are converted one group at a time."""
    shape = context.input.shape
    kinds = {None if group.images is None else group.images.dtype for group in groups}
    return kinds in ({np.dtype(np.uint8)}, {context.input.dtype}) and all(
        group.images is not None
        and group.images.shape == (shape[-1], *shape[:-1])
        and group.images.flags.c_contiguous
        for group in groups
    )


class Descent:
    """The steps of one context. For one thread at a time.

    Args:
        engine: Of the network.
        context: Made for training.
        buffers: Memory for gradients and the rule.
        rule: What to apply.
    """

    def __init__(self, engine: "Engine", context: Context, buffers: StepBuffers, rule: Sgd) -> None:
        self.buffers = buffers
        self._engine = engine
        self._layers = engine.topology.layers
        self._rule = rule
        self._hyper = np.array((0.0, rule.momentum, rule.weight_decay), engine.dtype)
        self._names = [p.name for layer in reversed(self._layers) for p in layer.parameters]
        self._refused = np.zeros(len(self._names), np.int64)
        self._levels = np.divide(np.arange(256, dtype=np.uint8), 255, dtype=engine.dtype, casting="unsafe")
        self._losses = context.slots(len(self._layers) - 1).output
        self._steps = self._assemble(context)

    def run(
        self, weights: Weights, state: Mapping[str, RuleState], context: Context, rate: float
    ) -> StepOutcome:
        """Train on the group loaded in the context."""
        self._hyper[0] = rate
        loss = 0.0
        for step in self._steps:
            if isinstance(step, Tape):
                loss += step.run(weights, state)
            elif step[0] == "forward":
                self._layers[step[1]].run_forward(weights, context.slots(step[1]))
            else:
                self._backward(weights, state, context, step[1], rate)
        if not isinstance(self._layers[-1], Compiled):
            loss = float(np.add.reduce(self._losses)) / self._losses.size
        if not self._refused.any():
            return StepOutcome(loss=loss)
        refused = self._named(self._refused)
        self._refused.fill(0)
        return StepOutcome(loss=loss, refused=refused)

    def run_groups(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: Context,
        groups: Sequence[StepInput],
        steps: Array,
    ) -> list[StepOutcome]:
        """Train on groups that `can_load`, one after the other, in one call without the lock."""
        (tape,) = self._steps
        assert isinstance(tape, Tape)
        targets = context.targets
        labels = np.empty((len(groups), sum(target.nbytes for target in targets) // _WORD), np.int32)
        rows = np.zeros((len(groups), REFUSED + len(self._names)), np.int64)
        for number, group in enumerate(groups):
            context.load_labels(group.labels)
            np.concatenate([target.reshape(-1).view(np.int32) for target in targets], out=labels[number])
            assert group.images is not None
            rows[number, :STALENESS] = group.images.ctypes.data, labels[number].ctypes.data
        rates = np.array([group.rate for group in groups])
        places = [(target.ctypes.data, target.nbytes // _WORD) for target in targets]
        source, shape = groups[0].images, context.input.shape
        assert source is not None
        tape.run_groups(
            weights,
            state,
            groups=rows,
            rates=rates,
            layout=np.array((context.input.ctypes.data, context.input.size // shape[-1], shape[-1])),
            places=np.array(places),
            levels=self._levels if source.dtype == np.uint8 else self._levels[:0],
            refused=self._refused,
            steps=steps,
        )
        return [
            StepOutcome(loss=loss, staleness=int(row[STALENESS]), refused=self._named(row[REFUSED:]))
            for loss, row in zip(rates.tolist(), rows, strict=True)
        ]

    def _named(self, flags: Array) -> tuple[str, ...]:
        return tuple(name for name, flag in zip(self._names, flags, strict=True) if flag)

    def _backward(
        self, weights: Weights, state: Mapping[str, RuleState], context: Context, number: int, rate: float
    ) -> None:
        self._engine.own_backward(weights, context, number)
        for parameter in self._layers[number].parameters:
            if parameter.frozen:
                continue
            name = parameter.name
            gradient = self.buffers.gradients[name]
            self._layers[number].run_delta(context.slots(number), parameter.kind, gradient)
            if is_finite(gradient):
                self._rule.apply(
                    weights[name], state[name], gradient, rate=rate, scratch=self.buffers.scratch
                )
            else:
                self._refused[self._names.index(name)] = 1

    def _assemble(self, context: Context) -> tuple[Step, ...]:
        steps: list[Step] = []
        ops: list[Op] = []

        def flush() -> None:
            if ops:
                steps.append(Tape(ops, self._engine.dtype, self._hyper))
                ops.clear()

        for number, layer in enumerate(self._layers):
            if isinstance(layer, Compiled):
                ops += self._engine.forward_ops(context, number, layer)
            else:
                flush()
                steps.append(("forward", number))
        if isinstance(self._layers[-1], Compiled):
            ops.append(Op.of(program.MEAN, self._losses.size, self._losses))
        for number, layer in reversed(tuple(enumerate(self._layers))):
            if isinstance(layer, Compiled):
                ops += self._engine.backward_ops(context, number, layer)
                for parameter in layer.parameters:
                    if not parameter.frozen:
                        ops += self._update(context.slots(number), layer, parameter)
            else:
                flush()
                steps.append(("backward", number))
        flush()
        return tuple(steps)

    def _update(self, slots: Slots, layer: Compiled, parameter: ParameterSpec) -> list[Op]:
        gradient = self.buffers.gradients[parameter.name]
        refused: Array = self._refused[self._names.index(parameter.name) :]
        values = Ref(name=parameter.name, shape=parameter.shape, written=True)
        momentum: Ref | int = 0
        if self._rule.momentum:
            momentum = Ref(name=parameter.name, shape=parameter.shape, key="momentum", written=True)
        ops = layer.delta_ops(slots, parameter.kind, gradient)
        if isinstance(layer, FastDense) and parameter.kind == "weight":
            return [layer.descent_op(slots, values, momentum, ops[0], refused)]
        return [*ops, Op.of(program.DESCEND, parameter.size, values, gradient, momentum, refused)]
