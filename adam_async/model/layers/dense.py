"""Pure: the fully connected layer, with the two factors of its weight gradient.

Letters: B batch, I inputs, O outputs. Weights O,I and bias O. The weight gradient is a product of two thin
matrices. A parameter server that multiplies them receives B * (I + O) numbers instead of I * O (Project Adam,
parameter server communication).
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.layer import INITS, Array, Cut, Factors, Layer, Slots, Weights, uniform_bound
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class Dense(Layer):
    """Every output reads every input. Options: outputs, init."""

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"outputs": None, "init": "he"}
    CUT: ClassVar[Cut] = "outputs"

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        if len(input_shapes[0]) != 1:
            raise self.refusal(
                f"needs a flat input, not {list(input_shapes[0])}; put a flatten layer before it"
            )
        inputs, outputs = input_shapes[0][0], self.integer("outputs", minimum=1)
        self.output_shape = (outputs,)
        self.multiply_adds = inputs * outputs
        self.weight, self.bias = f"{self.name}.weight", f"{self.name}.bias"
        bound = uniform_bound(self.choice("init", INITS), inputs)
        self.parameters = (
            self.tensor("weight", (outputs, inputs), bound=bound),
            self.tensor("bias", (outputs,)),
        )

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Multiply and add the bias."""
        np.dot(weights[self.weight], slots.inputs[0], out=slots.output)
        np.add(slots.output, weights[self.bias].reshape(-1, 1), out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the transposed weights."""
        np.matmul(weights[self.weight].T, slots.error, out=slots.input_errors[0])

    def delta(self, slots: Slots, kind: str, out: Array) -> None:
        """Multiply the factors; for the bias, add the errors up."""
        if kind == "weight":
            x_IB, errors_OB = slots.inputs[0], slots.error
            if slots.images == 1:
                # BLAS takes five times as long for a product of a column and a row.
                np.multiply(errors_OB, x_IB.T, out=out)
            else:
                np.matmul(errors_OB, x_IB.T, out=out)
        elif kind == "bias":
            np.add.reduce(slots.error, axis=1, out=out)
        else:
            super().delta(slots, kind, out)

    def factors(self, slots: Slots, kind: str) -> Factors | None:
        """Return views of the input and the error gradient, batch first; copy the views to send them."""
        return (slots.inputs[0].T, slots.error.T) if kind == "weight" else None
