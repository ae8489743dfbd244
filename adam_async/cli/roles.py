"""The role commands: one role in this process, until it is ended.

A role prints one line, with its address and the next command for a cluster started by hand; a controller also
logs changes of its group. A signal ends a role; a role of a parent process (`--supervised`) also ends at the
end of its stdin.
"""

import asyncio
import dataclasses
import logging
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import TypedDict

import msgspec

from adam_async.cli.data import load_data
from adam_async.cli.log import name_node
from adam_async.cli.options import (
    ControllerOptions,
    DataServerOptions,
    MemberOptions,
    RoleOptions,
    ServerOptions,
    WorkerOptions,
)
from adam_async.cli.printable import printable
from adam_async.cli.token import read_token
from adam_async.cluster.networks import (
    LOOPBACK,
    address_towards,
    cluster_network,
    copies_path,
    memory_budget,
    slowed,
)
from adam_async.cluster.parent_pipe import Orders, Parent, die_with_parent
from adam_async.cluster.roles import (
    Place,
    Role,
    controller,
    data_host,
    data_server,
    model_worker,
    parameter_server,
)
from adam_async.controller import status_log
from adam_async.controller.log_file import LogFile
from adam_async.controller.service import Controller
from adam_async.data_server.damage import Policy
from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.run.addresses import check_address, check_addresses, own_peer, read_peers
from adam_async.run.cache_size import cache_limits
from adam_async.run.config import MAX_THREADS_PER_CORE, MOST, Waits
from adam_async.run.image_size import read_image_size
from adam_async.run.stragglers import check_own, pace_of
from adam_async.run.token_file import holds_keys
from adam_async.run.user_code import (
    StepSource,
    add_import_folder,
    allow_functions,
    allow_steps,
    import_layers,
    read_layers,
)
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.health import Health
from adam_async.runtime.machine import available_bytes, usable_cores
from adam_async.runtime.role_handle import address_line
from adam_async.runtime.timeline import Timeline
from transport import BufferPool

NEXT = {
    "controller": ("ps", "--controller"),
    "ps": ("data", "--controller"),
    "data": ("worker", "--join"),
    "data-host": ("train", "--data"),
    "worker": ("train", "--controller"),
}
"""Command in a role's line, with its option for the address: the next command for a cluster started by hand.
A data host is a data server without a controller."""

KEYS_OF_NEXT = {"controller": "ps", "ps": "data", "data": "worker", "data-host": "driver", "worker": "driver"}
"""Role of the command in a role's line; the line names a file with the keys of that role."""


class _Imports(TypedDict):
    """User code that a worker may run."""

    layers: Mapping[str, type[Layer]]
    steps: StepSource


Open = Callable[[Place], AbstractAsyncContextManager[Role]]

LEAST_FLUSH_S = 0.01
"""Minimum of `--flush-s`, in seconds."""

WAITS = Waits()
"""Deadlines of a role started by hand, except the wait for its controller."""

DEFAULT_BIND = "tcp://127.0.0.1:7070"


