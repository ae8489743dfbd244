"""Copies that the benchmark of links counts."""

import shutil
from multiprocessing import resource_tracker

import pytest

from benchmarks.link import copies


@pytest.fixture(autouse=True, scope="module")
def pipe_of_processes_is_open() -> None:
    """Start the tracker of processes, whose pipe stays open: no test is the one that leaves it."""
    resource_tracker.ensure_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "by_processes", "by_kernel"),
    [("memory copy", 1, 0), ("ours", 0, 2), ("ours in shared memory", 1, 0), ("ours from a region", 0, 0)],
)
def test_a_link_copies_each_byte_as_often_as_its_kind_needs(kind, by_processes, by_kernel) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("counting copies needs gcc")
    row = copies(1 << 24, kind)
    assert row["processes"] == pytest.approx(by_processes, abs=0.05)
    assert row["kernel"] == pytest.approx(by_kernel, abs=0.05)
