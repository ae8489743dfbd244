"""Pure: a network, from its spec to numbers.

A `Network` has no weights: every call takes a mapping from names to arrays, such as a worker's copy or a
server's memory. A `Context` has the arrays of one group. Any number of threads may use one network, each with
its own contexts. Only `use_ready` changes a network: it replaces the set of kernels for groups that are
loaded later.

    network = Network(named_model("mnist-adam"))
    weights = network.initial_weights(Dice(1))
    context = network.context(16)
    context.load(images, labels)
    loss = network.forward(weights, context)
    network.backward(weights, context)
    network.deltas(context, {"fc1.weight": gradient})
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.errors import ModelError, SpecError
from adam_async.model.context import Context, Engine, GradientTargets, KernelSet
from adam_async.model.kernels import available_kernels
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Array, Factors, Layer, ParameterSpec, Weights
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.spec import ModelSpec, Shape
from adam_async.model.topology import INPUT_INDEX, Topology

RANGE_SLACK = 1e-3
"""Maximum distance of a floating-point pixel value below 0 or above 1; interpolation can cause such
values."""

PREDICT_BATCH = 64
"""Number of images per evaluation step: a larger group's columns exceed the second-level cache."""


class Trainable(Protocol):
    """Common interface of `Network` and `StepModel`; each takes only contexts that it made."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""

    @property
    def kernels(self) -> str:
        """Set of kernels, ``"numpy"`` or ``"numba"``."""

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All tensors, in layer order."""

    @property
    def trained(self) -> tuple[ParameterSpec, ...]:
        """The tensors that have a gradient."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that training leaves unchanged."""

    def parameter(self, name: str) -> ParameterSpec:
        """Look a tensor up by its name."""

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels, or read them from disk."""

    def context(self, group_size: int) -> Any:
        """Allocate the arrays for one group of up to `group_size` images."""

    def forward(self, weights: Weights, context: Any) -> float:
        """Run the loaded group up to its loss, and return the mean."""

    def backward(self, weights: Weights, context: Any) -> None:
        """Run the remaining steps, after `forward`; `deltas` and `factors` are valid afterwards."""

    def deltas(self, context: Any, out: Mapping[str, Array]) -> None:
        """Write the group gradients of some tensors into the arrays of `out`, by name."""

    def factors(self, context: Any, name: str) -> Factors | None:
        """Return the factors of one tensor's gradient; None if it has no factors."""


