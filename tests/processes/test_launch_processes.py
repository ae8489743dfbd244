"""The file of options of the launchers trains in child processes, too."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, RUN_S, Command, children_of, watched

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_a_run_in_processes_outlives_a_worker_and_a_server_and_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_text(ADAM_TOML)
    copies = ("--controllers", "3", "--copies", "2", "--min-in-sync", "1")
    with Command("train", "--config", str(file), "--processes", "--epochs", "60", *copies) as command:
        command.wait_for("epoch 1/60")
        with watched(list(children_of(command.pid))) as all_end:
            os.kill(command.child("worker-0"), signal.SIGKILL)
            command.wait_for("worker-0 died: killed by signal 9; starting it again")
            os.kill(command.child("ps-1"), signal.SIGKILL)
            command.wait_for("ps-1 came back as a new incarnation")
            command.ends(0, seconds=RUN_S)
            all_end(PATIENCE_S)

    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", command.output), command.output
