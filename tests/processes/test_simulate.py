"""The command `simulate` as a process: a killed soak can be continued, and its children end with it."""

import signal
from pathlib import Path

import msgspec
import pytest

from adam_async.simulation.soak import Soak
from tests.processes.commands import PATIENCE_S, Command, children_of, run, until, watched

pytestmark = pytest.mark.processes


def done_in(file: Path) -> list[tuple[int, int]]:
    """Ranges of seeds that a soak's file has."""
    if not file.exists():
        return []
    progress = msgspec.json.decode(file.read_bytes(), type=Soak).progress
    return [seeds for part in progress for seeds in part.done]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_soak_that_was_ended_goes_on_where_it_stopped(tmp_path: Path, number: int) -> None:
    file = tmp_path / "soak.json"
    words = ("simulate", "--scenario", "members", "--soak", str(file), "--jobs", "2")

    with Command(*words) as command:
        until(lambda: done_in(file), "a first slice of seeds")
        with watched(list(children_of(command.pid))) as all_end:
            command.signal(number)
            assert command.finish() == (-number if number == signal.SIGKILL else 128 + number)
            all_end(PATIENCE_S)
    done = done_in(file)
    last = done[-1][1] + 1
    left = last + 1 - sum(end - first + 1 for first, end in done)
    code, output = run(*words, "--seeds", f"0..{last}")

    assert code == 0, output
    assert f"members: {left} seed" in output
    assert f"members: {last + 1} seeds done, {last + 1} count, 0 failed" in output
