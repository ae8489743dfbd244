"""Pure: a network's passes as tapes: as many layers as possible in one call.

Neighbouring layers with compiled kernels share one tape. A layer without them, such as a user's, runs its own
steps between two tapes. A context keeps tapes with the addresses of its arrays, one set per number of images.

`Descent` does forward, backward and gradient descent in place, as one tape if every layer has compiled
kernels. The tape updates each tensor right after its layer's backward, because no earlier layer reads the
tensor again. A layer without compiled kernels runs its own steps between two tapes, and the rule checks and
updates its tensors.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from adam_async.model.context import (
    Context,
    GradientTargets,
    JobNotes,
    StepBuffers,
    StepInput,
    StepOutcome,
    is_finite,
)
from adam_async.model.fast import program
from adam_async.model.fast.layers import FAST_LAYERS, FastDense
from adam_async.model.fast.tape import Compiled, Op, Ref, Tape
from adam_async.model.layer import Array, Layer, ParameterSpec, Slots, Weights
from adam_async.model.rules import RuleState, Sgd
from adam_async.model.topology import Topology

COMMON = (program.ADD, program.COPY, program.CLEAR, program.DESCEND, program.GROUPS)
"""Numbers of the kernels that any network may need."""

Step = Tape | int
"""A tape, or the number of a layer without compiled kernels."""

DescentStep = Tape | tuple[str, int]
"""A tape, or ``("forward", number)`` or ``("backward", number)`` of a layer without compiled kernels."""

_WORD = 4
"""Bytes of a word, the unit in which targets are copied."""

STALENESS, REFUSED = 2, 3
"""Indexes of two columns of `groups` in `program.run_groups`: the number of other threads' steps, and the
first tensor's flag."""


def fast_kinds(kinds: Mapping[str, type[Layer]]) -> dict[str, type[Layer]]:
    """Replace each layer that has a compiled version."""
    return {kind: FAST_LAYERS.get(layer, layer) for kind, layer in kinds.items()}


