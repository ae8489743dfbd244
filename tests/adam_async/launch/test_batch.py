"""Ranks of torchrun are read from its variables, and the script of a Slurm job has its options."""

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from adam_async.errors import ConfigError
from adam_async.launch.batch import Job, Rank, job_script

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
JOB = Job(nodes=2, cpus=4, time="1:00:00", partition="main", name="adam")


def test_a_rank_knows_its_driver_and_all_agents() -> None:
    rank = Rank.of({**RANK, "TORCHELASTIC_RESTART_COUNT": "3"}, 0)

    assert (rank.number, rank.ranks, rank.local_ranks, rank.restarts) == (1, 4, 2, 3)
    assert (rank.name, rank.driver, rank.bind()) == ("rank-1", "tcp://10.0.0.1:29501", "tcp://0.0.0.0:29501")


def test_neighbours_among_the_agents_are_on_different_nodes() -> None:
    assert Rank.of(RANK, 0).names() == ("rank-0", "rank-2", "rank-1", "rank-3")


def test_the_ranks_of_one_node_use_its_address_and_a_chosen_port() -> None:
    rank = Rank.of({**RANK, "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "::1"}, 7000)

    assert rank.driver == rank.bind() == "tcp://[::1]:7000"
    assert Rank.of({**RANK, "MASTER_PORT": "40000"}, 0).driver == "tcp://10.0.0.1:20001"
    assert Rank.of({**RANK, "MASTER_ADDR": "fd00::1"}, 0).bind() == "tcp://[::]:29501"


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        (
            {"RANK": None},
            "torchrun sets RANK and MASTER_ADDR, and one is missing: start with torchrun --nnodes",
        ),
        ({"MASTER_ADDR": ""}, "and one is missing"),
        ({"RANK": "4"}, "RANK='4' must be a whole number within 0 and 3"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE='5' must be a whole number within 1 and 4"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0' must be a whole number within 1 and 65535"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR: address 'tcp://a b:29501' is not of the form"),
        ({"TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT='-1' must be a whole number"),
    ],
)
def test_a_wrong_variable_of_torchrun_is_named(changed: dict[str, str | None], claim: str) -> None:
    variables = {name: value for name, value in {**RANK, **changed}.items() if value is not None}
    with pytest.raises(ConfigError, match=claim):
        Rank.of(variables, 0)


def test_a_script_has_the_options_of_its_job_and_runs_its_command() -> None:
    script = job_script(JOB, ("printf", "<%s>", "a b", "$HOME"))

    assert [line for line in script.splitlines() if "SBATCH" in line] == [
        "#SBATCH --job-name=adam",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition=main",
        "#SBATCH --no-kill",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=adam-%j.out",
    ]
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "<a b><$HOME>"


def test_a_job_asks_for_memory_in_whole_mebibytes_if_it_has_a_size() -> None:
    assert "#SBATCH --mem=1025M\n" in job_script(replace(JOB, memory_bytes=(1 << 30) + 1), ("true",))
    assert "--mem" not in job_script(JOB, ("true",))


def test_a_job_without_cpus_has_whole_nodes() -> None:
    script = job_script(Job(nodes=1, cpus=0, time="", partition="", name="adam"), ("true",))

    assert "#SBATCH --exclusive\n" in script
    assert "cpus-per-task" not in script
    assert "time" not in script


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        ({"nodes": 0}, "--nodes must be within 1 and"),
        ({"cpus": -1}, "--cpus must be within 0 and"),
        ({"time": "1\n"}, "--time '1"),
        ({"partition": "a b"}, "--partition 'a b' has a character"),
        ({"name": "../a"}, "--job-name '../a' has a character"),
    ],
)
def test_a_wrong_option_of_a_job_is_named(wrong: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        replace(JOB, **wrong)
