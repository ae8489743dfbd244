"""The command `plan`: ways to cut a model over several workers, their predicted rates, and the best."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from adam_async.cli.data import load_data
from adam_async.cli.files import check_target, read_model_file, write_file
from adam_async.cli.link_speed import parse_bandwidth, parse_latency
from adam_async.cli.options import PlanOptions
from adam_async.cli.plan.choice import Candidate, Conditions, candidates, plan_report, reason, recommend
from adam_async.cli.terminal import Terminal, new_table
from adam_async.driver.calibration import calibrate
from adam_async.errors import ConfigError, ModelError
from adam_async.model import ModelSpec, Network, named_model
from adam_async.model.partition.planner import LayerTimes, LinkCost, estimated_times
from adam_async.run.model_selection import choose_model
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import Machine, describe_machine
from dataflow import ComputePool

COLUMNS = ("workers", "plan", "images per group", "threads", "images/s", "bound", "crossing bytes", "chain")
"""Titles of the table, without the arrow column. docs/reference/plan.md explains them under
`plan.candidates`."""


def show(
    best: Candidate, compared: Sequence[Candidate], recommendation: str, machine: Machine, terminal: Terminal
) -> None:
    """Print the plans, the recommendation last. Layers, workers, cuts and protocols are in the JSON alone."""
    for line in _condition_lines(best, machine):
        terminal.print(line)
    table = new_table("", *(f">{name}" for name in COLUMNS))
    for each in compared:
        table.add_row("->" if each is best else "", *_cells(each))
    terminal.table(table)
    for line in (*_prediction(best), *([recommendation] if recommendation else [])):
        terminal.print(line)


def _condition_lines(best: Candidate, machine: Machine) -> Iterator[str]:
    network, where = best.network, best.conditions
    times = "measured on one thread" if best.times.measured else "estimated, not measured"
    size = f"{network.num_parameters:,} parameters, {network.multiply_adds:,} multiply-adds forward"
    yield f"{network.spec.name}: {size}, {network.dtype}, kernels {network.kernels}, times {times}"
    machines = "a machine each, like this one" if where.own_machines else "all on this machine"
    caches = f"L2 {_cache(machine.l2_kb)}, L3 {_cache(machine.l3_kb)}"
    speed = f"{where.link.bytes_per_s / 1e6:,.6g} MB/s each way and {_seconds(where.link.latency_s)}"
    yield f"workers: {machines} ({where.cores} cores, {caches}), links of {speed}"


def _cells(each: Candidate) -> Iterator[str]:
    yield str(each.plan.workers)
    yield each.plan.kind if each.plan.workers > 1 else ""
    yield str(each.images)
    yield str(each.threads)
    yield f"{each.prediction.images_per_s:,.0f}"
    yield str(each.prediction.slowest)
    yield f"{each.crossing_bytes:,}"
    yield str(each.prediction.chain)


def _prediction(best: Candidate) -> Iterator[str]:
    found = best.prediction
    threads = f"{best.threads} thread{'s' * (best.threads > 1)} per worker"
    rate = f"{found.images_per_s:,.0f} images/s with {threads} and {found.in_flight} groups in flight"
    took = f"{_seconds(found.slowest.seconds)} per group of {best.images}"
    yield f"predicted: {rate}; bounded by {found.slowest}: {took}"
    if found.chain:
        alone = f"{_seconds(found.chain_s)}, with {found.chain} crossings one after the other"
        yield f"one group alone takes {alone}; hidden with {found.needed_in_flight} in flight"
    if best.in_place:
        yield "one worker on this machine trains in place: nothing is pushed or pulled"


def _cache(kib: int | None) -> str:
    return "unknown" if kib is None else f"{kib:,} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


MOST_WORKERS = 4
"""Maximum number of workers that the command tries without `--partitions`."""

GROUPS = (1, 16, 64)
"""Numbers of images per group that the command tries without `--images-per-group`."""

USUAL_MODEL = "mnist-adam"
"""Model without `--model` and `--data`."""

USUAL_GROUP = 16
"""Number of images per group above which the command tries a group size only if the group's working set fits
the third-level cache."""


async def run_plan(options: PlanOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Compare the plans that the options leave open, print them, and write the best as JSON for `--json`.

    Raises:
        ConfigError: The model is unknown or cannot be cut, or a file is not writable.
        DataError: The data of `--data` are missing or damaged.
    """
    machine = describe_machine(loop="uvloop")
    conditions = _conditions(options, machine)
    async with Disk() as disk:
        if options.json is not None:
            await check_target(options.json, "--json", disk)
        network = Network(await _spec(options, disk, environment), kernels="auto")
        found = _tried(network, await _times(network, options), conditions, options, machine)
        best = recommend(found)
        why = reason(best, found) if len(found) > 1 else ""
        show(best, found, why, machine, terminal)
        if options.json is not None:
            words = ("adam-async", *sys.argv[1:])
            report = plan_report(best, compared=found, recommendation=why, machine=machine, command=words)
            await write_file(options.json, "--json", [report], disk)
    return 0


def _conditions(options: PlanOptions, machine: Machine) -> Conditions:
    link = LinkCost()
    if options.bandwidth is not None:
        link = replace(link, bytes_per_s=parse_bandwidth(options.bandwidth))
    if options.latency is not None:
        link = replace(link, latency_s=parse_latency(options.latency))
    return Conditions(
        link=link,
        cores=machine.cores,
        own_machines=options.bandwidth is not None or options.latency is not None,
        threads=options.threads,
        in_flight=options.in_flight,
        servers=options.servers,
        halo=options.halo,
    )


async def _spec(options: PlanOptions, disk: Disk, environment: Mapping[str, str]) -> ModelSpec:
    model = options.model or (USUAL_MODEL if options.data is None else "auto")
    text = await read_model_file(model, disk)
    if options.data is not None or model == "auto":
        dataset = await load_data(options.data or "auto", disk, environment, damaged="skip")
        return choose_model(model, dataset.info(), text=text)
    return named_model(model) if text is None else ModelSpec.from_toml(text)


async def _times(network: Network, options: PlanOptions) -> list[LayerTimes]:
    """Measure or estimate the seconds of each layer, for each size of groups."""
    sizes = GROUPS if options.images_per_group is None else (options.images_per_group,)
    if not options.calibrate:
        return [estimated_times(network, images) for images in sizes]
    async with ComputePool(threads=1, name="plan") as pool:
        await pool.run(network.warm_up)
        measure = partial(calibrate, network, clock=fine_clock)
        return [await pool.run(measure, images) for images in sizes]


def _tried(
    network: Network,
    times: Sequence[LayerTimes],
    conditions: Conditions,
    options: PlanOptions,
    machine: Machine,
) -> list[Candidate]:
    """Make the plans that the options leave open and that fit this machine.

    Raises:
        ConfigError: The model cannot be cut into this number of parts.
    """
    most = MOST_WORKERS if conditions.own_machines else min(MOST_WORKERS, conditions.cores)
    workers = range(1, most + 1) if options.partitions is None else (options.partitions,)
    try:
        found = candidates(
            network,
            times,
            conditions,
            workers=workers,
            kinds=("vertical", "layers") if options.plan is None else (options.plan,),
        )
    except ModelError as error:
        raise ConfigError(f"--partitions {options.partitions}: {error}") from error
    if options.images_per_group is not None:
        return found
    return [each for each in found if each.images <= USUAL_GROUP or each.fits_in(machine.l3_kb)]
