"""The commands of an operator in another shell: `status`, `logs`, `scale` and `stop`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta

from adam_async.cli.options import OperatorOptions, StatusOptions
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.terminal import Terminal, age_text, new_table, print_json, printable
from adam_async.cli.token import read_token
from adam_async.cluster.networks import cluster_network
from adam_async.controller.client import Membership, joined_as
from adam_async.driver.cluster_watch import ClusterWatch
from adam_async.driver.events import RunEvents
from adam_async.driver.readiness import POLL_S
from adam_async.driver.requests import Action, Request, ask
from adam_async.driver.role_queries import RoleQueries
from adam_async.errors import ConfigError, RunFailed
from adam_async.report.stream import EventStream
from adam_async.run.addresses import check_addresses
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import DEFAULT_WAITS, ClusterStatus, RoleStatus, RunStatus
from adam_async.run.condition import LostRole, Verdict
from adam_async.run.config import Waits
from adam_async.run.run_copies import RunCopies
from adam_async.run.token_file import holds_keys_of
from adam_async.run.training_program import read_training
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy, time_of_day, wall_clock
from transport import BufferPool

MARGIN_S = 60.0
"""Maximum wait for a driver's answer beyond the time that the start of a worker may take, in seconds."""

VERDICT_CODES: dict[Verdict, int] = {"well": 0, "degraded": 10, "ending": 11}
"""Exit code of `status --check`; docs/reference/exit-codes.md lists all."""


async def show_status(options: StatusOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Print a cluster's roles and run, once or until cancelled; return the exit code.

    Raises:
        ConfigError: An address or the token is wrong.
        RoleUnreachable: No controller answered.
    """
    token = await read_token(options.token_file, environment)
    is_reader = token is not None and holds_keys_of(token, "reader")
    async with joined("reader" if is_reader else "driver", token, options.controller, options.wait) as (
        membership,
        queries,
    ):
        stream = EventStream()
        watch = ClusterWatch(
            None if is_reader else queries,
            membership,
            run=lambda: membership.map.run.id if membership.map.run is not None else "",
            events=RunEvents(stream, stores=None),
            stream=stream,
            waits=waits_of(membership.map),
        )
        status = await watch.poll(with_ended=options.all)
        while options.watch:
            terminal.clear()
            _show(status, options, terminal)
            await asyncio.sleep(POLL_S)
            status = await watch.poll(with_ended=options.all)
    _show(status, options, terminal)
    if is_reader and not options.json:
        terminal.notice(
            "the keys of a reader show the cluster map alone: give the keys of a driver for counts"
        )
    return VERDICT_CODES[status.condition.verdict] if options.check else 0


def waits_of(cluster: ClusterMap) -> Waits:
    """Return the run's deadlines; the usual ones if the cluster has none, or those of another release."""
    try:
        return read_training(cluster.run).config.waits if cluster.run is not None else DEFAULT_WAITS
    except (ConfigError, ValueError):
        return DEFAULT_WAITS


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
    async with joined("driver", token, options.controller, options.wait) as (membership, _):
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
async def joined(
    role: str, token: str | None, controller: str, wait: timedelta
) -> AsyncIterator[tuple[Membership, RoleQueries]]:
    """Join a cluster as an operator, until the block ends. See `waits_at_start` for `wait`."""
    controllers = check_addresses(controller, "--controller")
    waits = waits_at_start(wait)
    network = cluster_network(token, entropy=system_entropy, buffers=BufferPool())
    async with joined_as(role, network, controllers, waits) as (membership, identity):
        endpoint = Endpoint(network, identity)
        yield membership, RoleQueries(endpoint, waits=waits)


def _show(status: ClusterStatus, options: StatusOptions, terminal: Terminal) -> None:
    if options.json:
        print_json(status, terminal)
    else:
        print_status(status, terminal)


def print_status(status: ClusterStatus, terminal: Terminal) -> None:
    """Print a cluster's state: run, verdict, losses and waits first, then each role and the copies."""
    run, condition = status.run, status.condition
    if run is None:
        terminal.print("no run; adam-async store list shows the stores" if status.stores else "no run")
    else:
        terminal.print(_run_line(run))
        if not run.driven and run.phase not in ("finished", "failed"):
            terminal.print(f"its driver, {run.driver}, is lost: adam-async train --attach takes the run over")
    terminal.print(condition.judgement)
    if run is not None and run.phase not in ("finished", "failed"):
        terminal.print(condition.line)
    elif condition.survival:
        terminal.print(condition.survival)
    for lost in condition.lost:
        terminal.print(_lost_line(lost, wall_clock()))
    for wait in condition.waits:
        terminal.print(f"{wait}")
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


def _run_line(run: RunStatus) -> str:
    of = f" of {run.epochs}" if run.epochs else ""
    phase = f"{run.phase}: {run.reason}" if run.reason and run.phase != "failed" else run.phase
    parts = [f"run {run.id}: {phase}, epoch {run.epoch}{of}"]  # the verdict has the reason of a failure
    if run.in_place:
        parts.append("in place")
    if run.groups:
        parts.append(f"{run.finished:,} of {run.groups:,} groups")
    if run.images_per_s:
        parts.append(f"{run.images_per_s:,.0f} images/s")
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    if run.test_accuracy is not None:
        parts.append(f"test accuracy {run.test_accuracy:.2%}")
    if run.left_s is not None:
        parts.append(f"{age_text(run.left_s)} left")
    return ", ".join(parts)


def _lost_line(lost: LostRole, now: float) -> str:
    if lost.since is None:
        return f"{lost.node} is lost"
    return f"{lost.node} is lost since {time_of_day(lost.since)}, for {age_text(max(now - lost.since, 0.0))}"


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
