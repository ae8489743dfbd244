"""The command `train`: a configuration from options, a cluster of one of three kinds, and its results."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adam_async.checkpoint.checkpoint import (
    Manifest,
    kept_model,
    resumed_config,
    resumed_options,
    resumed_transforms,
)
from adam_async.checkpoint.files import (
    check_resumes_newest,
    has_checkpoints,
    newest_manifest,
    open_checkpoints,
)
from adam_async.checkpoint.names import FILE_NAME
from adam_async.checkpoint.trained_model import Model
from adam_async.cli.dashboard import train_page
from adam_async.cli.data import check_data_named, load_data
from adam_async.cli.files import check_spill, is_file, make_folder, read_file
from adam_async.cli.live_table import LiveTable
from adam_async.cli.options import WAITING, TrainOptions
from adam_async.cli.results import BaselineAround, Kept, announce_replaced, keep_results, write_results
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.running import with_serving
from adam_async.cli.signals import EARLY
from adam_async.cli.terminal import USAGE, Terminal, explain
from adam_async.cli.token import read_token
from adam_async.cli.train_checks import check_code, check_results, check_together, config_file, result_files
from adam_async.cli.train_lbfgs import check_lbfgs, minimise
from adam_async.cluster.launcher import Launcher
from adam_async.cluster.local import LocalCluster
from adam_async.cluster.networks import network_for
from adam_async.cluster.processes import ProcessCluster
from adam_async.cluster.setup import ClusterInputs
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.kinds import is_import_path
from adam_async.data_server.transforms.steps import read_steps
from adam_async.driver.driver import Driver
from adam_async.driver.saved_run import manifest_in
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.driver.takeover import Attach
from adam_async.errors import AdamError, ConfigError, Diverged, RunFailed, first_cause
from adam_async.report.baseline import Baseline
from adam_async.report.metrics import run_metrics
from adam_async.report.report import Report, build_report, write
from adam_async.report.stream import Callback, EventFile, texts
from adam_async.report.tensorboard import TensorBoard
from adam_async.run.addresses import addresses_in, check_addresses
from adam_async.run.config import BY_HAND, OPTIONS, Config
from adam_async.run.memory_sizes import cache_limits
from adam_async.run.model_selection import check_memory, image_size
from adam_async.run.option_sources import COMMAND_LINE, ENVIRONMENT, from_environment, make_config
from adam_async.run.result import OnEpoch, RunResult
from adam_async.run.user_code import NamedStep, import_layers, named_functions, named_step
from adam_async.run.user_rules import with_rule
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.health import Health
from adam_async.runtime.machine import available_bytes, describe_machine, usable_cores
from adam_async.runtime.timeline import Timeline
from transport import BufferPool, Identity

logger = logging.getLogger(__name__)

LEFT = "adam-async: ended by SIGTERM; a run in progress goes on, and waits for the next train --attach"
"""Last line of a driver that leaves its run to the next driver."""

Train = Callable[[OnEpoch], Awaitable[RunResult]]
"""Function that runs all epochs."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of the files that options name."""

    model_text: str | None = None
    transforms: Sequence[Mapping[str, Any]] | None = None
    init: Model | None = None
    attach: Attach | None = None
    """Request to take over a run, with the names of all options that are set."""


@dataclass(frozen=True, slots=True)
class Imports:
    """User code that options name."""

    layers: Mapping[str, str]
    """Import paths of layers by kind."""
    step_args: Mapping[str, Any]
    step: NamedStep | None


async def run_training(
    options: TrainOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
    launcher: Launcher | None = None,
    *,
    ranks: bool = False,
) -> int:
    """Train a model, answer probes, and write the results that the options name.

    Args:
        launcher: Starts the processes of the roles; None if the options decide how roles start.
        ranks: Whether ranks of a batch job start the roles, with the same options.

    Raises:
        AdamError: An option is wrong, or the run fails; see `adam_async/errors.py`.
    """

    def work(health: Health) -> Awaitable[int]:
        return _train(options, environment, terminal, health, launcher, ranks)

    return await with_serving(options, work)


