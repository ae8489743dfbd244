"""A job of Slurm: its script, its memory, and `sbatch`.

The script runs one rank on each node, `adam-async launch slurm --here`. The script draws a token, which
`srun` passes on in the ranks' variables. After the end at the time limit, the script returns the job to the
queue if the run has a new checkpoint, from which the next start continues.
"""

import asyncio
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

from msgspec import Meta

from adam_async.errors import ConfigError
from adam_async.launch.environment import MOST_RANKS, Layout, roles_of_rank
from adam_async.launch.settings import LauncherSettings, Training
from adam_async.option_types import Check
from adam_async.run.config import Config
from adam_async.run.memory_sizes import ROLES, asked_bytes, read_memory
from adam_async.runtime.child_process import COMMAND, child_environment
from adam_async.runtime.role_handle import how_it_ended

ANSWER_S = 60.0
"""Deadline of the answer of `sbatch`, in seconds."""

SIGNAL_S = 120
"""Time in seconds before a job's time limit at which Slurm sends SIGTERM to the ranks; the driver must write
its last checkpoint before the limit."""

RANK_BYTES = 256 << 20
"""Memory in bytes of a rank's process in addition to its roles and the driver."""

STOPPED = 143
"""Exit code of a run that SIGTERM has stopped."""


def _check_text(name: str, text: str) -> None:
    if any(not (character.isalnum() or character in "-_:.,+") for character in text):
        raise ConfigError(f"{name} {text[:80]!r} has a character that no such value of sbatch has")


class SlurmSettings(LauncherSettings, frozen=True, kw_only=True):
    """Print or submit the script of a Slurm job that trains on its nodes (docs/how-to/launch-slurm.md).

    Args:
        submit: Submit the job; by default the command prints its script.
        here: Train in this rank of a job: for `srun` in the script, or in a shell of salloc.
        nodes: Number of nodes.
        cpus: CPUs of each node; by default whole nodes.
        time: Time limit, such as 8:00:00; the job ends in order 120 s before, and returns into the queue if
            it has a new checkpoint.
        partition: Partition of the nodes.
        job_name: Name of the job, and beginning of the name of its output.
    """

    submit: bool = False
    here: bool = False
    nodes: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    cpus: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0
    time: Annotated[str, Check(_check_text)] = ""
    partition: Annotated[str, Check(_check_text)] = ""
    job_name: Annotated[str, Check(_check_text)] = "adam-async"


async def train(settings: SlurmSettings, training: Training) -> int:
    """Print a job's script, or submit it; or train in this rank of a job.

    Raises:
        ConfigError: This process is not a rank of a job, or Slurm refuses the job.
    """
    if settings.here:
        check_rank(training.environment)
        return await training.in_rank(training.environment)
    config = await training.config("launch slurm")
    words = [word for word in training.words if word not in ("--submit", "--no-submit")]
    memory_bytes = memory_of_node(config, settings.nodes)
    folder = str(training.checkpoints or "")
    script = job_script(settings, memory_bytes, COMMAND, [*words, "--here"], folder)
    if not settings.submit:
        sys.stdout.write(script)
        return 0
    number = await submit(script, training.environment)
    training.notice(f"submitted job {number}; its output is in {settings.job_name}-{number}.out")
    return 0


def check_rank(environment: Mapping[str, str]) -> None:
    """Check that this process is a rank of a Slurm job. Raises ConfigError: it is none."""
    if "SLURM_PROCID" not in environment:
        raise ConfigError(
            "--here is for a rank of a Slurm job, which has SLURM_PROCID: leave it out and give --submit, or "
            "start the ranks with srun"
        )


def job_script(
    job: SlurmSettings, memory_bytes: int, program: Sequence[str], words: Sequence[str], checkpoint: str = ""
) -> str:
    """Return the sbatch script that runs a command in a rank on each node of a job.

    Args:
        job: Size and name of the job; an empty text leaves the choice to Slurm.
        memory_bytes: Memory of each node, in bytes; 0: Slurm's default.
        program: Words that run `adam-async`.
        words: Words of the command after these.
        checkpoint: Folder of the run's checkpoints; empty without one.
    """
    options = [
        f"job-name={job.job_name}",
        f"nodes={job.nodes}",
        "ntasks-per-node=1",
        f"cpus-per-task={job.cpus}" if job.cpus else "exclusive",
        *([f"mem={-(-memory_bytes >> 20)}M"] if memory_bytes else ()),
        *([f"time={job.time}"] if job.time else ()),
        *([f"partition={job.partition}"] if job.partition else ()),
        "requeue",
        f"signal=TERM@{SIGNAL_S}",
        "open-mode=append",
        f"output={job.job_name}-%j.out",
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
    """Return the memory in bytes of each node of a job with one rank per node; 0 if the options name none.

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
    # From the number of roles on, each rank has one further worker.
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