class TapeEngine:
    """Runs the passes of one network. Holds no arrays, so any number of threads may share it.

    Args:
        topology: Layers of the network.
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
        """Whether the network's kernels are compiled, in this process or on disk."""
        return program.are_ready(self.kernels, self.dtype)

    @property
    def are_kept(self) -> bool:
        """Whether this process can read kernels that another process compiles."""
        return program.are_kept()

    def warm_up(self, progress: Callable[[int, int], None] | None) -> None:
        """Compile the kernels, or read them from disk."""
        program.compile_kernels(self.kernels, self.dtype, progress)

    def forward(self, weights: Weights, context: Context, layers: range) -> None:
        """Run these layers forward."""
        # The context gives other tapes for another number of images or other kernels.
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
        """Run these layers backward, last first."""
        key = ("backward", layers)
        steps = context.tapes.get(key)
        if steps is None:
            steps = context.tapes[key] = self._steps(context, reversed(layers), self.backward_ops)
        for step in steps:
            if isinstance(step, int):
                self.own_backward(weights, context, step)
            else:
                step.run(weights)

    def deltas(self, context: Context, out: Mapping[str, Array]) -> tuple[str, ...]:
        """In one call, write the gradients of all tensors in layers with compiled kernels.

        Returns the other names.
        """
        key = ("deltas", *out)
        found = context.tapes.get(key)
        if found is None:
            found = context.tapes[key] = self._delta_tape(context, out)
        tape, others = found
        if tape is not None:
            tape.run(out)
        return others

    def train(
        self,
        weights: Weights,
        context: Context,
        images: Array | None,
        labels: Array,
        gradients: GradientTargets,
    ) -> bool:
        """Load a group, run forward and backward, and write the gradients; see `Engine.train`."""
        key = ("train", gradients)
        if key not in context.tapes:
            context.tapes[key] = GroupTape.of(self, context, gradients)
        tape: GroupTape | None = context.tapes[key]
        if tape is None or images is None or not can_load(context, (images,)):
            return False
        context.load_labels(labels)
        tape.run(weights, images)
        return True

    def _delta_tape(self, context: Context, names: Collection[str]) -> tuple[Tape | None, tuple[str, ...]]:
        """Make the tape of some gradients; returns also the names without kernels."""
        ops: list[Op] = []
        others = list(names)
        for number, layer in enumerate(self.topology.layers):
            if not isinstance(layer, Compiled):
                continue
            for parameter in layer.parameters:
                if parameter.name in others:
                    others.remove(parameter.name)
                    # A name instead of an array: each call may pass another array to the same tape.
                    target = Ref(name=parameter.name, shape=parameter.shape, written=True)
                    ops += layer.delta_ops(context.slots(number), parameter.kind, target)
        return Tape(ops, self.dtype) if ops else None, tuple(others)

    def own_backward(self, weights: Weights, context: Context, number: int) -> None:
        """Run the backward of a layer without compiled kernels."""
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
        """Run forward, backward and the rule in place; in one call if every layer has compiled kernels."""
        return self._descent(context, buffers, rule).run(weights, state, context, rate)

    def can_descend_groups(self, context: Context, groups: Sequence[StepInput]) -> bool:
        """Return whether one call can train these groups, each with the context's number of images."""
        # Between two groups the call runs no Python: it draws nothing, converts nothing, and every layer has
        # kernels.
        return (
            not context.draws
            and bool(context.targets)
            and all(isinstance(layer, Compiled) for layer in self.topology.layers)
            and can_load(context, [group.images for group in groups])
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
        notes: JobNotes,
    ) -> list[StepOutcome]:
        """Load groups of one size, and do the work of `descend` for each, all in one call."""
        return self._descent(context, buffers, rule).run_groups(weights, state, context, groups, steps, notes)

    def _descent(self, context: Context, buffers: StepBuffers, rule: Sgd) -> "Descent":
        key = ("descend", rule)
        descent = context.tapes.get(key)
        # Tapes have the addresses of the buffers, so other buffers need other tapes.
        if descent is None or descent.buffers is not buffers:
            descent = context.tapes[key] = Descent(self, context, buffers, rule)
        assert isinstance(descent, Descent)
        return descent

    def _steps(
        self, context: Context, layers: Iterable[int], ops_of: Callable[[Context, int, Compiled], list[Op]]
    ) -> tuple[Step, ...]:
        """Join neighbouring layers with kernels into tapes; a number represents a layer without kernels."""
        steps: list[Step] = []
        ops: list[Op] = []
        for number in layers:
            layer = self.topology.layers[number]
            if isinstance(layer, Compiled):
                ops += ops_of(context, number, layer)
                continue
            # A layer without kernels ends the tape; its own steps run before the next tape.
            if ops:
                steps.append(Tape(ops, self.dtype))
            steps.append(number)
            ops = []
        if ops:
            steps.append(Tape(ops, self.dtype))
        return tuple(steps)

    def forward_ops(self, context: Context, number: int, layer: Compiled) -> list[Op]:
        """Return the ops of a layer's forward."""
        return layer.forward_ops(context.slots(number))

    def backward_ops(self, context: Context, number: int, layer: Compiled) -> list[Op]:
        """Return the ops of a layer's backward, after the sum of its readers' error gradients."""
        slots = context.slots(number)
        ops = self.gather_ops(context, number)
        # No layer before the first trained parameters needs an error gradient, so backward has no ops there.
        if any(error is not None for error in slots.input_errors):
            ops += layer.backward_ops(slots)
        return ops

    def gather_ops(self, context: Context, number: int) -> list[Op]:
        """Return the ops that sum several readers' error gradients; see `Context.gather_error`."""
        parts = context.error_parts(number)
        if not parts:
            return []
        total = context.slots(number).error
        # The order of `Context.gather_error`, so both sums have the same bits.
        ops = [Op.of(program.ADD, total.size, total, parts[0], parts[1])]
        return ops + [Op.of(program.ADD, total.size, total, total, part) for part in parts[2:]]


