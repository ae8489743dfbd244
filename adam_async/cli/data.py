"""Loading of data for a command, from ADAM_DATA_DIR and the user's cache, with the progress of downloads."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from adam_async.cli.terminal import Terminal
from adam_async.data_server.damage import Policy
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.datasets import load
from adam_async.data_server.sources.downloads import Downloader
from adam_async.data_server.sources.names import address_error, is_import_path
from adam_async.data_server.sources.objects import from_object
from adam_async.errors import AdamError, ConfigError
from adam_async.run.cache_size import CacheLimits, room_for_whole
from adam_async.run.image_size import Size
from adam_async.run.user_code import import_named
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes
from adam_async.runtime.user_cache import user_cache
from adam_async.runtime.user_thread import on_user_thread

IMPORTED_S = 3600.0
"""Maximum time of a user's function that makes a data set, in seconds; it may download the images."""


async def load_data(
    source: str,
    disk: Disk,
    environment: Mapping[str, str],
    *,
    damaged: Policy = "error",
    cache: CacheLimits | None = None,
    size: Size | None = None,
    available: Callable[[], int] = available_bytes,
) -> Dataset:
    """Load a data set as `data_server.sources.datasets.load` does, with downloads in the user's cache.

    Stderr shows the progress of downloads.

    Args:
        environment: Names the folders of data and of the user's cache.
        available: Returns the memory available to this process, in bytes. `room_for_whole` computes from this
            number the maximum size of a source that must be decoded as a whole.

    Raises:
        ConfigError: The source is an import path, and cannot be imported.
        DataError: The source is missing, more damaged than allowed, or too large to decode.
    """
    if is_import_path(source):
        return replace(await imported_dataset(source), cache=cache)
    if "://" in source:
        raise address_error(source)
    with Downloads(Terminal().err) as downloads:
        dataset = await load(
            source,
            disk,
            downloader=Downloader(on_bytes=downloads.on_bytes),
            data_dir=data_folder(environment),
            cache_dir=cache_folder(environment),
            damaged=damaged,
            cache=cache,
            room_bytes=room_for_whole(cache, available_bytes=available()),
            size=size,
        )
    return replace(dataset, cache=cache)


def check_data_named(source: str, origin: str, *, allowed: bool) -> None:
    """Check that the user allows the import of the data set that a checkpoint or record names.

    Raises:
        ConfigError: The source is an import path that the user does not allow; the text has the options that
            allow the import.
    """
    if is_import_path(source) and not allowed:
        raise ConfigError(
            f"{origin} names data whose module would be imported and run: {source}; if you trust it, give "
            f"--allow-functions, or --data {source}"
        )


async def imported_dataset(source: str, *, within_s: float = IMPORTED_S) -> Dataset:
    """Import a function of the user's, and return the data set that it makes.

    The user's code runs on a thread with a loop of its own, so the loop of the command stays free.

    Args:
        source: ``package.module:function``. The function returns a `Dataset`, an awaitable of one, or a
            source for `from_object`.
        within_s: Deadline of import, function and source together, in seconds.

    Raises:
        ConfigError: The function cannot be imported, or fails.
        DataError: The result is no data set.
        DeadlineExceeded: The function took longer than `within_s`.
    """
    return await on_user_thread(
        lambda: asyncio.run(_imported(source)), f"{source} to make the images", within_s=within_s
    )


async def _imported(source: str) -> Dataset:
    """Make the data set of `imported_dataset`."""
    make = import_named(source, "data")
    try:
        found = make()
        if isawaitable(found):
            found = await found
    except AdamError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"data {source} failed: {error!r}") from error
    return found if isinstance(found, Dataset) else await from_object(found, name=source)


class Downloads:
    """Shows downloads from their first bytes on: a bar for each on a terminal, otherwise one line for each.

    The end of the block removes the bars.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Each piece of a download redraws the bars, so no thread is needed.
        self._bars = Progress(
            TextColumn("downloading {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._known: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def on_bytes(self, url: str, done: int, total: int | None) -> None:
        """Show that `done` of the `total` bytes of a URL have arrived; `total` is None if unknown."""
        if url not in self._known:
            self._known[url] = self._bars.add_task(url, total=total)
            if self._console.is_terminal:
                self._bars.start()
            else:
                size = "" if total is None else f" ({total / 1e6:.1f} MB)"
                self._console.print(f"downloading {url}{size}")
        self._bars.update(self._known[url], completed=done, total=total)
        if self._console.is_terminal:
            self._bars.refresh()


def data_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of ADAM_DATA_DIR, or None."""
    folder = environment.get("ADAM_DATA_DIR")
    return Path(folder) if folder else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of downloaded data in the user's cache."""
    return user_cache(environment) / "mnist"
