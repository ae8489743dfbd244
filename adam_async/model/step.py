"""Pure: one training step: its buffers, its input, its outcome, and the check of its gradients."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from adam_async.model.keyed_random import Key
from adam_async.model.layer import Array, ParameterSpec
from adam_async.model.rules import new_scratch


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
    """Images of shape ``(n, C, H, W)``; None if no layer reads them."""
    labels: Array
    """Targets for the loss layer, one per image."""
    keys: tuple[Key, ...]
    """The group's name, for layers that draw random values."""
    rate: float
    """Learning rate of the group's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one step."""

    loss: float
    """Mean loss over the group's images; not finite if the network's scores are not."""
    staleness: int = 0
    """Number of steps that other threads finished during this step; 0 if steps are not counted."""
    refused: tuple[str, ...] = ()
    """Tensors with a gradient that is not finite, in backward order; the tensors and their state are
    unchanged."""


@np.errstate(over="ignore", invalid="ignore")
def is_finite(values: Array) -> bool:
    """Return whether all values are finite. The call allocates no memory for finite values."""
    flat = values.reshape(-1)
    # A finite sum of squares proves it at the speed of a dot product; a sum that overflows proves nothing.
    return math.isfinite(float(np.dot(flat, flat))) or bool(np.isfinite(values).all())