class GroupTape:
    """The gradients of full groups in one context, with the addresses of the memory.

    Args:
        engine: Engine of the network.
        context: Context for training.
        ops: Forward, backward and gradients.
    """

    def __init__(self, engine: TapeEngine, context: Context, ops: Sequence[Op]) -> None:
        self._tape = Tape(ops, engine.dtype)
        self._layout, self._levels = layout_of(context), levels_of(engine.dtype)
        self._group, self._none = np.zeros((1, REFUSED), np.int64), np.zeros((0, 2), np.int64)
        self._refused, self._steps, self._rates = self._none.reshape(-1), np.zeros(1, np.int64), np.zeros(1)
        self._done = np.zeros(1, np.int64)

    @classmethod
    def of(cls, engine: TapeEngine, context: Context, gradients: GradientTargets) -> "GroupTape | None":
        """Make the tape; None if a layer draws, or if a layer or a copy has no kernel."""
        layers = [(n, layer) for n, layer in enumerate(engine.topology.layers) if isinstance(layer, Compiled)]
        copies = gradients.copies(context)
        has_kernels = len(layers) == len(engine.topology.layers) and not context.draws
        if not (has_kernels and all(source.flags.c_contiguous for _, source in copies)):
            return None
        ops = [op for number, layer in layers for op in engine.forward_ops(context, number, layer)]
        ops += [op for number, layer in layers[::-1] for op in engine.backward_ops(context, number, layer)]
        for number, layer in layers:
            for parameter in layer.parameters:
                target = gradients.deltas_by_name.get(parameter.name)
                if target is not None:
                    ops += layer.delta_ops(context.slots(number), parameter.kind, target)
        ops += [Op.of(program.COPY, target.size, target, source) for target, source in copies]
        return cls(engine, context, ops)

    def run(self, weights: Weights, images: Array) -> None:
        """Load images and run the tape, in one call without the interpreter's lock."""
        self._group[0, 0] = images.ctypes.data
        self._tape.run_groups(
            weights,
            {},
            groups=self._group,
            rates=self._rates,
            layout=self._layout,
            # The loss layer has the targets already, and no rule counts refused tensors and steps.
            target_arrays=self._none,
            levels=self._levels[images.dtype.kind],
            refused=self._refused,
            steps=self._steps,
            done=self._done,
        )


