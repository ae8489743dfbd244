"""Real commands for the tests: start one, wait for its output, read its children, send it signals.

A wait ends with its event: a line, or the end of a process. If the system reports no event, as for a process
that starts, `until` polls.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0
RUN_S = 120.0
"""Deadline of a whole command, in seconds: beside other programs a cluster of processes starts in 20 s."""

ADAM_TOML = """
data = "digits"
servers = 2
replicas = 2
threads = 1
"""
"""The file of options with which every launcher trains, and `train --processes`."""


def until(predicate: Callable[[], object], what: str, *, seconds: float = PATIENCE_S) -> None:
    """Poll until a condition is true."""
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        os.sched_yield()


def children_of(pid: int) -> dict[int, str]:
    """The children of a process, with their command lines."""
    try:
        pids = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return {}
    return {child: line for child in pids if (line := command_line(child))}


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if it has ended, or has not yet called exec."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return " ".join(words) if "adam_async" in words else ""


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants, also those that left its process group."""
    found = [pid]
    for one in found:
        try:
            tasks = list(Path(f"/proc/{one}/task").iterdir())
            found += [int(word) for task in tasks for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def kill_all(pids: list[int]) -> None:
    """Kill processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def roles_among(pids: Iterable[int]) -> dict[str, int]:
    """Return the process ids of the roles among some processes, by node id."""
    found = {pid: re.search(r"adam_async \w+ --id (\S+)", command_line(pid)) for pid in pids}
    return {match[1]: pid for pid, match in found.items() if match}


def accuracy_of(output: str) -> float:
    """Return the test accuracy at the end of a training, in percent."""
    found = re.search(r"test accuracy (\d+\.\d+)% after", output)
    assert found is not None, output
    return float(found[1])


def answers_signals(pid: int) -> bool:
    """Whether the process has its own handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@contextmanager
def watched(pids: Iterator[int] | list[int]) -> Iterator[Callable[[float], None]]:
    """Watch processes, also foreign ones; the yielded function fails unless all end within the seconds."""
    handles = {os.pidfd_open(pid): pid for pid in pids}

    def all_end(seconds: float) -> None:
        poll = select.poll()
        waiting = set(handles)
        for handle in handles:
            poll.register(handle, select.POLLIN)
        deadline = time.monotonic() + seconds
        while waiting:
            left = deadline - time.monotonic()
            assert left > 0, f"still there: {[command_line(handles[handle]) for handle in waiting]}"
            for handle, _ in poll.poll(left * 1000):
                poll.unregister(handle)
                waiting.discard(handle)

    try:
        yield all_end
    finally:
        for handle in handles:
            os.close(handle)


class Command:
    """``adam-async ...`` as a process; stdout and stderr come as one.

    `within` goes in front of the command line: what runs it, such as ``ip netns exec NAME``. `folder` is the
    working directory.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        within: tuple[str, ...] = (),
        folder: Path = ROOT,
    ) -> None:
        self._start([*within, sys.executable, "-m", "adam_async", *arguments], environment or {}, folder)

    @classmethod
    def of(cls, words: list[str], *, folder: Path) -> "Command":
        """Start any other command, which becomes a process of ``adam-async``."""
        command = cls.__new__(cls)
        command._start(words, {}, folder)
        return command

    def _start(self, words: list[str], environment: dict[str, str], folder: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ADAM_")}
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for(self, text: str) -> str:
        """Read on to the line that holds `text`, and return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return line.rstrip()
        raise AssertionError(f"{text!r} did not come:\n{self.output}")

    def finish(self, *, seconds: float = PATIENCE_S) -> int:
        """Wait for the end; returns the exit code, and `output` is whole."""
        rest, _ = self.process.communicate(timeout=seconds)
        self.output += rest
        return self.process.returncode

    def ends(self, code: int, *, seconds: float = PATIENCE_S) -> None:
        """Wait for the end, and check the exit code."""
        assert self.finish(seconds=seconds) == code, self.output

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def child(self, node: str) -> int:
        """Process id of a child by its node id."""
        words = f"--id {node} "
        return next(pid for pid, line in children_of(self.pid).items() if words in line)


def run(*arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """Run a command to its end, check its exit code, and return its output."""
    with Command(*arguments, environment=environment) as command:
        command.ends(code, seconds=RUN_S)
    return command.output


def address_of(role: Command) -> str:
    line = role.wait_for(" listens on ")
    return line.partition(" listens on ")[2].partition(";")[0]


def started_by_hand(stack: ExitStack) -> tuple[str, Callable[..., Command]]:
    """Start a controller; return its address, and a function that starts a role which joins it."""
    meet = address_of(stack.enter_context(Command("controller", "--bind", "tcp://127.0.0.1:0")))

    def start(*words: str) -> Command:
        role = stack.enter_context(Command(*words, meet))
        address_of(role)
        return role

    return meet, start