async def _train(
    options: TrainOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
    health: Health,
    launcher: Launcher | None,
    ranks: bool,
) -> int:
    async with Disk() as disk:
        options, resumed = await _resumed(options, disk)
        config = await configure(options, environment, disk, resumed, launched=ranks or launcher is not None)
        if is_lbfgs := options.optimizer != "rule":
            check_lbfgs(options, config, is_launched=ranks or launcher is not None)
            if resumed is not None:
                raise ConfigError(
                    f"--store {options.store} has the shards of another training: name another folder"
                )
        imports = import_code(options, terminal)
        contents = await _read_contents(options, config, environment, disk, resumed, imports, terminal)
        if is_lbfgs:
            return await minimise(
                options,
                config,
                await _load_dataset(config, contents, environment, disk, resumed),
                model_text=contents.model_text,
                layers=import_layers(imports.layers),
                step=imports.step.step if imports.step is not None else None,
                environment=environment,
                disk=disk,
                terminal=terminal,
            )
        timeline = Timeline() if options.profile is not None else None
        dataset = None
        if needs_data(options, config) and (launcher is None or is_import_path(config.data)):
            dataset = await _load_dataset(config, contents, environment, disk, resumed)
        driver: Driver | None = None
        result: RunResult | None = None
        kept: Kept | None = None
        try:
            async with open_cluster(
                options, config, contents, environment, dataset, terminal, timeline, imports, launcher
            ) as (driver, train):
                # Roles that ranks or this command start have no separate endpoint.
                starts_roles = ranks or options.controller is None
                table = _followed(driver, health, quiet=options.quiet, with_roles=starts_roles)
                async with table, train_page(options, driver, terminal):
                    terminal.give_way(table.aside)
                    around = await _measure_before(
                        options, driver, dataset, contents, resumed, table, imports
                    )
                    try:
                        with _stop_at_sigterm(options, driver, terminal):
                            result = await train(table.on_epoch)
                    except (asyncio.CancelledError, AdamError, ExceptionGroup) as error:
                        kept = await _kept_results(error, driver, options, disk, environment, terminal)
                        raise
                    if around is not None:
                        await _measure(around, driver)
                baseline = around.result() if around is not None else None
                report = _report(result, driver, terminal, baseline=baseline)
                try:
                    await write_results(options, result, report, disk, environment, timeline)
                    _print_files(options, timeline, table, terminal)
                finally:  # print the summary even without the files
                    table.finish(report)
        except BaseException as error:  # after Ctrl-C too: keep the results so far
            await _report_early_end(options, error, driver, result, kept, disk, terminal)
            raise
    _check_last_checkpoint(result, config)
    return 0


def _followed(driver: Driver, health: Health, *, quiet: bool, with_roles: bool) -> LiveTable:
    """Return a run's live table, which follows its events; let its probes answer with its metrics."""
    table = LiveTable(
        driver.progress,
        stream=sys.stdout,
        quiet=quiet,
        leader=lambda: driver.leading if len(driver.controllers) > 1 else "",
    )
    driver.events.listen(table.on_event)
    health.metrics = lambda: run_metrics(driver.counts(), driver.progress, with_roles=with_roles)
    return table


async def _kept_results(
    error: BaseException,
    driver: Driver,
    options: TrainOptions,
    disk: Disk,
    environment: Mapping[str, str],
    terminal: Terminal,
) -> Kept | None:
    """Keep the results of a training that ends early; None without results, or if their notice is printed."""
    if isinstance(first_cause(error), Diverged):  # such weights are of no use
        return None
    kept = await keep_results(driver, options, disk, environment)
    if not EARLY.interrupted:
        return kept
    terminal.notice(kept.sentence(interrupted=True))  # print now: closing the cluster may take long
    return None


async def _report_early_end(
    options: TrainOptions,
    error: BaseException,
    driver: Driver | None,
    result: RunResult | None,
    kept: Kept | None,
    disk: Disk,
    terminal: Terminal,
) -> None:
    """Print where an early-ended run's results are, and write its report."""
    interrupted = isinstance(error, asyncio.CancelledError) or EARLY.interrupted
    if kept is not None and (line := kept.sentence(interrupted=interrupted)):
        terminal.notice(line)
    cannot = not interrupted and explain(error)[0] == USAGE  # the same options are refused again
    if options.store is not None and driver is not None and not cannot:
        terminal.notice(f"the same command goes on from the shards in {options.store}")
    if result is None and driver is not None and options.report is not None:
        ended = "interrupted" if interrupted else explain(error)[1]
        await _report_cut_short(driver, options.report, ended, disk, terminal)


