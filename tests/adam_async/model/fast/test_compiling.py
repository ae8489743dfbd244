"""Kernels compiled by one process are ready for the next, and are compiled one process after the other."""

import fcntl
import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async.model.fast import program

CLEAR = str(program.CLEAR)
ASK = (
    "import numpy as np; from adam_async.model.fast import program; "
    f"print(program.are_ready([{CLEAR}], np.dtype('float64')), program.are_ready([0], np.dtype('float64')))"
)


def environment(folder):
    return {**os.environ, "NUMBA_CACHE_DIR": str(folder)}


def test_kernels_that_a_process_compiles_are_ready_for_the_next_and_no_others(tmp_path):
    command = [sys.executable, "-m", "adam_async.model.fast.compiling", "float64", CLEAR]
    subprocess.run(command, check=True, env=environment(tmp_path))
    asked = subprocess.run(
        [sys.executable, "-c", ASK], check=True, env=environment(tmp_path), capture_output=True, text=True
    )
    assert asked.stdout.split() == ["True", "False"]


def test_a_process_waits_for_another_that_compiles_into_the_folder(tmp_path):
    command = [sys.executable, "-m", "adam_async.model.fast.compiling", "float64", CLEAR]
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, env=environment(tmp_path)) as child:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=3)
            assert not (tmp_path / "compiled").exists()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert child.wait(timeout=60) == 0
    assert any((tmp_path / "compiled").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_without_a_writable_cache_each_process_compiles_for_itself(tmp_path):
    tmp_path.chmod(0o500)
    command = [sys.executable, "-m", "adam_async.model.fast.compiling", "float64", CLEAR]
    assert subprocess.run(command, env=environment(tmp_path)).returncode == 0
