"""Checks of a training's options that need neither NumPy nor the training's modules.

A command checks options before it imports slower modules. `train` checks them again once the options of a
checkpoint or record have joined.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from adam_async.cli.files import (
    check_checkpoints,
    check_folder,
    check_model_option,
    check_result,
    check_spill,
    read_file,
)
from adam_async.cli.option_checks import check_page
from adam_async.cli.options import TrainOptions
from adam_async.data_server.sources.kinds import check_source, is_import_path
from adam_async.data_server.transforms.steps import check_steps
from adam_async.errors import ConfigError
from adam_async.model.named import check_model
from adam_async.option_types import check_modes
from adam_async.run.config import BY_HAND, CHECKPOINTS, LINKED, ON_DISK, Config
from adam_async.run.option_sources import COMMAND_LINE, ENVIRONMENT, from_environment, from_toml, make_config
from adam_async.run.user_code import add_import_folder, import_factory, import_named, read_args, read_layers
from adam_async.run.user_rules import with_rule
from adam_async.runtime.disk import Disk
from adam_async.runtime.loop_thread import on_user_thread

IMPORTED_S = 3600.0
"""Maximum time in seconds to import a user's function that makes a data set."""


async def check_values(
    options: TrainOptions, environment: Mapping[str, str], file: Path | None, *, reads_files: bool
) -> None:
    """Check the options of a training.

    Options that join those of a checkpoint or record are checked later, together with them.

    Args:
        file: File of options.
        reads_files: Whether the driver runs in this process, and so reads the files that options name.

    Raises:
        ConfigError: A value is wrong, or the file of options cannot be read.
        DataError: The data are missing.
    """
    check_code(options)
    if options.resume is not None and options.attach is None:
        check_checkpoints("--resume", options.resume)
    async with Disk() as disk:
        if reads_files:
            await disk.run(check_results, options)
        if options.resume is not None or options.store is not None or options.replay is not None:
            return
        layers = (await config_file(file, disk), from_environment(environment), options.layer())
        config = make_config(*layers, sources=(str(file), ENVIRONMENT, COMMAND_LINE))
        check_model(config.model)
        with_rule(config)
        if reads_files:
            check_together(options, config)
            await _check_sources(options, config, disk)


async def _check_sources(options: TrainOptions, config: Config, disk: Disk) -> None:
    """Check the model's file, the transforms and the data that options name."""
    await disk.run(check_model_option, config.model)
    if config.transforms:
        text = await read_file(Path(config.transforms), "--transforms", disk)
        check_steps(text, config.transforms)
    if options.controller is not None:
        return
    check_source(config.data)
    check_spill(config)
    if is_import_path(config.data):
        what = f"the import of {config.data}"
        await on_user_thread(lambda: import_named(config.data, "data"), what, within_s=IMPORTED_S)


async def config_file(file: Path | None, disk: Disk) -> Mapping[str, Any]:
    """Read the options in a file; none without a file. Raises ConfigError: the file is wrong."""
    return {} if file is None else from_toml(await read_file(file, "--config", disk), source=str(file))


def check_code(options: TrainOptions) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """Import the layers and the step that the command line names.

    Returns the import paths of the layers by kind, and the arguments of the step.

    Raises:
        ConfigError: A folder does not exist, a name cannot be imported, or options contradict each other.
    """
    for folder in options.step_path:
        add_import_folder(folder)
    if options.step is None and options.step_args is not None:
        raise ConfigError("--step-args are for the factory of --step, which is not given")
    if options.step is not None and options.model is not None:
        raise ConfigError("--model and --step both name what is trained: leave one of them out")
    layers, args = read_layers(options.layers), read_args(options.step_args, "--step-args")
    for kind, path in layers.items():
        import_named(path, f"layer {kind!r}")
    if options.step is not None:
        import_factory(options.step)
    return layers, args


def result_files(options: TrainOptions) -> dict[str, Path]:
    """Return the result files, by the options that name them."""
    files = {
        "--events": options.events,
        "--report": options.report,
        "--profile": options.profile,
        "--record": options.record,
    }
    return {option: file for option, file in files.items() if file is not None}


def check_results(options: TrainOptions) -> None:
    """Check that results can be written to the files and folders that options name.

    Raises:
        ConfigError: A name belongs to something else, is below a file, or is that of two results.
    """
    taken: dict[Path, str] = {}
    for option, file in result_files(options).items():
        check_result(file, option)
        if (other := taken.setdefault(file.absolute(), option)) != option:
            raise ConfigError(f"{other} and {option} both write {file}: name another file for one of them")
    folders = {
        "--out": options.out,
        "--checkpoint": options.checkpoint,
        "--store": options.store,
        "--tensorboard": options.tensorboard,
    }
    for option, folder in folders.items():
        if folder is not None:
            check_folder(folder, option)


def check_together(options: TrainOptions, config: Config) -> None:
    """Check options that contradict or need each other.

    Raises:
        ConfigError: Options contradict each other, or lack one that they need.
    """
    _check_attach(options)
    _check_dashboard(options, config)
    other = "--resume" if options.resume is not None else "--record" if config.record else ""
    if options.init is not None and other:
        raise ConfigError(f"--init and {other} both set the first weights: leave one of them out")
    one_process = not config.processes and options.controller is None
    config.weights_in("" if one_process else config.obstacle_of_memory(one_host=options.controller is None))
    hosts = config.hosts((), starts_own=False) if options.controller is None else ()
    outside = {
        CHECKPOINTS: options.checkpoint or options.resume,
        ON_DISK: options.store,
        LINKED: config.processes or options.controller or hosts,
        BY_HAND: options.controller,
    }
    modes = {mode: mode.name if held else "" for mode, held in outside.items()}
    check_modes(Config, structs.asdict(config), options.given(), modes)
    if options.controller is not None and options.profile is not None:
        raise ConfigError(
            "--profile is for roles that this command starts, not for those at --controller: leave one of "
            "them out"
        )
    if options.token_file is not None and not outside[LINKED]:
        raise ConfigError(
            "--token-file is the token of a cluster of processes, and all roles share this one: leave it "
            "out, or give --processes"
        )


def _check_dashboard(options: TrainOptions, config: Config) -> None:
    if options.dashboard is not None:
        check_page(options.dashboard, "--dashboard", options.dashboard_token_file)
    elif options.dashboard_token_file is not None:
        raise ConfigError("--dashboard-token-file is for the page of --dashboard, which is not given")
    if options.allow_operations and (options.controller is not None or not config.processes):
        raise ConfigError("--allow-operations is for processes that this command starts: give --processes")


def _check_attach(options: TrainOptions) -> None:
    for name in ("attach", "replace"):
        if getattr(options, name) and options.controller is None:
            raise ConfigError(
                f"--{name} is for a cluster whose roles outlive train: give its --controller. A cluster that "
                "train starts ends with it, and --resume continues from its checkpoints"
            )
    if options.attach and options.replace:
        raise ConfigError("--attach takes over the run that --replace gives up: give one of them")
