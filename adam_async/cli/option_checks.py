"""Checks of the options of single commands; the checks of `train` are in `train_checks.py`.

A command makes them before it imports the modules of its work, which takes longer than the checks.
"""

from collections.abc import Sequence
from pathlib import Path

from adam_async.checkpoint.names import FILE_NAME
from adam_async.cli.files import check_folder, check_regular, is_file, text_of
from adam_async.cli.options import ExportOptions, InspectOptions, PredictOptions, check_within
from adam_async.data_server.sources.kinds import check_source
from adam_async.data_server.transforms.steps import check_steps
from adam_async.errors import ConfigError, install_command
from adam_async.model.named import check_model
from adam_async.model.spec import ModelSpec
from adam_async.report.schema import check_schema
from adam_async.run.config import MAX_THREADS_PER_CORE, MOST
from adam_async.run.image_size import read_image_size
from adam_async.runtime.machine import usable_cores
from adam_async.runtime.ordinary_files import read_ordinary

MOST_REPORT_BYTES = 1 << 26
"""Maximum size of a report's file, in bytes; its objects take several times as much memory."""

MOST_SAMPLES, MOST_CLASSES = 256, 1024
"""Maximum values of `--samples` and `--classes`."""


def check_threads(threads: int) -> None:
    """Check a number of compute threads; 0 is one per core. Raises ConfigError: it is out of range."""
    check_within("--threads", threads, 0, MAX_THREADS_PER_CORE * usable_cores())


def check_model_option(model: str) -> None:
    """Check that ``--model`` names a model or a file with a spec. Raises ConfigError or SpecError if not."""
    check_model(model)
    if is_file(model):
        ModelSpec.from_toml(text_of(Path(model), "--model"))


def check_result(file: Path | None, option: str) -> None:
    """Check that a result can be written to the file of an option. Raises ConfigError: it cannot."""
    if file is not None:
        check_regular(file, option)
        check_folder(file.parent, option)


def check_png(file: Path | None) -> None:
    """Check that a contact sheet can be drawn into a file.

    Raises:
        ConfigError: The file does not end in .png, cannot be written, or Pillow is not installed.
    """
    if file is None:
        return
    if file.suffix != ".png":
        raise ConfigError(f"--png {file}: name a file that ends in .png")
    check_result(file, "--png")
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(f"--png needs Pillow, of the extra `data`: {install_command('data')}") from None


def check_prediction(images: Sequence[Path], options: PredictOptions) -> None:
    """Check the words of `predict`. Raises ConfigError: one is missing or wrong."""
    if not images:
        raise ConfigError("predict needs images: adam-async predict MODEL FILE-OR-FOLDER...")
    if options.top < 1:
        raise ConfigError(f"--top must be at least 1, not {options.top}")
    check_png(options.png)


def check_export(model: Path, options: ExportOptions) -> None:
    """Check that `export` has a file to write, writes none twice, and does not overwrite the model.

    Raises:
        ConfigError: There is no target, one is the model or is named twice, or one cannot be written.
    """
    targets = {
        option: file
        for option, file in (("--onnx", options.onnx), ("--torch", options.torch))
        if file is not None
    }
    if not targets:
        raise ConfigError("export needs a file to write: --onnx FILE, --torch FILE, or both")
    taken = {model.resolve(), (model / FILE_NAME).resolve()}
    for option, target in targets.items():
        if target.resolve() in taken:
            raise ConfigError(f"{target} is the model, or is named twice; name another file")
        taken.add(target.resolve())
        check_result(target, option)


def check_inspection(source: str, options: InspectOptions) -> None:
    """Check the words of `data inspect`.

    Raises:
        ConfigError: An option is wrong, or a file cannot be used.
        DataError: There are no data.
    """
    check_within("--samples", options.samples, 1, MOST_SAMPLES)
    check_within("--classes", options.classes, 1, MOST_CLASSES)
    for option, value, least in (("--seed", options.seed, 0), ("--epoch", options.epoch, 1)):
        if value < least:
            raise ConfigError(f"{option} must be at least {least}, not {value}")
    read_image_size(options.size)
    check_png(options.png)
    if options.transforms is not None:
        check_steps(text_of(options.transforms, "--transforms"), str(options.transforms))
    check_source(source)


def check_doctor(model: str, images_per_group: int) -> None:
    """Check the options of `doctor`. Raises ConfigError or SpecError: one is wrong."""
    check_within("--images-per-group", images_per_group, 1, MOST["images_per_group"])
    check_model_option(model)


def check_reports(files: tuple[Path, ...], plot: Path | None) -> None:
    """Check the words of `report`. Raises ConfigError: a file is no report, or the plot cannot be written."""
    for file in name_runs(files).values():
        read_checked(file)
    check_result(plot, "--plot")


def read_checked(file: Path) -> bytes:
    """Return the file of a report, after a check of its format. Blocks.

    Raises:
        ConfigError: The file cannot be read, or is no report of this version.
    """
    try:
        data = read_ordinary(file, MOST_REPORT_BYTES)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    check_schema(data, str(file))
    return data


def name_runs(files: tuple[Path, ...]) -> dict[str, Path]:
    """Return a short name for each file: its stem, or its whole path if stems are equal.

    Raises:
        ConfigError: No file is named, or a file is named twice.
    """
    if not files:
        raise ConfigError("name one report or several, as `train --report FILE` wrote them")
    stems = [file.stem for file in files]
    names = {file.stem if stems.count(file.stem) == 1 else str(file): file for file in files}
    if len(names) < len(files):
        twice = next(file for file in files if files.count(file) > 1)
        raise ConfigError(f"{twice} is named twice")
    return names
