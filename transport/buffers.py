"""Reused memory for received payloads: aligned buffers in power-of-two sizes, freed with their last view.

`BufferPool.acquire` lends an array of bytes. Tensors are views of the lent array, users slice those, and
numpy keeps the lent array alive as the base of all of them. A weak reference to it therefore fires when the
last view is freed, and the memory returns to the free list at that moment, on the thread that dropped the
last view. (numpy shortens chains of bases to the oldest *array*, also through memoryviews; the memory below
is a bytearray or a mapping, so the chain ends at the lent array.)

Only atomic list and set operations run on that other thread; everything else runs on the loop's
thread. Memory from 1 MiB on is mapped: unwritten pages cost nothing, so a reservation only takes address
space until bytes arrive. A reused buffer has its pages already. This saves more time than a copy would cost:
fresh pages for 16 MiB take about as long as the receipt of 16 MiB.
"""

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport.tensors import ALIGNMENT, Tensor

MIN_BYTES = 4 << 10
"""Minimum size of a pooled buffer, in bytes."""

MAX_BYTES = 32 << 20
"""Maximum size of a pooled buffer, in bytes; the pool keeps no larger ones."""

_MAP_FROM_BYTES = 1 << 20
_MIN_SHIFT = MIN_BYTES.bit_length() - 1
_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """State of a pool. ``outstanding`` buffers have live views; ``free_bytes`` wait for reuse."""

    outstanding: int
    outstanding_bytes: int
    free: int
    free_bytes: int
    acquired: int
    created: int


class _Block:
    """One piece of memory, lent or free."""

    __slots__ = ("free_list", "keep", "lent", "memory", "reference", "size")

    def __init__(self, size: int, free_list: "list[_Block]", keep: int, lent: "set[_Block]") -> None:
        self.size = size
        self.memory = _aligned(size)
        self.free_list = free_list
        self.keep = keep
        self.lent = lent
        self.reference: weakref.ref[Tensor] | None = None

    def returned(self, reference: object) -> None:
        """Take the memory back when its last view is freed; free it if the free list is full."""
        # May run on any thread: each line is atomic, and the block is free only after the last one.
        self.reference = None
        self.lent.discard(self)
        if len(self.free_list) < self.keep:
            self.free_list.append(self)


class BufferPool:
    """Lends aligned memory, which returns when its last view is freed.

    Args:
        retain_bytes: Free memory to keep for reuse, for each size, in bytes; at least one buffer is kept.
    """

    def __init__(self, *, retain_bytes: int = 64 << 20) -> None:
        if retain_bytes < 0:
            raise ValueError(f"retain_bytes must not be negative, not {retain_bytes}")
        self._retain_bytes = retain_bytes
        self._free: list[list[_Block]] = [[] for _ in range(MAX_BYTES.bit_length() - _MIN_SHIFT)]
        self._lent: set[_Block] = set()
        self._acquired = 0
        self._created = 0

    def acquire(self, size_bytes: int) -> Tensor:
        """Lend ``size_bytes`` (at least 1) bytes as a uint8 array whose memory is 64-byte aligned.

        The memory returns when the array and all its views are freed. Buffers beyond 32 MiB are not kept for
        reuse.
        """
        return self.lend(size_bytes, _UINT8, (size_bytes,))[0]

    def lend(
        self, size_bytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Tensor, memoryview]:
        """Lend an array of a dtype and shape as `acquire` does, with a view of its bytes to fill it.

        Use the view only while the array exists, because it does not keep the memory lent. The view may be
        longer than requested.
        """
        index = 0 if size_bytes <= MIN_BYTES else (size_bytes - 1).bit_length() - _MIN_SHIFT
        self._acquired += 1
        if index < len(self._free):
            free = self._free[index]
            try:
                block = free.pop()
            except IndexError:
                block = self._create(MIN_BYTES << index, free)
        else:
            block = self._create(size_bytes, [])
        lent: Tensor = np.ndarray(shape, dtype, block.memory)
        self._lent.add(block)
        block.reference = weakref.ref(lent, block.returned)
        return lent, block.memory

    def joined(self, parts: Sequence[Tensor], dtype: np.dtype[Any], size: int) -> Tensor:
        """Lend a copy of flat arrays of one dtype in a row; ``size`` is their number of values."""
        copy = self.lend(size * dtype.itemsize, dtype, (size,))[0]
        np.concatenate(parts, out=copy)
        return copy

    def _create(self, size: int, free: list[_Block]) -> _Block:
        self._created += 1
        keep = max(1, self._retain_bytes // size) if size <= MAX_BYTES else 0
        return _Block(size, free, keep, self._lent)

    def statistics(self) -> PoolStatistics:
        """Return the numbers of buffers and bytes, lent and free."""
        lent = list(self._lent)
        free = [block for blocks in self._free for block in list(blocks)]
        return PoolStatistics(
            outstanding=len(lent),
            outstanding_bytes=sum(block.size for block in lent),
            free=len(free),
            free_bytes=sum(block.size for block in free),
            acquired=self._acquired,
            created=self._created,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<BufferPool {now.outstanding} lent ({now.outstanding_bytes} B), {now.free} free>"


def _aligned(size: int) -> memoryview:
    """Make 64-byte aligned memory; from 1 MiB on it is mapped, so that untouched pages cost nothing."""
    if size >= _MAP_FROM_BYTES:
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    raw = bytearray(size + ALIGNMENT)
    start = -np.frombuffer(raw, _UINT8).ctypes.data % ALIGNMENT
    return memoryview(raw)[start : start + size]