async def _resumed(options: TrainOptions, disk: Disk) -> tuple[TrainOptions, Manifest | None]:
    """Return the options, and the state to continue: of `--store`, or the newest checkpoint of `--resume`.

    With `--attach` the folder may have no checkpoint yet: the run then writes its first one there.

    Raises:
        CheckpointError: No checkpoint can be read.
    """
    if options.attach is not None:
        check_resumes_newest(options.resume, "--attach")
        EARLY.end_at_once_on_sigterm(LEFT)
    if options.store is not None and options.controller is None:
        saved = await manifest_in(options.store, disk)
        if saved is not None:
            # The same command again may name the first weights of the run that it continues.
            return replace(options, init=None), saved
    if options.resume is None:
        return options, None
    if options.attach is not None and not await has_checkpoints(options.resume, disk):
        return replace(options, checkpoint=options.checkpoint or options.resume, resume=None), None
    return options, await newest_manifest(options.resume, disk)


def _stop_at_sigterm(
    options: TrainOptions, driver: Driver, terminal: Terminal
) -> AbstractContextManager[None]:
    """Stop a run with checkpoints at SIGTERM; without a folder for them SIGTERM interrupts it."""
    if options.checkpoint is None and options.resume is None:
        return nullcontext()

    def stop() -> None:
        if not driver.progress.epoch:  # before training there is nothing to keep
            EARLY.cancel()
            return
        terminal.notice("SIGTERM: the run stops after the groups in flight, with a checkpoint")
        driver.stop()

    return EARLY.calling_at_sigterm(stop)


def _check_last_checkpoint(result: RunResult, config: Config) -> None:
    if result.checkpoint_missed and config.checkpoint_misses:
        raise RunFailed(
            f"all epochs are trained, but the last checkpoint is missing: {result.checkpoint_missed}; "
            "--checkpoint-misses 0 allows that"
        )


def import_code(options: TrainOptions, terminal: Terminal) -> Imports:
    """Import the step that the command line names, before the first role starts.

    Raises:
        ConfigError: The step cannot be imported, or contradicts an option.
    """
    for folder in options.step_path:
        terminal.notice(f"imports also find modules in {folder.resolve()}")
    layers, args = check_code(options)
    return Imports(layers, args, named_step(options.step, args))


async def _read_contents(
    options: TrainOptions,
    config: Config,
    environment: Mapping[str, str],
    disk: Disk,
    resumed: Manifest | None,
    imports: Imports,
    terminal: Terminal,
) -> Contents:
    """Read the files that options name, and make the folders of the results."""
    model_text = None
    if is_file(config.model) and resumed is None:  # a checkpoint contains its model
        model_text = await read_file(Path(config.model), "--model", disk)
    transforms: Sequence[Mapping[str, Any]] | None = None
    if config.transforms:
        text = await read_file(Path(config.transforms), "--transforms", disk)
        transforms = read_steps(text, config.transforms)
    if resumed is not None:
        if options.allow_functions:
            transforms = resumed.transforms
        announce_imports(resumed_transforms(resumed, transforms), resumed.title, terminal)
    await disk.run(check_results, options)
    await disk.run(check_spill, config)
    if options.out is not None:
        await disk.run(make_folder, options.out, "--out")
    for option, file in result_files(options).items():
        await disk.run(make_folder, file.parent, option)
    await announce_replaced(options.out, disk, terminal)
    init = None
    if options.init is not None:
        layers = import_layers(imports.layers)
        init = await disk.run(partial(Model.load, options.init, layers=layers))
    return Contents(model_text, transforms, init, await _attach_of(options, environment, disk))


async def _load_dataset(
    config: Config, contents: Contents, environment: Mapping[str, str], disk: Disk, resumed: Manifest | None
) -> Dataset:
    """Load the images, in the size that the model needs."""
    cache = cache_limits(config.cache, config.spill, available_bytes=available_bytes())
    spec = kept_model(resumed.spec, None, resumed.title) if resumed is not None else None
    first = contents.init.network.spec if contents.init is not None else None
    size = image_size(config.size, config.model, text=contents.model_text, spec=spec, init=first)
    return await load_data(config.data, disk, environment, damaged=config.damaged, cache=cache, size=size)


def _print_files(
    options: TrainOptions, timeline: Timeline | None, table: LiveTable, terminal: Terminal
) -> None:
    """Print the file of the model, and a notice if the profile is not complete."""
    if options.out is not None:
        table.print(f"saved  {options.out / FILE_NAME}")
    if timeline is not None and timeline.full:
        terminal.notice(
            f"the profile ends before the run: a process notes at most {timeline.limit_events} events"
        )


