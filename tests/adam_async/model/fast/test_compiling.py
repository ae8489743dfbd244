"""Kernels compiled by one process are ready for the next, and are compiled one process after the other."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize("change", ["folder", "time"])
def test_kernels_of_other_files_with_the_same_text_do_not_count_as_compiled(tmp_path, change):
    root, copy = Path(program.__file__).parents[3], tmp_path / "copy"
    for package in ("adam_async", "dataflow", "transport"):
        shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    other = environment(tmp_path / "cache") | {"PYTHONPATH": str(copy)}
    command = [sys.executable, "-P", "-m", "adam_async.model.fast.compiling", "float64", CLEAR]
    subprocess.run(command, check=True, env=other, cwd=tmp_path)

    def ready(environment):
        ask = [sys.executable, "-P", "-c", ASK]
        ran = subprocess.run(ask, check=True, env=environment, capture_output=True, text=True, cwd=tmp_path)
        return ran.stdout.split()[0]

    assert ready(other) == "True"
    if change == "time":
        os.utime(copy / "adam_async/model/fast/curves.py", (1, 1))
    else:
        other = environment(tmp_path / "cache") | {"PYTHONPATH": str(root)}
    assert ready(other) == "False"


READ = (
    "import numpy as np; from adam_async.model.fast import memory, program\n"
    "try:\n"
    f"    with memory.only_read(): program.compile_kernels([{CLEAR}], np.dtype('float64'))\n"
    "except memory.NotOnDiskError: print('missing')\n"
) + ASK


@pytest.mark.parametrize("left", [None, b""], ids=["removed", "damaged"])
def test_reading_compiles_nothing_and_removes_the_marks_of_lost_kernels(tmp_path, left):
    command = [sys.executable, "-m", "adam_async.model.fast.compiling", "float64", CLEAR]
    subprocess.run(command, check=True, env=environment(tmp_path))
    (index,) = tmp_path.glob("*/curves.clear-*.nbi")
    index.unlink() if left is None else index.write_bytes(left)
    ran = subprocess.run(
        [sys.executable, "-c", READ], check=True, env=environment(tmp_path), capture_output=True, text=True
    )
    assert ran.stdout.split() == ["missing", "False", "False"]
    assert not any(tmp_path.glob("*/*.nbi"))


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
