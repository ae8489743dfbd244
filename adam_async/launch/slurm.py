"""The commands of Slurm: `sbatch` for a job, `srun` for its agents, `scontrol` for its nodes and its requeue.

The orders of the agents are the first line on the stdin of `srun`, which passes the line to each agent. So no
file, argument or variable has the token.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from adam_async.errors import ConfigError, RunFailed
from adam_async.launch.batch import restarts_in
from adam_async.runtime.child_process import COMMAND, child_environment
from adam_async.runtime.role_handle import READ_BYTES, LineSplitter, how_it_ended

logger = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Deadline of an answer of Slurm, in seconds."""

POLL_S = 10.0
"""Time between two queries by the second node about the loss of the first, in seconds; later nodes query less
often."""

LOST_S = 900.0
"""Maximum wait until Slurm notices the loss of a node, in seconds; the default of Slurm is 300."""

END_S = 15.0
"""Maximum wait for the end of `srun` after SIGTERM, and again after SIGKILL, in seconds."""


class StepOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Orders of the agents of a job, the first line on the stdin of each agent."""

    token: str
    port: int
    """Port of the driver, on the machine of `srun`."""
    wait_s: float
    """Deadline of the driver's first answer, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The job of this process.

    Attributes:
        id: Number of the job.
        nodes: Names of its nodes; this process is on the first.
        cpus: CPUs of each node, as a word; empty: all CPUs of the job there.
        restarts: Number of returns into the queue.
    """

    id: str
    nodes: tuple[str, ...]
    cpus: str
    restarts: int


async def job_of(environment: Mapping[str, str]) -> SlurmJob:
    """Read the job of this process.

    Raises:
        ConfigError: This process is in no job.
        RunFailed: Slurm does not answer.
    """
    id, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not id or not nodes:
        raise ConfigError(
            "--here is for a process within a Slurm job, with SLURM_JOB_ID and SLURM_JOB_NODELIST: leave it "
            "out and give --submit, or start a shell with salloc"
        )
    names = await _output(("scontrol", "show", "hostnames", nodes), environment)
    return SlurmJob(
        id=id,
        nodes=tuple(names.split()),
        cpus=environment.get("SLURM_CPUS_PER_TASK", ""),
        restarts=restarts_in(environment, "SLURM_RESTART_COUNT"),
    )


async def submit(script: str, environment: Mapping[str, str]) -> str:
    """Submit a job, and return its number.

    Raises:
        ConfigError: Slurm has no `sbatch` here, refuses the job, or does not answer.
    """
    try:
        answer = await _output(("sbatch", "--parsable"), environment, script)
    except RunFailed as error:
        raise ConfigError(f"the job is not submitted: {error}") from None
    return answer.strip().partition(";")[0]


async def requeue(job: SlurmJob, environment: Mapping[str, str]) -> str:
    """Put a running job back into the queue, and return a line about it.

    A job that is cancelled, or that Slurm itself requeues, no longer runs, and is left alone.
    """
    try:
        state = await _output(("squeue", "--noheader", "--format=%T", f"--jobs={job.id}"), environment)
        if state.strip() != "RUNNING":
            return f"job {job.id} is {state.strip().lower() or 'over'}"
        await _output(("scontrol", "requeue", job.id), environment)
    except (ConfigError, RunFailed) as error:
        return f"job {job.id} does not go back into the queue: {error}"
    return f"job {job.id} goes back into the queue, and continues from its checkpoint"


async def requeue_if_driver_lost(job: SlurmJob, own: str, environment: Mapping[str, str]) -> None:
    """Put a job back into the queue if its first node, the node of the driver, is lost.

    Slurm leaves a job with `--no-kill` running without its script, and removes the lost node from the job
    after `SlurmdTimeout`. If the driver's node is not lost, the job is over as soon as its script ends.

    Args:
        job: The job.
        own: Name of the agent's node.
        environment: Variables of the commands.
    """
    # The second node queries first, so the nodes do not query all at once.
    pause_s = POLL_S * max(1, job.nodes.index(own) if own in job.nodes else len(job.nodes))
    for _ in range(max(1, round(LOST_S / pause_s))):
        await asyncio.sleep(pause_s)
        try:
            answer = await _output(
                ("squeue", "--noheader", "--format=%T %N", f"--jobs={job.id}"), environment
            )
            state, _, nodes = answer.strip().partition(" ")
            if state != "RUNNING":
                return
            left = (await _output(("scontrol", "show", "hostnames", nodes), environment)).split()
        except RunFailed as error:
            logger.debug("%s", error)  # slurmctld may answer the next query
            continue
        if job.nodes[0] not in left:
            await requeue(job, environment)
            return


async def run_step(
    job: SlurmJob, orders: StepOrders, environment: Mapping[str, str], on_line: Callable[[str], None]
) -> str:
    """Run an agent on each node of a job until all have ended, and return the end of `srun` in words.

    Cancelling ends the agents.

    Args:
        job: The job.
        orders: Orders of the agents.
        environment: Variables of the agents.
        on_line: Called with each line of the agents and of `srun`.

    Raises:
        ConfigError: There is no `srun`.
    """
    words = (
        "srun",
        # A lost node, or an agent that fails, leaves the others to the driver.
        "--no-kill",
        "--kill-on-bad-exit=0",
        f"--nodes={len(job.nodes)}",
        f"--ntasks={len(job.nodes)}",
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else ()),
        *COMMAND,
        "agent",
    )
    process = await _started(words, environment, stderr=asyncio.subprocess.STDOUT)
    assert process.stdin is not None
    assert process.stdout is not None
    splitter = LineSplitter()
    try:
        with suppress(OSError, RuntimeError):  # srun has ended, and its output has the reason
            process.stdin.write(msgspec.json.encode(orders) + b"\n")
        while data := await process.stdout.read(READ_BYTES):
            for line in splitter.feed(data):
                on_line(f"srun | {line}")
        return how_it_ended(await process.wait())
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process, unless it has ended: with SIGTERM, so that its step ends too, else with SIGKILL."""
    for signal_it in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            signal_it()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()


async def _output(words: Sequence[str], environment: Mapping[str, str], given: str = "") -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        ConfigError: There is no such command.
        RunFailed: The command fails, or takes longer than `ANSWER_S`.
    """
    process = await _started(words, environment, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(ANSWER_S):
            out, err = await process.communicate(given.encode() or None)
    except TimeoutError:
        raise RunFailed(f"{words[0]} did not answer within {ANSWER_S:g} s: does slurmctld run?") from None
    finally:
        await _end(process)
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or [how_it_ended(process.returncode)]
        raise RunFailed(
            lines[-1][:300] if lines[-1].startswith(words[0]) else f"{words[0]}: {lines[-1][:300]}"
        )
    return out.decode(errors="replace")


async def _started(
    words: Sequence[str], environment: Mapping[str, str], *, stderr: int
) -> asyncio.subprocess.Process:
    """Start a command of Slurm, with these variables except the token."""
    kept = child_environment({name: text for name, text in environment.items() if name != "ADAM_TOKEN"})
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=kept,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} is not on PATH: run this command on a login node of a Slurm cluster, or take the "
            "script that it prints without --submit there"
        ) from None
