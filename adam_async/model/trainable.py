"""Pure: what it takes to be trained on a copy of its weights: a network, or all parts of one together."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from adam_async.model.layer import Array, Factors, ParameterSpec, Weights


class Trainable(Protocol):
    """What `Network` and `JointNetwork` have in common; a context is one that it has made."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""

    @property
    def kernels(self) -> str:
        """Which implementation of the layers."""

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All tensors, in the order of their layers."""

    @property
    def trained(self) -> tuple[ParameterSpec, ...]:
        """The tensors that have a gradient."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that stay as they are."""

    def parameter(self, name: str) -> ParameterSpec:
        """Look a tensor up by its name."""

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels, or read them from the disk."""

    def context(self, group_size: int) -> Any:
        """Allocate the arrays for one group of up to `group_size` images."""

    def forward(self, weights: Weights, context: Any) -> float:
        """Run the loaded group until its loss is there, and return its mean."""

    def backward(self, weights: Weights, context: Any) -> None:
        """Run what is left; afterwards `delta` and `factors` are valid."""

    def delta(self, context: Any, name: str, *, out: Array) -> None:
        """Write the group gradient of one tensor into `out`."""

    def factors(self, context: Any, name: str) -> Factors | None:
        """Give the factors of one tensor's gradient; None if it has none."""
