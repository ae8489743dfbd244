"""Downloads of published files into a folder, with `pooch`, by checksum, from one mirror after the other.

A file gets its name only after its checksum matches; an interrupted download starts from the beginning. Each
download runs on a daemon thread, because a call to a silent name server cannot be interrupted, and must delay
neither the disk nor the end of the program.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from adam_async.errors import DataError, install_command

CHUNK_BYTES = 1 << 14
"""Size of one read from a connection, in bytes."""

LOOK_S = 0.02
"""Interval between two polls of the progress of a download, in seconds."""

OnBytes = Callable[[str, int, int | None], None]
"""Callback with a URL, the number of bytes that have arrived, and the total if the server sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A published file."""

    name: str
    """Name in the folder, and at the end of a mirror's address."""
    checksum: str
    """``md5:`` or ``sha256:`` and hexadecimal digits."""
    limit_bytes: int
    """Upper bound of the size of a good copy, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSet:
    """The files of one data set, and their addresses."""

    name: str
    """Name in errors, such as ``MNIST``."""
    mirrors: tuple[str, ...]
    """Addresses of the folders that have the files, without a ``/`` at the end, in the order of attempts."""
    files: tuple[RemoteFile, ...]
    """Files in the order of their download: a small first file shows which mirrors answer."""
    file_s: float = 3600.0
    """Deadline for one whole file, in seconds, over all mirrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloader:
    """Downloads data sets; reports each piece that arrives."""

    on_bytes: OnBytes = lambda url, done, total: None
    connect_s: float = 5.0
    """Deadline for the first bytes of the first file, in seconds, for all mirrors together."""
    stall_s: float = 30.0
    """Deadline between two pieces, in seconds."""

    async def download(self, wanted: RemoteSet, folder: Path) -> str:
        """Download the missing and the damaged files of a data set; return the mirror that served last.

        If no file was missing or damaged, the result is the first mirror.

        Raises:
            DataError: No mirror serves one of the files in time, or the folder cannot be written; the error
                has the failure of each mirror. Or `pooch` is not installed.
        """
        require_pooch()
        mirrors, first_s = wanted.mirrors, self.connect_s / max(len(wanted.mirrors), 1)
        for file in wanted.files:
            failures: list[str] = []
            try:
                async with asyncio.timeout(wanted.file_s):
                    for mirror in mirrors:
                        failure = await self._retrieve(file, f"{mirror}/{file.name}", folder, first_s)
                        if not failure:
                            break
                        failures.append(failure)
                    else:
                        text = "; ".join(failures) or "no mirrors"
                        raise DataError(f"{wanted.name} broke off at {file.name} ({text})")
            except TimeoutError:
                raise DataError(
                    f"{wanted.name} broke off at {file.name} (not whole after {wanted.file_s:g} s); try again"
                ) from None
            # The mirror that has served comes first from now on, because it is known to answer.
            mirrors, first_s = (mirror, *(each for each in mirrors if each != mirror)), self.stall_s
        return mirrors[0]

    async def _retrieve(self, file: RemoteFile, url: str, folder: Path, first_s: float) -> str:
        """Download a missing file from one mirror; return the failure, or an empty text."""
        loop = asyncio.get_running_loop()
        # The deadline here must pass first, because its error has the number of bytes.
        transfer = _Transfer(file.limit_bytes, 2 * self.stall_s)
        arguments, name = (file, url, folder), f"download {url}"
        thread = threading.Thread(target=transfer.run, args=arguments, name=name, daemon=True)
        seen, deadline = 0, loop.time() + first_s
        try:
            thread.start()
            while True:
                alive, done = thread.is_alive(), transfer.done
                if done > seen:
                    seen, deadline = done, loop.time() + self.stall_s
                    self.on_bytes(url, done, transfer.total)
                if not alive:
                    return transfer.failure and f"{url}: {transfer.failure}"
                if loop.time() > deadline:
                    return f"{url}: no answer in time, after {seen} bytes"
                await asyncio.sleep(LOOK_S)
        finally:
            transfer.abandoned = True


class _Transfer:
    """One download on a thread, as pooch's downloader and as the file that it writes to."""

    def __init__(self, limit_bytes: int, timeout_s: float) -> None:
        self._limit_bytes, self._timeout_s = limit_bytes, timeout_s
        self._file: IO[bytes]
        self._responses = contextlib.ExitStack()
        self.done = 0
        self.total: int | None = None
        self.failure = ""
        self.abandoned = False

    def run(self, file: RemoteFile, url: str, folder: Path) -> None:
        """Download a missing file, or note the failure."""
        import pooch

        # pooch's lines would mix with the lines of the progress.
        pooch.get_logger().setLevel(logging.WARNING)
        try:
            pooch.retrieve(url, known_hash=file.checksum, fname=file.name, path=folder, downloader=self)
        except Exception as error:
            self.failure = _reason(error)

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        from pooch import HTTPDownloader

        downloader = HTTPDownloader(
            chunk_size=CHUNK_BYTES,
            timeout=self._timeout_s,
            # A server that compresses for the transfer would send other bytes than those of the checksum.
            headers={"Accept-Encoding": "identity"},
            # pooch leaves the connection of a download that fails open.
            hooks={"response": self._answered},
        )
        with self._responses, open(output_file, "wb") as self._file:
            downloader(url, self, pooch)
        # pooch makes the file private, and several users may share a cache.
        Path(output_file).chmod(0o644)

    def _answered(self, response: Any, **options: Any) -> None:
        self._responses.callback(response.close)
        length = response.headers.get("Content-Length", "")
        self.total = int(length) if length.isdecimal() else None

    def write(self, data: bytes) -> None:
        """Write a piece to the file, in the place of the file that pooch would open.

        Raises:
            OSError: The server sends more than the limit, or the download is abandoned; the error ends the
                thread.
        """
        self.done += len(data)
        if max(self.done, self.total or 0) > self._limit_bytes:
            raise OSError(f"it sends more than the {self._limit_bytes} bytes expected")
        if self.abandoned:
            raise OSError("the download is abandoned")
        self._file.write(data)

    def flush(self) -> None:
        """Do nothing, because pooch flushes after each piece; closing the file flushes it."""


def _reason(error: BaseException) -> str:
    """Return the text of the error below the layers of pooch, requests and urllib3."""
    if isinstance(error, ValueError):
        return "it does not contain the file (its checksum differs)"
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or repr(error)


def require_pooch() -> None:
    """Refuse to continue without the library for downloads.

    Raises:
        DataError: `pooch` is not installed; the error has the command that installs it.
    """
    try:
        import pooch  # noqa: F401
    except ImportError:
        raise DataError(f"downloading needs pooch, of the extra `data`: {install_command('data')}") from None
