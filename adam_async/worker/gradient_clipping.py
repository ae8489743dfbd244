"""Pure: limits on a step's gradient, applied as factors before the push: clipping, layer-wise rate control.

Clipping bounds the norm over all tensors. Layer-wise rate control limits each tensor's rate to the scheduled
rate, and to `layer_rate` times the tensor's norm over the norm of its clipped gradient (CL-07). A tensor of
zeros, such as an initial bias, has no norm for the comparison and keeps the rate. A gradient that is not
finite is not scaled: the server refuses and counts it.

A gradient sent as factors is the product E X^T of error gradients E (rows, K) and activations X (inputs, K).
Factors give the norm without their product: |E X^T|^2 is the sum over all entries of (E^T E) * (X^T X), two
Gram matrices of K by K. If several servers have the rows, their matrices add up. If the product is smaller
than a Gram matrix, the norm is computed from the product. A limit's factor multiplies E.

The limits apply to the gradient that the rule would see from this push alone: the sum over the groups of the
step. In bsp, servers average over all images of a step, so this gradient is the mean over the images of this
push.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from adam_async.run.config import Config
from adam_async.worker.push_plan import PushBuffer


class Scaling:
    """The limits that a run sets.

    Args:
        clip: Largest norm over all tensors; 0 for none.
        layer_rate: Largest change of a tensor, as a share of its norm; 0 for no limit.
    """

    def __init__(self, *, clip: float, layer_rate: float) -> None:
        self._clip = clip
        self._layer_rate = layer_rate

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """Return the limits in a run's options; None if there are none."""
        if not config.clip and not config.layer_rate:
            return None
        return cls(clip=config.clip, layer_rate=config.layer_rate)

    def factors(
        self, buffer: PushBuffer, weights: Mapping[str, NDArray[Any]], *, rate: float, unit: float = 1.0
    ) -> dict[str, float]:
        """Return the factor of each tensor whose factor is not 1.

        Args:
            buffer: A group's or step's gradients.
            weights: The values from which the gradients were computed.
            rate: Learning rate of their application.
            unit: Factor from the buffer's gradient to the gradient that the rule sees.
        """
        norms = {name: unit * norm for name, norm in gradient_norms(buffer).items()}
        clip = 1.0
        if self._clip:
            total = math.hypot(*norms.values())
            if self._clip < total < math.inf:
                clip = self._clip / total
        found = dict.fromkeys(norms, clip)
        if self._layer_rate:
            for name, norm in norms.items():
                change, size = rate * clip * norm, norm_of(weights[name])
                if size and self._layer_rate * size < change < math.inf:
                    found[name] *= self._layer_rate * size / change
        return {name: factor for name, factor in found.items() if factor != 1.0}

    def apply(
        self, buffer: PushBuffer, weights: Mapping[str, NDArray[Any]], *, rate: float, unit: float = 1.0
    ) -> dict[str, float]:
        """Scale a buffer to keep the limits; returns the result of `factors`."""
        factors = self.factors(buffer, weights, rate=rate, unit=unit)
        buffer.scale(factors)
        return factors


@np.errstate(over="ignore", invalid="ignore")
def gradient_norms(buffer: PushBuffer) -> dict[str, float]:
    """Return the Euclidean norm of each tensor's gradient, in either form; not finite if a value is not."""
    squares: dict[str, float] = {}
    for name, delta in buffer.deltas():
        squares[name] = squares.get(name, 0.0) + _square(delta)
    for name, inputs, errors in buffer.factors():
        squares[name] = _square_of_product(inputs, errors)
    return {name: math.sqrt(square) for name, square in squares.items()}


@np.errstate(over="ignore", invalid="ignore")
def norm_of(values: NDArray[Any]) -> float:
    """Return the Euclidean norm of an array."""
    return math.sqrt(_square(values.reshape(-1)))


def _square(flat: NDArray[Any]) -> float:
    found = float(np.dot(flat, flat))
    if found < math.inf:
        return found
    # A sum that overflows in float32 may be finite in float64.
    wide = flat.astype(np.float64)
    return float(np.dot(wide, wide))


def _square_of_product(inputs: NDArray[Any], errors: list[NDArray[Any]]) -> float:
    width, count = inputs.shape
    if count * count > width * sum(len(rows) for rows in errors):
        return sum(_square((rows @ inputs.T).reshape(-1)) for rows in errors)
    gram = np.zeros((count, count))
    for rows in errors:
        gram += rows.T @ rows
    found = float(np.vdot(gram, (inputs.T @ inputs).astype(np.float64)))
    if found < math.inf:
        return max(found, 0.0)
    wide = inputs.astype(np.float64)
    gram = sum((rows.astype(np.float64).T @ rows.astype(np.float64) for rows in errors), np.zeros_like(gram))
    return max(float(np.vdot(gram, wide.T @ wide)), 0.0)
