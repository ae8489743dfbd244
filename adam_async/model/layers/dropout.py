"""Pure: dropout. Which values are dropped is a function of seed, group and layer.

What is kept is divided by the share that is kept, so the expected output is the input, and evaluation is
the identity. Draws are made once per group, in float64 whatever the network computes in: a network
in either precision drops the same values, and so does a run that starts again in the middle.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from adam_async.dice import Dice, Key
from adam_async.model.layer import Cut, Layer, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class Dropout(Layer):
    """Zero a share of the values in training. Options: rate, the share that is dropped."""

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"rate": 0.5}
    CUT: ClassVar[Cut] = "rows"
    SHARES_INPUT: ClassVar[bool] = True
    OVERWRITES: ClassVar[bool] = True
    DRAWS: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.rate = self.real("rate", minimum=0, below=1)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """What is drawn, and what values are multiplied by: 0, or 1 over the share that is kept."""
        shape: Shape = (*self.output_shape, images)
        return {"drawn": (shape, np.float64), "factors": (shape, None)}

    def draw(self, slots: Slots, dice: Dice, keys: tuple[Key, ...]) -> None:
        """Drop what draws less than the rate."""
        drawn, factors = slots.scratch["drawn"], slots.scratch["factors"]
        dice.fill_uniform("dropout", drawn, keys=(self.name, *keys))
        np.greater_equal(drawn, self.rate, out=factors, casting="unsafe")
        np.multiply(factors, 1.0 / (1.0 - self.rate), out=factors)

    def prepare(self, slots: Slots) -> None:
        """Find out whether evaluation has anything to copy."""
        slots.views["shared"] = np.may_share_memory(slots.inputs[0], slots.output)

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the factors in training; copy otherwise."""
        if slots.training:
            np.multiply(slots.inputs[0], slots.scratch["factors"], out=slots.output)
        elif not slots.views["shared"]:
            np.copyto(slots.output, slots.inputs[0])

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply by the same factors."""
        np.multiply(slots.error, slots.scratch["factors"], out=slots.input_errors[0])
