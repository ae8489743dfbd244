"""The commands of Slurm get no secret of this process.

tests/processes/test_launch_slurm.py runs jobs on a real cluster of Slurm.
"""

import os
from pathlib import Path

import pytest

from adam_async.launch.slurm import SlurmJob, requeue

JOB = SlurmJob(id="7", nodes=("a", "b"), cpus="", restarts=0)


async def test_a_command_of_slurm_does_not_inherit_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, line in (("squeue", "echo RUNNING"), ("scontrol", "true")):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\nenv >> {tmp_path}/{name}.env\n{line}\n")
        command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ADAM_TOKEN", "a token that nobody guesses")
    environment = {**os.environ, "SLURM_CONF": "/etc/slurm.conf"}

    assert (await requeue(JOB, environment)).startswith("job 7 goes back into the queue")

    for name in ("squeue", "scontrol"):
        text = (tmp_path / f"{name}.env").read_text()
        assert "SLURM_CONF=/etc/slurm.conf" in text
        assert "ADAM_TOKEN" not in text
