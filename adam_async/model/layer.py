"""Pure: the interface of a layer.

A layer is one class. It knows shapes and arithmetic; it owns no arrays, no optimiser and no thread, so one
object serves any number of contexts at once. Its three steps are separate, so that segments, partitions and
push protocols compose:

    forward          inputs and weights to the output
    backward         the output's error gradient to those of the inputs
    delta, factors   the output's error gradient to a weight gradient, or to the two factors of it

Arrays come in `Slots`, allocated once per context and reused. **Inside a context the batch is the last
axis**: the memory of an activation is (C, H, W, B) or (F, B), C-contiguous. A row of pixels of all images
then is one run of memory, which makes column copies, pooling and their ways back long strides at any group
size above a few; a convolution is one GEMM over the whole group, flattening is free, and rows of an image can
be cut by a slice. The outside sees BCHW views (`Context.output`).

Group gradients are means over the group's images: the loss divides its error gradient by the number of
images, the layers only add up.

A layer can be *cut*: `Layer.cut` gives a layer that computes one block of the output, a range of image rows
or of features, from the part of the inputs that `Layer.needs` names. A network cut over several workers is
made of such layers.

To add a layer, subclass `Layer`, and hand ``{**BUILTIN_LAYERS, "mine": Mine}`` to the `Network`.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from adam_async.model.errors import LayerFailed, ModelError, SpecError
from adam_async.model.keyed_random import Dice, Key
from adam_async.model.spec import LayerSpec, OptionValue, Shape

Array = NDArray[Any]
Weights = Mapping[str, Array]
Factors = tuple[Array, Array]
Cut = Literal["rows", "outputs", "whole"]
"""How a layer's output may be cut: by rows of an image (or ranges of features, where it is flat), whose
inputs are cut likewise; by output neurons, each of which reads all of the input; or not at all."""

INITS = ("he", "lecun", "zero")
"""Start values: `he` keeps the variance through a ReLU, `lecun` through a linear layer; `zero` is 0."""


def uniform_bound(init: str, fan_in: int) -> float:
    """Half-width of the uniform distribution from which a weight with `fan_in` inputs starts.

    Start values are uniform, because uniform draws have the same bits on every machine.
    """
    return {"he": math.sqrt(6 / fan_in), "lecun": math.sqrt(3 / fan_in), "zero": 0.0}[init]


def extent(shape: Shape) -> int:
    """Count what blocks of an output are ranges of: rows of an image, features of a flat one.

    Args:
        shape: Of one image, without the batch: ``(C, H, W)`` or ``(F,)``. The losses' ``()`` counts as 1.
    """
    return shape[_axis(shape)] if shape else 1


def _axis(shape: Shape) -> int:
    return 1 if len(shape) == 3 else 0


def _resized(shape: Shape, size: int) -> Shape:
    axis = _axis(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One tensor of a layer.

    `kind` tells a layer's tensors apart: ``"weight"``, ``"bias"`` or a word of its own. `bound` is the
    half-width of its uniform start values. A `frozen` one keeps them: it has no gradient and is not trained.

    Of a tensor that was cut, `shape` is that of the part: its rows from `first_row` on, of `of_rows` that
    the whole tensor has. `of_rows` is 0 where all rows are here. The name is that of the whole.
    """

    name: str
    shape: Shape
    layer: str
    kind: str
    bound: float = 0.0
    frozen: bool = False
    first_row: int = 0
    of_rows: int = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def row_size(self) -> int:
        """Number of values in one row, a row being one index of the first axis."""
        return math.prod(self.shape[1:])

    def rows(self, block: range) -> Self:
        """Describe the part of the tensor that holds these of its rows."""
        return replace(
            self,
            shape=(len(block), *self.shape[1:]),
            first_row=self.first_row + block.start,
            of_rows=self.of_rows or self.shape[0],
        )

    def initial_values(self, dice: Dice, start_row: int, stop_row: int, dtype: np.dtype[Any]) -> Array:
        """Draw rows ``start_row`` to ``stop_row``; they equal the same rows of the whole tensor.

        Of a tensor that was cut, rows are counted from `first_row` on.
        """
        if not 0 <= start_row <= stop_row <= self.shape[0]:
            raise ModelError(
                f"rows {start_row} to {stop_row} of {self.name!r} do not exist: it has {self.shape[0]} rows"
            )
        shape = (stop_row - start_row, *self.shape[1:])
        if self.bound == 0.0:
            return np.zeros(shape, dtype)
        drawn = dice.uniform(
            "initial values",
            keys=(self.name,),
            start=(self.first_row + start_row) * self.row_size,
            count=math.prod(shape),
            dtype=dtype,
        )
        drawn *= 2.0 * self.bound
        drawn -= self.bound
        return drawn.reshape(shape)


