"""Arrays for gradients in memory that the servers of this host read, so that a push copies nothing.

The arrays of a message lie one after the other, in the order of its shards, so that the message is one range
of the memory. A message with parts of an array that lie apart has copies.
"""

import logging
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.store.layout import StorePlan
from transport import Region
from transport.tensors import ALIGNMENT

logger = logging.getLogger(__name__)


class PushBuffers(Mapping[str, NDArray[Any]]):
    """Writable arrays by name, for the gradients of a store; `ParameterStore.buffers` makes them.

    Args:
        plan: The arrays, and their messages.
        shares: Whether the arrays are in memory that other processes can read.
    """

    __slots__ = ("_arrays", "flats", "plan")

    def __init__(self, plan: StorePlan, *, shares: bool) -> None:
        nbytes = {
            name: prod(shape) * dtype.itemsize
            for name, shape, dtype in zip(plan.names, plan.shapes, plan.dtypes, strict=True)
        }
        starts: dict[str, int] = {}
        end = 0
        for message in plan.messages:
            if message.ranges[0].name not in starts:
                end = -(-end // ALIGNMENT) * ALIGNMENT
            for each in message.ranges:
                if each.name not in starts:
                    starts[each.name] = end
                    end += nbytes[each.name]
        memory = _memory(max(end, 1), shares=shares)
        self.plan = plan
        self._arrays: dict[str, NDArray[Any]] = {}
        for name, shape, dtype in zip(plan.names, plan.shapes, plan.dtypes, strict=True):
            start = starts.get(name, 0)  # an empty array has no message
            self._arrays[name] = memory[start : start + nbytes[name]].view(dtype).reshape(shape)
        self.flats: list[NDArray[Any] | None] = []
        """Values of each message; None if they do not lie one after the other."""
        for message in plan.messages:
            dtype = message.dtype
            begins = {starts[each.name] + (each.start - each.at) * dtype.itemsize for each in message.ranges}
            begin = min(begins)
            flat = memory[begin : begin + message.size * dtype.itemsize].view(dtype)
            self.flats.append(flat if len(begins) == 1 else None)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<PushBuffers of {len(self)} arrays>"


def _memory(nbytes: int, *, shares: bool) -> NDArray[Any]:
    """Return bytes of zeros, shared if this is possible."""
    if shares:
        try:
            return Region.allocate(nbytes)
        except (OSError, AttributeError) as error:  # no memory or descriptor is free, or the system has none
            logger.debug("%d bytes for gradients are not shared: %s", nbytes, error)
    return np.zeros(nbytes, np.uint8)
