"""Results of `train`: the files of its options, also after an interrupted run."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from adam_async.checkpoint.files import written_folder
from adam_async.checkpoint.names import FILE_NAME
from adam_async.checkpoint.trained_model import save_model
from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Dataset
from adam_async.driver.driver import Driver
from adam_async.errors import AdamError, ConfigError, RecordError, first_cause
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.report import baseline
from adam_async.report.baseline import measure_sgemm
from adam_async.report.report import Report, write
from adam_async.run.config import Config
from adam_async.run.learning_rate import default_rate
from adam_async.run.model_selection import choose_model
from adam_async.run.result import RunResult
from adam_async.run.step_model import RunModel
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.timeline import Timeline
from transport import TransportError

RESCUE_S = 5.0
"""Time limit in seconds for reading an interrupted run's weights from its servers."""


async def write_results(
    options: TrainOptions,
    result: RunResult,
    report: Report,
    disk: Disk,
    environment: Mapping[str, str],
    timeline: Timeline | None = None,
) -> None:
    """Write the model, the report, the profile and the record to the files that the options name.

    An error in one file does not stop the others. If the model's folder is not writable, the model is written
    to another folder.

    Raises:
        ConfigError: Some files are not writable; the error lists them, and the model's other folder.
        RecordError: The run has no record; the other files are written.
    """
    problems: list[str] = []

    async def attempt(path: Path, writing: Callable[[], Awaitable[None]]) -> None:
        try:
            await writing()
        except OSError as error:
            problems.append(f"{path} cannot be written: {error.strerror or error}")

    if options.out is not None:
        try:
            await save_somewhere(
                result.model, result.weights, options.out, disk, environment, class_names=result.class_names
            )
        except ConfigError as error:
            problems.append(str(error))
    if (path := options.report) is not None:
        await attempt(path, lambda: write(report, path, disk))
    if (profile := options.profile) is not None and timeline is not None:
        trace = await disk.run(timeline.trace)
        await attempt(profile, lambda: disk.write_atomic(profile, [trace]))
    if (file := options.record) is not None and isinstance(data := result.record, bytes):
        await attempt(file, lambda: disk.write_atomic(file, [data]))
    if problems:
        raise ConfigError("; ".join(problems))
    if options.record is not None and isinstance(result.record, RecordError):
        raise result.record


async def announce_replaced(folder: Path | None, disk: Disk, terminal: Terminal) -> None:
    """Print a notice if the folder of `--out` has a model, which the command replaces at its end."""
    if folder is not None and await disk.run((folder / FILE_NAME).exists):
        terminal.notice(
            f"{folder / FILE_NAME} exists, and is replaced at the end, or by an interruption; to keep it, "
            "end this command now, and name another folder with --out"
        )


async def save_somewhere(
    network: RunModel,
    weights: Mapping[str, NDArray[Any]],
    folder: Path,
    disk: Disk,
    environment: Mapping[str, str],
    *,
    class_names: Sequence[str],
) -> None:
    """Write ``model.safetensors`` into a folder; if that fails, into another folder with room.

    Raises:
        ConfigError: The folder is not writable; the error has the file, and the model's other folder if any.
    """
    try:
        await save_model(network, weights, folder, disk, class_names=class_names)
        return
    except OSError as error:
        problem = f"{folder / FILE_NAME} cannot be written: {error.strerror or error}"
    name = f"adam-async-{system_entropy(4).hex()}"
    for place in fallbacks(environment):
        try:
            saved = await save_model(network, weights, place / name, disk, class_names=class_names)
        except OSError:
            continue
        raise ConfigError(f"{problem}; the model is in {saved} instead")
    raise ConfigError(
        f"{problem}, nor can the model be written to {', '.join(map(str, fallbacks(environment)))}"
    )


def fallbacks(environment: Mapping[str, str]) -> list[Path]:
    """Return the other folders for a model: temporary files, home, the current folder."""
    home = environment.get("HOME")
    return [Path(environment.get("TMPDIR") or "/tmp"), *([Path(home)] if home else []), Path.cwd()]