ScratchSpec = tuple[Shape, Any]
"""Shape and dtype of one scratch array; dtype None means the network's."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slots:
    """The arrays of one layer in one context, for one number of images. Batch axis last.

    An entry of `input_errors` is None where nobody needs that gradient. `scratch` is what `Layer.scratch`
    asked for; its contents survive from forward to backward, but not a change of the number of images.
    `views` belongs to the layer: `Layer.prepare` fills it once. `training` says whether the group is trained
    on, or only evaluated.
    """

    images: int
    inputs: tuple[Array, ...]
    output: Array
    output_error: Array | None
    input_errors: tuple[Array | None, ...]
    scratch: dict[str, Array]
    training: bool = True
    views: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> Array:
        """The output's error gradient, in a layer that is known to have one."""
        assert self.output_error is not None, "this context holds no error gradients"
        return self.output_error


class Layer(ABC):
    """One layer of a network. See the head of this file.

    Subclasses set `OPTIONS` and, in ``__init__``, `output_shape` and where they apply `parameters` and
    `multiply_adds`. One that may be cut otherwise than its class's `CUT` and `MOVES` say sets `cut_by` and
    `moves`.

    Args:
        spec: Name, kind and options.
        input_shapes: Shape of one image at each input, without the batch.

    Raises:
        SpecError: An option is unknown, missing or out of range, or an input's shape does not fit.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {}
    """Known options and their defaults; None means that the option is required. Every layer with parameters
    also knows ``frozen``: whether they stay as they are."""
    NUM_INPUTS: ClassVar[int | None] = 1
    """Number of inputs; None means two or more."""
    CUT: ClassVar[Cut] = "whole"
    """How the output may be cut, unless `__init__` sets `cut_by` to something else."""
    MOVES: ClassVar[bool] = False
    """Whether it only moves values. Of a network that is cut, nobody sends what such a layer gives: whoever
    reads it makes all of it from the input himself. ``__init__`` may set `moves` to something else."""
    SHARES_INPUT: ClassVar[bool] = False
    """Whether output and error gradient may lie in the memory of the (only) input."""
    OVERWRITES: ClassVar[bool] = False
    """Whether, sharing its input's memory, it changes the values there."""
    READS_OUTPUT: ClassVar[bool] = False
    """Whether the way back reads the layer's own output, which then nobody may overwrite."""
    DRAWS: ClassVar[bool] = False
    """Whether training leaves something to chance, which `draw` settles for each group."""

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        self.spec = spec
        self.name = spec.name
        self.input_shapes = input_shapes
        self.output_shape: Shape = input_shapes[0] if input_shapes else ()
        self.parameters: tuple[ParameterSpec, ...] = ()
        self.multiply_adds: int = 0
        self.cut_by: Cut = self.CUT
        self.moves: bool = self.MOVES
        self.hosts_at: int | None = None
        """First feature of the output of which the (only) input is a part, and in the memory of the output if
        nobody else reads it; None where it is not."""
        known = ", ".join(self.OPTIONS) or "none"
        given = dict(spec.options)
        self.frozen = given.pop("frozen", False)
        if type(self.frozen) is not bool:
            raise self.refusal(f"option 'frozen' must be true or false, not {self.frozen!r}")
        for key in given:
            if key not in self.OPTIONS:
                raise self.refusal(f"unknown option {key!r}; known options: {known}")
        for key, default in self.OPTIONS.items():
            if default is None and key not in given:
                raise self.refusal(f"option {key!r} is missing; known options: {known}")
        self._options = {**self.OPTIONS, **given}
        count = len(input_shapes)
        if count < 2 if self.NUM_INPUTS is None else count != self.NUM_INPUTS:
            wanted = "two or more inputs" if self.NUM_INPUTS is None else f"{self.NUM_INPUTS} input"
            raise self.refusal(f"needs {wanted}, but reads {count}: {', '.join(spec.inputs)}")

    def __repr__(self) -> str:
        shapes = " and ".join(str(list(shape)) for shape in self.input_shapes)
        return f"<{self.spec.kind} {self.name!r} {shapes} to {list(self.output_shape)}>"

    def refusal(self, reason: str) -> SpecError:
        """Make the error that names this layer."""
        return SpecError(f"layer {self.name!r} ({self.spec.kind}): {reason}")

    def tensor(self, kind: str, shape: Shape, *, bound: float = 0.0) -> ParameterSpec:
        """Describe a parameter, named after layer and kind; its start values lie within `bound` of 0."""
        name = f"{self.name}.{kind}"
        frozen = bool(self.frozen)
        return ParameterSpec(name=name, shape=shape, layer=self.name, kind=kind, bound=bound, frozen=frozen)

    def integer(self, key: str, *, minimum: int) -> int:
        """Read a whole-number option."""
        value = self._options[key]
        if type(value) is not int or value < minimum:
            raise self.refusal(f"option {key!r} must be a whole number of at least {minimum}, not {value!r}")
        return value

    def real(self, key: str, *, minimum: float, below: float = math.inf) -> float:
        """Read an option that is a finite number, at least `minimum` and less than `below`."""
        value = self._options[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value < below:
            limit = "" if below == math.inf else f" and less than {below:g}"
            raise self.refusal(
                f"option {key!r} must be a finite number of at least {minimum:g}{limit}, not {value!r}"
            )
        return float(value)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        """Read an option that is one of a few words."""
        value = self._options[key]
        if value not in known:
            raise self.refusal(f"option {key!r} must be one of {', '.join(known)}, not {value!r}")
        return str(value)

    def image_input(self) -> tuple[int, int, int]:
        """The input's channels, height and width, for a layer that needs an image."""
        if len(self.input_shapes[0]) != 3:
            raise self.refusal(
                f"needs an input of [channels, height, width], not {list(self.input_shapes[0])}"
            )
        channels, height, width = self.input_shapes[0]
        return channels, height, width

    @property
    def partial(self) -> bool:
        """Whether the gradients of cut layers are partial sums, which add up to that of the whole layer.

        Such layers keep all of each tensor. Where this is false, each has gradients of rows of its own.
        """
        return self.cut_by == "rows" and bool(self.parameters)

    def needs(self, block: range, position: int = 0) -> range:
        """Say what a block of the output needs of an input: rows of an image, or a range of features.

        By default the same block where layers are cut by rows, and all of the input otherwise.

        Args:
            block: Rows of the output, or features. One that is empty needs nothing.
            position: Number of the input, in the order of the spec.
        """
        if not block:
            return range(0)
        return block if self.cut_by == "rows" else range(extent(self.input_shapes[position]))

    def cut(self, block: range) -> "Layer":
        """Make a layer of the same name that computes only `block` of the output; this one stays as it is.

        Its inputs hold what `needs` says of each and nothing else; `input_shapes`, `output_shape`,
        `parameters` and `multiply_adds` are its own. It may be cut again, its rows then counting from 0.

        Returns:
            The cut layer; this one itself where the block is the whole output.

        Raises:
            ModelError: The block is empty or not within the output, or the layer may not be cut.
        """
        whole = extent(self.output_shape)
        if block.step != 1 or not 0 <= block.start < block.stop <= whole:
            raise ModelError(
                f"layer {self.name!r} ({self.spec.kind}): {block} is no block of its output of "
                f"{list(self.output_shape)}: give at least one of rows or features 0 to {whole - 1}"
            )
        if len(block) == whole:
            return self
        if self.cut_by == "whole":
            raise ModelError(
                f"layer {self.name!r} ({self.spec.kind}) may not be cut, but {block} is only a part of its "
                f"output of {list(self.output_shape)}: let one worker compute all of it"
            )
        piece = copy.copy(self)
        piece.limit(block)
        piece.input_shapes = tuple(
            _resized(shape, len(self.needs(block, position)))
            for position, shape in enumerate(self.input_shapes)
        )
        piece.output_shape = _resized(self.output_shape, len(block))
        piece.multiply_adds = self.multiply_adds // whole * len(block)
        if self.cut_by == "outputs":
            piece.parameters = tuple(parameter.rows(block) for parameter in self.parameters)
        return piece

    def limit(self, block: range) -> None:  # noqa: B027 - most layers know nothing else
        """Change what a cut layer knows beside shapes, parameters and multiply-adds.

        `cut` calls it on the new layer, which is still a copy of the one that is cut, shapes included.
        """

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the scratch arrays for a group; sizes must not shrink as `images` grows."""
        return {}

    def prepare(self, slots: Slots) -> None:  # noqa: B027 - most layers need no views
        """Make the views that the steps use, once per context and number of images."""

    def draw(self, slots: Slots, dice: Dice, keys: tuple[Key, ...]) -> None:
        """Settle what is left to chance, as a function of dice, layer and `keys`, the group's name.

        Called once per group before forward, in training only, where `DRAWS` says so.
        """
        raise ModelError(f"layer {self.name!r} leaves nothing to chance")

    @abstractmethod
    def forward(self, weights: Weights, slots: Slots) -> None:
        """Fill ``slots.output`` from ``slots.inputs``."""

    @abstractmethod
    def backward(self, weights: Weights, slots: Slots) -> None:
        """Fill each wanted one of ``slots.input_errors`` from ``slots.error``.

        Called only when at least one is wanted. May overwrite ``slots.error`` only where
        `SHARES_INPUT` says so. Weights are as they are now, not as forward saw them: they may be shared and
        unlocked, on purpose.
        """

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Write the group gradient of the parameter of this kind into `out`, C-contiguous, of its shape.

        Every layer with parameters that are trained defines this method.
        """
        if all(parameter.kind != kind for parameter in self.parameters):
            raise ModelError(f"layer {self.name!r} has no parameter of kind {kind!r}")
        raise ModelError(
            f"layer {self.name!r} ({self.spec.kind}) has no gradient for its parameter of kind {kind!r}: "
            f"give the class {type(self).__name__} a method delta(slots, kind, out) that writes it into out"
        )

    def factors(self, slots: Slots, kind: str) -> Factors | None:
        """Give views ``(x_BI, errors_BO)`` with ``errors_BO.T @ x_BI`` the group gradient, or None."""
        return None

    def failure(self, method: str, error: Exception) -> Exception:
        """Make the error that names this layer and its method; one that needs no name stays as it is."""
        if isinstance(error, ModelError | MemoryError):
            return error
        failure = LayerFailed(self.name, self.spec.kind, method, error)
        failure.__cause__ = error
        return failure

    def run_forward(self, weights: Weights, slots: Slots) -> None:
        """Run `forward`; its error names this layer."""
        try:
            self.forward(weights, slots)
        except Exception as error:
            raise self.failure("forward", error)  # noqa: B904 - it has its cause

    def run_backward(self, weights: Weights, slots: Slots) -> None:
        """Run `backward`; its error names this layer."""
        try:
            self.backward(weights, slots)
        except Exception as error:
            raise self.failure("backward", error)  # noqa: B904 - it has its cause

    def run_delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Run `delta`; its error names this layer."""
        try:
            self.delta(slots, kind, out)
        except Exception as error:
            raise self.failure("delta", error)  # noqa: B904 - it has its cause


class Loss(Layer):
    """A last layer: its output is one loss per image, shape ``(B,)``; its way back starts the errors."""

    TARGETS: ClassVar[tuple[str, ...]] = ()
    """Names of all scratch that `load_targets` fills. Without them, groups are loaded one by one."""

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.output_shape = ()

    @abstractmethod
    def load_targets(self, slots: Slots, labels: Array) -> None:
        """Store what the group should have given.

        Raises:
            ModelError: The labels do not fit the layer.
        """