class Network:
    """A network that can run. The constructor allocates no arrays.

    Args:
        spec: Layers and input.
        dtype: float32 for training, float64 for exact comparisons.
        kernels: Set of kernels, one of `KERNELS`. A layer without compiled kernels, such as a user's, runs
            its own steps with either set of kernels.
        layers: Kinds of layers that the spec may use; ``{**BUILTIN_LAYERS, "mine": Mine}`` adds one.

    Raises:
        SpecError: The spec cannot be built, `dtype` has another type, or `kernels` cannot be used.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DTypeLike = np.float32,
        *,
        kernels: str = "numpy",
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
    ) -> None:
        self._may_change = kernels == "auto"
        chosen = available_kernels(kernels)
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.float32, np.float64):
            raise SpecError(f"a network computes in float32 or float64, not {self._dtype}")
        self._spec = spec
        self._kinds = layers
        self.kernel_set = self._whole(chosen)
        self._wire(spec.input_shape)

    def _whole(self, kernels: str) -> KernelSet:
        kinds = self._kinds
        if kernels == "numba":
            # A late import, because numba takes as long to import as all other modules together.
            from adam_async.model.fast.engine import fast_kinds

            kinds = fast_kinds(kinds)
        return self._run_by(kernels, Topology.of(self._spec, kinds))

    def _run_by(self, kernels: str, topology: Topology) -> KernelSet:
        if kernels == "numpy":
            return KernelSet(kernels=kernels, topology=topology, engine=None)
        from adam_async.model.fast.engine import TapeEngine

        return KernelSet(kernels=kernels, topology=topology, engine=TapeEngine(topology, self._dtype))

    def use_ready(self) -> None:
        """Run later groups with the best kernels that need no compiling.

        Has no effect on a part of a network, or if the constructor's `kernels` was not ``"auto"``.
        """
        if self._may_change and available_kernels("auto") == "numba":
            compiled = self.kernel_set if self.kernels == "numba" else self._whole("numba")
            assert compiled.engine is not None
            if compiled.engine.is_ready:
                self.kernel_set = compiled
            elif self.kernels == "numba":
                self.kernel_set = self._whole("numpy")

    def part(self, topology: Topology, input_shape: Shape) -> "Network":
        """Make a network of other layers, such as one partition's, with the same kernels."""
        other = copy(self)
        other._may_change = False
        other.kernel_set = self._run_by(self.kernels, topology)
        other._wire(input_shape)
        return other

    def _wire(self, input_shape: Shape) -> None:
        self._input_shape = input_shape
        self._parameters = tuple(parameter for layer in self.layers for parameter in layer.parameters)
        self._owners = {
            parameter.name: (number, parameter)
            for number, layer in enumerate(self.layers)
            for parameter in layer.parameters
        }
        if len(self._owners) != len(self._parameters):
            raise SpecError(f"model {self._spec.name!r}: two parameters share a name")

    def __repr__(self) -> str:
        return (
            f"<Network {self._spec.name} {self.num_parameters} parameters, "
            f"{self.multiply_adds} multiply-adds, "
            f"{self._dtype} {self.kernels}>"
        )

    @property
    def spec(self) -> ModelSpec:
        """The specification of the network."""
        return self._spec

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self._dtype

    @property
    def kernels(self) -> str:
        """Set of kernels in use: ``"numpy"`` or ``"numba"``."""
        return self.kernel_set.kernels

    @property
    def engine(self) -> Engine | None:
        """Engine that runs many compiled layers in one call; None with NumPy kernels."""
        return self.kernel_set.engine

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels, or read them from disk; otherwise the first group waits for the compilation.

        Args:
            progress: Called with the number of ready kernels and of all kernels, once at the start and after
                each kernel; not called with NumPy kernels.
        """
        if self.engine is not None:
            self.engine.warm_up(progress)

    @property
    def topology(self) -> Topology:
        """The layers, and the edges between them."""
        return self.kernel_set.topology

    @property
    def input_shape(self) -> Shape:
        """Shape of one image."""
        return self._input_shape

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers in the order of the forward pass; the last is the loss."""
        return self.kernel_set.topology.layers

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All tensors, in layer order."""
        return self._parameters

    @property
    def trained(self) -> tuple[ParameterSpec, ...]:
        """The tensors with a gradient: all except tensors of frozen layers."""
        return tuple(parameter for parameter in self._parameters if not parameter.frozen)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that training leaves unchanged."""
        return frozenset(parameter.name for parameter in self._parameters if parameter.frozen)

    @property
    def num_parameters(self) -> int:
        """Number of values in all tensors, including frozen ones."""
        return sum(parameter.size for parameter in self._parameters)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds in convolutions and dense layers for one image's forward pass."""
        return sum(layer.multiply_adds for layer in self.layers)

    @property
    def operations(self) -> int:
        """Floating-point operations in convolutions and dense layers for training on one image.

        Each multiply-add is two operations. A layer's multiply-adds take place forward, for the gradients of
        its trained tensors, and for its inputs' error gradients; images have no error gradients.
        """
        topology, passes = self.topology, []
        for number, layer in enumerate(topology.layers):
            trained = any(not parameter.frozen for parameter in layer.parameters)
            back = any(
                source != INPUT_INDEX and topology.wants_error[source]
                for source in topology.producers[number]
            )
            passes.append((1 + trained + back) * layer.multiply_adds)
        return 2 * sum(passes)

    def parameter(self, name: str) -> ParameterSpec:
        """Find a tensor by its name, such as ``"conv1.weight"``.

        Raises:
            ModelError: The name is unknown.
        """
        return self._owner(name)[1]

    def initial_values(
        self, dice: Dice, name: str, start_row: int = 0, stop_row: int | None = None
    ) -> NDArray[Any]:
        """Draw start values of rows ``start_row`` to ``stop_row``; they equal these rows of the whole."""
        parameter = self.parameter(name)
        stop = parameter.shape[0] if stop_row is None else stop_row
        return parameter.initial_values(dice, start_row, stop, self._dtype)

    def initial_weights(self, dice: Dice) -> dict[str, NDArray[Any]]:
        """Draw the start values of all tensors."""
        return {parameter.name: self.initial_values(dice, parameter.name) for parameter in self._parameters}

    def context(self, group_size: int, *, training: bool = True) -> Context:
        """Allocate the arrays for one group of up to `group_size` images."""
        return Context(self, group_size=group_size, training=training)

    def forward(self, weights: Weights, context: Context) -> float:
        """Run all layers on the loaded group and return its mean loss."""
        self.forward_layers(weights, context, range(len(self.layers)))
        return self.loss(context)

    def train(
        self,
        weights: Weights,
        context: Context,
        images: Array | None,
        labels: Array,
        gradients: GradientTargets,
    ) -> float | None:
        """Train on a full group with one call of compiled kernels; return the mean loss.

        Returns None, and does nothing, if the kernels cannot load the images, run all layers, or write all
        gradients.

        Args:
            images: See `Context.load`.
            labels: See `Context.load`.
            gradients: Memory for the gradients.
        """
        context.resize(len(labels))
        engine = context.kernel_set.engine
        if engine is None or not engine.train(weights, context, images, labels, gradients):
            return None
        return self.loss(context)

    def loss(self, context: Context) -> float:
        """Return the mean loss of the group, after all layers have run forward."""
        losses = context.slots(len(self.layers) - 1).output
        return float(np.add.reduce(losses)) / context.images

    def forward_layers(self, weights: Weights, context: Context, layers: range) -> None:
        """Run the layers with these numbers forward; their inputs must be computed already."""
        used = context.kernel_set
        if used.engine is not None:
            used.engine.forward(weights, context, layers)
            return
        for number in layers:
            used.topology.layers[number].run_forward(weights, context.slots(number))

    def backward(self, weights: Weights, context: Context) -> None:
        """Compute all error gradients of the group's mean loss; `forward` must have run."""
        self.backward_layers(weights, context, range(len(self.layers)))

    def backward_layers(self, weights: Weights, context: Context, layers: range) -> None:
        """Run the layers with these numbers backward, last first.

        Afterwards `deltas` and `factors` of their tensors are valid, except in frozen layers. Layers before
        the first parameters to train compute no error gradients.

        Raises:
            ModelError: The context has no error gradients.
        """
        if not context.training:
            raise ModelError("this context was made with training=False and has no error gradients")
        used = context.kernel_set
        if used.engine is not None:
            used.engine.backward(weights, context, layers)
            return
        for number in reversed(layers):
            context.gather_error(number)
            slots = context.slots(number)
            if any(error is not None for error in slots.input_errors):
                used.topology.layers[number].run_backward(weights, slots)

    def deltas(self, context: Context, out: Mapping[str, Array]) -> None:
        """Write the group gradients of some tensors (means over the group's images) into `out`, by name.

        Raises:
            ModelError: A name is unknown, or an array has the wrong shape or dtype or is not C-contiguous.
        """
        engine = context.kernel_set.engine
        for name in out if engine is None else engine.deltas(context, out):
            self._delta(context, name, out[name])

    def _delta(self, context: Context, name: str, out: Array) -> None:
        """Write one tensor's gradient with only its layer."""
        number, parameter = self._owner(name)
        if out.shape != parameter.shape or out.dtype != self._dtype or not out.flags.c_contiguous:
            raise ModelError(
                f"the gradient of {name!r} needs a C-contiguous {self._dtype} array "
                f"of shape {parameter.shape}, not {out.dtype} of {out.shape}"
            )
        context.kernel_set.topology.layers[number].run_delta(context.slots(number), parameter.kind, out)

    def factors(self, context: Context, name: str) -> Factors | None:
        """Return ``(x_BI, errors_BO)`` whose ``errors_BO.T @ x_BI`` is the group gradient.

        The result is None for a tensor without factors. The factors are views into the context, not
        contiguous; copy them to keep or send them.
        """
        number, parameter = self._owner(name)
        return context.kernel_set.topology.layers[number].factors(context.slots(number), parameter.kind)

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # weights of a run that diverged
    def scores(self, weights: Weights, images: Array, batch: int = PREDICT_BATCH) -> NDArray[Any]:
        """Compute the input of the loss layer, ``(N, ...)``: in classifiers one score per image and class.

        Args:
            weights: Values of each tensor by its name.
            images: ``(N, C, H, W)`` as for `Context.load`: uint8 from 0 to 255, or floats from 0 to 1.
            batch: Number of images computed together.

        Raises:
            ModelError: The shape or type does not fit, or the input is an image with a value outside 0 to 1.
        """
        if len(self._input_shape) == 3:
            _check_range(images)
        context = self.context(batch, training=False)
        last = len(self.layers) - 1
        found = np.empty((images.shape[0], *self.layers[last].input_shapes[0]), self._dtype)
        for start in range(0, images.shape[0], batch):
            context.load(images[start : start + batch])
            self.forward_layers(weights, context, range(last))
            found[start : start + batch] = np.moveaxis(context.slots(last).inputs[0], -1, 0)
        return found

    def predict(self, weights: Weights, images: Array, batch: int = PREDICT_BATCH) -> NDArray[np.int64]:
        """Return the number of the class with the highest score for each image, shape ``(N,)``."""
        scores = self.scores(weights, images, batch).reshape(images.shape[0], -1)
        return np.asarray(scores.argmax(axis=1), np.int64)

    def _owner(self, name: str) -> tuple[int, ParameterSpec]:
        try:
            return self._owners[name]
        except KeyError:
            raise ModelError(
                f"no parameter is named {name!r}; known names: {', '.join(self._owners)}"
            ) from None


def _check_range(images: Array) -> None:
    """Refuse floating-point images with another scale than uint8 images have in training."""
    if images.dtype.kind == "f" and images.size:
        least, most = images.min(), images.max()
        if np.isnan(least):
            raise ModelError(
                "floating-point images must hold numbers between 0 and 1, but some of their values are NaN "
                "(not a number): replace those"
            )
        if not (-RANGE_SLACK <= least and most <= 1 + RANGE_SLACK):
            raise ModelError(
                f"floating-point images must lie between 0 and 1, not between {least:g} and {most:g}: divide "
                "pixels from 0 to 255 by 255, or give them as uint8"
            )
