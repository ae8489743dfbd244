"""Pure: tapes, the rows that `program.run` runs, with the addresses of arrays.

Layers return their steps as `Op`s: a kernel and its fields. A row has the address of each array in an `Op`; a
`Ref` represents an array that each call passes, such as weights. `Tape` keeps the arrays alive, checks each
new array and stores its address. A tape also fuses neighbouring ops: a ReLU becomes the ending of the kernel
before it.

`Compiled` extends the interface of all layers to layers with compiled kernels. The steps of a `Compiled`
layer are `Op`s, so that a network can run many layers in one call. The layer's `forward`, `backward` and
`delta` run the layer alone, with tapes that the slots keep.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from adam_async.errors import ModelError
from adam_async.model.fast import program
from adam_async.model.fast.products import BIAS, BIAS_RELU, PLAIN, WHERE_POSITIVE
from adam_async.model.layer import Array, Layer, ParameterSpec, Slots, Weights
from adam_async.model.spec import Shape

OUT = "out"
"""Name under which calls of a tape pass the array for a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """An array that each call passes: a tensor, or with `key` an array of its rule's state."""

    name: str
    shape: Shape
    key: str = ""
    written: bool = False
    """Whether the tape changes the array."""


Field = int | Array | Ref

_start_of = (c_char * 0).from_buffer
"""Makes a ctypes object at the first byte of an array that may be written."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One kernel and its fields, in the order of the kernel's docstring."""

    code: int
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, code: int, *fields: Field) -> "Op":
        """Make an op in one line."""
        return cls(code, fields)


_PARAMETER_OPS = frozenset(
    {program.OUTER, program.ROW_SUMS, program.CORRELATE, program.DESCEND, program.DESCEND_OUTER}
)
"""Kernels that may come between the backward of two layers, and do not use the error gradient between these
layers."""

_ENDINGS = {
    program.MULTIPLY: (4, 8),
    program.MULTIPLY_ONE: (3, 6),
    program.MULTIPLY_BACK_ONE: (3, 6),
    program.CONVOLVE: (5, 14),
}
"""Positions of two fields in each kernel with an ending: the results, and the ending. The field after the
ending is `extra`."""


def same_memory(first: Field, second: Field) -> bool:
    """Return whether two fields are arrays that start at one address and are equally large."""
    return (
        isinstance(first, np.ndarray)
        and isinstance(second, np.ndarray)
        and first.ctypes.data == second.ctypes.data
        and first.size == second.size
    )


def fuse(ops: Sequence[Op]) -> list[Op]:
    """Make each ReLU (or its backward) the ending of the previous kernel, if both have the same results."""
    fused: list[Op] = []
    for op in ops:
        # The kernel just before applies its ending to each row of results while the cache has it.
        if op.code == program.RELU and fused:
            joined = _with_relu(fused[-1], op)
            if joined is not None:
                fused[-1] = joined
                continue
        if op.code == program.RELU_BACK:
            # In the backward pass, gradients of parameters may come between the two; see `_PARAMETER_OPS`.
            place = next(
                (at for at in reversed(range(len(fused))) if fused[at].code not in _PARAMETER_OPS), None
            )
            joined = None if place is None else _with_relu_back(fused[place], op)
            if place is not None and joined is not None:
                fused[place] = joined
                continue
        fused.append(op)
    return fused


def _with_relu(before: Op, relu: Op) -> Op | None:
    _, output, source = relu.fields
    if before.code not in _ENDINGS or not same_memory(output, source):
        return None
    # Docstrings count fields from 1, after the address of the kernel.
    results, ending = (at - 1 for at in _ENDINGS[before.code])
    # The ReLU must work in the very memory of the results; only a bias has a joined ending.
    if before.fields[ending] != BIAS or not same_memory(before.fields[results], output):
        return None
    return _replaced(before, ending, BIAS_RELU)


def _with_relu_back(before: Op, relu: Op) -> Op | None:
    """Return an op that also does the following ReLU's backward; None if the kernels cannot join."""
    _, target, errors, output = relu.fields
    if not same_memory(target, errors):
        return None
    if before.code in (program.MULTIPLY, program.MULTIPLY_BACK_ONE):
        results, ending = (at - 1 for at in _ENDINGS[before.code])
        # A kernel has one ending.
        if before.fields[ending] == PLAIN and same_memory(before.fields[results], target):
            return _replaced(before, ending, WHERE_POSITIVE, output)
    if before.code == program.MAX_POOL_BACK:
        kernel, stride = before.fields[6:8]
        # The pool's input is the ReLU's output: a maximum is positive exactly if the ReLU passed its input.
        if kernel <= stride and same_memory(before.fields[9], target):  # type: ignore[operator]
            return _replaced(before, 11, 1)
    return None


def _replaced(op: Op, start: int, *fields: Field) -> Op:
    return replace(op, fields=(*op.fields[:start], *fields, *op.fields[start + len(fields) :]))


