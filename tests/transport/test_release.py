"""A release fires once, after the last reader of the arrays is gone."""

import numpy as np
import pytest

from transport.release import watched


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
