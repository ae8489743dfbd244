"""Pure: a training context, the arrays of one group in flight.

A context allocates all arrays once, for `group_size` images. A smaller group (the last of an epoch) uses the
front of the same memory: each array is a view of a flat buffer, made once per number of images.

An output with several readers has one error gradient per reader. The network adds these up before the layer's
backward. A single reader writes straight into the output's error gradient.

A training step's buffers, outcome and gradient check are here, too.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from adam_async.errors import ModelError
from adam_async.model.keyed_random import Dice, Key
from adam_async.model.layer import Array, Layer, Loss, ParameterSpec, Slots, Weights
from adam_async.model.rules import RuleState, Sgd, new_scratch
from adam_async.model.spec import Shape
from adam_async.model.topology import INPUT_INDEX, Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBuffers:
    """One thread's gradients, by tensor name, and its scratch for the rule."""

    gradients: Mapping[str, Array]
    scratch: Array

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec], dtype: DTypeLike) -> "StepBuffers":
        """Allocate the buffers for these tensors."""
        gradients = {p.name: np.empty(p.shape, dtype) for p in parameters}
        return cls(gradients=gradients, scratch=new_scratch(dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """One group to load into a context."""

    images: Array | None
    """Images of shape ``(n, C, H, W)``; None if no layer reads them."""
    labels: Array
    """Targets for the loss layer, one per image."""
    keys: tuple[Key, ...]
    """The group's name, for layers that draw random values."""
    rate: float
    """Learning rate of the group's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one step."""

    loss: float
    """Mean loss over the group's images; not finite if a score of the network is not."""
    staleness: int = 0
    """Number of steps that other threads finished during this step; 0 if the steps are not counted."""
    refused: tuple[str, ...] = ()
    """Tensors whose gradient is not finite, in backward order; they and their state did not change."""


BEGUN = -1
"""Value of `JobNotes.done` while a step changes the weights."""


@dataclass(frozen=True, slots=True, eq=False)
class JobNotes:
    """Notes on the steps of one job, in memory that may outlive the thread's process.

    A step writes `BEGUN` before it first changes a weight, and the rest after its last change. A reader looks
    only at the notes of an ended thread. By then the processor has done the thread's writes in program order,
    up to some point. So notes need no lock.
    """

    done: Array
    """int64, one per group: 0 before the step, `BEGUN` during it, 1 + staleness after it."""
    losses: Array
    """float64, one per group: its mean loss once the step is done."""

    @classmethod
    def new(cls, groups: int) -> "JobNotes":
        """Allocate the notes of a job."""
        return cls(np.zeros(groups, np.int64), np.zeros(groups))

    def part(self, start: int, groups: int) -> "JobNotes":
        """Return the notes on some groups of the job."""
        return JobNotes(self.done[start : start + groups], self.losses[start : start + groups])


@np.errstate(over="ignore", invalid="ignore")
def is_finite(values: Array) -> bool:
    """Return whether all values are finite. The call allocates no memory for finite values."""
    flat = values.reshape(-1)
    # A finite sum of squares proves it at the speed of a dot product; an overflowing sum proves nothing.
    return math.isfinite(float(np.dot(flat, flat))) or bool(np.isfinite(values).all())


class GradientTargets(Protocol):
    """Memory for the gradients of one full group, which stays the same for all groups."""

    @property
    def deltas_by_name(self) -> Mapping[str, Array]:
        """Memory of each whole gradient, by the tensor's name."""

    def copies(self, context: Any) -> Sequence[tuple[Array, Array]]:
        """Return the arrays to copy once all whole gradients are written: the target, and its source."""


class Engine(Protocol):
    """Compiled kernels that run many layers of one network in one call: `fast.engine.TapeEngine`."""

    @property
    def kernels(self) -> frozenset[int]:
        """Numbers of the kernels that the network needs."""

    @property
    def is_ready(self) -> bool:
        """Whether the network's kernels are compiled, in this process or on disk."""

    @property
    def are_kept(self) -> bool:
        """Whether this process can read kernels that another process compiles."""

    def warm_up(self, progress: Callable[[int, int], None] | None) -> None:
        """Compile the kernels, or read them from disk."""

    def forward(self, weights: Weights, context: "Context", layers: range) -> None:
        """Run these layers forward."""

    def backward(self, weights: Weights, context: "Context", layers: range) -> None:
        """Run these layers backward, last first."""

    def train(
        self,
        weights: Weights,
        context: "Context",
        images: Array | None,
        labels: Array,
        gradients: GradientTargets,
    ) -> bool:
        """In one call, load a group, run forward and backward, and write the gradients.

        Returns False, and does nothing, if compiled kernels cannot do all of this.
        """

    def deltas(self, context: "Context", out: Mapping[str, Array]) -> tuple[str, ...]:
        """Write the gradients of tensors in layers with compiled kernels; return the other tensors' names."""

    def descend(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: "Context",
        buffers: StepBuffers,
        rule: Sgd,
        rate: float,
    ) -> StepOutcome:
        """Run forward, backward and the rule in place; in one call if every layer has compiled kernels."""

    def can_descend_groups(self, context: "Context", groups: Sequence[StepInput]) -> bool:
        """Return whether `descend_groups` can train these groups, each of `context.images` images."""

    def descend_groups(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: "Context",
        buffers: StepBuffers,
        rule: Sgd,
        groups: Sequence[StepInput],
        steps: Array,
        notes: JobNotes,
    ) -> list[StepOutcome]:
        """Load groups of one size, and do the work of `descend` for each, all in one call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSet:
    """The layers of a network with one set of kernels."""

    kernels: str
    """``"numpy"`` or ``"numba"``."""
    topology: Topology
    engine: Engine | None
    """Engine of the compiled layers; None with NumPy's kernels."""


class RunnableNetwork(Protocol):
    """The parts of a `Network` that its contexts read."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""

    @property
    def input_shape(self) -> Shape:
        """Shape of one image."""

    kernel_set: KernelSet
    """The layers and kernels for groups that are loaded from now on."""


class Context:
    """Activations, error gradients and scratch for one group; only one thread at a time may use it.

    `Network.context` makes contexts. A group runs with the network's `kernel_set` at the time of loading.

    Args:
        network: The network that runs groups in this context.
        group_size: Largest number of images.
        training: Whether to allocate error gradients, which backward needs.
    """

    def __init__(self, network: RunnableNetwork, *, group_size: int, training: bool) -> None:
        if group_size < 1:
            raise ModelError(f"a context must hold at least 1 image, not {group_size}")
        self._network = network
        self._input_shape = network.input_shape
        self._group_size = group_size
        self._dtype = network.dtype
        self._training = training
        layers = network.kernel_set.topology.layers
        self._drawing = tuple(number for number, layer in enumerate(layers) if training and layer.DRAWS)
        self._take_up(network.kernel_set)
        self._current = self._bind(group_size)

    def _take_up(self, kernel_set: KernelSet) -> None:
        """Change to these kernels, and drop all arrays, because other kernels need other scratch."""
        self.kernel_set = kernel_set
        self._topology = kernel_set.topology
        self._memory: dict[tuple[object, ...], Array] = {}
        self._bound: dict[int, _Bound] = {}

    def __repr__(self) -> str:
        kind = "training" if self._training else "evaluation"
        return f"<Context {kind} {self.images} of {self._group_size} images, {self.nbytes / 1e6:.1f} MB>"

    @property
    def group_size(self) -> int:
        """Largest number of images."""
        return self._group_size

    @property
    def images(self) -> int:
        """Number of images in the loaded group."""
        return self._current.images

    @property
    def training(self) -> bool:
        """Whether the context has error gradients."""
        return self._training

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(buffer.nbytes for buffer in self._memory.values())

    def load(
        self,
        images: Array | None,
        labels: Array | None = None,
        *,
        dice: Dice | None = None,
        keys: tuple[Key, ...] = (),
    ) -> None:
        """Load a group of 1 to `group_size` images; uint8 becomes 0 to 1, floats are copied.

        Args:
            images: Shape ``(n, C, H, W)``, axes of length 1 optional, or ``(n, C * H * W)``. None in a
                network part that reads no images; then n is the number of labels.
            labels: Targets for the loss layer: class numbers ``(n,)``, or target values. None to predict.
            dice: Random source for layers that draw in training, such as dropout; None if no layer draws.
            keys: The group's name, such as epoch and number: equal keys draw equal values.

        Raises:
            ModelError: Number, shape or dtype does not fit, or a layer needs dice and the caller passed none.
        """
        counted = images if images is not None else labels
        count = counted.shape[0] if counted is not None and counted.ndim else 0
        if not 1 <= count <= self._group_size:
            raise ModelError(f"this context holds 1 to {self._group_size} images, not {count}")
        self.resize(count)
        if images is not None:
            self._load_images(images, count)
        elif math.prod(self._input_shape):
            raise ModelError(
                f"this network reads images of shape {list(self._input_shape)}: load images with the labels"
            )
        if labels is not None:
            self.load_labels(labels)
        for number in self._drawing:
            layer = self._topology.layers[number]
            if dice is None:
                raise ModelError(
                    f"layer {layer.name!r} ({layer.spec.kind}) draws at random in training: "
                    "load the group with dice= and keys="
                )
            layer.draw(self._current.slots[number], dice, keys)

    def load_labels(self, labels: Array) -> None:
        """Load only labels, one for each image of the present layout.

        Raises:
            ModelError: The labels do not fit the loss layer.
        """
        loss = self._topology.layers[-1]
        if isinstance(loss, Loss):
            loss.load_targets(self._current.slots[-1], labels)

    @property
    def targets(self) -> tuple[Array, ...]:
        """Arrays in which the loss layer keeps labels; empty if its `TARGETS` names none."""
        loss = self._topology.layers[-1]
        scratch = self._current.slots[-1].scratch
        return (
            tuple(scratch[name] for name in loss.TARGETS if name in scratch) if isinstance(loss, Loss) else ()
        )

    @property
    def draws(self) -> bool:
        """Whether a layer draws random values for each group."""
        return bool(self._drawing)

    def _load_images(self, images: Array, count: int) -> None:
        features = math.prod(self._input_shape)
        if images.shape[1:] != self._input_shape:
            check_layout(images.shape[1:], self._input_shape)
        source, target = images.reshape(count, features).T, self.input.reshape(features, count)
        if images.dtype == np.uint8:
            np.divide(source, 255, out=target, dtype=self._dtype, casting="unsafe")
        elif images.dtype.kind == "f":
            np.copyto(target, source, casting="same_kind")
        else:
            raise ModelError(f"images must be uint8 or floating point, not {images.dtype}")

    def resize(self, images: int) -> None:
        """Lay the context out for another number of images; its values are lost."""
        # Kernels change only here, between two groups, because a group ends with the kernels that began it.
        if self._network.kernel_set is not self.kernel_set:
            self._take_up(self._network.kernel_set)
        bound = self._bound.get(images)
        self._current = bound if bound is not None else self._bind(images)

    @property
    def input(self) -> Array:
        """The images, batch last: ``(C, H, W, B)`` or ``(F, B)``."""
        return self._current.input

    def slots(self, number: int) -> Slots:
        """Return the arrays of the layer with this number, for the current number of images."""
        return self._current.slots[number]

    def gather_error(self, number: int) -> None:
        """Add up the error gradients from several readers of one output."""
        parts = self.error_parts(number)
        if not parts:
            return
        total = self.slots(number).error
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)

    def error_parts(self, number: int) -> tuple[Array, ...]:
        """Return the error gradients that `gather_error` adds up; empty for an output with one reader."""
        return self._current.merges.get(number, ())

    @property
    def tapes(self) -> dict[Any, Any]:
        """Cache of the network's engine for these arrays and the current number of images."""
        return self._current.tapes

    def _take(self, key: tuple[object, ...], full: Shape, shape: Shape, dtype: Any) -> Array:
        buffer = self._memory.get(key)
        if buffer is None:
            # `zeros` would write nothing: memory goes to the NUMA node of the thread that first writes it.
            buffer = self._memory[key] = np.full(math.prod(full), 0, dtype)
        return buffer[: math.prod(shape)].reshape(shape)

    def _per_image(self, key: tuple[object, ...], shape: Shape, images: int) -> Array:
        return self._take(key, (*shape, self._group_size), (*shape, images), self._dtype)

    def _bind(self, images: int) -> "_Bound":
        """Lay out all arrays for groups of this size, once, and let the layers make their views."""
        topology, layers = self._topology, self._topology.layers
        bound = _Bound(images, self._per_image(("input",), self._input_shape, images))
        for number, layer in enumerate(layers):
            if topology.shares[number]:
                output = bound.outputs[topology.producers[number][0]].reshape(*layer.output_shape, images)
            elif number in topology.hosts:
                output = self._hosted(number, layer, images)
            else:
                output = self._per_image(("output", number), layer.output_shape, images)
            bound.outputs.append(output)
        if self._training:
            self._bind_errors(bound)
        for number, layer in enumerate(layers):
            slots = Slots(
                images=images,
                inputs=tuple(
                    bound.input if source == INPUT_INDEX else bound.outputs[source]
                    for source in topology.producers[number]
                ),
                output=bound.outputs[number],
                output_error=bound.errors.get(number),
                input_errors=tuple(
                    bound.edges.get((number, position)) for position in range(len(topology.producers[number]))
                ),
                scratch=self._scratch(number, layer, images),
                training=self._training,
            )
            layer.prepare(slots)
            bound.slots.append(slots)
        self._bound[images] = bound
        return bound

    def _hosted(self, number: int, layer: Layer, images: int) -> Array:
        """Return the memory of an output that is a part of a later output."""
        host, start = self._topology.hosts[number]
        whole = self._per_image(("output", host), self._topology.layers[host].output_shape, images)
        stop = start + math.prod(layer.output_shape)
        return whole[start:stop].reshape(*layer.output_shape, images)

    def _bind_errors(self, bound: "_Bound") -> None:
        """Lay out the error gradients: one per output, and one per edge if an output has several readers."""
        topology = self._topology
        for number in reversed(range(len(topology.layers))):
            readers = topology.consumers[number]
            if not topology.wants_error[number] or isinstance(topology.layers[number], Loss):
                continue
            shape = topology.layers[number].output_shape
            # This error gradient may share memory with the only reader's, as their outputs do.
            if len(readers) == 1 and topology.shares[readers[0][0]]:
                error = bound.errors[readers[0][0]].reshape(*shape, bound.images)
            elif len(readers) == 1 and (start := topology.layers[readers[0][0]].hosts_at) is not None:
                error = bound.errors[readers[0][0]][start : start + shape[0]]
            else:
                error = self._per_image(("error", number), shape, bound.images)
            bound.errors[number] = error
            if len(readers) < 2:
                bound.edges |= dict.fromkeys(readers, error)
                continue
            for edge in readers:
                bound.edges[edge] = self._per_image(("edge", *edge), shape, bound.images)
            bound.merges[number] = tuple(bound.edges[edge] for edge in readers)

    def _scratch(self, number: int, layer: Layer, images: int) -> dict[str, Array]:
        full = layer.scratch(self._group_size)
        return {
            name: self._take(("scratch", number, name), full[name][0], shape, dtype or self._dtype)
            for name, (shape, dtype) in layer.scratch(images).items()
        }


def check_layout(shape: Shape, wanted: Shape) -> None:
    """Refuse images whose shape or axis order differs from the network's input.

    Args:
        shape: Shape of one image; axes of length 1 do not count, and a flat image fits.
        wanted: Shape of the network's input, such as (C, H, W).

    Raises:
        ModelError: The shapes differ; for images with channels last, the message names the call that moves
            the channels.
    """
    if shape == (math.prod(wanted),) or _long_axes(shape) == _long_axes(wanted):
        return
    cure = ""
    if len(wanted) == 3 and shape == (*wanted[1:], wanted[0]):
        cure = "; images.transpose(0, 3, 1, 2) puts their channels first"
    raise ModelError(f"images must have shape {list(wanted)}, not {list(shape)}{cure}")


def _long_axes(shape: Shape) -> list[int]:
    return [length for length in shape if length != 1]


class _Bound:
    """All views of the arrays for a given number of images."""

    def __init__(self, images: int, images_in: Array) -> None:
        self.images = images
        self.input = images_in
        self.outputs: list[Array] = []
        self.errors: dict[int, Array] = {}
        self.edges: dict[tuple[int, int], Array] = {}
        self.merges: dict[int, tuple[Array, ...]] = {}
        self.slots: list[Slots] = []
        self.tapes: dict[Any, Any] = {}
