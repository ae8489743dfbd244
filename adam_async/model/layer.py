"""Pure: the interface of a layer.

A layer is one class. A layer has shapes and arithmetic, but no arrays, optimiser or thread. So one object
serves any number of contexts at once. The three steps of a layer are separate, so segments, partitions and
push protocols can combine them:

    forward          computes the output from inputs and weights
    backward         computes the inputs' error gradients from the output's
    delta, factors   compute a weight gradient, or its two factors, from the output's error gradient

Arrays come in `Slots`, allocated once per context and reused. **Inside a context the batch is the last
axis**: an activation is (C, H, W, B) or (F, B), C-contiguous. So a row of pixels of all images is one run of
memory. Column copies and pooling work on long runs, forward and backward, at any group size above a few. A
convolution is one GEMM over the whole group, flattening is free, and a slice cuts rows of an image.
`Context.output` gives BCHW views.

Group gradients are means over the group's images: the loss divides its error gradient by the number of
images, and layers only add up.

A layer can be *cut*: `Layer.cut` makes a layer that computes one block of the output (a range of image rows
or features) from the parts of the inputs that `Layer.needs` names. A network cut over several workers
consists of cut layers.

To add a layer, subclass `Layer` and pass ``{**BUILTIN_LAYERS, "mine": Mine}`` to the `Network`.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import LayerFailed, ModelError, SpecError
from adam_async.model.keyed_random import Dice, Key
from adam_async.model.spec import LayerSpec, OptionValue, Shape

Array = NDArray[Any]
Weights = Mapping[str, Array]
Factors = tuple[Array, Array]
Cut = Literal["rows", "outputs", "whole"]
"""Ways to cut a layer's output: ``"rows"`` of an image (ranges of features if it is flat), with inputs cut
alike; ``"outputs"``, neurons that each read the whole input; ``"whole"``, not at all."""

INITS = ("he", "lecun", "zero")
"""Start values: `he` keeps the variance through a ReLU, `lecun` through a linear layer; `zero` is 0."""


def uniform_bound(init: str, fan_in: int) -> float:
    """Return the half-width of the uniform distribution from which a weight with `fan_in` inputs starts.

    Start values are uniform, because uniform draws have the same bits on every machine.
    """
    return {"he": math.sqrt(6 / fan_in), "lecun": math.sqrt(3 / fan_in), "zero": 0.0}[init]


def extent(shape: Shape) -> int:
    """Return the length of the axis that cuts divide: rows of an image, or features.

    Args:
        shape: Shape of one image, without the batch: ``(C, H, W)`` or ``(F,)``. For a loss the shape is
            ``()`` and the number 1.
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

    `kind` distinguishes a layer's tensors: ``"weight"``, ``"bias"`` or another word. `bound` is the
    half-width of the uniform start values. A `frozen` tensor keeps its values and has no gradient.

    A cut tensor has the whole tensor's name and the `shape` of its own part: the rows from `first_row` on.
    `of_rows` is the whole tensor's number of rows; 0 if this tensor is whole.
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
        """Number of values in one row: the part of the tensor at one index of the first axis."""
        return math.prod(self.shape[1:])

    def rows(self, block: range) -> Self:
        """Describe the part of the tensor with these rows."""
        return replace(
            self,
            shape=(len(block), *self.shape[1:]),
            first_row=self.first_row + block.start,
            of_rows=self.of_rows or self.shape[0],
        )

    def initial_values(self, dice: Dice, start_row: int, stop_row: int, dtype: np.dtype[Any]) -> Array:
        """Draw rows ``start_row`` to ``stop_row``; they equal these rows of the whole tensor.

        In a tensor that was cut, rows count from `first_row` on.
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
"""Shape and dtype of one scratch array; dtype None means the network's dtype."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slots:
    """One layer's arrays in one context, for a given number of images. Batch axis last.

    An entry of `input_errors` is None if no layer needs that gradient. `scratch` has the arrays that
    `Layer.scratch` names; their values last from forward to backward, but not beyond a change of the number
    of images. `views` belongs to the layer: `Layer.prepare` fills it once. `training` is false if the group
    is only evaluated.
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
        """The output's error gradient; the context must have error gradients."""
        assert self.output_error is not None, "this context holds no error gradients"
        return self.output_error

    @property
    def input_error(self) -> Array:
        """The error gradient of the only input; some layer must need it."""
        (error,) = self.input_errors
        assert error is not None, "no layer needs the error gradient of this input"
        return error