@dataclass(frozen=True, slots=True)
class Kept:
    """Results kept of a run that did not finish."""

    done: str
    """Progress of the run, in words; see `progress_words`."""
    began: bool
    results: tuple[str, ...]

    def sentence(self, *, interrupted: bool) -> str:
        """Return the line for the user; empty for a failed run without results."""
        if interrupted:
            return f"interrupted {self.done}; kept: {', '.join(self.results) or NOTHING}"
        return f"failed {self.done}; kept: {', '.join(self.results)}" if self.began and self.results else ""


async def keep_results(
    driver: Driver, options: TrainOptions, disk: Disk, environment: Mapping[str, str]
) -> Kept:
    """Return the results of a run that ends early; write its weights if `--out` names a folder."""
    progress = driver.progress
    kept: list[str] = []
    await driver.look()
    if options.out is not None and progress.epoch:
        try:
            async with asyncio.timeout(RESCUE_S):
                network, weights, best = await driver.weights_so_far()
            result = driver.so_far()
            names = () if result is None else result.class_names
            await save_somewhere(network, weights, options.out, disk, environment, class_names=names)
            which = f"the weights of epoch {best}, the best one," if best else "the latest weights"
            kept.append(f"{which} in {options.out / FILE_NAME}")
        except ConfigError as error:
            kept.append(str(error))
        except (AdamError, TransportError, TimeoutError, ExceptionGroup) as error:
            why = str(first_cause(error)) or f"no answer within {RESCUE_S:g} s"
            kept.append(f"no weights, because the servers could not be read ({why})")
    if progress.checkpoint:
        folder = written_folder(options.checkpoint, options.resume)
        kept.append(f"{progress.checkpoint} (go on with --resume {folder})")
    if options.report is not None:
        kept.append(f"the report in {options.report}")
    return Kept(progress_words(driver), bool(progress.epoch), tuple(kept))


NOTHING = "nothing (--out keeps the latest weights, --checkpoint a state for --resume)"
"""Text in place of results, for a run whose options name no file or folder."""


def progress_words(driver: Driver) -> str:
    """Return how far a run has come, in words."""
    progress = driver.progress
    if not progress.epoch:
        return "before training began"
    total = progress.images_of_epoch
    done = f"in epoch {progress.epoch}, after {progress.images:,} of {total:,} images"
    if not progress.epochs:
        return f"{done}; no epoch has ended"
    last = progress.epochs[-1]
    if last.epoch == progress.epoch:  # the next epoch is about to begin
        return f"after epoch {last.epoch}, with {last.accuracies}"
    return f"{done}; epoch {last.epoch} ended with {last.accuracies}"


class BaselineAround:
    """Measures the kernels before and after a run.

    Args:
        model_text: Contents of the model file, if `config` names one.
        init: Saved model that the run begins with, as for `choose_model`.
        layers: Kinds of layers that the model may use.

    Raises:
        ConfigError: The model is unknown or does not fit the data.
    """

    def __init__(
        self,
        config: Config,
        *,
        threads: int,
        dataset: Dataset,
        data: Mapping[str, Any],
        model_text: str | None,
        spec: ModelSpec | None = None,
        init: ModelSpec | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
    ) -> None:
        self._config = config
        self._threads = threads
        self._dataset = dataset
        spec = spec or choose_model(config.model, data, text=model_text, init=init, layers=layers)
        self.network = Network(spec, dtype=config.dtype, kernels=config.kernels, layers=layers)
        self._rates: list[float] = []
        self._sgemm: list[float] = []

    async def measure(self) -> None:
        """Measure the kernels once, which takes about 4 s."""
        config = self._config
        rate = await baseline.measure(
            self.network,
            rule_of(config),
            rate=default_rate(config, squared_norm=self._dataset.squared_norm),
            images=self._dataset.train_images,
            labels=self._dataset.train_labels,
            group_images=config.images_per_group,
            threads=self._threads,
            shared=config.weights == "aliased",
        )
        self._rates.append(rate)
        self._sgemm.append(await measure_sgemm(self._threads))

    def result(self) -> baseline.Baseline:
        """Return the baseline from the measurements before and after the run."""
        before, after = self._rates
        sgemm = sum(self._sgemm) / len(self._sgemm)
        return baseline.Baseline(threads=self._threads, before=before, after=after, sgemm=sgemm)
