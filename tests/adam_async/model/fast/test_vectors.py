"""The registers of a machine decide the shapes of tiles, and a user may force narrower ones."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

import llvmlite.binding

from adam_async.errors import ConfigError
from adam_async.model.fast.vectors import FEWEST, SETS, registers_of

AVX512 = {"avx2": True, "avx512f": True}


@pytest.mark.parametrize(
    ("name", "tile_rows", "dot_rows"), [("avx512", 12, 5), ("avx2", 6, 3), ("neon", 12, 4)]
)
def test_shapes_fit_into_the_registers(name, tile_rows, dot_rows):
    assert (SETS[name].tile_rows, SETS[name].dot_rows) == (tile_rows, dot_rows)


@pytest.mark.parametrize(
    ("features", "registers"),
    [
        (AVX512, SETS["avx512"]),
        ({"avx2": True, "avx512f": False}, SETS["avx2"]),
        ({"neon": True}, SETS["neon"]),
        ({"sse2": True}, FEWEST),
        ({}, FEWEST),
    ],
)
def test_the_widest_registers_are_chosen(features, registers):
    assert registers_of(features) == registers


def test_narrower_registers_can_be_forced():
    assert registers_of(AVX512, "avx2") == SETS["avx2"]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("neon", "ADAM_VECTORS=neon: this processor does not have them; choose from avx512, avx2, auto"),
        ("avx3", "ADAM_VECTORS=avx3: unknown name; choose from avx512, avx2, auto"),
    ],
)
def test_registers_that_are_not_there_are_refused(wanted, why):
    with pytest.raises(ConfigError) as refused:
        registers_of(AVX512, wanted)
    assert str(refused.value) == why


@pytest.mark.thorough
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", SETS)
def test_kernels_are_right_with_each_kind_of_registers(name):
    """The tests of all compiled layers and networks, in a process that is forced to use them.

    All other tests use the registers that this process chose.
    """
    features = llvmlite.binding.get_host_cpu_features()
    try:
        registers_of(features, name)
    except ConfigError as absent:
        pytest.skip(str(absent))
    if registers_of(features, os.environ.get("ADAM_VECTORS", "auto")) == SETS[name]:
        pytest.skip(f"all other tests use {name}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [f"tests/adam_async/model/fast/test_{part}.py" for part in ("layers", "networks", "curves")]
    found = subprocess.run(
        [*command, *tests],
        env={**os.environ, "ADAM_VECTORS": name, "NUMBA_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    assert " passed" in found.stdout
