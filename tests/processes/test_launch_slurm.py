"""Slurm on two node names: a job trains, outlives a worker, and returns into the queue."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, command_line, until, watched
from tests.processes.slurm_cluster import SlurmCluster, SlurmJob, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

TWO = ("--nodes", "2", "--cpus", "1")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    (tmp_path / "adam.toml").write_text(ADAM_TOML)
    with SlurmCluster(tmp_path, "n1", "n2") as cluster:
        yield cluster


def test_a_job_trains_restarts_a_lost_worker_and_leaves_no_process(slurm: SlurmCluster) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "60")
    job.wait_for("epoch 1/")
    roles = job.roles()
    assert sorted(roles) == ["controller", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    assert {name for name, _ in roles.values()} == {"n1", "n2"}
    with watched([pid for _, pid in roles.values()]) as all_end:
        os.kill(roles["worker-1"][1], signal.SIGKILL)
        job.wait_for("worker-1 died: killed by signal 9; starting it again")
        job.wait_for_state("COMPLETED", seconds=120)
        all_end(PATIENCE_S)
    assert job.roles() == {}
    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", job.output), job.output
    assert "Traceback" not in job.output


@pytest.mark.timeout(300)
def test_a_signalled_job_returns_into_the_queue_and_continues_from_its_checkpoint(
    slurm: SlurmCluster,
) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "200", "--checkpoint", "kept")
    job.wait_for("epoch 2/200")
    roles = job.roles()
    for _, pid in roles.values():
        assert "adam-async-keys" not in command_line(pid)
        assert b"adam-async-keys" not in Path(f"/proc/{pid}/environ").read_bytes()
    script = slurm.run("scontrol", "write", "batch_script", job.number, "-")
    assert "export ADAM_TOKEN=$(" in script
    newest = slurm.folder / "kept/latest"
    until(newest.exists, "the first checkpoint")
    with watched([pid for _, pid in roles.values()]) as all_end:
        before = newest.read_text()
        slurm.run("scancel", "--signal=TERM", job.number)
        job.wait_for_state("PENDING")
        all_end(PATIENCE_S)
    assert "SIGTERM: the run stops after the groups in flight, with a checkpoint" in job.output
    assert "no checkpoint was taken" not in job.output
    assert newest.read_text() > before
    job.start_now()
    job.wait_for("restart 1: the run continues from checkpoint-")
    job.wait_for("resumed from checkpoint-")
    job.wait_for("% after 200 epochs", seconds=150)
    job.wait_for_state("COMPLETED")


@pytest.mark.timeout(300)
def test_a_job_that_loses_a_node_returns_into_the_queue_and_continues(slurm: SlurmCluster) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "200", "--checkpoint", "kept")
    job.wait_for("epoch 2/200")
    until((slurm.folder / "kept/latest").exists, "the first checkpoint")
    slurm.kill("n2")
    job.wait_for_state("PENDING", seconds=120)
    until(lambda: job.roles() == {}, "the end of all roles")
    slurm.revive("n2")
    job.start_now()
    job.wait_for("restart 1: the run continues from checkpoint-")
    job.wait_for("% after 200 epochs", seconds=150)
    job.wait_for_state("COMPLETED")


def test_a_job_whose_driver_is_killed_fails_and_leaves_no_process(slurm: SlurmCluster) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "100000", "--checkpoint", "kept")
    job.wait_for("epoch 2/")
    daemons = {daemon.pid for daemon in slurm.daemons.values()}
    tasks = {pid for name in slurm.names for pid in slurm.processes(name)} - daemons
    ranks = [pid for pid in tasks if " launch slurm " in command_line(pid)]
    driver = next(pid for pid in ranks if b"\0SLURM_PROCID=0\0" in Path(f"/proc/{pid}/environ").read_bytes())
    with watched([*tasks]) as all_end:
        os.kill(driver, signal.SIGKILL)
        job.wait_for_state("FAILED")
        all_end(PATIENCE_S)


def test_a_cancelled_job_ends_in_order_and_does_not_return(slurm: SlurmCluster) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "100000", "--checkpoint", "kept")
    job.wait_for("epoch 2/")
    daemons = {daemon.pid for daemon in slurm.daemons.values()}
    tasks = {pid for name in slurm.names for pid in slurm.processes(name)} - daemons
    with watched([*tasks]) as all_end:
        slurm.run("scancel", job.number)
        job.wait_for("SIGTERM: the run stops")
        all_end(PATIENCE_S)
    job.wait_for_state("CANCELLED")
    assert "goes back into the queue" not in job.output


def test_a_job_that_slurm_refuses_is_explained(slurm: SlurmCluster) -> None:
    done = slurm.launch("adam.toml", "--partition", "none", "--submit")

    assert done.returncode == 2, done.stderr
    assert "the job is not submitted: sbatch: error: " in done.stderr
    assert "Invalid partition name specified" in done.stderr
    done = slurm.launch("adam.toml", "--epochs", "-1", "--submit")
    assert done.returncode == 2, done.stderr
    assert "epochs" in done.stderr


def test_a_job_asks_slurm_for_the_memory_of_its_roles(slurm: SlurmCluster) -> None:
    sizes = ("controller=100M", "ps=200M", "data=150M", "worker=300M", "driver=250M")
    words = [word for size in sizes for word in ("--memory", size)]
    job = SlurmJob(slurm, "adam.toml", *TWO, *words, "--epochs", "2")
    memory = 256 + max(100 + 200 + 300 + 250, 200 + 150 + 300)
    assert slurm.run("squeue", "-h", "--states=all", "-o", "%m", "-j", job.number) == f"{memory}M"
    job.wait_for_state("COMPLETED")


def test_a_job_above_a_limit_of_its_cluster_is_explained(slurm: SlurmCluster) -> None:
    sizes = ("controller=1T", "ps=1T", "data=1T", "worker=1T", "driver=1T")
    done = slurm.launch("adam.toml", *(word for size in sizes for word in ("--memory", size)), "--submit")
    assert done.returncode == 2, done.stderr
    assert "the job is not submitted: sbatch: error: " in done.stderr
    assert "Requested node configuration is not available" in done.stderr
    done = slurm.launch("adam.toml", "--nodes", "3", "--submit")
    assert done.returncode == 2, done.stderr
    assert "the job is not submitted: sbatch: error: " in done.stderr
    assert slurm.run("squeue", "-h") == ""