class Tape:
    """Rows ready to run. Only one thread at a time may use a tape, like the context of its arrays.

    Args:
        ops: Steps, in their order.
        dtype: Type of all number arrays.
        hyper: Array for rules: rate, momentum, weight decay, and 1 with Nesterov's momentum, else 0. The
            array is not copied, so the caller may change its values. None for a tape without a rule.
    """

    def __init__(self, ops: Sequence[Op], dtype: np.dtype[Any], hyper: Array | None = None) -> None:
        # Kept, because the rows have addresses and the ops the arrays.
        self._ops = fuse(ops)
        self._like = dtype.type(0)
        self._rows = np.zeros((len(self._ops), program.FIELDS), np.int64)
        self._hyper = np.zeros(4, dtype) if hyper is None else hyper
        # The same array may be in several rows; check its change once.
        cells: dict[Ref, list[tuple[int, int]]] = {}
        for row, op in enumerate(self._ops):
            self._rows[row, 0] = program.address(op.code, dtype)
            for column, field in enumerate(op.fields, start=1):
                if isinstance(field, Ref):
                    cells.setdefault(field, []).append((row, column))
                else:
                    self._rows[row, column] = field if isinstance(field, int) else field.ctypes.data
        self._cells = tuple(cells.items())
        # No array is bound yet, so the first call fills these cells.
        self._bound: list[Array | None] = [None] * len(cells)

    def __repr__(self) -> str:
        return f"<Tape {len(self._ops)} kernels, {self._like.dtype}>"

    @property
    def rows(self) -> Array:
        """The rows as an array, to pass to a kernel that calls another kernel."""
        return self._rows

    def run(self, weights: Weights, state: Mapping[str, Mapping[str, Array]] | None = None) -> float:
        """Run the rows. Returns the mean loss if a row computes it, otherwise 0.

        Args:
            weights: Arrays by name.
            state: Arrays of the rule by tensor, if the tape changes weights.

        Raises:
            ModelError: An array has the wrong shape, dtype or layout.
        """
        # Rows are addresses; the call does not pass arrays one by one, because unpacking takes time.
        self._bind_all(weights, state)
        return float(program.run(self._rows, self._like, self._hyper))

    def run_groups(
        self,
        weights: Weights,
        state: Mapping[str, Mapping[str, Array]],
        *,
        groups: Array,
        rates: Array,
        layout: Array,
        target_arrays: Array,
        levels: Array,
        refused: Array,
        steps: Array,
        done: Array,
    ) -> None:
        """Load groups and run the rows for each; see `program.run_groups`."""
        self._bind_all(weights, state)
        program.run_groups(
            *(self._rows, self._like, self._hyper),
            *(groups, rates, layout, target_arrays, levels, refused, steps, done),
        )

    def _bind_all(self, weights: Weights, state: Mapping[str, Mapping[str, Array]] | None) -> None:
        for number, (ref, cells) in enumerate(self._cells):
            if ref.key:
                assert state is not None
                array = state[ref.name][ref.key]
            else:
                array = weights[ref.name]
            # Most calls pass the arrays of the call before, whose addresses the rows have.
            if array is not self._bound[number]:
                self._bind(number, ref, cells, array)

    def _bind(self, number: int, ref: Ref, cells: list[tuple[int, int]], array: Array) -> None:
        # Kernels check nothing, so this check refuses a wrong array.
        flags = array.flags
        if array.shape != ref.shape or array.dtype != self._like.dtype or not flags.c_contiguous:
            raise ModelError(
                f"kernels need {ref.name!r} as a C-contiguous {self._like.dtype} array of shape {ref.shape}, "
                f"not {array.dtype} of {array.shape}"
            )
        if ref.written and not flags.writeable:
            raise ModelError(f"{ref.name!r} changes in place, but its array is read-only")
        # Pulled values are new arrays for every group, and `ctypes.data` takes five times as long.
        address = addressof(_start_of(array.data)) if flags.writeable else array.ctypes.data
        for row, column in cells:
            self._rows[row, column] = address
        self._bound[number] = array


class Compiled(Layer):
    """A layer whose steps are rows of a tape. Subclasses list this class before the NumPy layer."""

    KERNELS: ClassVar[tuple[int, ...]] = ()
    """Numbers of the kernels that the layer's ops need for any number of images, except those in
    `engine.COMMON`."""

    @abstractmethod
    def forward_ops(self, slots: Slots) -> list[Op]:
        """Return the ops that fill the output."""

    @abstractmethod
    def backward_ops(self, slots: Slots) -> list[Op]:
        """Return the ops that fill the needed input errors."""

    def delta_ops(self, slots: Slots, kind: str, out: Field) -> list[Op]:
        """Return the ops that write the gradient of this kind of parameter to `out`."""
        raise ModelError(f"layer {self.name!r} has no parameter of kind {kind!r}")

    def parameter(self, kind: str) -> ParameterSpec:
        """Return the parameter of this kind."""
        for parameter in self.parameters:
            if parameter.kind == kind:
                return parameter
        raise ModelError(f"layer {self.name!r} has no parameter of kind {kind!r}")

    def ref(self, kind: str) -> Ref:
        """Return a reference to the parameter of this kind, for reading."""
        parameter = self.parameter(kind)
        return Ref(name=parameter.name, shape=parameter.shape)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Run `forward_ops`."""
        # Runs the layer alone, for callers without an engine; an engine joins the ops of many layers.
        self._tape(slots, "forward", self.forward_ops).run(weights)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Run `backward_ops`."""
        self._tape(slots, "backward", self.backward_ops).run(weights)

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Run `delta_ops`."""

        def ops(slots: Slots) -> list[Op]:
            # A name instead of an array: each call may pass another `out` to the same tape.
            return self.delta_ops(slots, kind, Ref(name=OUT, shape=self.parameter(kind).shape, written=True))

        self._tape(slots, f"delta {kind}", ops).run({OUT: out})

    def _tape(self, slots: Slots, name: str, ops: Callable[[Slots], list[Op]]) -> Tape:
        # Kept in the slots' views, because a tape has the addresses of these slots' arrays.
        key = f"tape: {name}"
        # Made at the first call, because the tape compiles the kernels that it names.
        tape = slots.views.get(key)
        if tape is None:
            tape = slots.views[key] = Tape(ops(slots), slots.output.dtype)
        assert isinstance(tape, Tape)
        return tape
