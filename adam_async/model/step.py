"""Pure: one training step: its buffers, its input, its outcome, and the bounds on its gradients."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from adam_async.model.keyed_random import Key
from adam_async.model.layer import Array, Layer, Loss, ParameterSpec
from adam_async.model.rules import new_scratch

WHOLE_STEP = 1.5
"""Largest loss of a whole step in place, in multiples of the loss of guessing; fresh models begin near 1."""

WHOLE_STEP_IMAGES = 16
"""Minimum number of images of a group for which `WHOLE_STEP` holds. The mean of fewer images varies more, and
their default rate is lower in proportion, so their limit is higher in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBuffers:
    """One thread's gradients, by the name of the tensor, and its scratch for the rule."""

    gradients: Mapping[str, Array]
    scratch: Array

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec], dtype: DTypeLike) -> "StepBuffers":
        """Allocate the buffers for these tensors."""
        gradients = {p.name: np.empty(p.shape, dtype) for p in parameters}
        return cls(gradients=gradients, scratch=new_scratch(dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """One group, to load into a context."""

    images: Array | None
    """Shape ``(n, C, H, W)``; None if no layer reads them."""
    labels: Array
    """n targets for the loss layer."""
    keys: tuple[Key, ...]
    """The group's name, for layers that draw random values."""
    rate: float
    """Learning rate of the group's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one step."""

    loss: float
    """Mean over the group's images; not finite if the network's scores were not."""
    staleness: int = 0
    """Number of steps that other threads finished during this one; 0 if steps are not counted."""
    refused: tuple[str, ...] = ()
    """Tensors with a gradient that is not finite, in backward order; the tensors and their state are
    unchanged."""


@np.errstate(over="ignore", invalid="ignore")
def is_finite(values: Array) -> bool:
    """Whether all values are finite. Allocates no memory for finite values."""
    flat = values.reshape(-1)
    # A finite sum of squares proves it at the speed of a dot product; a sum that overflows proves nothing.
    return math.isfinite(float(np.dot(flat, flat))) or bool(np.isfinite(values).all())


def largest_whole(layers: Sequence[Layer], images: int) -> float:
    """Return the largest mean loss of a whole step in place; infinite for a loss without a scale.

    Args:
        layers: All layers of the network.
        images: Images of the group.
    """
    last = layers[-1]
    if not isinstance(last, Loss):
        return math.inf
    return WHOLE_STEP * last.guessing * max(WHOLE_STEP_IMAGES / images, 1.0)


def shorten(errors: Sequence[Array | None], loss: float, largest: float) -> None:
    """Scale the error gradients of a loss beyond `largest` by ``(largest / loss) ** 2``.

    Such a loss shows weights that stale gradients have taken too far. Activations grow with the loss, and the
    scores change by their square times the rate: whole steps from there would take the weights further, until
    the loss is not finite. With this factor the change of the scores is bounded, however large the loss is.

    Args:
        errors: Error gradients of the loss layer's inputs; None for one that no layer needs.
        loss: Mean loss of the group; a NaN changes nothing.
        largest: The value of `largest_whole`.
    """
    if loss > largest:
        for error in errors:
            if error is not None:
                np.multiply(error, (largest / loss) ** 2, out=error)
