"""Compiled kernels make the bytes of NumPy's."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.data_server.transforms.pipeline import first_kernels, kernels_of
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.data_server.transforms.resample import Spline
from adam_async.model.keyed_random import Dice
from adam_async.runtime.kernel_cache import KernelCache

NUMPY = kernels_of("numpy")
SEEDS = st.integers(0, 1000)


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("numba")
    return kernels_of("numba")


def longs(name, shape, most, seed):
    words = Dice(seed).bits(name, count=int(np.prod(shape))).reshape(shape)
    return (words % np.uint64(2 * most + 1)).astype(np.int64) - most


@given(seed=SEEDS, n=st.integers(0, 9), m=st.integers(0, 9))
@settings(deadline=None)
def test_random_words_are_equal(compiled, seed, n, m):
    keys = Dice(seed).bits("keys", count=2 * m).reshape(m, 2)
    blocks = Dice(seed).bits("blocks", count=n * m).reshape(n, m)

    np.testing.assert_array_equal(compiled.philox(keys, blocks), NUMPY.philox(keys, blocks))


@given(
    seed=SEEDS,
    n=st.integers(0, 3),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    sizes=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 7, 9, 31, 32, 33, 70])),
    cells=st.integers(0, 5),
    far=st.sampled_from([1 << 16, 1 << 20, 1 << 40]),
    repeat=st.booleans(),
)
@settings(deadline=None)
def test_images_are_resampled_to_equal_bytes_however_far_away(
    compiled, seed, n, shape, sizes, cells, far, repeat
):
    images = Dice(seed).bits("pixels", count=n * int(np.prod(shape))).astype(np.uint8).reshape(n, *shape)
    maps = longs("maps", (n, 6), far, seed)
    points = cells + 3 if cells else 0
    controls = longs("controls", (n, 2, points, points), 1 << 18, seed)
    down, across = Spline.of(sizes[0], cells or 1), Spline.of(sizes[1], cells or 1)
    made = np.zeros((2, n, shape[0], *sizes), np.uint8)

    for out, kernels in zip(made, (NUMPY, compiled), strict=True):
        kernels.resample(images, maps, controls, down, across, repeat, out)

    np.testing.assert_array_equal(*made)


@given(
    seed=SEEDS,
    n=st.integers(0, 4),
    points=st.integers(4, 9),
    pixels=st.floats(0, 32_767),
    stretch=st.sampled_from([0.0, 0.9, 1.7, 1e4]),
)
@settings(deadline=None)
def test_control_points_are_displaced_to_equal_places_however_far(compiled, seed, n, points, pixels, stretch):
    words = Dice(seed).bits("words", count=n * 2 * points**2).reshape(n, 2 * points**2)
    linear = stretch * (Dice(seed).uniform("linear", count=n * 4, dtype=np.float64).reshape(n, 4) - 0.5)

    made = [kernels.displaced(words, pixels, linear, points) for kernels in (NUMPY, compiled)]

    np.testing.assert_array_equal(*made)


@given(
    seed=SEEDS,
    shape=st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 70)),
    most=st.sampled_from([1 << 16, 1 << 18, 1 << 33]),
)
@settings(deadline=None)
def test_levels_are_equal(compiled, seed, shape, most):
    images = Dice(seed).bits("pixels", count=int(np.prod(shape))).astype(np.uint8).reshape(shape)
    gains, offsets = longs("gains", shape[:2], most, seed), longs("offsets", shape[:2], most << 8, seed)

    made = [kernels.levelled(images, gains, offsets) for kernels in (NUMPY, compiled)]

    np.testing.assert_array_equal(*made)


@given(seed=SEEDS, n=st.integers(0, 4), size=st.integers(1, 20), factor=st.integers(0, 1 << 20))
@settings(deadline=None)
def test_noise_is_equal(compiled, seed, n, size, factor):
    images = Dice(seed).bits("pixels", count=n * size).astype(np.uint8).reshape(n, size)
    words = Dice(seed).bits("words", count=n * (size + 1) // 2 * 2)[: n * ((size + 1) // 2)]
    words = words.reshape(n, (size + 1) // 2)

    np.testing.assert_array_equal(compiled.noisy(images, words, factor), NUMPY.noisy(images, words, factor))


def test_no_images_make_a_kernel_be_compiled_once_more(compiled):
    from adam_async.data_server.transforms import kernels

    steps = [
        {"kind": "flip"},
        {"kind": "elastic", "pixels": 2},
        {"kind": "noise", "levels": 3},
        {"kind": "normalise"},
    ]
    whole = np.zeros((4, 1, 6, 7), np.uint8)
    read_only = whole.copy()
    read_only.setflags(write=False)
    for order in (steps, steps[::-1], [steps[1]]):
        for images in (whole, read_only, whole[::2], whole[:1], whole.transpose(0, 1, 3, 2)):
            recipe = Recipe.of(order, images.shape[1:], kernels="numba")
            recipe.apply(images, np.arange(len(images), dtype=np.int32), dice=Dice(1), epoch=1)

    for kernel in (kernels.philox, kernels.displaced, kernels.resample, kernels.levelled, kernels.noisy):
        assert len(kernel.signatures) == 1


EMPTY = (
    "import asyncio, sys; from adam_async.data_server import group_producer as producer\n"
    "from adam_async.data_server.transforms.pipeline import first_kernels\n"
    "from adam_async.runtime.child_process import run_module\n"
    "print(first_kernels('auto'), asyncio.run(run_module((producer.MODULE,), within_s=300)))\n"
    "print(first_kernels('auto'), first_kernels('numpy'), first_kernels('numba'))"
)


@pytest.mark.slow
def test_with_an_empty_cache_a_run_begins_with_numpys_kernels_and_a_child_compiles_the_others(tmp_path):
    pytest.importorskip("numba")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", EMPTY], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines() == [
        "('numpy', True) None",
        "('numba', False) ('numpy', False) ('numba', False)",
    ]


def test_a_disk_that_keeps_nothing_gets_no_child(compiled, monkeypatch, tmp_path):
    from adam_async.model.fast import memory

    (tmp_path / "file").touch()
    monkeypatch.setattr(memory, "CACHE", KernelCache(str(tmp_path / "file" / "below")))
    assert first_kernels("auto") == ("numba", False)
