"""The commands of an operator in another shell: `status`, `logs`, `scale` and `stop`."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from adam_async.cli.operation_options import OperatorOptions, StatusOptions
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.terminal import Terminal, new_table, print_json, printable
from adam_async.cli.token import read_token
from adam_async.cluster.networks import cluster_network
from adam_async.controller.client import Membership, joined_as
from adam_async.driver.requests import Action, Request, ask
from adam_async.driver.role_queries import RoleQueries
from adam_async.driver.status import ClusterStatus, RoleStatus, read_status
from adam_async.errors import RunFailed
from adam_async.run.addresses import check_addresses
from adam_async.run.run_copies import RunCopies
from adam_async.run.token_file import holds_keys_of
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from transport import BufferPool

MARGIN_S = 60.0
"""Maximum wait for a driver's answer beyond the time that the start of a worker may take, in seconds."""


async def show_status(options: StatusOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Print the roles of a cluster and its run.

    Raises:
        ConfigError: An address or the token is wrong.
        RoleUnreachable: No controller answered.
    """
    token = await read_token(options.token_file, environment)
    is_reader = token is not None and holds_keys_of(token, "reader")
    async with _joined("reader" if is_reader else "driver", token, options) as (membership, queries):
        status = await read_status(membership, None if is_reader else queries, with_ended=options.all)
    if options.json:
        print_json(status, terminal)
    else:
        _print(status, terminal)
        if is_reader:
            terminal.notice(
                "the keys of a reader show the cluster map alone: give the keys of a driver for counts"
            )
    return 0


async def send_request(
    action: Action,
    options: OperatorOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
    *,
    node: str = "",
    workers: int = 0,
) -> int:
    """Ask the driver of the run in progress, and print its answer.

    Raises:
        ConfigError: An address or the token is wrong, or the driver refuses the request.
        DeadlineExceeded: The driver did not answer in time.
        RoleUnreachable: No controller answered.
        RunFailed: No run is in progress, or it has no live driver.
    """
    token = await read_token(options.token_file, environment, role="driver")
    async with _joined("driver", token, options) as (membership, _):
        run = membership.map.run
        if run is None or run.over:
            there = f"the last one, {run.id}, is over" if run is not None else "the cluster has had none"
            raise RunFailed(f"no run is in progress: {there}; adam-async status shows the cluster")
        request = Request(run=run.id, action=action, node=node, workers=workers)
        waits = waits_at_start(options.wait)
        lines = await ask(membership, request, within_s=waits.prepare_s + MARGIN_S)
        for line in lines:
            terminal.print(printable(line))
        if not lines:
            terminal.notice(f"{node} has written no line")
    return 0


@asynccontextmanager
async def _joined(
    role: str, token: str | None, options: OperatorOptions
) -> AsyncIterator[tuple[Membership, RoleQueries]]:
    controllers = check_addresses(options.controller, "--controller")
    waits = waits_at_start(options.wait)
    network = cluster_network(token, entropy=system_entropy, buffers=BufferPool())
    async with joined_as(role, network, controllers, waits) as (membership, identity):
        endpoint = Endpoint(network, identity)
        yield membership, RoleQueries(endpoint, waits=waits)


def _print(status: ClusterStatus, terminal: Terminal) -> None:
    run = status.run
    if run is None:
        terminal.print("no run; adam-async store list shows the stores" if status.stores else "no run")
    else:
        of = f" of {run.epochs}" if run.epochs else ""
        groups = f", {run.finished:,} of {run.groups:,} groups" if run.groups else ""
        accuracy = f", test accuracy {run.test_accuracy:.2%}" if run.test_accuracy is not None else ""
        reason = f": {run.reason}" if run.reason else ""
        terminal.print(f"run {run.id}: {run.phase}{reason}, epoch {run.epoch}{of}{groups}{accuracy}")
        if not run.driven and run.phase not in ("finished", "failed"):
            terminal.print(f"its driver, {run.driver}, is lost: adam-async train --attach takes the run over")
    table = new_table(
        "node", "state", "machine", ">pid", ">age", ">MB", ">shared", ">groups", ">lag", ">version", "address"
    )
    for role in status.roles:
        table.add_row(*_row(role))
    terminal.table(table)
    for role in status.roles:
        if role.notice:
            terminal.print(f"{role.node}: {role.notice}")
    if status.copies is not None and status.copies.copies > 1:
        print_copies("the run", status.copies, terminal)
    for name, copies in status.store_copies.items():
        if copies.copies > 1 or copies.lagging:
            print_copies(f"store {name!r}", copies, terminal)


def _row(role: RoleStatus) -> tuple[str, ...]:
    low, high = role.version or (0, 0)
    return (
        role.node,
        role.state,
        role.host or "-",
        f"{role.pid or '-'}",
        age_text(role.age_s) if role.host else "-",
        f"{role.peak_rss_mb:,.0f}" if role.host else "-",
        f"{role.shared}" if role.host else "-",
        f"{role.groups:,}" if role.role in ("data", "worker") and role.host else "-",
        "-" if role.lag is None else f"{role.lag:,}",
        "-" if role.version is None else (f"{low:,}" if low == high else f"{low:,} to {high:,}"),
        role.address,
    )


def age_text(seconds: float) -> str:
    """Return a duration with two units at most, such as ``2h 05m``."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s" if minutes else f"{whole}s"


def print_copies(owner: str, copies: RunCopies, terminal: Terminal) -> None:
    """Print the servers with copies of each bundle of a run or store, and the bundles with too few copies.

    Args:
        owner: The run or store, in words.
    """
    if not copies.bundles:
        return
    table = new_table(f"bundle of {owner}", "primary", "others in sync", "joining")
    for bundle in copies.bundles:
        others = ", ".join(bundle.in_sync[1:]) or "-"
        table.add_row(bundle.home, bundle.primary or "lost", others, ", ".join(bundle.joining) or "-")
    terminal.table(table)
    for bundle in copies.lagging:
        terminal.print(
            f"bundle {bundle.home} of {owner} has {len(bundle.in_sync)} of {copies.copies} copies in sync"
        )
