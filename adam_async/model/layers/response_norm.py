"""Pure: local response normalisation across channels (Krizhevsky, Sutskever and Hinton, 2012).

    scale_c = k + alpha / size * (sum of x_j squared, over the `size` channels j around c)
    y_c     = x_c * scale_c ** -beta

The window of channel c extends from ``c - size // 2`` to ``c + (size - 1) // 2`` and ends at the edges; the
sum is divided by `size` there, too (PyTorch's definition). With errors e, backward computes

    e_c * scale_c ** -beta  -  2 * alpha * beta / size * x_c * (sum of e_j * y_j / scale_j, over the channels
                                                                j with c in their window)

and those channels are the mirrored window. Channels are the first axis, so a window takes a few additions of
whole runs of memory. A running sum would need fewer, but would round.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from adam_async.model.layer import Array, Cut, Layer, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class LocalResponseNorm(Layer):
    """Divide by a power of the energy in neighbouring channels. Options: size, alpha, beta, k."""

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0}
    CUT: ClassVar[Cut] = "rows"
    READS_OUTPUT: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        self.image_input()
        self.size = self.integer("size", minimum=1)
        self.alpha = self.real("alpha", minimum=0)
        self.beta = self.real("beta", minimum=0)
        self.k = self.real("k", minimum=0)
        if self.k == 0:
            raise self.refusal("option 'k' must be more than 0, to keep the output of an input of 0 finite")

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the scales, their powers, and an array for the terms of the sums."""
        shape: Shape = (*self.output_shape, images)
        return {"scale": (shape, None), "power": (shape, None), "terms": (shape, None)}

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Square, add up over the window, raise to the power, multiply."""
        x = slots.inputs[0]
        scale, power, squares = (slots.scratch[name] for name in ("scale", "power", "terms"))
        np.multiply(x, x, out=squares)
        self._add_windows(squares, scale, before=self.size // 2)
        np.multiply(scale, self.alpha / self.size, out=scale)
        np.add(scale, self.k, out=scale)
        np.power(scale, -self.beta, out=power)
        np.multiply(x, power, out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Add up the derivative's two terms."""
        target = slots.input_error
        scale, power, terms = (slots.scratch[name] for name in ("scale", "power", "terms"))
        np.multiply(slots.error, slots.output, out=terms)
        np.divide(terms, scale, out=terms)
        self._add_windows(terms, target, before=(self.size - 1) // 2)
        np.multiply(target, slots.inputs[0], out=target)
        np.multiply(target, -2.0 * self.alpha * self.beta / self.size, out=target)
        np.multiply(slots.error, power, out=terms)
        np.add(target, terms, out=target)

    def _add_windows(self, values: Array, out: Array, *, before: int) -> None:
        """Fill each channel of `out` with a sum of `size` channels, which begins `before` channels
        earlier."""
        channels = values.shape[0]
        np.copyto(out, values)
        for shift in range(-before, self.size - before):
            if shift == 0 or abs(shift) >= channels:
                continue
            first, last = max(-shift, 0), channels - max(shift, 0)
            np.add(out[first:last], values[first + shift : last + shift], out=out[first:last])
