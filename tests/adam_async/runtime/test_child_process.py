"""A parent reads the lines of its children in bounded memory, and finds their address or their error."""

import asyncio
import os
import signal
import sysconfig
from pathlib import Path

import pytest

from adam_async.errors import RoleDied
from adam_async.runtime.child_process import (
    LINE_BYTES,
    ChildProcess,
    LineSplitter,
    address_in,
    address_line,
    child_environment,
    how_it_ended,
)

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


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            "adam-async data --controller tcp://[::1]:71",
            "ps-0 listens on tcp://[::1]:70; join it with: adam-async data --controller tcp://[::1]:71",
        ),
        ("", "ps-0 listens on tcp://[::1]:70"),
    ],
)
def test_a_role_line_has_the_address_and_a_next_command_if_there_is_one(command: str, text: str) -> None:
    line = address_line("ps-0", "tcp://[::1]:70", command)

    assert line == text
    assert address_in(line) == "tcp://[::1]:70"


def test_other_lines_hold_no_address() -> None:
    assert address_in("worker-0 is here") == ""


def test_the_end_of_a_child_is_described_in_words() -> None:
    assert how_it_ended(-9) == "killed by signal 9"
    assert how_it_ended(5) == "ended with exit code 5"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_end_at_newlines_and_carriage_returns_however_the_bytes_arrive(size: int) -> None:
    data = "erste\nzweite Zeile ü\r\n\r 10 %\r 20 %\r\n\nohne Ende".encode()
    splitter = LineSplitter()

    lines = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]

    assert lines == ["erste", "zweite Zeile ü", " 10 %", " 20 %"]
    assert splitter.end() == ["ohne Ende"]
    assert splitter.end() == []


def test_a_long_line_keeps_its_beginning_and_its_end_in_bounded_memory() -> None:
    splitter = LineSplitter()
    splitter.feed(b"begun ")
    for _ in range(256):
        assert splitter.feed(b"." * 65536) == []
        assert len(splitter._kept) <= LINE_BYTES

    (line,) = splitter.feed(b" ps-0 listens on tcp://127.0.0.1:7\nnext")

    assert line.startswith("begun ....")
    assert line.endswith(".... ps-0 listens on tcp://127.0.0.1:7")
    assert " bytes left out] " in line
    assert len(line) < LINE_BYTES + 50
    assert splitter.end() == ["next"]


def test_a_line_of_the_largest_size_is_whole() -> None:
    assert LineSplitter().feed(b"x" * LINE_BYTES + b"\n") == ["x" * LINE_BYTES]


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
