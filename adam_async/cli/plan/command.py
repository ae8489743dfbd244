"""The command `plan`: ways to cut a model over several workers, their predicted rates, and the best."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from adam_async.cli.data import load_data
from adam_async.cli.files import check_target, read_model_file, write_file
from adam_async.cli.options import PlanOptions
from adam_async.cli.plan.choice import Candidate, Conditions, candidates, reason, recommend
from adam_async.cli.plan.link_speed import parse_bandwidth, parse_latency
from adam_async.cli.plan.option_checks import check_plan
from adam_async.cli.plan.report import plan_report
from adam_async.cli.plan.table import show
from adam_async.cli.terminal import Terminal
from adam_async.driver.calibration import calibrate
from adam_async.errors import ConfigError, ModelError
from adam_async.model import ModelSpec, Network, named_model
from adam_async.model.partition.prediction import LayerTimes, LinkCost, estimated_times
from adam_async.run.model_selection import choose_model
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import Machine, describe_machine
from dataflow import ComputePool

MOST_WORKERS = 4
"""Maximum number of workers that the command tries without `--partitions`."""

GROUPS = (1, 16, 64)
"""Numbers of images per group that the command tries without `--images-per-group`."""

USUAL_MODEL = "mnist-adam"
"""Model without `--model` and `--data`."""

USUAL_GROUP = 16
"""Number of images per group above which the command tries a group size only if the working set of the group
fits the third-level cache."""


async def run_plan(options: PlanOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Compare the plans that the options leave open, print them, and write the best as JSON for `--json`.

    Raises:
        ConfigError: A value is wrong, the model is unknown or cannot be cut, or a file cannot be written.
        DataError: The data of `--data` are missing or damaged.
    """
    check_plan(options)
    machine = describe_machine(loop=options.loop)
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
