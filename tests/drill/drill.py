"""The run of the command `drill`: faults of servers under a workload, measured and judged."""

import json
import logging
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from adam_async.cli.files import check_target, write_file
from adam_async.cli.terminal import Terminal, new_table
from adam_async.errors import ConfigError
from adam_async.option_types import check_bounds
from adam_async.run.config import Config
from adam_async.run.user_code import add_import_folder, import_step, read_args
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from tests.drill.command import DrillOptions
from tests.drill.counter import CounterDrill
from tests.drill.judging import MOST_PAIRS, Claim, KindRow, Observations, exit_code, judge, kind_rows
from tests.drill.network_namespaces import NamespaceNetwork, namespace_network
from tests.drill.plan import plan_faults, read_kinds, skipped_kinds
from tests.drill.training import DrilledStep, TrainingDrill

logger = logging.getLogger(__name__)

DEFAULT_COUNT = 4
"""Default number of faults, without `--count`, `--every` and `--for`."""

LEAST_COPIES = 3
"""Minimum number of copies of each shard in a drill. A push needs two copies in sync, even while a third copy
is lost."""

MOST_FAULTS = 100_000

WORDS = {True: "holds", False: "FAILED", None: "not checked"}


async def run_drill(options: DrillOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Run a drill, print its table, and return its exit code.

    Raises:
        ConfigError: An option is wrong, or contradicts another; or the file cannot be written.
        RoleDied: A process could not start.
    """
    kinds = read_kinds(options.faults)
    config = options.config(processes=True)
    check_options(options, config)
    async with Disk() as disk, AsyncExitStack() as stack:
        if options.json is not None:
            await check_target(options.json, "--json", disk)
        network, no_network = None, ""
        if "cut" in kinds:
            try:
                servers = [f"ps-{number}" for number in range(config.servers)]
                network = await stack.enter_async_context(namespace_network(servers))
            except OSError as error:
                no_network = f"cuts need root and network namespaces: {error}"
        skipped = skipped_kinds(kinds, has_signals=hasattr(signal, "SIGSTOP"), no_network=no_network)
        injectable = tuple(kind for kind in kinds if kind not in skipped)
        for kind, reason in skipped.items():
            terminal.notice(f"skipped: {kind}: {reason}")
        seen = await drill_of(options, config, injectable, network, environment, terminal).run()
        claims = judge(seen, margin=options.margin / 100)
        code = exit_code(claims, tuple(skipped), require=options.require)
        if options.json is not None:
            result = report_of(options, seen, claims, skipped, code)
            text = json.dumps(result, indent=1) + "\n"
            await write_file(options.json, "--json", [text.encode()], disk)
    print_results(seen, claims, terminal)
    return code


def drill_of(
    options: DrillOptions,
    config: Config,
    kinds: tuple[str, ...],
    network: NamespaceNetwork | None,
    environment: Mapping[str, str],
    terminal: Terminal,
) -> CounterDrill | TrainingDrill:
    """Return the drill of these options, with faults of these kinds."""
    count = fault_count(options)
    if options.workload == "counter":
        return CounterDrill(
            servers=config.servers,
            copies=config.copies_in_force,
            controllers=config.controllers,
            plan=plan_faults(kinds, count, config.seed),
            every_s=options.every or 0.0,
            environment=environment,
            entropy=system_entropy,
            on_fault=terminal.notice,
            waits=config.waits,
            network=network,
        )
    return TrainingDrill(
        config=config,
        step=step_of(options),
        plans=[plan_faults(kinds, count, config.seed + pair) for pair in range(options.pairs)],
        every_s=options.every or 0.0,
        environment=environment,
        on_fault=terminal.notice,
        on_line=logger.info,
        network=network,
    )


# --- options -------------------------------------------------------------------------------------


def check_options(options: DrillOptions, config: Config) -> None:
    """Check options that contradict others.

    Raises:
        ConfigError: An option is out of bounds, or contradicts another.
    """
    if options.count is not None and options.for_ is not None:
        raise ConfigError("--count and --for both set the number of faults: leave one out")
    if (options.for_ is not None) and options.every is None:
        raise ConfigError("--for needs --every, the seconds between two faults")
    check_bounds("--count (--for / --every)", fault_count(options), 1, MOST_FAULTS)
    check_bounds("--pairs", options.pairs, 1, MOST_PAIRS)
    if options.workload == "counter":
        for name, value, default in (("--pairs", options.pairs, 1), ("--epochs", config.epochs, 0)):
            if value != default:
                raise ConfigError(f"{name} belongs to --workload train")
        if options.step is not None:
            raise ConfigError("--step belongs to --workload train")
    if min(config.copies, config.servers) < LEAST_COPIES:
        raise ConfigError(
            f"a drill needs --servers and --copies of at least {LEAST_COPIES}: with fewer, pushes wait for "
            "the lost server"
        )


def step_of(options: DrillOptions) -> DrilledStep | None:
    """Return the step of the training runs; None for a network.

    Raises:
        ConfigError: The step cannot be imported, or its arguments are invalid.
    """
    if options.step is None:
        if options.step_args is not None or options.step_path:
            raise ConfigError("--step-args and --step-path are for --step, which is not given")
        return None
    for folder in options.step_path:
        add_import_folder(folder)
    args = read_args(options.step_args, "--step-args")
    import_step(options.step, args)  # an error ends the command before the first process starts
    return DrilledStep(options.step, args, options.step_path)


def fault_count(options: DrillOptions) -> int:
    """Return the number of faults in one workload."""
    if options.for_ is not None and options.every is not None:
        return int(options.for_ / options.every)
    return DEFAULT_COUNT if options.count is None else options.count


# --- results -------------------------------------------------------------------------------------


def report_of(
    options: DrillOptions, seen: Observations, claims: Sequence[Claim], skipped: Mapping[str, str], code: int
) -> dict[str, Any]:
    """Return the content of the `--json` file."""
    settings = {
        name: getattr(options, name)
        for name in ("workload", "data", "servers", "copies", "controllers", "replicas", "seed")
    }
    return {
        "settings": settings,
        "claims": msgspec.to_builtins(claims),
        "kinds": msgspec.to_builtins(kind_rows(seen)),
        "skipped": dict(skipped),
        "observations": msgspec.to_builtins(seen),
        "exit_code": code,
    }


def print_results(seen: Observations, claims: Sequence[Claim], terminal: Terminal) -> None:
    """Print the tables of a drill."""
    rows = kind_rows(seen)
    if rows:
        table = new_table(
            "fault", ">faults", ">bundles", ">p50 s", ">p99 s", ">max s", ">copies back p50 s", ">max s"
        )
        for row in rows:
            table.add_row(row.kind, str(row.faults), str(row.bundles), *_seconds(row))
        terminal.table(table)
    if seen.pairs:
        table = new_table(">seed", ">faults", ">without", ">with", ">difference", ">images/s", ">with faults")
        for pair in seen.pairs:
            table.add_row(
                str(pair.seed),
                str(pair.faults),
                f"{pair.accuracy_without:.2%}",
                f"{pair.accuracy_with:.2%}",
                f"{100 * pair.difference:+.2f}",
                f"{pair.images_per_s_without:,.0f}",
                f"{pair.images_per_s_with:,.0f}",
            )
        terminal.table(table)
    table = new_table("claim", "result", "observed")
    for claim in claims:
        table.add_row(claim.name, WORDS[claim.holds], claim.text)
    terminal.table(table)


def _seconds(row: KindRow) -> list[str]:
    values = (row.p50_s, row.p99_s, row.max_s, row.whole_p50_s, row.whole_max_s)
    return ["-" if value is None else f"{value:.2f}" for value in values]
