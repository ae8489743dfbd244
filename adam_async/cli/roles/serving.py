"""How a command serves one role: the options, a parent process's orders, the printed line."""

import asyncio
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from adam_async.cli.options import ControllerOptions, DataServerOptions, MemberOptions, RoleOptions
from adam_async.cli.terminal import describe_logs, name_node, printable
from adam_async.cli.token import read_token
from adam_async.cluster.networks import address_towards, cluster_network, copies_path, memory_budget, slowed
from adam_async.cluster.parent_pipe import Orders, Parent, die_with_parent
from adam_async.cluster.roles.place import Place
from adam_async.controller.role import Role
from adam_async.errors import ConfigError
from adam_async.report.metrics import role_metrics
from adam_async.run.addresses import check_address, check_addresses
from adam_async.run.config import Waits
from adam_async.run.stragglers import check_own
from adam_async.run.token_file import holds_keys
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.health import Health
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
"""For a cluster started by hand, the next command and its option for the role's address, by the role that
prints the command in its line. A data host is a data server without a controller."""

KEYS_OF_NEXT = {"controller": "ps", "ps": "data", "data": "worker", "data-host": "driver", "worker": "driver"}
"""Role whose keys the command in `NEXT` needs, by the role that prints the command."""


_R = TypeVar("_R", bound=Role)

Open = Callable[[Place], AbstractAsyncContextManager[_R]]

WAITS = Waits()
"""Deadlines of a role started by hand, except the wait for its controller."""


async def serve_member(
    role: str,
    options: MemberOptions | DataServerOptions,
    environment: Mapping[str, str],
    health: Health,
    open_role: Open[_R],
) -> int:
    """Run a member of a cluster until it is ended, and return the exit code."""
    assert options.controller is not None, "a member has a controller"
    controllers = check_addresses(options.controller, "--join" if role == "worker" else "--controller")
    bind = options.bind or await address_towards(controllers)
    return await serve(role, options, controllers, bind, environment, health, open_role)


async def serve(
    role: str,
    options: ControllerOptions | MemberOptions | DataServerOptions,
    controllers: str,
    bind: str,
    environment: Mapping[str, str],
    health: Health,
    open_role: Open[_R],
    *,
    is_cut_off: Callable[[_R], bool] = lambda _: False,
) -> int:
    """Run a role until it is ended, and return the exit code.

    Args:
        role: Name of the role: controller, ps, data, data-host or worker.
        options: Options of its command.
        controllers: Addresses of the controllers, joined by commas; empty without a controller.
        bind: Address to listen on.
        environment: Environment variables, which may have the token.
        health: Answers the probes of the role.
        open_role: Opens the role at a `Place`, which has its network and address.
        is_cut_off: Returns whether a role that joins this one would have to wait; then the printed line has
            no command for the next role.
    """
    check_address(bind, "--bind", everywhere=options.advertise is not None)
    stay = partial(_stay, role, options, controllers, bind, health, open_role, is_cut_off)
    if not options.supervised:
        token = await read_token(options.token_file, environment, role=role.removesuffix("-host"))
        waits = WAITS if isinstance(options, ControllerOptions) else waits_at_start(options.wait)
        await stay(token, waits)
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
                stay(orders.token, orders.waits, orders.profile_events), name=f"{role}/serve"
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


async def _place(
    stack: AsyncExitStack,
    node: str,
    options: RoleOptions,
    controllers: str,
    bind: str,
    token: str | None,
    waits: Waits,
    profile_events: int,
) -> Place:
    """Return the place of a role, whose network ends with the stack."""
    buffers, config = BufferPool(), options.config()
    shared: dict[str, Any] = {
        "entropy": system_entropy,
        "buffers": buffers,
        "checksum": config.checksum,
        "link": config.link,
        "budget": memory_budget(config.memory_budget),
    }
    network = cluster_network(token, advertise=options.advertise or "", **shared)
    return Place(
        node=node,
        bind=bind,
        controller=controllers,
        network=await stack.enter_async_context(slowed(network, config.slow)),
        buffers=buffers,
        waits=waits,
        entropy=system_entropy,
        timeline=Timeline(node, limit_events=profile_events) if profile_events else None,
        copies=copies_path(token, config.copies_bind, **shared) if config.copies_bind else None,
    )


async def _stay(
    role: str,
    options: RoleOptions,
    controllers: str,
    bind: str,
    health: Health,
    open_role: Open[_R],
    is_cut_off: Callable[[_R], bool],
    token: str | None,
    waits: Waits,
    profile_events: int = 0,
) -> None:
    """Open the role, print its line when it has joined, and serve until cancelled.

    A controller of a group does not wait for the others: after a restart they may work without it.
    """
    node = options.id or f"{role}-{platform.node()[:40]}-{os.getpid()}"
    name_node(node)
    check_own(options.config().slow, node, computes=role == "worker")
    async with AsyncExitStack() as stack:
        place = await _place(stack, node, options, controllers, bind, token, waits, profile_events)
        running = await stack.enter_async_context(open_role(place))
        health.follow(running.unready)
        health.metrics = partial(role_metrics, running)
        describe_logs(running.log_facts)
        stack.callback(health.drain)
        await running.joined()
        join = ["adam-async", *NEXT[role], controllers or running.address]
        if token is not None and holds_keys(token):
            join += ["--token-file", f"{KEYS_OF_NEXT[role]}.keys"]  # the next role has its own keys
        elif options.token_file is not None:
            join += ["--token-file", str(options.token_file)]
        if is_cut_off(running):
            join = []  # a role that joins a controller without a majority waits
        command = shlex.join(join)
        if role == "ps" and join:
            command += f", or open a store at {controllers}"
        line = address_line(place.node, running.address, command)
        sys.stdout.write(f"{printable(line)}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
