"""One controller's log file: the durable records of its consensus core (`consensus.records`).

The log appends records to its one file, and syncs it. After the core's snapshot a new file with the whole
state replaces it. A file exists with its whole first record or not at all, because the log writes the first
record as a whole new file too. A crash can tear only the last append. A file that does not begin with a whole
record is not a log, and stays untouched. A lock beside the file keeps a second process out. Each error ends
the controller: after a write with unknown outcome it must acknowledge nothing.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adam_async.controller.consensus import DamagedLog, Saved, Writer, recover
from adam_async.controller.consensus.records import WHAT_TO_DO, LogFileRecord
from adam_async.errors import ConfigError
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)

NAME = "controller.log"

MOST_LOG_BYTES = 1 << 30
"""Maximum size of a log file, in bytes: far above a cluster's whole state and the following entries."""

ASIDE = re.compile(re.escape(NAME) + r"\.[0-9]+\.aside")
"""Pattern for the names of unfinished new logs, made by `Disk.write_atomic`."""

REMOVED = f"{NAME}.removed"
"""Name of the folder into which unfinished logs are moved, so that one folder removal removes them."""


class LogFile:
    """The log file in one folder.

    Args:
        disk: Disk of the log; a separate one, see `Disk`.
        folder: Folder that only one controller uses; made if absent.

    Attributes:
        begun: Set once the file has a durable identity, read or written.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._path = folder / NAME
        self._writer = Writer()
        self.begun = asyncio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Saved | None]:
        """Lock the file for the duration of the block, and read it.

        Yields the saved state; None if there is none.

        Raises:
            ConfigError: Another process has the file, or the file cannot be read or made.
            DamagedLog: The file is damaged, or is not a log; the file stays untouched.
        """
        self.begun.clear()
        async with AsyncExitStack() as stack:
            try:
                await self._disk.make_folder(self._folder)
                # A killed process may have made the folder without syncing its name.
                await self._disk.sync_folder(self._folder.parent)
                await stack.enter_async_context(self._disk.hold(self._folder / "lock"))
                await self._remove_asides()
                saved = await self._recover()
            except BlockingIOError:
                raise ConfigError(
                    f"{self._folder} is that of a controller that is running; give this one another"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"{self._folder} cannot be used: {error.strerror or error}; "
                    "give the controller a folder that it can write to"
                ) from error
            if saved is not None:
                self.begun.set()
            yield saved

    async def _remove_asides(self) -> None:
        """Remove the unfinished new logs of killed processes."""
        for name in await self._disk.names(self._folder):
            if ASIDE.fullmatch(name):
                await self._disk.make_folder(self._folder / REMOVED)
                await self._disk.rename(self._folder / name, self._folder / REMOVED / name)
        await self._disk.remove_folder(self._folder / REMOVED)

    async def _recover(self) -> Saved | None:
        try:
            data = await self._disk.read_bytes(self._path, MOST_LOG_BYTES)
        except FileNotFoundError:
            data = b""
        saved, end = recover(data, origin=str(self._path))
        if data and not end:
            raise DamagedLog(
                f"{self._path} is damaged at byte 0, in record 1: its {len(data)} bytes begin with no record "
                f"of a controller; {WHAT_TO_DO}"
            )
        if data:
            await self._keep_private()
            # The bytes and the name of a torn log may be in the page cache alone.
            await self._disk.truncate_durably(self._path, end)
            await self._disk.sync_folder(self._folder)
        self._writer = Writer(end)
        return saved

    async def _keep_private(self) -> None:
        """Make a log private if other users can read it, because it has the cluster's whole state."""
        try:
            mode = await self._disk.keep_private(self._path)
        except PermissionError:
            logger.warning("others can read %s, and its owner is another user", self._path)
        else:
            if mode:
                logger.warning("others could read %s, its mode was %s; it is 0600 now", self._path, mode)

    async def append(self, batches: Sequence[tuple[LogFileRecord, ...]]) -> None:
        """Append records, each batch in a separate frame; they are durable on return.

        Raises:
            ConfigError: The outcome of the write is unknown; do not use the file again.
        """
        position = self._writer.position
        data = b"".join([self._writer.frame(records) for records in batches])
        try:
            if position:
                await self._disk.append_durably(self._path, position, data)
            else:
                await self._disk.write_atomic(self._path, [data])
        except OSError as error:
            raise self._unwritable(error) from error
        self._writer.durable(self._writer.position)
        self.begun.set()

    async def begin_anew(self, records: tuple[LogFileRecord, ...]) -> None:
        """Replace the file by a new one with these records; durable on return.

        Raises:
            ConfigError: As for `append`.
        """
        writer = Writer()
        try:
            await self._disk.write_atomic(self._path, [writer.frame(records)])
        except OSError as error:
            raise self._unwritable(error) from error
        writer.durable(writer.position)
        self._writer = writer

    @property
    def folder(self) -> Path:
        return self._folder

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path} cannot be written: {error.strerror or error}; make room or repair the disk, "
            "then start this controller again"
        )

    def __repr__(self) -> str:
        return f"<LogFile {self._path} {self._writer.position} bytes>"
