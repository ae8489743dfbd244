"""Pure: layers that reshape or join their inputs: flatten, add, concatenate."""

import math
from typing import ClassVar

import numpy as np

from adam_async.model.layer import Cut, Layer, Slots, Weights
from adam_async.model.spec import LayerSpec, Shape


class Flatten(Layer):
    """An image as one row of features, in the order channel, row, column.

    Copies no values if input and output share memory. The layer may not be cut, because an image's rows are
    not a range of its features.
    """

    MOVES: ClassVar[bool] = True
    SHARES_INPUT: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.output_shape = (math.prod(input_shapes[0]),)

    def prepare(self, slots: Slots) -> None:
        """Record whether input and output share memory, so that forward needs no copy."""
        slots.views["shared"] = np.may_share_memory(slots.inputs[0], slots.output)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy, unless the memory is the same."""
        if not slots.views["shared"]:
            np.copyto(slots.output, slots.inputs[0].reshape(slots.output.shape))

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Copy back, unless the memory is the same."""
        target = slots.input_error
        if not np.may_share_memory(target, slots.error):
            np.copyto(target, slots.error.reshape(target.shape))


class Add(Layer):
    """The sum of two or more inputs of the same shape."""

    NUM_INPUTS: ClassVar[int | None] = None
    CUT: ClassVar[Cut] = "rows"

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        if len(set(input_shapes)) != 1:
            named = zip(spec.inputs, input_shapes, strict=True)
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in named)
            raise self.refusal(f"its inputs must have one shape, not {shapes}")

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Add up."""
        np.add(slots.inputs[0], slots.inputs[1], out=slots.output)
        for value in slots.inputs[2:]:
            np.add(slots.output, value, out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Copy the error gradient to every input."""
        for target in slots.input_errors:
            if target is not None:
                np.copyto(target, slots.error)


class Concatenate(Layer):
    """Two or more inputs, concatenated along channels (images) or features (flat inputs).

    Images may be cut by rows. Flat inputs may not be cut: a range of the output's features covers only some
    inputs.
    """

    NUM_INPUTS: ClassVar[int | None] = None
    CUT: ClassVar[Cut] = "rows"

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        if len({(len(shape), shape[1:]) for shape in input_shapes}) != 1:
            named = zip(spec.inputs, input_shapes, strict=True)
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in named)
            raise self.refusal(f"its inputs may differ only in the first size, not {shapes}")
        self.output_shape = (sum(shape[0] for shape in input_shapes), *input_shapes[0][1:])
        if len(self.output_shape) == 1:
            self.cut_by, self.moves = "whole", True

    def prepare(self, slots: Slots) -> None:
        """Make the slice of each input in the output."""
        parts, start = [], 0
        for value in slots.inputs:
            parts.append(slice(start, start + value.shape[0]))
            start += value.shape[0]
        slots.views["parts"] = tuple(parts)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Copy each input to its part."""
        for value, part in zip(slots.inputs, slots.views["parts"], strict=True):
            np.copyto(slots.output[part], value)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Copy each part of the error gradient to its input."""
        for target, part in zip(slots.input_errors, slots.views["parts"], strict=True):
            if target is not None:
                np.copyto(target, slots.error[part])
