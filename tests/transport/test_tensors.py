"""A release fires once, after the last reader of the arrays is gone."""

import threading

import numpy as np
import pytest

from transport.tensors import BufferPool, watched


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_a_kept_slice_keeps_the_array(shape: tuple[int, ...]) -> None:
    fired: list[int] = []
    array = np.arange(6.0).reshape(shape)
    views = watched((array,), lambda: fired.append(1))
    assert np.shares_memory(views[0], array)
    assert np.array_equal(views[0], array)
    part = views[0][..., :1]
    del views
    assert fired == []
    del part
    assert fired == [1]


def test_all_arrays_must_be_gone() -> None:
    fired: list[int] = []
    array = np.ones(3)
    one, two, empty = watched((array, array, np.zeros((0, 2))), lambda: fired.append(1))
    assert empty.shape == (0, 2)
    del one
    assert fired == []
    del two
    assert fired == [1]


def test_tensors_without_elements_are_released_at_once() -> None:
    fired: list[int] = []
    assert watched((), lambda: fired.append(1)) == ()
    watched((np.zeros(0),), lambda: fired.append(2))
    assert fired == [1, 2]


def test_bfloat16_scalars_and_read_only_arrays_can_be_watched() -> None:
    dtypes = pytest.importorskip("ml_dtypes")
    fired: list[int] = []
    frozen = np.ones(3)
    frozen.flags.writeable = False
    views = watched((np.ones(3, dtypes.bfloat16), np.array(True), frozen), lambda: fired.append(1))
    assert [view.shape for view in views] == [(3,), (), (3,)]
    assert not views[2].flags.writeable
    del views
    assert fired == [1]


def test_a_failing_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    views = watched((np.ones(1),), fail)
    del views
    assert "release callback failed" in caplog.text


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
