"""Pure: a batch job of torchrun or Slurm, from the variables of its engine, and the script of a Slurm job."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adam_async.errors import ConfigError
from adam_async.launch.environment import MOST_RANKS, address_at, number_in
from adam_async.run.addresses import check_address

TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 1 ... --no-python adam-async launch torchrun adam.toml"
"""Example of a command line, for error texts."""

PORTS = range(20000, 30000)
"""Range of the ports that a driver of a torchrun job gets by default."""

SIGNAL_S = 120
"""Time before the time limit of a job at which Slurm sends SIGTERM to the driver, in seconds; the driver must
write its last checkpoint before the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of torchrun.

    Attributes:
        number: Its rank.
        ranks: Number of all ranks.
        local_ranks: Number of ranks on its node.
        driver: Address of the driver, which is in rank 0.
        restarts: Number of restarts of all ranks.
    """

    number: int
    ranks: int
    local_ranks: int
    driver: str
    restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str], port: int) -> "Rank":
        """Read the variables of torchrun.

        Args:
            port: Port of the driver; 0: the port of `PORTS` that follows from MASTER_PORT, such as 29501 from
                29500.

        Raises:
            ConfigError: The port is wrong, or a variable is missing or wrong.
        """
        if not 0 <= port <= 65535:
            raise ConfigError(f"--port must be within 0 and 65535, not {port}")
        if "RANK" not in environment or not environment.get("MASTER_ADDR"):
            raise ConfigError(
                f"torchrun sets RANK and MASTER_ADDR, and one is missing: start with {TORCHRUN}"
            )
        ranks = number_in(environment, "WORLD_SIZE", 1, MOST_RANKS)
        # torchrun itself listens on MASTER_PORT; outgoing connections get ports above `PORTS`.
        port = port or PORTS[(number_in(environment, "MASTER_PORT", 1, 65535) + 1) % len(PORTS)]
        return cls(
            number=number_in(environment, "RANK", 0, ranks - 1),
            ranks=ranks,
            local_ranks=number_in(environment, "LOCAL_WORLD_SIZE", 1, ranks),
            driver=check_address(address_at(environment["MASTER_ADDR"], port), "MASTER_ADDR"),
            restarts=restarts_in(environment, "TORCHELASTIC_RESTART_COUNT"),
        )

    @property
    def name(self) -> str:
        """Name of the agent in this rank."""
        return f"rank-{self.number}"

    def names(self) -> tuple[str, ...]:
        """Return the names of all agents; successive agents are on different nodes, which spreads roles."""
        order = sorted(range(self.ranks), key=lambda rank: (rank % self.local_ranks, rank))
        return tuple(f"rank-{rank}" for rank in order)

    def bind(self) -> str:
        """Return the address on which the driver listens: every interface if there are other nodes."""
        if self.ranks == self.local_ranks:
            return self.driver
        host, _, port = self.driver.rpartition(":")
        return f"tcp://{'[::]' if '[' in host else '0.0.0.0'}:{port}"


def restarts_in(environment: Mapping[str, str], variable: str) -> int:
    """Return the number of restarts of a job; 0 if the variable is absent.

    Raises:
        ConfigError: The variable has no whole number.
    """
    return number_in(environment, variable, 0, 10**9) if environment.get(variable) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Size of a Slurm job; an empty text leaves the choice to Slurm.

    Attributes:
        nodes: Number of nodes.
        cpus: CPUs of each node; 0: whole nodes.
        memory_bytes: Memory of each node, in bytes; 0: the default of Slurm.
        time: Time limit, as ``sbatch --time`` takes it.
        partition: Partition.
        name: Name of the job.

    Raises:
        ConfigError: A value is invalid.
    """

    nodes: int
    cpus: int
    memory_bytes: int = 0
    time: str
    partition: str
    name: str

    def __post_init__(self) -> None:
        for option, value, least in (("--nodes", self.nodes, 1), ("--cpus", self.cpus, 0)):
            if not least <= value <= MOST_RANKS:
                raise ConfigError(f"{option} must be within {least} and {MOST_RANKS}, not {value}")
        texts = (("--time", self.time), ("--partition", self.partition), ("--job-name", self.name))
        for option, text in texts:
            if any(not (character.isalnum() or character in "-_:.,+") for character in text):
                raise ConfigError(f"{option} {text[:80]!r} has a character that no such value of sbatch has")


def job_script(job: Job, command: Sequence[str]) -> str:
    """Return the sbatch script that runs a command on the first node of a job."""
    options = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        "ntasks-per-node=1",
        f"cpus-per-task={job.cpus}" if job.cpus else "exclusive",
        *([f"mem={-(-job.memory_bytes >> 20)}M"] if job.memory_bytes else ()),
        *([f"time={job.time}"] if job.time else ()),
        *([f"partition={job.partition}"] if job.partition else ()),
        "no-kill",
        "requeue",
        f"signal=B:TERM@{SIGNAL_S}",
        "open-mode=append",
        f"output={job.name}-%j.out",
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in options), f"exec {shlex.join(command)}"]
    return "".join(f"{line}\n" for line in lines)
