"""The script of a Slurm job has its options, memory for its ranks, and a token that no file has."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adam_async.errors import ConfigError
from adam_async.launch.slurm import RANK_BYTES, SlurmSettings, check_rank, job_script, memory_of_node, submit
from adam_async.run.config import Config

G = 1 << 30
ALL = ("controller=1G", "ps=4G", "data=2G", "worker=3G", "driver=1G")
JOB = SlurmSettings(nodes=2, cpus=4, time="1:00:00", partition="main", job_name="adam")
PROGRAM = ("adam-async",)


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o700)


def run_script(folder: Path, script: str) -> "subprocess.CompletedProcess[str]":
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash"],
        input=script,
        cwd=folder,
        env={"PATH": path, "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
    )


def test_a_script_has_the_options_of_its_job_and_runs_its_command_in_each_rank(tmp_path: Path) -> None:
    script = job_script(JOB, 0, PROGRAM, ("launch", "slurm", "a b", "$HOME", "--here"))

    assert [line for line in script.splitlines() if "SBATCH" in line] == [
        "#SBATCH --job-name=adam",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition=main",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=adam-%j.out",
    ]
    program(tmp_path, "adam-async", 'echo "drawn by $*"')
    program(tmp_path, "srun", 'printf "<%s>" "$ADAM_TOKEN" "$@"; exit 4')
    done = run_script(tmp_path, script)
    assert done.returncode == 4, done.stderr
    options = "<--no-kill><--kill-on-bad-exit=0><--cpus-per-task=4>"
    command = "<adam-async><launch><slurm><a b><$HOME><--here>"
    assert done.stdout == f"<drawn by token new>{options}{command}"


@pytest.mark.parametrize(
    ("code", "state", "newest", "returns"),
    [
        (143, "RUNNING", "checkpoint-2", True),
        (143, "RUNNING", "checkpoint-1", False),
        (143, "COMPLETING", "checkpoint-2", False),
        (4, "RUNNING", "checkpoint-2", False),
        (0, "RUNNING", "checkpoint-2", False),
    ],
)
def test_a_stopped_job_returns_into_the_queue_only_with_a_new_checkpoint(
    code: int, state: str, newest: str, returns: bool, tmp_path: Path
) -> None:
    kept = tmp_path / "my runs"
    kept.mkdir()
    (kept / "latest").write_text("checkpoint-1")
    program(tmp_path, "adam-async", "echo token")
    program(tmp_path, "srun", f"echo -n {newest} > 'my runs/latest'; exit {code}")
    program(tmp_path, "squeue", f'[ "$*" = "--noheader --format=%T --jobs=7" ] && echo {state}')
    program(tmp_path, "scontrol", 'echo "$@"')
    done = run_script(tmp_path, job_script(JOB, 0, PROGRAM, ("launch",), "my runs"))

    assert done.returncode == code, done.stderr
    assert done.stdout == ("requeue 7\n" if returns else "")


def test_a_job_asks_for_memory_in_whole_mebibytes_if_it_has_a_size() -> None:
    assert "#SBATCH --mem=1025M\n" in job_script(JOB, (1 << 30) + 1, PROGRAM, ())
    assert "--mem" not in job_script(JOB, 0, PROGRAM, ())


def test_a_job_without_cpus_has_whole_nodes() -> None:
    script = job_script(SlurmSettings(job_name="adam"), 0, PROGRAM, ())

    assert "#SBATCH --exclusive\n" in script
    assert "cpus-per-task" not in script
    assert "time" not in script


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        ({"cpus": -1}, "cpus must be within 0 and"),
        ({"time": "1\n"}, "time '1"),
        ({"partition": "a b"}, "partition 'a b' has a character"),
        ({"job_name": "../a"}, "job_name '../a' has a character"),
    ],
)
def test_a_wrong_option_of_a_job_is_named(wrong: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        replace(JOB, **wrong)


def test_a_process_outside_a_job_is_told_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match="--here is for a rank of a Slurm job, which has SLURM_PROCID"):
        check_rank({})


@pytest.mark.parametrize(
    ("nodes", "size"),
    [(1, 1 + 2 * 4 + 2 + 2 * 3 + 1), (2, max(1 + 4 + 3 + 1, 4 + 2 + 3)), (3, max(1 + 2 + 1, 4 + 3)), (90, 4)],
)
def test_a_node_has_memory_for_the_largest_rank(nodes: int, size: int) -> None:
    config = Config(servers=2, replicas=2, memory=ALL)
    assert memory_of_node(config, nodes) == RANK_BYTES + size * G


def test_a_job_needs_the_size_of_every_role_or_of_none() -> None:
    assert memory_of_node(Config(), 4) == 0
    with pytest.raises(
        ConfigError, match=r"no size for controller, data, driver, .* --memory controller=SIZE"
    ):
        memory_of_node(Config(memory=("ps=4G", "worker=3G")), 2)
    sizes = ("controller=1G", "ps=4G", "worker=3G", "driver=1G")
    config = Config(memory=sizes, data="tcp://10.0.0.5:7100")
    assert memory_of_node(config, 1) == RANK_BYTES + 9 * G


async def test_sbatch_gets_the_script_and_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sbatch", f"env > {tmp_path}/env; cat > {tmp_path}/script; echo '12;cluster'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environment = {**os.environ, "ADAM_TOKEN": "a token that nobody guesses", "SLURM_CONF": "/etc/slurm.conf"}

    assert await submit("#!/bin/bash\n", environment) == "12"
    assert (tmp_path / "script").read_text() == "#!/bin/bash\n"
    assert "SLURM_CONF=/etc/slurm.conf" in (tmp_path / "env").read_text()
    assert "ADAM_TOKEN" not in (tmp_path / "env").read_text()


async def test_a_refused_job_and_a_missing_sbatch_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on PATH: run this command on a login node"):
        await submit("", os.environ)
    program(tmp_path, "sbatch", "echo 'sbatch: error: Invalid partition' >&2; exit 1")
    with pytest.raises(ConfigError, match="the job is not submitted: sbatch: error: Invalid partition"):
        await submit("", os.environ)