class Descent:
    """Training steps in one context. For one thread at a time.

    Args:
        engine: Engine of the network.
        context: Context for training.
        buffers: Memory for gradients and the rule.
        rule: The update rule.
    """

    def __init__(self, engine: TapeEngine, context: Context, buffers: StepBuffers, rule: Sgd) -> None:
        self.buffers = buffers
        self._engine = engine
        self._layers = engine.topology.layers
        self._rule = rule
        self._hyper = np.array((0.0, rule.momentum, rule.weight_decay, rule.nesterov), engine.dtype)
        # In backward order, as outcomes name refused tensors.
        self._names = [p.name for layer in reversed(self._layers) for p in layer.parameters]
        self._refused = np.zeros(len(self._names), np.int64)
        self._levels = levels_of(engine.dtype)
        self._losses = context.slots(len(self._layers) - 1).output
        self._steps = self._assemble(context)

    def run(
        self, weights: Weights, state: Mapping[str, RuleState], context: Context, rate: float
    ) -> StepOutcome:
        """Train on the group loaded in the context."""
        # Tapes pass this array to the kernels, so the rate goes into it.
        self._hyper[0] = rate
        loss = 0.0
        for step in self._steps:
            if isinstance(step, Tape):
                # Only the tape with the loss returns other than 0.
                loss += step.run(weights, state)
            elif step[0] == "forward":
                self._layers[step[1]].run_forward(weights, context.slots(step[1]))
            else:
                self._backward(weights, state, context, step[1], rate)
        # A loss without kernels has no tape to compute its mean.
        if not isinstance(self._layers[-1], Compiled):
            loss = float(np.add.reduce(self._losses)) / self._losses.size
        if not self._refused.any():
            return StepOutcome(loss=loss)
        # Kernels only set flags, so the next step needs them cleared.
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
        notes: JobNotes,
    ) -> list[StepOutcome]:
        """Train one by one on groups that pass `can_load`, in one call without the interpreter's lock."""
        # With kernels for every layer there is one tape.
        (tape,) = self._steps
        assert isinstance(tape, Tape)
        targets = context.targets
        labels = np.empty((len(groups), sum(target.nbytes for target in targets) // _WORD), np.int32)
        rows = np.zeros((len(groups), REFUSED + len(self._names)), np.int64)
        for number, group in enumerate(groups):
            # The loss layer checks and converts labels in its own arrays, which the next group overwrites.
            context.load_labels(group.labels)
            np.concatenate([target.reshape(-1).view(np.int32) for target in targets], out=labels[number])
            assert group.images is not None
            rows[number, :STALENESS] = group.images.ctypes.data, labels[number].ctypes.data
        notes.losses[:] = [group.rate for group in groups]
        target_arrays = [(target.ctypes.data, target.nbytes // _WORD) for target in targets]
        source = groups[0].images
        assert source is not None
        tape.run_groups(
            weights,
            state,
            groups=rows,
            rates=notes.losses,
            layout=layout_of(context),
            target_arrays=np.array(target_arrays),
            levels=self._levels[source.dtype.kind],
            refused=self._refused,
            steps=steps,
            done=notes.done,
        )
        return [
            StepOutcome(loss=loss, staleness=int(row[STALENESS]), refused=self._named(row[REFUSED:]))
            for loss, row in zip(notes.losses.tolist(), rows, strict=True)
        ]

    def _named(self, flags: Array) -> tuple[str, ...]:
        return tuple(name for name, flag in zip(self._names, flags, strict=True) if flag)

    def _backward(
        self, weights: Weights, state: Mapping[str, RuleState], context: Context, number: int, rate: float
    ) -> None:
        """Run a layer without kernels backward, and apply the rule to finite gradients."""
        self._engine.own_backward(weights, context, number)
        for parameter in self._layers[number].parameters:
            if parameter.frozen:
                continue
            name = parameter.name
            gradient = self.buffers.gradients[name]
            self._layers[number].run_delta(context.slots(number), parameter.kind, gradient)
            # Kernels check gradients themselves; this layer has no kernels.
            if is_finite(gradient):
                self._rule.apply(
                    weights[name], state[name], gradient, rate=rate, scratch=self.buffers.scratch
                )
            else:
                self._refused[self._names.index(name)] = 1

    def _assemble(self, context: Context) -> tuple[DescentStep, ...]:
        """Make the steps of one descent: forward, the mean of the losses, then backward with the updates."""
        steps: list[DescentStep] = []
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
        # A view has the address of the tensor's own flag; a momentum of 0 means no buffer.
        refused: Array = self._refused[self._names.index(parameter.name) :]
        values = Ref(name=parameter.name, shape=parameter.shape, written=True)
        momentum: Ref | int = 0
        if self._rule.momentum:
            momentum = Ref(name=parameter.name, shape=parameter.shape, key="momentum", written=True)
        ops = layer.delta_ops(slots, parameter.kind, gradient)
        # The largest tensors: one kernel forms and applies the gradient block by block, in the cache.
        if isinstance(layer, FastDense) and parameter.kind == "weight":
            return [layer.descent_op(slots, values, momentum, ops[0], refused)]
        return [*ops, Op.of(program.DESCEND, parameter.size, values, gradient, momentum, refused)]


def levels_of(dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return the argument `levels` of `program.run_groups`, by the kind of the images' type."""
    # The division of `Context.load`, so a byte becomes the same number in both functions.
    levels = np.divide(np.arange(256, dtype=np.uint8), 255, dtype=dtype, casting="unsafe")
    # Images that are numbers already need no levels.
    return {"u": levels, "f": levels[:0]}


def layout_of(context: Context) -> Array:
    """Return the argument `layout` of `program.run_groups`."""
    images = context.input.shape[-1]
    return np.array((context.input.ctypes.data, context.input.size // images, images))


def can_load(context: Context, groups: Sequence[Array | None]) -> bool:
    """Return whether a kernel can read these groups' images in place; `Context.load` converts the others."""
    shape = context.input.shape
    # One call has one type of images: bytes, or the network's own type.
    kinds = {None if images is None else images.dtype for images in groups}
    return kinds in ({np.dtype(np.uint8)}, {context.input.dtype}) and all(
        images is not None and images.shape == (shape[-1], *shape[:-1]) and images.flags.c_contiguous
        for images in groups
    )
