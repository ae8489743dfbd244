"""The commands `launch torchrun` and `launch slurm --here`: the roles of a rank, and in rank 0 the driver.

The engine starts this command in each rank. A rank runs its roles like `role --from-env`, with the options of
`train`. The ranks have no link to each other. Each rank except the driver's is an operator of the cluster,
and ends its roles when the cluster map shows that the driver has left. Only the driver decides whether the
run outlives a lost role, and its exit code is the run's.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.files import check_resumes_newest, newest_manifest
from adam_async.cli.from_environment import Found, find_roles, running_roles
from adam_async.cli.options import FromEnvironmentOptions, TrainOptions
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.signals import EARLY
from adam_async.cli.terminal import Terminal
from adam_async.cli.token import read_token
from adam_async.cli.train import run_training
from adam_async.cluster.external_data import DataHosts
from adam_async.cluster.networks import cluster_network
from adam_async.cluster.parent_pipe import die_with_parent
from adam_async.controller.client import Membership, joined_as
from adam_async.errors import ConfigError, DeadlineExceeded, RoleDied, RoleUnreachable, first_cause
from adam_async.launch.environment import restarts_in
from adam_async.run.addresses import addresses_in
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.token_file import root_token
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from transport import BufferPool

DRIVER = "driver"
"""Node id of the driver."""

LEAVE_S = 120.0
"""Time in seconds after SIGTERM in which the driver may end the run in order. Slurm signals a job so long
before its time limit, and torchrun kills its ranks after 30 s."""

LONGEST_RUN_S = 10 * 365 * 86400.0
"""Deadline of the wait for the end of a run, in seconds."""


async def launch_in_rank(options: TrainOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Run the roles of this rank until the run is over, and in rank 0 also the driver.

    Raises:
        AdamError: A variable or option is wrong, a role cannot start, the driver is lost, or the run fails.
    """
    _check(options)
    die_with_parent()  # a killed engine leaves its ranks running
    token = await read_token(options.token_file, environment)
    if token is None:
        raise ConfigError(
            "the ranks share no secret: set ADAM_TOKEN to the same token on all nodes before torchrun or "
            "srun, or give --token-file; adam-async token new makes one"
        )
    root_token(token, origin="--token-file" if options.token_file else "ADAM_TOKEN")
    found = await find_roles(_role_options(options), environment, options.layer(), options.store)
    waits = found.config.waits
    waits = waits if waits.meet_s else waits_at_start(options.wait, waits)
    try:
        async with running_roles(found, token, waits, environment, terminal, ignores_sigterm=True):
            if found.assignment.rank:
                return await _follow(found, token, waits)
            options = await _continued(options, restarts_in(environment), terminal)
            return await _train(found, options, token, waits, environment, terminal)
    except ExceptionGroup as errors:
        cause = first_cause(errors)
        raise cause from cause.__cause__


def _check(options: TrainOptions) -> None:
    check_resumes_newest(options.resume, "launch torchrun and launch slurm")
    if options.profile is not None:
        raise ConfigError(
            "--profile is for roles that one process starts, and here the ranks start them: leave it out"
        )


def _role_options(options: TrainOptions) -> FromEnvironmentOptions:
    """Return the options of a rank's roles: those with the same names in `train`."""
    return FromEnvironmentOptions(
        from_env=True,
        config=options.config,
        allow_step=(options.step.partition(":")[0],) if options.step is not None else (),
        layers=options.layers,
        step_path=options.step_path,
    )


async def _train(
    found: Found,
    options: TrainOptions,
    token: str,
    waits: Waits,
    environment: Mapping[str, str],
    terminal: Terminal,
) -> int:
    """Train on the roles of all ranks, and stay until those of the other ranks have left."""
    controllers = ",".join(found.assignment.controllers)
    file = f" --token-file {options.token_file}" if options.token_file is not None else ""
    terminal.notice(f"from another shell: adam-async status --controller {controllers}{file}")
    options = dataclasses.replace(options, controller=controllers, processes=False, memory=None, slow=())
    network = cluster_network(token, entropy=system_entropy, buffers=BufferPool())
    async with AsyncExitStack() as stack:
        membership, identity = await stack.enter_async_context(joined_as(DRIVER, network, controllers, waits))
        if addresses := addresses_in(found.config.data):
            hosts = DataHosts(addresses, network=network, identity=identity, waits=waits)
            await stack.enter_async_context(hosts)
            await hosts.serve(controllers)
        try:
            return await run_training(options, environment, terminal, ranks=True)
        finally:
            # The controllers are in the first ranks: the members in other ranks leave before the controllers
            # end.
            own = {node for _, node in found.assignment.roles}
            with suppress(DeadlineExceeded, RoleDied):
                await membership.wait_for(
                    lambda cluster: _members(cluster) <= own, "the other ranks to end", waits.drain_s
                )


def _members(cluster: ClusterMap) -> set[str]:
    """Return the live roles of all ranks, except controllers and standalone data servers."""
    return {*cluster.live("ps"), *cluster.live("worker"), *cluster.live("data")}


async def _follow(found: Found, token: str, waits: Waits) -> int:
    """Wait until the driver has left the cluster; returns 0.

    Raises:
        DeadlineExceeded: No driver has joined.
        RoleDied: The driver is lost.
    """
    controllers = ",".join(found.assignment.controllers)
    network = cluster_network(token, entropy=system_entropy, buffers=BufferPool())
    try:
        async with joined_as(DRIVER, network, controllers, waits) as (membership, _):
            async with asyncio.TaskGroup() as group:
                ended = group.create_task(_driver_ended(membership, waits), name="launch/driver")
                try:
                    await asyncio.shield(ended)
                except asyncio.CancelledError:
                    # An engine signals all ranks, and the driver needs their roles to end the run in order.
                    if EARLY.interrupted:
                        await asyncio.wait((ended,), timeout=LEAVE_S)
                    ended.cancel()
                    raise
    except ExceptionGroup as errors:
        cause = first_cause(errors)
        # The controllers were there, and have ended with rank 0.
        if isinstance(cause, RoleDied) and not isinstance(cause, RoleUnreachable):
            raise _lost() from None
        raise
    return 0


async def _driver_ended(membership: Membership, waits: Waits) -> None:
    def is_there(cluster: ClusterMap) -> bool:
        return DRIVER in cluster.nodes

    await membership.wait_for(is_there, "the driver in rank 0 to join", waits.prepare_s + waits.start_s)
    cluster = await membership.wait_for(
        lambda cluster: is_there(cluster) and not cluster.nodes[DRIVER].live, "the end", LONGEST_RUN_S
    )
    if not cluster.nodes[DRIVER].left:
        raise _lost()


def _lost() -> RoleDied:
    return RoleDied(DRIVER, "rank 0 is lost: its output has the reason")


async def _continued(options: TrainOptions, restarts: int, terminal: Terminal) -> TrainOptions:
    """Return the options with which a restarted job continues its run."""
    if not restarts or options.resume is not None or options.checkpoint is None:
        return options
    with suppress(CheckpointError):
        async with Disk() as disk:
            name = (await newest_manifest(options.checkpoint, disk)).name
        terminal.notice(f"restart {restarts}: the run continues from {name} in {options.checkpoint}")
        return dataclasses.replace(options, resume=options.checkpoint)
    terminal.notice(f"restart {restarts}: {options.checkpoint} has no checkpoint, so the run begins anew")
    return options