def announce_imports(steps: Sequence[object], origin: str, terminal: Terminal) -> None:
    """Print the functions of a checkpoint or record before the import of their modules."""
    if functions := named_functions(steps):
        terminal.notice(f"{origin} names functions, whose modules are imported: {', '.join(functions)}")


async def _measure_before(
    options: TrainOptions,
    driver: Driver,
    dataset: Dataset | None,
    contents: Contents,
    resumed: Manifest | None,
    table: LiveTable,
    imports: Imports,
) -> BaselineAround | None:
    """Measure the kernels alone, if the run has a report, a network and a rule of this package, and this
    process has the images."""
    is_measured = imports.step is None and not driver.config.has_user_rule
    if options.report is None or dataset is None or not is_measured:
        return None
    data = await driver.wait_for_data()
    around = BaselineAround(
        driver.config,
        threads=driver.config.workers * driver.config.threads_per_worker(usable_cores()),
        dataset=dataset,
        data=data,
        model_text=contents.model_text,
        spec=kept_model(resumed.spec, None, resumed.title) if resumed is not None else None,
        init=contents.init.network.spec if contents.init is not None else None,
        layers=import_layers(imports.layers),
    )
    check_memory(around.network, driver.config, available_bytes())
    table.introduce(data, around.network)
    table.print("kernels alone are measured first, and again after training")
    await _measure(around, driver)
    return around


async def _measure(around: BaselineAround, driver: Driver) -> None:
    before, driver.progress.phase = driver.progress.phase, "measuring the kernels alone"
    await around.measure()
    driver.progress.phase = before


def _report(
    result: RunResult,
    driver: Driver,
    terminal: Terminal,
    *,
    baseline: Baseline | None,
    ended: str = "finished",
) -> Report:
    return build_report(
        result,
        config=driver.config,
        # Paths of other encodings have surrogates, which JSON cannot hold.
        command=("adam-async", *(word.encode(errors="backslashreplace").decode() for word in sys.argv[1:])),
        machine=describe_machine(loop=type(asyncio.get_running_loop()).__module__),
        baseline=baseline,
        ended=ended,
    )


async def _report_cut_short(driver: Driver, path: Path, ended: str, disk: Disk, terminal: Terminal) -> None:
    """Write the report of a run that failed or was interrupted, if the run began."""
    result = driver.so_far()
    if result is None:
        return
    try:
        await write(_report(result, driver, terminal, baseline=None, ended=ended), path, disk)
    except OSError as failure:  # the run's error matters more than this one
        terminal.notice(f"{path} cannot be written: {failure.strerror or failure}")


def needs_data(options: TrainOptions, config: Config) -> bool:
    """Return whether this process needs the images: to serve them, or for a report's baseline."""
    if options.controller is not None or addresses_in(config.data):
        return False
    return not config.processes or options.report is not None or is_import_path(config.data)


async def configure(
    options: TrainOptions,
    environment: Mapping[str, str],
    disk: Disk,
    resumed: Manifest | None = None,
    *,
    launched: bool = False,
) -> Config:
    """Merge the options of defaults or a checkpoint, file, environment and command line; the last one wins.

    Args:
        launched: Whether the workers run on other machines, which may have more cores than this one.

    Raises:
        CheckpointError: An option differs from the checkpoint's, and must not differ.
        ConfigError: A value is wrong, or two options contradict each other.
    """
    layers = (await config_file(options.config, disk), from_environment(environment), options.layer())
    config = make_config(
        resumed_options(resumed) if resumed is not None else {},
        *layers,
        sources=(str(options.resume or options.store), str(options.config), ENVIRONMENT, COMMAND_LINE),
    )
    config = with_rule(config)
    if resumed is not None:
        named = any(layer.get("data") is not None for layer in layers)
        check_data_named(config.data, resumed.title, allowed=named or options.allow_functions)
        config = resumed_config(resumed, config)
    if options.allow_functions and resumed is None:
        raise ConfigError(
            "--allow-functions is for --resume and --replay, and neither is given: leave it out"
        )
    check_together(options, config)
    if options.controller is not None and options.store is not None and not launched:
        raise ConfigError(
            "--store is for servers that this command starts, and those at --controller have a --dir of "
            "their own: leave it out; --attach goes on with the run on their disks"
        )
    if options.controller is not None and not launched and options.optimizer == "rule":
        if idle := [name for name in options.given() if BY_HAND in OPTIONS[name].idle]:
            logger.warning("no effect with --controller, whose roles have their own: %s", ", ".join(idle))
    if options.controller is None and not launched:
        config.threads_per_worker(usable_cores())
    return config


