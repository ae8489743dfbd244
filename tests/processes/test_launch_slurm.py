"""Slurm on two node names: a job trains, outlives a worker and a node, and returns into the queue."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, command_line, run, until, watched
from tests.processes.slurm_cluster import SlurmCluster, SlurmJob, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

COPIES = ("--controllers", "3", "--copies", "2", "--min-in-sync", "1")
MNIST = os.environ.get("ADAM_DATA_DIR", "")
TWO = ("--nodes", "2", "--cpus", "1")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    (tmp_path / "adam.toml").write_text(ADAM_TOML)
    with SlurmCluster(tmp_path, "n1", "n2") as cluster:
        yield cluster


def outlive_a_worker_and_a_node(slurm: SlurmCluster, *words: str, seconds: float) -> str:
    """Kill a worker after the first epoch, then the node without the driver; returns the output."""
    job = SlurmJob(slurm, "adam.toml", *TWO, *words, *COPIES)
    job.wait_for("epoch 1/")
    roles = job.roles()
    nodes = [f"controller-{number}" for number in (1, 2, 3)]
    assert sorted(roles) == [*nodes, "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    assert {name for name, _ in roles.values()} == {"n1", "n2"}
    with watched([pid for _, pid in roles.values()]) as all_end:
        os.kill(next(pid for node, (name, pid) in roles.items() if "worker" in node and name == "n1"), 9)
        job.wait_for("died: killed by signal 9; starting it again")
        slurm.kill("n2")
        job.wait_for("died: its node n2 is lost")
        job.wait_for("came back as a new incarnation")
        job.wait_for_state("COMPLETED", seconds=seconds)
        all_end(PATIENCE_S)
    assert job.roles() == {}
    assert "Traceback" not in job.output
    return job.output


def test_a_job_outlives_a_worker_and_a_node_and_leaves_no_process(slurm: SlurmCluster) -> None:
    output = outlive_a_worker_and_a_node(slurm, "--epochs", "60", seconds=120)

    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", output), output


@pytest.mark.convergence
@pytest.mark.timeout(600)
@pytest.mark.skipif(not MNIST, reason="ADAM_DATA_DIR names no folder with MNIST")
def test_mnist_outlives_a_worker_and_a_node(slurm: SlurmCluster) -> None:
    output = outlive_a_worker_and_a_node(slurm, "--data", "mnist", "--epochs", "6", seconds=500)

    accuracy = re.search(r"test accuracy (\d+\.\d+)% after 6 epochs", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 98.5


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
    assert "exec " in script
    assert "token" not in script
    newest = slurm.folder / "kept/latest"
    until(newest.exists, "the first checkpoint")
    with watched([pid for _, pid in roles.values()]) as all_end:
        before = newest.read_text()
        slurm.run("scancel", "--signal=TERM", "--batch", job.number)
        # The driver asks for the return, and Slurm may kill it before it prints the answer.
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
def test_a_job_that_loses_its_first_node_returns_into_the_queue_and_continues(slurm: SlurmCluster) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "200", "--checkpoint", "kept")
    job.wait_for("epoch 2/200")
    until((slurm.folder / "kept/latest").exists, "the first checkpoint")
    left = [pid for pid in slurm.processes("n2") if pid != slurm.daemons["n2"].pid]
    with watched(left) as all_end:
        slurm.kill("n1")
        # The agent ends once Slurm counts the node as lost. Constant questions would delay Slurm.
        all_end(120)
    job.wait_for_state("PENDING")
    assert job.roles() == {}
    slurm.revive("n1")
    job.start_now()
    job.wait_for("restart 1: the run continues from checkpoint-")
    job.wait_for("resumed from checkpoint-")
    job.wait_for("% after 200 epochs", seconds=150)
    job.wait_for_state("COMPLETED")


def test_a_job_whose_driver_is_killed_fails_and_leaves_no_process(slurm: SlurmCluster) -> None:
    job = SlurmJob(slurm, "adam.toml", *TWO, "--epochs", "100000", "--checkpoint", "kept")
    job.wait_for("epoch 2/")
    daemons = {daemon.pid for daemon in slurm.daemons.values()}
    tasks = {pid for name in slurm.names for pid in slurm.processes(name)} - daemons
    driver = next(pid for pid in tasks if " launch slurm " in command_line(pid))
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


def test_a_node_that_cannot_run_the_package_is_named_and_nothing_is_left(slurm: SlurmCluster) -> None:
    # A step with its own programs: the agent of the second node cannot start.
    blocked = slurm.folder / "bin"
    blocked.mkdir()
    (blocked / "srun").write_text(
        '#!/bin/bash\\nexec /usr/bin/srun --nodes=1 --ntasks=1 "${@:5}"\\n'.replace("\\n", "\n")
    )
    (blocked / "srun").chmod(0o755)
    slurm.environment["PATH"] = f"{blocked}:{slurm.environment['PATH']}"
    job = SlurmJob(slurm, "adam.toml", *TWO, "--wait", "10s")
    job.wait_for("waited 10 s for the agents of n2; n1 arrived; the lines of srun above have the reason")
    job.wait_for_state("FAILED")
    until(lambda: len(slurm.processes("n1")) == 1, "the end of all tasks")


def test_a_folder_that_a_node_lacks_is_named_with_the_remedy(slurm: SlurmCluster) -> None:
    # srun starts the agents in a folder that only the first node would have.
    blocked = slurm.folder / "bin"
    blocked.mkdir()
    (blocked / "srun").write_text('#!/bin/bash\nexec /usr/bin/srun --chdir=/ "$@"\n')
    (blocked / "srun").chmod(0o755)
    slurm.environment["PATH"] = f"{blocked}:{slurm.environment['PATH']}"
    job = SlurmJob(slurm, "adam.toml", *TWO)
    job.wait_for(f"works in /, and the driver in {slurm.folder}, which that machine lacks: submit from a")
    job.wait_for_state("FAILED")
    until(lambda: len(slurm.processes("n1")) == 1, "the end of all tasks")


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
    # Room for all roles and the agent on one node, after the loss of the other.
    memory = 100 + 2 * 200 + 150 + 2 * 300 + 250 + 256
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


def test_a_machine_without_slurm_prints_the_script_and_names_what_is_missing(tmp_path: Path) -> None:
    nowhere = {"PATH": "/nowhere"}
    code, output = run("launch", "slurm", "--nodes", "2", "--job-name", "mine", environment=nowhere)
    assert code == 0, output
    assert "#SBATCH --nodes=2\n" in output
    assert output.splitlines()[-1].endswith(" launch slurm --nodes 2 --job-name mine --here")
    code, output = run("launch", "slurm", "--submit", environment=nowhere)
    assert code == 2, output
    assert "sbatch is not on PATH: run this command on a login node" in output
    code, output = run("launch", "slurm", "--here", environment=nowhere)
    assert code == 2, output
    assert "--here is for a process within a Slurm job" in output
