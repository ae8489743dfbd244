"""Pure: what a training step needs beside weights and context, and what it tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from adam_async.model.keyed_random import Key
from adam_async.model.layer import Array
from adam_async.model.rules import new_scratch

if TYPE_CHECKING:
    from adam_async.model.network import Network


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBuffers:
    """One thread's gradients, by the name of the tensor, and its scratch for the rule."""

    gradients: Mapping[str, Array]
    scratch: Array

    @classmethod
    def of(cls, network: "Network") -> "StepBuffers":
        """Allocate them."""
        gradients = {p.name: np.empty(p.shape, network.dtype) for p in network.trained}
        return cls(gradients=gradients, scratch=new_scratch(network.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """One group, before it is loaded into a context."""

    images: Array | None
    """Shape ``(n, C, H, W)``; None where no layer reads them."""
    labels: Array
    """What the loss layer takes, n of them."""
    keys: tuple[Key, ...]
    """The group's name, for layers that draw."""
    rate: float
    """Learning rate of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of one step."""

    loss: float
    """Mean over the group's images; not finite if the network's scores were not."""
    staleness: int = 0
    """Steps that other threads counted while this one was under way; 0 where none is counted."""
    refused: tuple[str, ...] = ()
    """Tensors whose gradient was not finite, in the order of the way back; they and their state are as
    they were."""