async def _attach_of(options: TrainOptions, environment: Mapping[str, str], disk: Disk) -> Attach | None:
    """Return the request to continue a run, with the names of all set options; None if the command starts the
    roles, or begins a new run."""
    if options.controller is None or (options.attach is None and options.store is None):
        return None
    layers = (await config_file(options.config, disk), from_environment(environment), options.layer())
    given = frozenset(name for layer in layers for name, value in layer.items() if value is not None)
    return Attach(run="" if options.attach in (None, WAITING) else options.attach, given=given)


@asynccontextmanager
async def open_cluster(
    options: TrainOptions,
    config: Config,
    contents: Contents,
    environment: Mapping[str, str],
    dataset: Dataset | None,
    terminal: Terminal,
    timeline: Timeline | None,
    imports: Imports,
    launcher: Launcher | None = None,
) -> AsyncIterator[tuple[Driver, Train]]:
    """Start the roles of the configuration, or join running ones."""
    role = "driver" if options.controller is not None else ""
    token = await read_token(options.token_file, environment, role=role)
    # Other processes may lack an imported data set's module: this process serves the data.
    served = not config.processes or is_import_path(config.data)
    shared: ClusterInputs = {
        "dataset": dataset if served else None,
        "token": token,
        "model_text": contents.model_text,
        "transforms": contents.transforms,
        "timeline": timeline,
        "checkpoint": options.checkpoint,
        "resume": options.resume,
        "store": options.store,
        "init": contents.init,
        "step": options.step,
        "step_args": imports.step_args,
        "callbacks": _callbacks(options),
    }
    if options.controller is not None:
        async with _join(options, config, contents, token, imports) as driver:
            driver.events.listen(texts(terminal.notice))
            yield driver, driver.train
    elif config.processes:
        async with ProcessCluster(
            config,
            environment=environment if launcher is None else None,
            on_line=terminal.notice,
            layers=imports.layers,
            step_path=options.step_path,
            launcher=launcher,
            allow_operations=options.allow_operations,
            **shared,
        ) as processes:
            if token is not None:  # without a given token no other program can join
                found = ",".join(processes.driver.controllers)
                file = f" --token-file {options.token_file}" if options.token_file is not None else ""
                terminal.notice(f"from another shell: adam-async status --controller {found}{file}")
            yield processes.driver, processes.train
    else:
        layers = import_layers(imports.layers)
        async with LocalCluster(config, layers=layers, **shared) as local:
            local.driver.events.listen(texts(terminal.notice))
            yield local.driver, local.train


def _callbacks(options: TrainOptions) -> tuple[Callback, ...]:
    """Return the writers of events that options name."""
    found: list[Callback] = []
    if options.events is not None:
        found.append(EventFile(options.events))
    if options.tensorboard is not None:
        found.append(TensorBoard(options.tensorboard))
    return tuple(found)


@asynccontextmanager
async def _join(
    options: TrainOptions, config: Config, contents: Contents, token: str | None, imports: Imports
) -> AsyncIterator[Driver]:
    assert options.controller is not None
    waits = config.waits if config.waits.meet_s else waits_at_start(options.wait, config.waits)
    config = msgspec.structs.replace(config, waits=waits)
    async with AsyncExitStack() as stack:
        folder, resume = await open_checkpoints(stack, options.checkpoint, options.resume)
        settings = DriverSettings(
            network=network_for(config, token, entropy=system_entropy, buffers=BufferPool()),
            controller=check_addresses(options.controller, "--controller"),
            identity=Identity(
                role="driver", node="driver", incarnation=int.from_bytes(system_entropy(7), "little")
            ),
            threads=usable_cores(),
        )
        inputs = RunInputs(
            model_text=contents.model_text,
            transforms=contents.transforms,
            checkpoints=folder,
            resume=resume,
            on_disks=options.store is not None,
            init=contents.init,
            layers=import_layers(imports.layers),
            step=imports.step,
            attach=contents.attach,
            replace=options.replace,
            callbacks=_callbacks(options),
        )
        yield await stack.enter_async_context(Driver(config, settings, inputs))