class Layer(ABC):
    """One layer of a network. See the head of this file.

    Subclasses set `OPTIONS`. A subclass's ``__init__`` sets `output_shape` and, if the layer has any,
    `parameters` and `multiply_adds`. A layer that differs from its class's `CUT` and `MOVES` sets `cut_by`
    and `moves`.

    Args:
        spec: Name, kind and options.
        input_shapes: Shape of one image at each input, without the batch.

    Raises:
        SpecError: An option is unknown, missing or out of range, or the shape of an input does not fit.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {}
    """Known options and their defaults; None marks a required option. A layer with parameters also takes
    ``frozen``: whether its parameters keep their values."""
    NUM_INPUTS: ClassVar[int | None] = 1
    """Number of inputs; None means two or more."""
    CUT: ClassVar[Cut] = "whole"
    """Way to cut the output, unless ``__init__`` sets `cut_by`."""
    MOVES: ClassVar[bool] = False
    """Whether the layer only moves values, unless ``__init__`` sets `moves`. In a cut network no worker sends
    such a layer's output: each worker that reads it computes all of it from the input."""
    SHARES_INPUT: ClassVar[bool] = False
    """Whether output and error gradient may use the memory of the (only) input and of its error gradient."""
    OVERWRITES: ClassVar[bool] = False
    """Whether a layer that shares its input's memory changes the values there."""
    READS_OUTPUT: ClassVar[bool] = False
    """Whether backward reads the layer's own output, which no other layer may then overwrite."""
    DRAWS: ClassVar[bool] = False
    """Whether training needs random values, which `draw` makes for each group."""

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
        """Feature of the output at which the (only) input begins, if the input is a part of the output;
        otherwise None. The input is in the output's memory if no other layer reads the input."""
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
        """Make an error that names this layer."""
        return SpecError(f"layer {self.name!r} ({self.spec.kind}): {reason}")

    def tensor(self, kind: str, shape: Shape, *, bound: float = 0.0) -> ParameterSpec:
        """Describe a parameter, named after layer and kind; its start values are within `bound` of 0."""
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
        """Read an option that is one of the `known` words."""
        value = self._options[key]
        if value not in known:
            raise self.refusal(f"option {key!r} must be one of {', '.join(known)}, not {value!r}")
        return str(value)

    def image_input(self) -> tuple[int, int, int]:
        """Return channels, height and width of the input, which must be an image."""
        if len(self.input_shapes[0]) != 3:
            raise self.refusal(
                f"needs an input of [channels, height, width], not {list(self.input_shapes[0])}"
            )
        channels, height, width = self.input_shapes[0]
        return channels, height, width

    @property
    def partial(self) -> bool:
        """Whether the gradients of cut layers are partial sums, which add up to the whole layer's.

        Such layers keep each tensor whole. Other cut layers each have the gradients of separate rows.
        """
        return self.cut_by == "rows" and bool(self.parameters)

    def needs(self, block: range, position: int = 0) -> range:
        """Return the range of an input that a block of the output needs: image rows, or features.

        By default the range is the same block if the layer is cut by rows, otherwise all of the input.

        Args:
            block: Rows or features of the output. An empty block needs no input.
            position: Number of the input, in the order of the spec.
        """
        if not block:
            return range(0)
        return block if self.cut_by == "rows" else range(extent(self.input_shapes[position]))

    def cut(self, block: range) -> "Layer":
        """Make a layer of the same name that computes only `block` of the output.

        The cut layer reads exactly the ranges that `needs` returns; `input_shapes`, `output_shape`,
        `parameters` and `multiply_adds` describe the part. A cut layer can be cut again; rows count from 0.

        Returns:
            The cut layer; this layer itself if the block is the whole output.

        Raises:
            ModelError: The block is empty or exceeds the output, or the layer may not be cut.
        """
        whole = extent(self.output_shape)
        if block.step != 1 or not 0 <= block.start < block.stop <= whole:
            raise ModelError(
                f"layer {self.name!r} ({self.spec.kind}): {block} is no block of its output of "
                f"{list(self.output_shape)}: choose at least one of rows or features 0 to {whole - 1}"
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

    def limit(self, block: range) -> None:  # noqa: B027 - most layers have no other state
        """Adapt the state of a cut layer other than shapes, parameters and multiply-adds.

        `cut` calls this method on the new layer, which still has the shapes of the uncut layer.
        """

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the scratch arrays for a group; their sizes must not shrink as `images` grows."""
        return {}

    def prepare(self, slots: Slots) -> None:  # noqa: B027 - most layers need no views
        """Make the views that the steps use; called once per context and number of images."""

    def draw(self, slots: Slots, dice: Dice, keys: tuple[Key, ...]) -> None:
        """Draw the group's random values, a function of dice, layer and `keys`, the group's name.

        The method is called once per group before forward, in training only, if `DRAWS` is true.
        """
        raise ModelError(f"layer {self.name!r} draws no random values")

    @abstractmethod
    def forward(self, weights: Weights, slots: Slots) -> None:
        """Fill ``slots.output`` from ``slots.inputs``."""

    @abstractmethod
    def backward(self, weights: Weights, slots: Slots) -> None:
        """From ``slots.error``, fill each of ``slots.input_errors`` that is not None.

        Called only if at least one input error is not None. The method may overwrite ``slots.error`` only if
        `SHARES_INPUT` is true. Weights may have changed since forward, because other threads update them
        without a lock, by design.
        """

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Write the group's gradient of this kind of parameter into `out`.

        `out` is C-contiguous and has the parameter's shape. Every layer with trained parameters defines this
        method.
        """
        if all(parameter.kind != kind for parameter in self.parameters):
            raise ModelError(f"layer {self.name!r} has no parameter of kind {kind!r}")
        raise ModelError(
            f"layer {self.name!r} ({self.spec.kind}) has no gradient for its parameter of kind {kind!r}: "
            f"define a method delta(slots, kind, out) in class {type(self).__name__} that writes it into out"
        )

    def factors(self, slots: Slots, kind: str) -> Factors | None:
        """Return views ``(x_BI, errors_BO)`` whose ``errors_BO.T @ x_BI`` is the group gradient, or None."""
        return None

    def failure(self, method: str, error: Exception) -> Exception:
        """Make an error that names this layer and its method; leave a ModelError or MemoryError as it is."""
        if isinstance(error, ModelError | MemoryError):
            return error
        failure = LayerFailed(self.name, self.spec.kind, method, error)
        failure.__cause__ = error
        return failure

    def run_forward(self, weights: Weights, slots: Slots) -> None:
        """Run `forward`; an error names this layer."""
        try:
            self.forward(weights, slots)
        except Exception as error:
            raise self.failure("forward", error)  # noqa: B904 - it has its cause

    def run_backward(self, weights: Weights, slots: Slots) -> None:
        """Run `backward`; an error names this layer."""
        try:
            self.backward(weights, slots)
        except Exception as error:
            raise self.failure("backward", error)  # noqa: B904 - it has its cause

    def run_delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Run `delta`; an error names this layer."""
        try:
            self.delta(slots, kind, out)
        except Exception as error:
            raise self.failure("delta", error)  # noqa: B904 - it has its cause


class Loss(Layer):
    """A last layer: its output is one loss per image, ``(B,)``; its backward computes the first errors."""

    TARGETS: ClassVar[tuple[str, ...]] = ()
    """Names of all scratch arrays that `load_targets` fills. If no array is named, groups are loaded one by
    one."""

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.output_shape = ()

    @abstractmethod
    def load_targets(self, slots: Slots, labels: Array) -> None:
        """Store the targets of the group.

        Raises:
            ModelError: The labels do not fit the layer.
        """
