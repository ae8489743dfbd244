"""Pure: the interface of a layer with compiled kernels, an extension of the interface of all layers.

Such a layer returns its steps as `Op`s, so that a network can run many layers in one call. Its `forward`,
`backward` and `delta` run the layer alone, with tapes kept in the slots.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from adam_async.errors import ModelError
from adam_async.model.fast.tape import OUT, Field, Op, Ref, Tape
from adam_async.model.layer import Array, Layer, ParameterSpec, Slots, Weights


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
        """Return the ops that write the gradient of the parameter of this kind to `out`."""
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
        # The layer alone, for callers without an engine; an engine joins the ops of many layers.
        self._tape(slots, "forward", self.forward_ops).run(weights)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Run `backward_ops`."""
        self._tape(slots, "backward", self.backward_ops).run(weights)

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Run `delta_ops`."""

        def ops(slots: Slots) -> list[Op]:
            # A name in place of an array: each call may pass another `out`, and the tape stays.
            return self.delta_ops(slots, kind, Ref(name=OUT, shape=self.parameter(kind).shape, written=True))

        self._tape(slots, f"delta {kind}", ops).run({OUT: out})

    def _tape(self, slots: Slots, name: str, ops: Callable[[Slots], list[Op]]) -> Tape:
        # In the views of the slots, because a tape has the addresses of the arrays of these slots.
        key = f"tape: {name}"
        # Made at the first call, because the tape compiles the kernels that it names.
        tape = slots.views.get(key)
        if tape is None:
            tape = slots.views[key] = Tape(ops(slots), slots.output.dtype)
        assert isinstance(tape, Tape)
        return tape
