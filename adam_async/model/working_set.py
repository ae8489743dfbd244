"""Pure: how much memory training on a group uses, part by part, and the smallest cache with room for it.

A *part* begins at each layer with parameters and ends before the next such layer; earlier layers belong to
the first part. The last entry is the whole network. One job of a compute thread trains all of it, so the
layers after a part decide whether backward finds the part in the caches.

Sizes are those of a context's arrays; arrays that layers share count once. The sizes are for one group in
flight: activations, gradients and scratch exist once per group, weights once per worker.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from adam_async.model.context import Context
from adam_async.model.layer import Array
from adam_async.model.network import Network

Level = Literal["L2", "L3", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """Bytes that some layers touch forward and backward, for one group."""

    layers: tuple[str, ...]
    """Names of the layers, in order."""
    weights: int
    """Bytes of the parameters."""
    activations: int
    """Bytes of inputs and outputs."""
    gradients: int
    """Bytes of the inputs' and outputs' error gradients."""
    scratch: int
    """Bytes of the layers' scratch, such as columns of a convolution."""
    push_buffers: int
    """Bytes of the parameters' gradients, which go to the servers or into the weights."""

    @property
    def total(self) -> int:
        """Sum of all these fields, in bytes."""
        return self.weights + self.activations + self.gradients + self.scratch + self.push_buffers

    def fits(self, *, l2_kb: int | None, l3_kb: int | None) -> Level | None:
        """Name the smallest cache with room for the working set, if the layers use the cache alone.

        Args:
            l2_kb: Second-level cache of one core, in KiB; None if unknown.
            l3_kb: Third-level cache, in KiB; None if unknown.

        Returns:
            Name of the cache, or ``"memory"``; None if the answer depends on an unknown size.
        """
        if l2_kb is not None and self.total <= l2_kb << 10:
            return "L2"
        if l3_kb is not None and self.total <= l3_kb << 10:
            return "L3"
        return None if l2_kb is None or l3_kb is None else "memory"

    def __str__(self) -> str:
        named = self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} to {self.layers[-1]}"
        kinds = ("weights", "activations", "gradients", "scratch", "push_buffers")
        sizes = [f"{kind.replace('_', ' ')} {_kib(getattr(self, kind))}" for kind in kinds]
        return f"{named}: {_kib(self.total)} KiB ({', '.join(sizes)})"


def working_sets(network: Network, images: int) -> tuple[WorkingSet, ...]:
    """Measure the arrays for a group of this many images: an entry per part, then the whole network.

    Allocates one context.

    Raises:
        ModelError: The group has no image.
    """
    context = network.context(images)
    ways = _parts(network)
    if len(ways) > 1:
        ways.append(range(len(network.layers)))
    return tuple(_working_set(network, context, way) for way in ways)


def _parts(network: Network) -> list[range]:
    starts = [number for number, layer in enumerate(network.layers) if layer.parameters][1:]
    edges = [0, *starts, len(network.layers)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _working_set(network: Network, context: Context, way: range) -> WorkingSet:
    layers = [network.layers[number] for number in way]
    slots = [context.slots(number) for number in way]
    seen: set[int] = set()
    parameters = sum(p.size for layer in layers for p in layer.parameters) * network.dtype.itemsize
    return WorkingSet(
        layers=tuple(layer.name for layer in layers),
        weights=parameters,
        activations=_bytes((array for s in slots for array in (*s.inputs, s.output)), seen),
        gradients=_bytes((array for s in slots for array in (s.output_error, *s.input_errors)), seen),
        scratch=_bytes((array for s in slots for array in s.scratch.values()), seen),
        push_buffers=parameters,
    )


def _bytes(arrays: Iterable[Array | None], seen: set[int]) -> int:
    """Add up the sizes of the arrays whose memory is not in `seen`, and add their memory to it."""
    total = 0
    for array in arrays:
        if array is not None and array.nbytes and array.ctypes.data not in seen:
            seen.add(array.ctypes.data)
            total += array.nbytes
    return total


def _kib(size: int) -> str:
    return f"{-(-size // 1024):,}"
