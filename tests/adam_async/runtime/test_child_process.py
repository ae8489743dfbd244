"""What a parent reads from its children."""

import os
import sysconfig
from pathlib import Path

import pytest

from adam_async.errors import RoleDied
from adam_async.runtime.child_process import (
    ChildProcess,
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


def child_of(program: str, folder: Path, *arguments: str, said: list[str]) -> ChildProcess:
    """A child that runs a program of the test in place of the package's command."""
    (folder / "adam_async").mkdir()
    (folder / "adam_async" / "__init__.py").touch()
    (folder / "adam_async" / "__main__.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return ChildProcess("ps-0", arguments, orders=b"{}\n", environment=environment, say=said.append)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_megabyte_without_a_newline_ends_no_child(stream: str, tmp_path: Path) -> None:
    said: list[str] = []
    child = child_of(PROGRESS_BAR, tmp_path, stream, said=said)

    assert await child.run() == 2

    assert await child.address == "tcp://127.0.0.1:7"
    assert said[-3:] == ["ps-0 |  99 %", "ps-0 | 100 %", "ps-0 | no room"]
    assert all(len(line) < 9000 for line in said)


async def test_the_last_words_of_a_child_are_its_error_whatever_it_drew_before(tmp_path: Path) -> None:
    program = "import sys\nsys.stderr.write('.' * 200000 + '\\radam-async: no room\\n\\n')\nsys.exit(2)"
    child = child_of(program, tmp_path, said=[])

    await child.run()

    with pytest.raises(RoleDied, match="no room"):
        await child.address


async def test_no_child_imports_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    child = child_of("import msgspec, sys; print(msgspec.__file__, file=sys.stderr)", tmp_path, said=said)
    here = tmp_path / "here"
    here.mkdir()
    (here / "msgspec.py").write_text("")
    monkeypatch.chdir(here)

    assert await child.run() == 0

    assert len(said) == 1
    assert str(here) not in said[0]


def test_a_child_finds_packages_that_are_not_installed_after_those_that_are_named() -> None:
    assert child_environment({"A": "b"}, "/src") == {"A": "b", "PYTHONPATH": "/src"}
    assert child_environment({"PYTHONPATH": "/mine"}, "/src") == {"PYTHONPATH": f"/mine{os.pathsep}/src"}
    assert child_environment({"PYTHONPATH": "/src"}, "/src") == {"PYTHONPATH": "/src"}
    installed = sysconfig.get_path("purelib")
    assert child_environment({}, installed) == {}


def test_a_role_line_tells_the_address_to_people_and_parents() -> None:
    line = address_line("ps-0", "tcp://[::1]:70", "adam-async data --controller tcp://[::1]:71")

    assert line == (
        "ps-0 listens on tcp://[::1]:70; join it with: adam-async data --controller tcp://[::1]:71"
    )
    assert address_in(line) == "tcp://[::1]:70"


def test_a_role_that_nobody_can_join_says_no_more_than_where_it_is() -> None:
    line = address_line("controller-1", "tcp://127.0.0.1:70", "")

    assert line == "controller-1 listens on tcp://127.0.0.1:70"
    assert address_in(line) == "tcp://127.0.0.1:70"


def test_other_lines_hold_no_address() -> None:
    assert address_in("worker-0 is here") == ""


def test_how_a_child_ended_is_said_in_words() -> None:
    assert how_it_ended(-9) == "killed by signal 9"
    assert how_it_ended(5) == "ended with exit code 5"
