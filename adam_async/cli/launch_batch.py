"""The commands `launch torchrun`, `launch slurm` and `agent`: `train`, with the roles on the nodes of a job.

The first process of the job is the driver; agents on all nodes run the roles (`launch/agents.py`).
"""

import asyncio
import dataclasses
import platform
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from adam_async.checkpoint.files import check_resumes_newest, newest_manifest, written_folder
from adam_async.checkpoint.manifest import CheckpointError
from adam_async.cli.launch import launched
from adam_async.cli.launch_options import SlurmOptions
from adam_async.cli.options import TrainOptions
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.signals import EARLY
from adam_async.cli.terminal import Terminal
from adam_async.cli.token import TOKEN_BYTES, read_token
from adam_async.cli.train import configure, run_training
from adam_async.cluster.parent_pipe import Parent, die_with_parent
from adam_async.errors import ConfigError, first_cause
from adam_async.launch.agent import Agent, AgentSettings, DriverLost
from adam_async.launch.agents import AgentLauncher, Gathering
from adam_async.launch.batch import Rank, job_script
from adam_async.launch.environment import address_at, number_in
from adam_async.launch.node_memory import memory_of_node
from adam_async.launch.slurm import (
    END_S,
    StepOrders,
    job_of,
    requeue,
    requeue_if_driver_lost,
    run_step,
    submit,
)
from adam_async.run.addresses import addresses_in
from adam_async.run.option_sources import for_children
from adam_async.run.token_file import root_token
from adam_async.runtime.child_process import COMMAND
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import usable_cores

LEAVE_S = 20.0
"""Time after SIGTERM in which the driver may end the run, in seconds; then an agent kills its remaining
roles."""


