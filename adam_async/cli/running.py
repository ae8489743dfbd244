"""Runs of the commands' coroutines, each in an event loop of its own."""

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from adam_async.cli.options import LogLevel, RoleOptions, TrainOptions
from adam_async.cli.signals import EARLY
from adam_async.cli.terminal import JsonLine, NodeLine, OneLine, RoleLine, Terminal, log_to_stderr
from adam_async.run.option_sources import PLAIN, check_variables
from adam_async.runtime.health import Health


def run_in_loop(
    main: Callable[[Terminal], Coroutine[Any, Any, int]],
    *,
    verbose: bool = False,
    quiet: bool = False,
    level: LogLevel | None = None,
    lines: OneLine | None = None,
) -> int:
    """Run a command's coroutine in its own loop."""
    check_variables(os.environ, PLAIN)
    log_to_stderr(verbose=verbose, level=level, lines=lines)
    terminal = Terminal(quiet=quiet)
    return EARLY.run(lambda: main(terminal))


def run_role(main: Callable[[Terminal, Health], Coroutine[Any, Any, int]], options: RoleOptions) -> int:
    """Run a role, and answer its probes. A parent process prefixes the lines of its children."""
    from adam_async.cli.health import with_health

    lines = NodeLine() if options.supervised else JsonLine() if options.log_json else RoleLine()
    return run_in_loop(
        lambda terminal: with_health(options.health, lambda health: main(terminal, health)),
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

    from adam_async.cli.train_checks import check_values

    async def checked(terminal: Terminal) -> int:
        await check_values(options, os.environ, options.config or file, reads_files=reads_files)
        return await main(terminal)

    return run_in_loop(
        checked,
        verbose=options.verbose,
        quiet=options.quiet,
        level=options.log_level,
        lines=JsonLine("driver") if options.log_json else None,
    )
