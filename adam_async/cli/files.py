"""Files and folders that options name: checks before their content is made, reads and writes."""

import errno
import os
from collections.abc import AsyncIterable, Iterable
from pathlib import Path

from adam_async.checkpoint.model_head import cannot_read, check_head
from adam_async.checkpoint.names import FILE_NAME, is_folder_name
from adam_async.cli.terminal import Terminal
from adam_async.driver.replay.record_head import check_record
from adam_async.errors import ConfigError, failing_as
from adam_async.model.named import check_model
from adam_async.model.spec import ModelSpec
from adam_async.model.toml_text import MOST_TEXT_BYTES
from adam_async.run.config import Config
from adam_async.runtime.disk import Disk, Part
from adam_async.runtime.ordinary_files import read_ordinary


def is_file(model: str) -> bool:
    """Return whether the value of ``--model`` is a file with a spec."""
    return model.endswith(".toml")


async def read_model_file(model: str, disk: Disk) -> str | None:
    """Read the spec file that ``--model`` names; None if the value is a name.

    Raises:
        ConfigError: The file is unreadable, or is not text.
    """
    return await read_file(Path(model), "--model", disk) if is_file(model) else None


def check_present(option: str, path: Path) -> None:
    """Check that a file or folder exists. Raises ConfigError: the system does not find it."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {path} cannot be read: {why}") from None


def check_file(option: str, path: Path) -> None:
    """Check that a file exists. Raises ConfigError: the system does not find it, or it is a folder."""
    check_present(option, path)
    if path.is_dir():
        raise ConfigError(f"{option} {path} cannot be read: {os.strerror(errno.EISDIR)}")


def check_readable_folder(option: str, path: Path) -> None:
    """Check that a folder can be listed. Raises ConfigError: it cannot."""
    with failing_as(ConfigError, f"{option} {path} cannot be read"):
        os.listdir(path)


def check_model_path(option: str, path: Path) -> None:
    """Check that a path is a model file, or a folder that has one. Raises ConfigError: there is none."""
    check_present(option, path)
    file = path / FILE_NAME if path.is_dir() else path
    try:
        check_head(file)
    except OSError as error:
        raise cannot_read(option, file, error) from None


def check_replay(option: str, path: Path) -> None:
    """Check that a file begins as a record. Raises ConfigError or RecordError: it does not."""
    with failing_as(ConfigError, f"{option} {path} cannot be read"):
        check_record(path)


def check_model_option(model: str) -> None:
    """Check that ``--model`` names a model or a file with a spec. Raises ConfigError or SpecError if not."""
    check_model(model)
    if is_file(model):
        ModelSpec.from_toml(text_of(Path(model), "--model"))


def check_checkpoints(option: str, path: Path) -> None:
    """Check that a path is a checkpoint, or a folder that has one. Raises ConfigError: it has none."""
    check_present(option, path)
    with failing_as(ConfigError, f"no checkpoint in {path}"):
        names = os.listdir(path)
    # A server's folder, or a renamed checkpoint: read it, to name its content.
    if any(any(path.glob(each)) for each in ("lock", "*/lock", "*.segment")):
        return
    if not any(map(is_folder_name, [path.name, *names])):
        raise ConfigError(f"no checkpoint in {path} can be read: train --checkpoint writes them")


async def check_target(file: Path, option: str, disk: Disk) -> None:
    """Make the folder of the result file that an option names, and check that the file can be written.

    Raises:
        ConfigError: The folder cannot be made or written to, or the file is not regular.
    """
    await disk.run(check_regular, file, option)
    await disk.run(make_folder, file.parent, option)


async def announce_existing(file: Path, disk: Disk, terminal: Terminal) -> None:
    """Print a notice if a file exists, because the result replaces it."""
    if await disk.run(file.exists):
        terminal.notice(f"{file} exists, and is replaced")


def check_result(file: Path, option: str) -> None:
    """Check that a result can be written to the file of an option. Raises ConfigError: it cannot."""
    check_regular(file, option)
    check_folder(file.parent, option)


def check_folder(folder: Path, option: str) -> None:
    """Check that the folder that an option names can be made or written to. Raises ConfigError: it cannot."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there):
        what = "it" if there == folder else there
        raise ConfigError(f"{option}: {folder} cannot be made: {what} exists and is no folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: the folder {there.absolute()} cannot be written to; name another")


def check_spill(config: Config) -> None:
    """Check that the scratch file of images can be made. Raises ConfigError: its folder cannot be used."""
    if config.spill:
        check_folder(Path(config.spill), "spill")


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that an option names. Raises ConfigError: the folder cannot be made or written to."""
    check_folder(folder, option)
    with failing_as(ConfigError, f"{option}: {folder} cannot be made"):
        os.makedirs(folder, exist_ok=True)
    check_folder(folder, option)


def check_regular(file: Path, option: str) -> None:
    """Check that an option's result file is absent or a regular file, because the result replaces it.

    Raises:
        ConfigError: The file is a folder, a device, a pipe or a link, such as ``/dev/stdout``.
    """
    if os.path.islink(file):
        raise ConfigError(
            f"{option}: {file} is a link, and a result would replace it; name the file it leads to"
        )
    if os.path.isdir(file):
        raise ConfigError(f"{option}: {file} is a folder; name a file in it")
    if os.path.exists(file) and not os.path.isfile(file):
        raise ConfigError(f"{option}: {file} is no regular file, and a result would replace it; name another")


async def read_file(path: Path, option: str, disk: Disk) -> str:
    """Read the text file that an option names.

    Raises:
        ConfigError: The file is unreadable, is larger than `MOST_TEXT_BYTES`, or is not text.
    """
    return await disk.run(text_of, path, option)


def text_of(path: Path, option: str) -> str:
    """Read the text file that an option names. Blocks. For errors see `read_file`."""
    try:
        with failing_as(ConfigError, f"{option} {path} cannot be read"):
            return read_ordinary(path, MOST_TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {path} is not text in UTF-8") from None


async def write_file(
    path: Path, option: str, parts: Iterable[Part] | AsyncIterable[Part], disk: Disk
) -> None:
    """Replace the file that an option names, all or nothing.

    Raises:
        ConfigError: The file cannot be written.
    """
    with failing_as(ConfigError, f"{option} {path} cannot be written"):
        await disk.write_atomic(path, parts)
