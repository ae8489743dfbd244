"""Pure: the memory of the shards, one contiguous aligned buffer per tensor.

A server is handed its storage and does not allocate it, so that servers of one process can hold
views of the same tensors. 64-byte alignment keeps every row start on a cache line for vector units.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.layer import ParameterSpec
from adam_async.placement import ShardSpec

ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector register."""


def aligned_zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return a zeroed vector of `size` values whose first byte lies on a 64-byte boundary."""
    item = np.dtype(dtype).itemsize
    raw = np.zeros(size * item + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size * item].view(dtype)


class ShardStorage:
    """One flat aligned buffer per parameter tensor; shards are views into them."""

    def __init__(self, parameters: Iterable[ParameterSpec], dtype: DTypeLike = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self._flat = {p.name: aligned_zeros(prod(p.shape), self.dtype) for p in parameters}

    def values(self, shard: ShardSpec) -> NDArray[Any]:
        """The memory of one shard, flat."""
        return self._flat[shard.tensor][shard.start : shard.stop]

    def __repr__(self) -> str:
        total = sum(flat.nbytes for flat in self._flat.values())
        return f"<ShardStorage {len(self._flat)} tensors {total} bytes {self.dtype}>"
