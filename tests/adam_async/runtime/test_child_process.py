"""A parent starts children, reads their address or their error, and ends them."""

import asyncio
import errno
import os
import resource
import signal
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from adam_async.errors import DeadlineExceeded, RoleDied
from adam_async.runtime import child_process
from adam_async.runtime.child_process import ChildProcess, PeerProcess, child_environment, run_module
from tests.adam_async.runs import until

PROGRESS_BAR = """
import sys
stream = getattr(sys, sys.argv[1])
for _ in range(64):
    stream.write("." * (1 << 14))
stream.flush()
print("\\nps-0 listens on tcp://127.0.0.1:7", flush=True)
print("\\r 99 %\\r100 %\\rno room", file=sys.stderr, end="", flush=True)
sys.exit(2)
"""


def child_of(program: str, folder: Path, *arguments: str, printed: list[str]) -> ChildProcess:
    """A child that runs a program of the test in place of the package's command."""
    (folder / "adam_async").mkdir()
    (folder / "adam_async" / "__init__.py").touch()
    (folder / "adam_async" / "__main__.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return ChildProcess("ps-0", arguments, orders=b"{}\n", environment=environment, on_line=printed.append)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_megabyte_without_a_newline_ends_no_child(stream: str, tmp_path: Path) -> None:
    printed: list[str] = []
    child = child_of(PROGRESS_BAR, tmp_path, stream, printed=printed)

    assert await child.run() == 2

    assert await child.address == "tcp://127.0.0.1:7"
    assert printed[-3:] == ["ps-0 |  99 %", "ps-0 | 100 %", "ps-0 | no room"]
    assert all(len(line) < 9000 for line in printed)


async def test_the_last_line_of_a_child_is_its_error_even_after_a_progress_bar(tmp_path: Path) -> None:
    program = "import sys\nsys.stderr.write('.' * 200000 + '\\radam-async: no room\\n\\n')\nsys.exit(2)"
    child = child_of(program, tmp_path, printed=[])

    await child.run()

    with pytest.raises(RoleDied, match="no room"):
        await child.address


async def test_a_child_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    child = child_of(
        "import msgspec, sys; print(msgspec.__file__, file=sys.stderr)", tmp_path, printed=printed
    )
    here = tmp_path / "here"
    here.mkdir()
    (here / "msgspec.py").write_text("")
    monkeypatch.chdir(here)

    assert await child.run() == 0

    assert len(printed) == 1
    assert str(here) not in printed[0]


def test_a_child_finds_packages_of_a_checkout_behind_those_of_its_environment() -> None:
    assert child_environment({"A": "b"}, "/src") == {"A": "b", "PYTHONPATH": "/src"}
    assert child_environment({"PYTHONPATH": "/mine"}, "/src") == {"PYTHONPATH": f"/mine{os.pathsep}/src"}
    assert child_environment({"PYTHONPATH": "/src"}, "/src") == {"PYTHONPATH": "/src"}
    installed = sysconfig.get_path("purelib")
    assert child_environment({}, installed) == {}


async def test_a_frozen_child_does_nothing_until_it_wakes(tmp_path: Path) -> None:
    program = (
        "import sys\nprint('ps-0 listens on tcp://127.0.0.1:7', flush=True)\nsys.stdin.read()\nsys.exit(5)"
    )
    child = child_of(program, tmp_path, printed=[])
    async with asyncio.TaskGroup() as group:
        running = group.create_task(child.run())
        await child.address
        assert child.pid is not None
        child.freeze()
        options = os.WSTOPPED | os.WEXITED | os.WNOWAIT
        found = await asyncio.to_thread(os.waitid, os.P_PID, child.pid, options)
        child.end()

        assert found is not None
        assert found.si_status == signal.SIGSTOP
        assert not running.done()
        child.wake()

        assert await running == 5
    child.wake()  # which does nothing after the end


async def test_a_child_that_the_system_refuses_to_start_ends_its_role_only(tmp_path: Path) -> None:
    printed: list[str] = []
    child = ChildProcess(
        "ps-0", (), orders=b"{}\n", environment={}, on_line=printed.append, within=(str(tmp_path / "absent"),)
    )

    assert await child.run() == RoleDied.exit_code

    assert child.ended.is_set()
    assert printed == ["ps-0 | adam-async: the process cannot start: No such file or directory"]
    with pytest.raises(RoleDied, match="the process cannot start: No such file"):
        await child.address


async def test_a_child_without_a_free_descriptor_names_the_limit_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    printed: list[str] = []
    child = ChildProcess("ps-0", (), orders=b"{}\n", environment={}, on_line=printed.append)

    assert await child.run() == RoleDied.exit_code

    assert printed == [
        "ps-0 | adam-async: the process cannot start: Too many open files; raise the limit: ulimit -n 1024"
    ]


async def test_a_child_that_lacks_descriptors_for_its_start_does_not_reach_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached: list[str] = []

    async def refuse(*_arguments: Any, **_options: Any) -> None:
        reached.append("the loop")
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    monkeypatch.setattr(child_process, "SPARE", highest + 8)
    child = ChildProcess("ps-0", (), orders=b"{}\n", environment={}, on_line=lambda _line: None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
    try:
        assert await child.run() == RoleDied.exit_code
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not reached


async def test_a_child_ends_although_a_process_that_it_started_keeps_its_output_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "REST_S", 0.5)
    printed: list[str] = []
    program = (
        "import os, subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        "print(other.pid, file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    child = child_of(program, tmp_path, printed=printed)

    assert await child.run() == -signal.SIGKILL

    assert child.ended.is_set()
    other = int(printed[0].rpartition(" ")[2])
    await until(lambda: has_ended(other))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie of a parent that does not ask for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_the_cause_of_a_module_that_failed_is_its_last_line_also_after_much_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import sys\nfor _ in range(9000): print('a warning', file=sys.stderr)\nsys.exit('no room')\n"
    (tmp_path / "talkative.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="exit code 1, no room"):
        await run_module(("talkative",), within_s=60)


async def test_a_peer_is_killed_also_while_it_stands_still() -> None:
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    peer = PeerProcess(os.pidfd_open(child.pid))
    child.send_signal(signal.SIGSTOP)
    await peer.kill("its end", within_s=60)
    await peer.kill("its end", within_s=60)  # nothing is left to do
    peer.close()
    assert await child.wait() == -signal.SIGKILL


async def test_a_killed_peer_that_does_not_end_is_named_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    peer = PeerProcess(os.pidfd_open(child.pid))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: None)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the process of worker-1 to end"):
        await peer.kill("the process of worker-1 to end", within_s=0.01)
    peer.close()
    child.kill()
    await child.wait()
