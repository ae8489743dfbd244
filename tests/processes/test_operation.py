"""`status`, `logs`, `scale` and `stop` from another shell, against a training in processes."""

import json
import re
import signal

import pytest

from tests.processes.commands import RUN_S, Command, children_of, watched

pytestmark = pytest.mark.processes

TOKEN = {"ADAM_TOKEN": "a token that nobody guesses"}
INTERRUPTED = 130
"""Exit code after Ctrl-C."""

TRAIN = (
    "train",
    "--data",
    "digits",
    "--processes",
    "--servers",
    "2",
    "--replicas",
    "2",
    "--epochs",
    "100000",
)


def asked(*words: str, environment: dict[str, str] = TOKEN) -> tuple[int, str]:
    """Run a command with the token of the cluster; returns its exit code and its output."""
    with Command(*words, environment=environment) as command:
        code = command.finish(seconds=RUN_S)
    return code, command.output


@pytest.mark.timeout(180)
def test_another_shell_sees_scales_and_ends_a_run() -> None:
    with Command(*TRAIN, environment=TOKEN) as train:
        where = re.search(r"status --controller (\S+)", train.wait_for("status --controller"))
        assert where is not None
        there = ("--controller", where[1])
        train.wait_for("epoch 1/100000")
        children = list(children_of(train.pid))
        with watched(children) as all_end:
            code, text = asked("status", *there, "--json")
            status = json.loads(text)
            assert (code, status["run"]["epochs"]) == (0, 100000)
            assert status["run"]["phase"] in ("training", "between")
            workers = {role["node"]: role for role in status["roles"] if role["role"] == "worker"}
            assert set(workers) == {"worker-0", "worker-1"}
            assert all(worker["pid"] in children for worker in workers.values())
            assert all(role["age_s"] > 0 for role in status["roles"] if role["role"] != "driver")

            with Command("status", "--watch", *there, environment=TOKEN) as watch:
                watch.wait_for("2 live, 2 taking part")
                assert asked("scale", "3", *there) == (0, "3 workers: started worker-2\n")
                watch.wait_for("3 live, 3 taking part")
                assert re.match(r"worker-2 +replica 2", watch.wait_for("worker-2 ")), watch.output
                watch.signal(signal.SIGINT)
                watch.ends(INTERRUPTED)
            code, text = asked("status", *there)
            assert code == 0
            assert re.search(r"worker-2 +replica 2", text), text
            assert re.search(r"epoch \d+ of 100000, .* test accuracy [\d.]+%", text.splitlines()[0]), text
            assert text.splitlines()[1] == "well", text
            assert asked("status", "--check", *there)[0] == 0
            assert asked("scale", "1", *there) == (0, "1 worker: ended worker-1, worker-2\n")
            train.wait_for("worker-2 left")
            code, text = asked("scale", "1000", *there)
            assert (code, "scale in steps" in text) == (2, True), text
            code, text = asked("scale", "0", *there)
            assert (code, "0 workers are too few" in text) == (2, True), text

            code, text = asked("logs", "ps-7", *there)
            assert (code, "'ps-7' is no role of this cluster" in text) == (2, True), text
            code, text = asked("logs", "ps-0", *there)
            assert (code, bool(text.strip())) == (0, True)  # its lines, or the line that there are none

            code, text = asked("stop", *there, environment={"ADAM_TOKEN": "another token, quite long"})
            assert code != 0, text
            code, text = asked("stop", *there)
            assert (code, "ends after the groups in flight" in text) == (0, True), text
            assert train.finish(seconds=RUN_S) == 0, train.output
            all_end(RUN_S)
    # The request may arrive between two epochs, so the end alone is the same in every run.
    assert re.search(r"test accuracy [\d.]+% after \d+ epochs", train.output), train.output
    assert "driver-" not in train.output  # operators are no event of the run
