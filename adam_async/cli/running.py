"""Runs of the commands' coroutines, each in an event loop of its own."""

import os
from collections.abc import Callable, Coroutine
from typing import Any

from adam_async.cli.log import JsonLine, OneLine, RoleLine
from adam_async.cli.options import LogLevel, LoopName, RoleOptions, TrainOptions
from adam_async.cli.signals import EARLY, loop_factory
from adam_async.cli.terminal import Terminal, log_to_stderr
from adam_async.run.option_sources import PLAIN, check_variables
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

    lines = None if options.supervised else JsonLine() if options.log_json else RoleLine()
    return run_in_loop(
        lambda terminal: with_health(options.health, lambda health: main(terminal, health)),
        loop=options.loop,
        verbose=options.verbose,
        level=options.log_level,
        lines=lines,
    )


def run_driver(main: Callable[[Terminal], Coroutine[Any, Any, int]], options: TrainOptions) -> int:
    """Run a command that drives a training."""
    return run_in_loop(
        main,
        loop=options.loop,
        verbose=options.verbose,
        quiet=options.quiet,
        level=options.log_level,
        lines=JsonLine("driver") if options.log_json else None,
    )