async def serve_controller(options: ControllerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a controller until cancelled: alone, or as one of `--peers`."""
    peers: dict[str, str] = {}
    bind = options.bind or DEFAULT_BIND
    if options.peers:
        peers = read_peers(options.peers)
        node = own_peer(peers, options.id)
        bind = options.bind or peers[node]
        options = dataclasses.replace(options, id=node, advertise=options.advertise or peers[node])
    elif options.dir is not None and options.id is None:
        # The files in the folder name their node: the next process must have the same name.
        options = dataclasses.replace(options, id="controller")
    if not options.supervised:
        # A person watches the controller, and needs to know the changes of its group.
        status_log.logger.setLevel(logging.INFO)
    async with AsyncExitStack() as stack:
        file = None
        if options.dir is not None:
            disk = await stack.enter_async_context(Disk(name="controller", private=True))
            file = LogFile(disk, options.dir)
        return await _serve(
            "controller",
            options,
            ",".join(peers.values()),
            bind,
            environment,
            health,
            lambda place: controller(place, peers=peers, file=file),
        )


async def serve_ps(options: ServerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a parameter server until cancelled."""
    if not LEAST_FLUSH_S <= options.flush_s <= MOST["flush_s"]:
        raise ConfigError(
            f"--flush-s must be within {LEAST_FLUSH_S} and {MOST['flush_s']:g} seconds, not {options.flush_s}"
        )
    if options.copies_bind:
        check_address(options.copies_bind, "--copies-bind")
    return await _serve_member(
        "ps",
        options,
        environment,
        health,
        partial(parameter_server, folder=options.dir, flush_s=options.flush_s),
    )


async def serve_data(
    options: DataServerOptions,
    data: str,
    damaged: Policy,
    environment: Mapping[str, str],
    health: Health,
    *,
    size: str = "",
) -> int:
    """Load the data, then run a data server until cancelled; without a controller a data host."""
    _add_folders(options)
    functions = allow_functions(options.allow_transform)
    async with Disk() as disk:
        cache = cache_limits(options.cache, options.spill, available_bytes=available_bytes())
        wanted = read_image_size(size)
        dataset = await load_data(data, disk, environment, damaged=damaged, cache=cache, size=wanted)
    if options.controller is None:
        bind = options.bind or LOOPBACK

        def open_host(place: Place) -> AbstractAsyncContextManager[Role]:
            return data_host(dataclasses.replace(place, functions=functions), dataset)

        return await _serve("data-host", options, "", bind, environment, health, open_host)

    def open_server(place: Place) -> AbstractAsyncContextManager[Role]:
        return data_server(dataclasses.replace(place, functions=functions), dataset)

    return await _serve_member("data", options, environment, health, open_server)


async def serve_worker(
    options: WorkerOptions, threads: int, in_flight: int, environment: Mapping[str, str], health: Health
) -> int:
    """Run a model worker until cancelled."""
    cores = usable_cores()
    if not 0 <= threads <= cores * MAX_THREADS_PER_CORE or not 0 <= in_flight <= MOST["in_flight"]:
        raise ConfigError(
            f"--threads must be within 0 and {cores * MAX_THREADS_PER_CORE} on {cores} cores and --in-flight "
            f"within 0 and {MOST['in_flight']}, not {threads} and {in_flight}"
        )
    imports = _imports_of(options)
    return await _serve_member(
        "worker",
        options,
        environment,
        health,
        lambda place: model_worker(
            dataclasses.replace(place, **imports),
            threads=threads or cores,
            in_flight=in_flight,
            pace=pace_of(options.slow, place.node),
        ),
    )


def _imports_of(options: WorkerOptions) -> _Imports:
    """Import the layers and the modules of steps that a worker's command line names.

    Raises:
        ConfigError: A folder, module or layer does not exist, or fails in its import.
    """
    _add_folders(options)
    return {"layers": import_layers(read_layers(options.layers)), "steps": allow_steps(options.allow_step)}


def _add_folders(options: DataServerOptions | WorkerOptions) -> None:
    """Let imports find the modules of the folders that a command line names.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in options.step_path:
        add_import_folder(folder)
        if not options.supervised:  # the parent has printed the line
            sys.stderr.write(f"imports also find modules in {printable(str(folder.resolve()))}\n")


async def _serve_member(
    role: str,
    options: MemberOptions | DataServerOptions,
    environment: Mapping[str, str],
    health: Health,
    open_role: Open,
) -> int:
    assert options.controller is not None, "a member has a controller"
    controllers = check_addresses(options.controller, "--join" if role == "worker" else "--controller")
    bind = options.bind or await address_towards(controllers)
    return await _serve(role, options, controllers, bind, environment, health, open_role)


async def _serve(
    role: str,
    options: ControllerOptions | MemberOptions | DataServerOptions,
    controllers: str,
    bind: str,
    environment: Mapping[str, str],
    health: Health,
    open_role: Open,
) -> int:
    if options.advertise is not None:
        check_address(options.advertise, "--advertise")
    check_address(bind, "--bind", everywhere=options.advertise is not None)
    if not options.supervised:
        token = await read_token(options.token_file, environment, role=role.removesuffix("-host"))
        waits = WAITS if isinstance(options, ControllerOptions) else waits_at_start(options.wait)
        await _stay(role, options, controllers, bind, token, waits, health, open_role)
        return 0
    die_with_parent()
    async with Parent() as parent:
        orders = await parent.orders(Orders)
        if orders is None:
            return 0
        if orders.ignores_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        async with asyncio.TaskGroup() as group:
            work = group.create_task(
                _stay(
                    role,
                    options,
                    controllers,
                    bind,
                    orders.token,
                    orders.waits,
                    health,
                    open_role,
                    orders.profile_events,
                ),
                name=f"{role}/serve",
            )
            await parent.gone(orders.silence_s)
            work.cancel()
    return 0


def waits_at_start(wait: timedelta, waits: Waits = WAITS) -> Waits:
    """Return deadlines with ``--wait`` as the maximum wait for a controller.

    Raises:
        ConfigError: The wait is not above 0.
    """
    if wait <= timedelta():
        raise ConfigError(f"--wait must be a time above 0, such as 60s or 5m, not {wait.total_seconds():g}s")
    return msgspec.structs.replace(waits, meet_s=wait.total_seconds())


async def _stay(
    role: str,
    options: RoleOptions,
    controllers: str,
    bind: str,
    token: str | None,
    waits: Waits,
    health: Health,
    open_role: Open,
    profile_events: int = 0,
) -> None:
    """Open the role, print its line when it has joined, and serve until cancelled.

    A controller of several does not wait for the others: after a restart they may not need it.
    """
    buffers = BufferPool()
    node = options.id or f"{role}-{platform.node()[:40]}-{os.getpid()}"
    name_node(node)
    check_own(options.slow, node, computes=role == "worker")
    async with AsyncExitStack() as stack:
        budget = memory_budget(options.memory_budget)
        network = cluster_network(
            token,
            entropy=system_entropy,
            buffers=buffers,
            checksum=options.checksum,
            budget=budget,
            advertise=options.advertise or "",
        )
        copies = None
        if isinstance(options, ServerOptions) and options.copies_bind:
            copies = copies_path(
                token,
                options.copies_bind,
                entropy=system_entropy,
                buffers=buffers,
                checksum=options.checksum,
                budget=budget,
            )
        place = Place(
            node=node,
            bind=bind,
            controller=controllers,
            network=await stack.enter_async_context(slowed(network, options.slow)),
            buffers=buffers,
            waits=waits,
            entropy=system_entropy,
            timeline=Timeline(node, limit_events=profile_events) if profile_events else None,
            copies=copies,
        )
        running = await stack.enter_async_context(open_role(place))
        health.follow(running.unready)
        stack.callback(health.drain)
        await running.joined()
        join = ["adam-async", *NEXT[role], controllers or running.address]
        if token is not None and holds_keys(token):
            join += ["--token-file", f"{KEYS_OF_NEXT[role]}.keys"]  # the next role has its own keys
        elif options.token_file is not None:
            join += ["--token-file", str(options.token_file)]
        if isinstance(running, Controller) and running.group.is_cut_off:
            join = []  # a role that joined the controller would wait as long as it does
        command = shlex.join(join)
        if role == "ps" and join:
            command += f", or open a store at {controllers}"
        line = address_line(place.node, running.address, command)
        sys.stdout.write(f"{printable(line)}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
