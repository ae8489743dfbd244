"""The folder of compiled kernels belongs to the user and to one text of the kernels."""

import os
import subprocess
import sys

import pytest

from adam_async.runtime import kernel_cache as cache
from adam_async.runtime.kernel_cache import KernelCache, kernel_cache_folder, use_kernel_cache


def test_the_folder_lies_in_the_users_cache():
    assert kernel_cache_folder({"XDG_CACHE_HOME": "/caches"}).parent.as_posix() == "/caches/adam-async"
    assert kernel_cache_folder({}).is_absolute()


def test_a_changed_kernel_has_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "KERNELS", tmp_path)
    (tmp_path / "a.py").write_text("one")
    first = kernel_cache_folder({})
    assert kernel_cache_folder({}) == first

    (tmp_path / "a.py").write_text("two")
    assert kernel_cache_folder({}) != first


def test_folders_chosen_by_the_user_stay():
    chosen, left_open = {"NUMBA_CACHE_DIR": "/mine"}, {"XDG_CACHE_HOME": "/caches"}
    use_kernel_cache(chosen)
    use_kernel_cache(left_open)

    assert chosen["NUMBA_CACHE_DIR"] == "/mine"
    assert left_open["NUMBA_CACHE_DIR"] == str(kernel_cache_folder(left_open))


def test_forced_registers_have_a_folder_and_a_processor_of_their_own():
    forced, free = {"ADAM_VECTORS": "avx2"}, {"ADAM_VECTORS": ""}
    use_kernel_cache(forced)
    use_kernel_cache(free)

    assert forced["NUMBA_CPU_NAME"] == "x86-64-v3"
    assert "avx512" not in forced["NUMBA_CPU_FEATURES"]
    assert forced["NUMBA_CACHE_DIR"] != free["NUMBA_CACHE_DIR"]
    assert free.keys() == {"ADAM_VECTORS", "NUMBA_CACHE_DIR"}


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["use_kernel_cache()", "pass"], ids=["chosen", "embedded"])
def test_kernels_are_kept_there_whoever_owns_the_process(tmp_path, owner):
    pytest.importorskip("numba", reason="compiled kernels need numba")
    code = (
        f"import os; from adam_async.runtime.kernel_cache import use_kernel_cache; {owner}; "
        "import numpy as np; from adam_async.model.fast.memory import largest; "
        "x = np.ones(3); assert largest(x.ctypes.data, 3, np.float64(0)) == 1"
    )
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment | {"XDG_CACHE_HOME": str(tmp_path)}
    )

    (folder,) = tmp_path.glob("adam-async/kernels-*")
    assert any(folder.glob("*/*.nbi"))


def test_a_kernel_is_there_when_any_process_has_noted_it(tmp_path):
    cache = KernelCache(str(tmp_path / "new"))
    assert not cache.has("relu-float32")
    cache.note("relu-float32")

    assert KernelCache(str(tmp_path / "new")).has("relu-float32")
    assert not cache.has("relu-float64")


def test_where_nothing_can_be_written_there_is_nothing_and_no_turn_to_wait_for(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache = KernelCache(str(tmp_path / "file"))
    cache.note("relu-float32")
    with cache.turn(), cache.turn():
        assert not cache.has("relu-float32")


@pytest.mark.parametrize("closed", ["folder", "subfolder"])
def test_where_nothing_can_be_written_kernels_are_compiled_in_memory_with_a_word(tmp_path, closed):
    pytest.importorskip("numba", reason="compiled kernels need numba")
    folder = tmp_path / "kernels"
    if closed == "folder":
        folder.write_text("a file")
    else:
        (folder / "compiled").mkdir(parents=True)
    code = (
        "import os; access = os.access; "
        f"no = {str(folder / 'compiled')!r}; "
        "os.access = lambda path, mode: os.fspath(path) != no and access(path, mode); "
        "from adam_async.model.fast.memory import CACHE, exact, largest; "
        "exact(lambda: 0); print(largest.stats.cache_path, CACHE.has('any'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
    )

    assert ran.stdout == "None False\n"  # numba's own second choice is a folder beside the source
    assert ran.stderr.count(f"compiled kernels cannot be kept in {folder}") == 1


OWN_KERNEL = """
from numba import float64
from adam_async.model.fast.memory import CACHE, compile_kept, exact

@exact
def twice(number):
    return number + number

compile_kept(lambda: twice.compile((float64,)))
CACHE.note("twice")
print(twice(21.0), twice.stats.cache_hits and True)
"""


def test_a_damaged_file_of_the_cache_is_replaced_with_a_word(tmp_path):
    pytest.importorskip("numba", reason="compiled kernels need numba")
    program, folder = tmp_path / "own_kernel.py", tmp_path / "kernels"
    program.write_text(OWN_KERNEL)

    def ran():
        return subprocess.run(
            [sys.executable, program],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    assert ran().stdout.split()[0] == "42.0"
    (index,) = folder.glob("*/own_kernel.twice-*.nbi")
    for left in (b"", b"no index"):
        index.write_bytes(left)
        repaired = ran()
        assert repaired.stdout.split()[0] == "42.0"
        assert repaired.stderr.count(f"the kernels in {folder} are damaged") == 1
    after = ran()
    assert after.stdout.split() == ["42.0", "True"]
    assert after.stderr == ""