async def launch_with_torchrun(
    port: int, file: Path | None, options: TrainOptions, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Train in the ranks of torchrun: rank 0 is the driver and an agent, the others are agents.

    Raises:
        AdamError: A variable or option is wrong, an agent does not arrive, or the run fails.
    """
    options = launched(options, file)
    check_resumes_newest(options.resume, "launch torchrun")
    rank = Rank.of(environment, port)
    die_with_parent()  # a killed torchrun leaves its ranks running
    token = await read_token(options.token_file, environment)
    if token is None:
        raise ConfigError(
            "torchrun gives its ranks no secret: before torchrun, on all nodes, set ADAM_TOKEN to the same "
            "token, or give --token-file; adam-async token new makes one"
        )
    root_token(token, origin="--token-file" if options.token_file else "ADAM_TOKEN")
    wait_s = waits_at_start(options.wait).meet_s
    agent = Agent(
        AgentSettings(
            name=rank.name,
            driver=rank.driver,
            token=token,
            machine=platform.node(),
            folder=str(Path.cwd()),
            cores=max(1, usable_cores() // rank.local_ranks),
            environment=for_children(environment),
            wait_s=wait_s,
            remedy="rank 0 is the driver: its output has the reason, or a firewall closes --port",
            entropy=system_entropy,
        )
    )
    if rank.number:
        return await _until_the_driver_ends(agent)
    options = await _continued(options, rank.restarts, terminal)
    gathering = Gathering(
        names=rank.names(),
        wait_s=wait_s,
        remedy="start torchrun with the same command on each node, and with the same token; --wait sets the "
        "deadline",
        port_remedy="choose another with --port on all nodes, or change --master-port of torchrun",
    )
    try:
        async with asyncio.TaskGroup() as group:
            async with AgentLauncher(
                gathering, token=token.encode(), bind=rank.bind(), entropy=system_entropy
            ) as launcher:
                group.create_task(agent.run(), name="launch/agent")
                await launcher.gathered()
                return await run_training(options, environment, terminal, launcher)
    except ExceptionGroup as errors:
        cause = first_cause(errors)
        raise cause from cause.__cause__


async def launch_on_slurm(
    file: Path | None,
    options: TrainOptions,
    slurm: SlurmOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
) -> int:
    """Write the script of a job, submit it, or run within a job: see `SlurmOptions`.

    Raises:
        AdamError: An option is wrong, Slurm refuses the job, an agent does not arrive, or the run fails.
    """
    options = launched(options, file)
    check_resumes_newest(options.resume, "launch slurm")
    if slurm.here:
        return await _train_in_job(options, environment, terminal)
    async with Disk() as disk:
        config = await configure(options, environment, disk, launched=True)
    data_servers = 0 if addresses_in(config.data) else config.data_servers
    words = [word for word in sys.argv[1:] if word not in ("--submit", "--no-submit")]
    job = slurm.job(memory_of_node(config, slurm.nodes, data_servers=data_servers))
    script = job_script(job, (*COMMAND, *words, "--here"))
    if not slurm.submit:
        sys.stdout.write(script)
        return 0
    number = await submit(script, environment)
    terminal.print(f"submitted job {number}; its output is in {job.name}-{number}.out")
    return 0


async def _train_in_job(options: TrainOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Train on the nodes of this job; after SIGTERM, requeue the job if it has a new checkpoint."""
    job = await job_of(environment)
    token = await read_token(options.token_file, environment) or system_entropy(TOKEN_BYTES).hex()
    root_token(token, origin="--token-file" if options.token_file else "ADAM_TOKEN")
    environment = {**environment, "ADAM_TOKEN": token}
    begun = await _newest_checkpoint(options)
    options = await _continued(options, job.restarts, terminal)
    wait_s = waits_at_start(options.wait).meet_s
    gathering = Gathering(
        names=job.nodes,
        wait_s=wait_s,
        remedy="the lines of srun above have the reason, or the node needs more time: --wait 5m",
        folder=str(Path.cwd()),
    )
    try:
        async with asyncio.TaskGroup() as group:
            async with AgentLauncher(
                gathering, token=token.encode(), bind="tcp://0.0.0.0:0", entropy=system_entropy
            ) as launcher:

                async def step() -> None:
                    orders = StepOrders(token=token, port=launcher.port, wait_s=wait_s)
                    how = await run_step(job, orders, environment, terminal.notice)
                    launcher.give_up(f"srun {how} before all agents arrived; its lines above have the reason")

                agents = group.create_task(step(), name="launch/srun")
                await launcher.gathered()
                code = await run_training(options, environment, terminal, launcher)
            await asyncio.wait((agents,), timeout=END_S)
            agents.cancel()
            return code
    except ExceptionGroup as errors:
        cause = first_cause(errors)
        raise cause from cause.__cause__
    finally:
        newest = await _newest_checkpoint(options)
        if EARLY.first == signal.SIGTERM and newest != begun:
            terminal.notice(await requeue(job, environment))


async def serve_agent(environment: Mapping[str, str]) -> int:
    """Run the agent of one node of a Slurm job until the driver ends it.

    If the driver is lost with its node, the job goes back into the queue.

    Raises:
        AdamError: The orders on stdin are missing, or `Agent.run` fails.
    """
    die_with_parent()
    async with Parent() as parent:
        orders = await parent.orders(StepOrders)
    if orders is None:
        return 0
    name = environment.get("SLURMD_NODENAME", "")
    host = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if not name or not host:
        raise ConfigError(
            "launch slurm starts the command agent, within a step of its job: start launch slurm instead"
        )
    cores = usable_cores()
    if environment.get("SLURM_CPUS_PER_TASK"):
        cores = min(cores, number_in(environment, "SLURM_CPUS_PER_TASK", 1, 10**6))
    agent = Agent(
        AgentSettings(
            name=name,
            driver=address_at(host, orders.port),
            token=orders.token,
            machine=platform.node(),
            folder=str(Path.cwd()),
            cores=cores,
            environment=for_children(environment),
            wait_s=orders.wait_s,
            remedy="the driver is on the first node of the job; its output has the reason",
            entropy=system_entropy,
        )
    )
    try:
        return await _until_the_driver_ends(agent)
    except DriverLost:
        # Before any output: srun, which would print it, is lost with the driver.
        await requeue_if_driver_lost(await job_of(environment), name, environment)
        raise


async def _until_the_driver_ends(agent: Agent) -> int:
    """Run an agent, and continue for `LEAVE_S` after SIGTERM, so that the driver can end the run in order."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agent.run(), name="launch/agent")
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                await asyncio.wait((task,), timeout=LEAVE_S)
                task.cancel()
                raise
    except ExceptionGroup as errors:
        cause = first_cause(errors)
        raise cause from cause.__cause__
    return task.result()


async def _continued(options: TrainOptions, restarts: int, terminal: Terminal) -> TrainOptions:
    """Return the options with which a restarted job continues its run."""
    if not restarts or options.resume is not None or options.checkpoint is None:
        return options
    name = await _newest_checkpoint(options)
    if not name:
        terminal.notice(f"restart {restarts}: {options.checkpoint} has no checkpoint, so the run begins anew")
        return options
    terminal.notice(f"restart {restarts}: the run continues from {name} in {options.checkpoint}")
    return dataclasses.replace(options, resume=options.checkpoint)


async def _newest_checkpoint(options: TrainOptions) -> str:
    """Return the name of the newest checkpoint of a run; empty without one."""
    folder = written_folder(options.checkpoint, options.resume)
    if folder is None:
        return ""
    with suppress(CheckpointError):
        async with Disk() as disk:
            return (await newest_manifest(folder, disk)).name
    return ""
