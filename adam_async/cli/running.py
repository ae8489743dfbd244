"""Runs of the commands' coroutines, each in an event loop of its own."""

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from adam_async.cli.log import JsonLine, NodeLine, OneLine, RoleLine
from adam_async.cli.options import LogLevel, LoopName, RoleOptions, TrainOptions, check_present
from adam_async.cli.signals import EARLY, loop_factory
from adam_async.cli.terminal import Terminal, log_to_stderr
from adam_async.data_server.sources.names import check_exists
from adam_async.model.named import check_model
from adam_async.run.config import check_ranges
from adam_async.run.option_sources import (
    COMMAND_LINE,
    ENVIRONMENT,
    PLAIN,
    check_variables,
    from_environment,
    from_toml,
    make_config,
)
from adam_async.runtime.health import Health


def run_in_loop(
    main: Callable[[Terminal], Coroutine[Any, Any, int]],
    *,
    loop: LoopName,
    verbose: bool = False,
    quiet: bool = False,
    level: LogLevel | None = None,
    lines: OneLine | None = None,
) -> int:
    """Run a command's coroutine in its own loop."""
    check_variables(os.environ, PLAIN)
    log_to_stderr(verbose=verbose, level=level, lines=lines)
    terminal = Terminal(quiet=quiet)
    return EARLY.run(lambda: main(terminal), loop_factory=loop_factory(loop))


def run_role(main: Callable[[Terminal, Health], Coroutine[Any, Any, int]], options: RoleOptions) -> int:
    """Run a role, and answer its probes. A parent process prefixes the lines of its children."""
    from adam_async.cli.health import with_health

    lines = NodeLine() if options.supervised else JsonLine() if options.log_json else RoleLine()
    return run_in_loop(
        lambda terminal: with_health(options.health, lambda health: main(terminal, health)),
        loop=options.loop,
        verbose=options.verbose,
        level=options.log_level,
        lines=lines,
    )


def run_driver(
    main: Callable[[Terminal], Coroutine[Any, Any, int]],
    options: TrainOptions,
    file: Path | None = None,
    *,
    reads_files: bool = False,
) -> int:
    """Run a command that drives a training; `main` imports the modules of a training when it is called.

    Args:
        file: File of options of `launch`, in place of `--config`.
        reads_files: Whether the driver runs in this process, and so reads the files that options name.
    """

    async def checked(terminal: Terminal) -> int:
        await check_values(options, os.environ, options.config or file, reads_files=reads_files)
        return await main(terminal)

    return run_in_loop(
        checked,
        loop=options.loop,
        verbose=options.verbose,
        quiet=options.quiet,
        level=options.log_level,
        lines=JsonLine("driver") if options.log_json else None,
    )


async def check_values(
    options: TrainOptions, environment: Mapping[str, str], file: Path | None, *, reads_files: bool
) -> None:
    """Check options before the modules of a training are imported, which takes longer than the checks.

    Options that join those of a checkpoint or a record are checked later, together with them, except for
    the bounds of numbers.

    Raises:
        ConfigError: A value is wrong, or the file of options cannot be read.
        DataError: The data are missing.
    """
    given = {name: value for name, value in options.layer().items() if value is not None}
    check_ranges(given)
    if options.resume is not None and options.attach is None:
        check_present("--resume", options.resume)
    if options.resume is not None or options.store is not None or options.replay is not None:
        return
    in_file: Mapping[str, Any] = {}
    if file is not None:
        from adam_async.cli.files import read_file
        from adam_async.runtime.disk import Disk

        async with Disk() as disk:
            in_file = from_toml(await read_file(file, "--config", disk), source=str(file))
    layers = (in_file, from_environment(environment), options.layer())
    config = make_config(*layers, sources=(str(file), ENVIRONMENT, COMMAND_LINE))
    check_model(config.model)
    if reads_files:
        if config.model.endswith(".toml"):
            check_present("--model", Path(config.model))
        if config.transforms:
            check_present("--transforms", Path(config.transforms))
        if options.controller is None:
            check_exists(config.data)
