"""The command `simulate` as a process: its children end with it."""

import os
import signal

import pytest

from tests.processes.commands import PATIENCE_S, Command, children_of, until, watched

pytestmark = pytest.mark.processes


def in_their_sessions(pid: int) -> list[int]:
    """Return the children that have left the process group of their parent: a Ctrl-C is for the parent."""
    return [child for child in children_of(pid) if os.getsid(child) == child]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_children_of_a_simulation_end_with_it(number: int) -> None:
    with Command("simulate", "--scenario", "members", "--seeds", "0..99", "--jobs", "2") as command:
        until(lambda: len(in_their_sessions(command.pid)) == 2, "two children")
        with watched(in_their_sessions(command.pid)) as all_end:
            command.signal(number)
            assert command.finish() == (-number if number == signal.SIGKILL else 128 + number)
            all_end(PATIENCE_S)
