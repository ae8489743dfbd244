"""The command `train --replay`: the repetition of a recorded run."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path

from adam_async.checkpoint.trained_model import save_model
from adam_async.cli.data import check_data_named, load_data
from adam_async.cli.files import make_folder
from adam_async.cli.options import TrainOptions
from adam_async.cli.results import announce_replaced
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import announce_imports, import_code
from adam_async.data_server.dataset import Dataset, Policy
from adam_async.driver.replay.decode import read_recording
from adam_async.driver.replay.recording import Header, RecordedEpoch, Recording
from adam_async.driver.replay.run import Replay
from adam_async.errors import ConfigError, counted, failing_as
from adam_async.run.user_code import NamedStep, check_named, named_functions
from adam_async.run.user_rules import RuleSource, allow_rules
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import numerics
from dataflow import ComputePool

BESIDE = frozenset(
    {"replay", "allow_functions", "data", "out", "quiet", "verbose", "step", "step_args", "step_path", "rule"}
)
"""Options allowed with `--replay`; the record has all others."""

ROUNDS = 64
"""Number of shard batches that the compute thread applies between two checks for cancellation."""


async def run_replay(options: TrainOptions, environment: Mapping[str, str], terminal: Terminal) -> int:
    """Repeat a recorded run, check that its weights are the same, and write them.

    Raises:
        ConfigError: An option contradicts the record, the record names functions or data to import and
            `--allow-functions` is missing, `--step` or `--rule` is not the record's, or the model is not
            writable.
        RecordError: The record cannot be read or played.
        ReplayDiffers: The weights differ.
        DataError: The data are missing or damaged.
    """
    assert options.replay is not None
    check_options(options)
    async with Disk() as disk:
        if options.out is not None:
            await disk.run(make_folder, options.out, "--out")
        step = import_code(options, terminal).step
        recording = await read_record(options.replay, disk, step)
        rules = rules_named(recording.header, options)
        transforms = recording.header.transforms
        functions = named_functions(transforms) if options.allow_functions else ()
        check_named(transforms, str(options.replay), allowed=functions)
        announce_imports(transforms, str(options.replay), terminal)
        for line in differences(recording.header):
            terminal.notice(line)
        source = options.data or str(recording.header.config["data"])
        named = options.data is not None or options.allow_functions
        check_data_named(source, str(options.replay), allowed=named)
        damaged: Policy = recording.header.config.get("damaged", "error")
        dataset = await load_data(source, disk, environment, damaged=damaged)
        await announce_replaced(options.out, disk, terminal)
        replay = await repeat(recording, dataset, terminal, functions, step, rules)
        if options.out is not None:
            names = dataset.class_names
            with failing_as(ConfigError, f"{options.out} cannot be written to"):
                await save_model(replay.network, replay.weights(), options.out, disk, class_names=names)
    terminal.print(
        f"{counted(replay.groups, 'group')} repeated; all weights are those of the run, to the last bit"
    )
    return 0


def check_options(options: TrainOptions) -> None:
    """Check that the options contain none that the record decides.

    Raises:
        ConfigError: Options of the record are given; the error lists them.
    """
    plain = TrainOptions()
    given = [f.name for f in fields(options) if getattr(options, f.name) != getattr(plain, f.name)]
    other = [f"--{name.replace('_', '-')}" for name in given if name not in BESIDE]
    if other:
        raise ConfigError(f"--replay takes these options from the record: leave out {', '.join(other)}")


def rules_named(header: Header, options: TrainOptions) -> RuleSource:
    """Import the rule of the user that a record and the command line name.

    Raises:
        ConfigError: Only the options or only the record name a rule, they name two, or the rule cannot be
            imported.
    """
    config, named = header.options(), options.rule
    if config.has_user_rule and named != config.rule:
        raise ConfigError(
            f"{options.replay} applies rule {config.rule}, whose module would be imported and run: if you "
            f"trust it, give --rule {config.rule}"
        )
    if named is not None and not config.has_user_rule:
        raise ConfigError("--replay takes these options from the record: leave out --rule")
    return allow_rules([config.rule] if config.has_user_rule else [])


async def read_record(path: Path, disk: Disk, step: NamedStep | None = None) -> Recording:
    """Read a record's file.

    Args:
        step: Step that the run trained; None for a run that trained a network.

    Raises:
        ConfigError: The file cannot be read, or is the record of a run with another step.
        RecordError: The file is no record, or damaged.
    """
    with failing_as(ConfigError, f"--replay {path} cannot be read"):
        data = await disk.read_bytes(path)
    return await disk.run(lambda: read_recording(data, origin=str(path), step=step))


def differences(header: Header) -> list[str]:
    """Return the differences between this machine and the machine of the run that may change last bits."""
    here = numerics()
    return [
        f"{name} was {then or 'unknown'} in the run and is {here.get(name) or 'unknown'} here: "
        "last bits may differ"
        for name, then in header.machine.items()
        if here.get(name) != then
    ]


async def repeat(
    recording: Recording,
    dataset: Dataset,
    terminal: Terminal,
    functions: Collection[str] = (),
    step: NamedStep | None = None,
    rules: RuleSource | None = None,
) -> Replay:
    """Repeat a run on a compute thread, print its epochs, and return the checked run.

    Cancelling ends the replay after the current batches of the thread.
    """
    async with ComputePool(threads=1, name="replay") as pool:
        replay = await pool.run(
            lambda: Replay(recording, dataset, functions=functions, step=step, rules=rules)
        )
        for epoch in recording.header.epochs:
            await _go(pool, replay.steps(epoch))
            accuracy = await pool.run(replay.accuracy, epoch)
            terminal.print(_epoch_line(epoch, len(recording.header.epochs), accuracy))
        await _go(pool, replay.steps())
        await pool.run(replay.check)
    return replay


async def _go(pool: ComputePool, steps: Iterator[None]) -> None:
    while await pool.run(lambda: sum(1 for _ in islice(steps, ROUNDS))) == ROUNDS:
        pass


def _epoch_line(epoch: RecordedEpoch, epochs: int, accuracy: float) -> str:
    line = f"epoch {epoch.epoch}/{epochs}: test accuracy {accuracy:.2%}, {counted(epoch.images, 'image')}"
    if accuracy != epoch.test_accuracy:
        line += f" (the run had {epoch.test_accuracy:.2%})"
    return line
