"""Pure: the layers of a network with one set of kernels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adam_async.model.topology import Topology

if TYPE_CHECKING:
    from adam_async.model.fast.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSet:
    """Layers, and the engine that runs them where they are compiled."""

    kernels: str
    """``"numpy"`` or ``"numba"``."""
    topology: Topology
    engine: "Engine | None"
    """None with NumPy's kernels."""
