"""A job of Slurm: its script, its memory, and `sbatch`.

The script runs one rank on each node, `adam-async launch slurm --here`. It draws a token, which `srun` passes
on in the variables of the ranks. After the end at the time limit, the script returns the job into the queue
if the run has a new checkpoint, from which the next start continues.
"""

import asyncio
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from adam_async.errors import ConfigError
from adam_async.launch.environment import MOST_RANKS, Layout, roles_of_rank
from adam_async.run.config import Config
from adam_async.run.role_memory import ROLES, asked_bytes, read_memory
from adam_async.runtime.child_process import child_environment
from adam_async.runtime.role_handle import how_it_ended

ANSWER_S = 60.0
"""Deadline of the answer of `sbatch`, in seconds."""

SIGNAL_S = 120
"""Time before the time limit of a job at which Slurm sends SIGTERM to the ranks, in seconds; the driver must
write its last checkpoint before the limit."""

RANK_BYTES = 256 << 20
"""Memory of the process of a rank beside its roles and the driver, in bytes."""

STOPPED = 143
"""Exit code of a run that SIGTERM has stopped."""


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


def job_script(job: Job, program: Sequence[str], words: Sequence[str], checkpoint: str = "") -> str:
    """Return the sbatch script that runs a command in a rank on each node of a job.

    Args:
        program: Words that run `adam-async`.
        words: Words of the command after these.
        checkpoint: Folder of the run's checkpoints; empty without one.
    """
    options = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        "ntasks-per-node=1",
        f"cpus-per-task={job.cpus}" if job.cpus else "exclusive",
        *([f"mem={-(-job.memory_bytes >> 20)}M"] if job.memory_bytes else ()),
        *([f"time={job.time}"] if job.time else ()),
        *([f"partition={job.partition}"] if job.partition else ()),
        "requeue",
        f"signal=TERM@{SIGNAL_S}",
        "open-mode=append",
        f"output={job.name}-%j.out",
    ]
    run = shlex.join(program)
    cpus = f" --cpus-per-task={job.cpus}" if job.cpus else ""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in options),
        "# The ranks share this token. No file, argument or accounting record has it.",
        f"export ADAM_TOKEN=$({run} token new)",
    ]
    # The driver decides whether the run outlives a lost rank.
    step = f"srun --no-kill --kill-on-bad-exit=0{cpus} {run} {shlex.join(words)}"
    if not checkpoint:
        return "".join(f"{line}\n" for line in [*lines, f"exec {step}"])
    latest = shlex.quote(f"{checkpoint}/latest")
    lines += [
        f"before=$(cat {latest} 2>/dev/null)",
        step,
        "code=$?",
        "# Stopped before the time limit: continue from a new checkpoint, except after scancel.",
        f'if [ $code = {STOPPED} ] && [ "$(cat {latest} 2>/dev/null)" != "$before" ] &&',
        '   [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = RUNNING ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "".join(f"{line}\n" for line in lines)


def memory_of_node(config: Config, nodes: int) -> int:
    """Return the memory of each node of a job with one rank per node, in bytes; 0 if the options name none.

    Raises:
        ConfigError: The options name the memory of some roles only.
    """
    memory = read_memory(config.memory)
    if not memory:
        return 0
    layout = Layout.of(config)
    missing = [role for role in ROLES if role not in memory and (role != "data" or layout.data_servers)]
    if missing:
        raise ConfigError(
            f"memory has no size for {', '.join(missing)}, and a job asks for the sum of all roles: add "
            f"{' '.join(f'--memory {role}=SIZE' for role in missing)}, or leave memory out"
        )
    # Each rank from the number of roles on has one further worker.
    ranks = range(min(nodes, len(layout.nodes()) + 1))
    asked = (asked_bytes(memory, (role for role, _ in roles_of_rank(rank, nodes, layout))) for rank in ranks)
    first, *others = asked
    return RANK_BYTES + max((first + memory["driver"], *others))


async def submit(script: str, environment: Mapping[str, str]) -> str:
    """Submit a job, and return its number. The job does not inherit the token of this process.

    Raises:
        ConfigError: Slurm has no `sbatch` here, refuses the job, or does not answer.
    """
    kept = child_environment({name: text for name, text in environment.items() if name != "ADAM_TOKEN"})
    try:
        # The script is a file: writing to a pipe would fail where sbatch refuses a job before it reads it.
        with tempfile.TemporaryFile() as file:
            file.write(script.encode())
            file.seek(0)
            process = await asyncio.create_subprocess_exec(
                "sbatch",
                "--parsable",
                stdin=file,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=kept,
                start_new_session=True,
            )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not on PATH: run this command on a login node of a Slurm cluster, or take the script "
            "that it prints without --submit there"
        ) from None
    try:
        async with asyncio.timeout(ANSWER_S):
            out, err = await process.communicate()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        raise ConfigError(
            f"the job is not submitted: sbatch did not answer within {ANSWER_S:g} s: does slurmctld run?"
        ) from None
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or [how_it_ended(process.returncode)]
        raise ConfigError(f"the job is not submitted: {lines[-1][:300]}")
    return out.decode(errors="replace").strip().partition(";")[0]
