"""Loading data on behalf of a user: where their cache is, what ADAM_DATA_DIR says, how a download goes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.damage import Policy
from adam_async.data_server.sources.datasets import load
from adam_async.data_server.sources.downloads import Downloader
from adam_async.errors import DataError
from adam_async.run.cache_size import CacheLimits, room_for_whole
from adam_async.run.image_size import Size
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes


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
    """Load a data set as `data_server.datasets.load` does, with downloads kept in the user's cache.

    Downloads show on stderr while they go.

    Args:
        source: A name, a folder or a file.
        disk: Reads and decodes.
        environment: Says where data and the user's cache are.
        damaged: What to do with damaged images; ``skip`` leaves out up to one in twenty.
        cache: Memory of a data server for them; without it all images are loaded.
        size: Columns and rows that encoded images are scaled and cut to; None lets the images decide.
        available: Bytes of memory that this process could use; `room_for_whole` derives the limit of a source
            that decodes as a whole.

    Raises:
        DataError: The source is missing, damaged beyond what may be left out, or too large to be decoded.
    """
    if "://" in source:
        raise DataError(
            f"{source} is an address, and what is wanted here is a name, a folder or a file; train takes "
            "addresses of data servers, tcp://HOST:PORT"
        )
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


class Downloads:
    """Shows downloads from their first bytes on: a bar for each on a terminal, one line for each elsewhere.

    Leaving the block takes the bars away.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn with each piece that arrives: no thread is needed.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def on_bytes(self, url: str, done: int, total: int | None) -> None:
        """Take in that `done` bytes of a URL are there, of `total`, if that is known."""
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
    """The folder that ADAM_DATA_DIR names, if it does."""
    folder = environment.get("ADAM_DATA_DIR")
    return Path(folder) if folder else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where downloaded data are kept: the user's cache, by the usual rules."""
    root = environment.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path(environment.get("HOME", ".")) / ".cache") / "adam-async" / "mnist"
