"""Memory returns to the pool with its last view, and not before."""

import threading

import numpy as np
import pytest

from transport.buffers import BufferPool


@pytest.mark.parametrize("size", [1, 100, 4096, 4097, 1 << 20, 3 << 20, 40 << 20])
def test_buffers_are_aligned_and_writable(size: int) -> None:
    lent = BufferPool().acquire(size)
    assert lent.shape == (size,)
    assert lent.ctypes.data % 64 == 0
    lent[-1] = 7
    assert lent[-1] == 7


@pytest.mark.parametrize("size", [400, 4 << 20])
def test_memory_is_lent_while_a_slice_of_a_slice_exists(size: int) -> None:
    pool = BufferPool()
    lent, _ = pool.lend(size, np.dtype(np.float32), (size // 4,))
    part = lent.reshape(2, -1)[1:][:, ::2]
    raw = memoryview(lent)
    del lent
    assert pool.statistics().outstanding == 1
    del part
    assert pool.statistics().outstanding == 1
    raw.release()
    del raw
    assert pool.statistics().outstanding == 0


@pytest.mark.parametrize("size", [400, 4 << 20])
def test_memory_is_lent_while_a_tensor_within_it_exists(size: int) -> None:
    pool = BufferPool()
    whole = pool.acquire(size)
    inner = np.ndarray((2, 3), np.float32, whole, 64)
    del whole
    assert pool.statistics().outstanding == 1
    del inner
    assert pool.statistics().outstanding == 0


def test_returned_memory_is_used_again() -> None:
    pool = BufferPool()
    first = pool.acquire(5000).ctypes.data
    assert pool.acquire(6000).ctypes.data == first
    statistics = pool.statistics()
    assert (statistics.acquired, statistics.created, statistics.free) == (2, 1, 1)
    assert statistics.free_bytes == 8192


def test_little_is_kept_beyond_what_may_be_retained() -> None:
    pool = BufferPool(retain_bytes=8192)
    lent = [pool.acquire(4096) for _ in range(10)]
    assert pool.statistics().outstanding_bytes == 10 * 4096
    lent.clear()
    assert pool.statistics().free == 2
    del lent
    large = pool.acquire(33 << 20)
    del large
    assert pool.statistics().free == 2


def test_the_last_view_may_end_on_another_thread() -> None:
    pool = BufferPool()
    held = [pool.acquire(100)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.statistics().outstanding == 0
    assert repr(pool) == "<BufferPool 0 lent (0 B), 1 free>"
