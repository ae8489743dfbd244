"""Runs commands' coroutines, each in a separate event loop; answers the probes of `--health`."""

import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

from adam_async.cli.options import LogLevel, LogOptions, RoleOptions, TrainOptions
from adam_async.cli.signals import EARLY
from adam_async.cli.terminal import JsonLine, NodeLine, OneLine, RoleLine, Terminal, log_to_stderr
from adam_async.errors import ConfigError, binding
from adam_async.run.addresses import check_address
from adam_async.run.option_sources import PLAIN, check_variables
from adam_async.runtime.health import Health, health_endpoint
from adam_async.runtime.standard_streams import unblocked_streams
from transport.sockets import parse_tcp_address


def run_in_loop(
    main: Callable[[Terminal], Coroutine[Any, Any, int]],
    *,
    verbose: bool = False,
    quiet: bool = False,
    level: LogLevel | None = None,
    lines: OneLine | None = None,
    serves: bool = False,
) -> int:
    """Run a command's coroutine in its own loop.

    Args:
        serves: Whether others wait for the loop's answers, so that no reader of the output may block it.
    """
    check_variables(os.environ, PLAIN)
    with unblocked_streams(lambda: EARLY.first is not None) if serves else nullcontext():
        log_to_stderr(verbose=verbose, level=level, lines=lines)
        terminal = Terminal(quiet=quiet)
        return EARLY.run(lambda: main(terminal))


def run_role(main: Callable[[Terminal, Health], Coroutine[Any, Any, int]], options: RoleOptions) -> int:
    """Run a role, and answer health probes. A parent process prefixes the lines of its children."""
    lines = NodeLine() if options.supervised else JsonLine() if options.log_format == "json" else RoleLine()
    return run_in_loop(
        lambda terminal: with_health(options, lambda health: main(terminal, health)),
        verbose=options.verbose,
        level=options.log_level,
        lines=lines,
        serves=True,
    )


def run_driver(
    main: Callable[[Terminal], Coroutine[Any, Any, int]],
    options: TrainOptions,
    file: Path | None = None,
    *,
    reads_files: bool = False,
) -> int:
    """Run a command that drives a training; calling `main` imports the training's modules.

    Args:
        file: Options file of `launch`, instead of `--config`.
        reads_files: Whether the driver runs in this process, and so reads the files that options name.
    """

    from adam_async.cli.train_checks import check_values

    async def checked(terminal: Terminal) -> int:
        await check_values(options, os.environ, options.config or file, reads_files=reads_files)
        return await main(terminal)

    return run_in_loop(
        checked,
        verbose=options.verbose,
        quiet=options.quiet,
        level=options.log_level,
        lines=JsonLine("driver") if options.log_format == "json" else None,
        serves=True,
    )


async def with_health(options: LogOptions, work: Callable[[Health], Awaitable[int]]) -> int:
    """Run a command, answer probes at `--health` until it ends, and return its exit code.

    Raises:
        BindFailed: The address is not available.
        ConfigError: The address is not ``tcp://host:port``, or `--metrics` lacks it.
    """
    health, address = Health(with_metrics=options.metrics), options.health
    if address is None:
        if options.metrics:
            raise ConfigError("--metrics answers at the address of --health: give --health tcp://HOST:PORT")
        return await work(health)
    host, port = parse_tcp_address(check_address(address, "--health", everywhere=True))
    async with AsyncExitStack() as stack:
        with binding(address, "choose another with --health"):
            await stack.enter_async_context(health_endpoint(host, port, health))
        return await work(health)


async def with_serving(options: LogOptions, work: Callable[[Health], Awaitable[int]]) -> int:
    """Run a command that is ready as long as it runs. See `with_health`."""

    async def ready(health: Health) -> int:
        """Run the command; the health is ready until the command ends, then draining."""
        health.follow(lambda: "")
        try:
            return await work(health)
        finally:
            health.drain()

    return await with_health(options, ready)
