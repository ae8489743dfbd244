"""The page of `train --dashboard`, and the command `dashboard` for running clusters and past runs."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from adam_async.cli.operation import MARGIN_S, joined, waits_of
from adam_async.cli.options import DashboardOptions, TrainOptions
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.terminal import Terminal
from adam_async.cli.token import read_token
from adam_async.dashboard.access import SECRET_BYTES, Access
from adam_async.dashboard.state import State
from adam_async.driver.cluster_watch import ClusterWatch
from adam_async.driver.driver import Driver
from adam_async.driver.events import RunEvents
from adam_async.driver.predictions import Predictions
from adam_async.driver.requests import Request, ask
from adam_async.errors import ConfigError, binding, install_command
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.events import EpochEnds, Evaluated, RunBegins
from adam_async.run.training_program import read_training
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from transport.sockets import parse_tcp_address

if TYPE_CHECKING:
    from adam_async.dashboard.server import Site


@asynccontextmanager
async def train_page(options: TrainOptions, driver: Driver, terminal: Terminal) -> AsyncIterator[None]:
    """Show a driver's runs until the block ends; without `--dashboard` do nothing.

    Raises:
        BindFailed: The address is not available.
        ConfigError: The extra `dashboard` is not installed, or the token is missing or wrong.
    """
    if options.dashboard is None:
        yield
        return
    with _installed():
        from adam_async.dashboard.server import Site, feed

    async def operate(request: Request) -> Sequence[str]:
        """Carry out a request of a visitor."""
        answer = await driver.answer(request)
        if answer.refusal:
            raise ConfigError(answer.refusal)
        return answer.lines

    live = State("a run that begins")
    feed(driver.events, live)
    site = Site(live=live, operate=operate if options.allow_operations else None)
    async with _page(options.dashboard, "--dashboard", site, options.dashboard_token_file, terminal):
        yield


async def serve_dashboard(
    options: DashboardOptions, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Serve the page of a cluster, of past runs, or of both, until cancelled.

    Raises:
        BindFailed: The address is not available.
        ConfigError: An address or a token is wrong, or the extra `dashboard` is not installed.
        RoleUnreachable: No controller answered.
    """
    with _installed():
        from adam_async.dashboard.past_runs import PastRuns
        from adam_async.dashboard.server import Site, feed
    token = await read_token(options.token_file, environment, role="driver")
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        disk = await stack.enter_async_context(Disk())
        past = PastRuns(options.runs, disk) if options.runs is not None else None
        live = None
        if options.controller is not None:
            member, queries = await stack.enter_async_context(
                joined("driver", token, options.controller, options.wait)
            )
            live, stream = State("cluster"), EventStream()
            feed(stream, live)
            watch = ClusterWatch(
                queries,
                member,
                run=lambda: member.map.run.id if member.map.run is not None else "",
                events=RunEvents(stream, stores=None),
                stream=stream,
                waits=waits_of(member.map),
                asks_stores=True,
            )
            group.create_task(watch.run(), name="dashboard/watch")
            group.create_task(publish_epochs(member.changes(), stream), name="dashboard/epochs")
            predictions = Predictions(queries.endpoint, member, stream, waits=waits_at_start(options.wait))
            group.create_task(predictions.run(), name="dashboard/predictions")
        operate = _asking(options, token) if options.allow_operations else None
        site = Site(live=live, past=past, operate=operate)
        async with _page(options.bind, "--bind", site, options.dashboard_token_file, terminal):
            await asyncio.Event().wait()
    return 0


def _asking(options: DashboardOptions, token: str | None) -> Callable[[Request], Awaitable[Sequence[str]]]:
    """Return a function that asks the driver of the run, each time as another operator."""

    async def operate(request: Request) -> Sequence[str]:
        """Ask, and return the lines of the answer."""
        assert options.controller is not None, "operations need it"
        async with joined("driver", token, options.controller, options.wait) as (member, _):
            return await ask(member, request, within_s=waits_at_start(options.wait).prepare_s + MARGIN_S)

    return operate


async def publish_epochs(changes: AsyncIterable[ClusterMap], stream: EventStream) -> None:
    """Publish a run's begin and its epochs' results, as in the cluster map."""
    run, ended, evaluated = "", 0, 0
    async for cluster in changes:
        program, epoch = cluster.run, cluster.epoch
        if program is None or epoch is None or epoch.run != program.id:
            continue
        if program.id != run:
            run, ended, evaluated = program.id, 0, 0
            stream.publish(_beginning(cluster))
        first = cluster.ended - len(cluster.results) + 1
        for number in range(max(ended + 1, first), cluster.ended + 1):
            stream.publish(EpochEnds(epoch=number, counts=cluster.result(number)))
        ended = cluster.ended
        for each in program.evaluated:
            if each.epoch > evaluated:
                stream.publish(Evaluated(evaluation=each))
                evaluated = each.epoch


def _beginning(cluster: ClusterMap) -> RunBegins:
    """Return the begin of a map's run; without options if a driver of another release made it."""
    assert cluster.run is not None
    assert cluster.epoch is not None
    try:
        config = read_training(cluster.run).config
    except (ConfigError, ValueError):
        config = None
    return RunBegins(
        run=cluster.run.id,
        driver=cluster.run.driver,
        model=config.model if config is not None else cluster.run.id,
        data=config.data if config is not None else "",
        config=to_builtins(config) if config is not None else {},
        epochs=cluster.run.terms.get("epochs", 1),
        images=cluster.epoch.groups * (config.images_per_group if config is not None else 1),
    )


@contextmanager
def _installed() -> Iterator[None]:
    """Raise the absence of a package as ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11"):
            raise
        how = install_command("dashboard")
        raise ConfigError(f"the dashboard needs {error.name}, of the extra `dashboard`: {how}") from None


@asynccontextmanager
async def _page(
    bind: str, option: str, site: "Site", token_file: Path | None, terminal: Terminal
) -> AsyncIterator[None]:
    """Serve a page until the block ends, and print its address."""
    from adam_async.dashboard.server import serving

    host, port = parse_tcp_address(f"tcp://{bind}")
    token = await read_token(token_file, {}, option="--dashboard-token-file")
    access = Access(token or system_entropy(SECRET_BYTES).hex(), host=host, entropy=system_entropy)
    async with AsyncExitStack() as stack:
        with binding(f"tcp://{bind}", f"choose another with {option}"):
            port = await stack.enter_async_context(serving(host, port, site, access))
        shown = f"[{host}]" if ":" in host else host
        secret = f"#{access.token}" if token is None else f" with the token in {token_file}"
        terminal.notice(f"dashboard: http://{shown}:{port}/{secret}")
        yield
