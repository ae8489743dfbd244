"""The file of one controller: what its consensus core must not forget (`consensus.records`), on a disk.

One file at a time, appended to and forced down; when the core has put a snapshot in place of its entries, a
new file that begins with all there is takes the place of the old one. The first record comes in the same way,
so a file is there with a whole first record or not at all: what a crash may tear is what was appended last,
and a file that does not begin with a whole record is no log, and is left as it is. A lock beside it keeps a
second process out. Whatever fails, fails the controller: nothing may be promised after a write whose fate is
unknown.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adam_async.controller.consensus import DamagedLog, Saved, Writer, recover
from adam_async.controller.consensus.records import WHAT_TO_DO, Record
from adam_async.errors import ConfigError
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)

NAME = "controller.log"

ASIDE = re.compile(re.escape(NAME) + r"\.[0-9]+\.aside")
"""Names of files that were to take the place of the log: `Disk.write_atomic` makes them."""

REMOVED = f"{NAME}.removed"
"""A folder for these, as the port removes folders alone."""


class LogFile:
    """The file in one folder.

    Args:
        disk: Disk of the log; a private one, see `Disk`.
        folder: Made if it is not there; of one controller alone.

    Attributes:
        begun: Set when the file was read and says whose it is, or when a new one was written.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._path = folder / NAME
        self._writer = Writer()
        self.begun = asyncio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Saved | None]:
        """Read it, or begin it, and keep others out for as long as the block lasts.

        Yields what was saved; None if nothing was.

        Raises:
            ConfigError: Another process has it, or it cannot be read or made.
            DamagedLog: It was damaged after it was written, or is no log; it is left as it is.
        """
        self.begun.clear()
        async with AsyncExitStack() as stack:
            try:
                await self._disk.make_folder(self._folder)
                # A life that was killed may have made it, and not forced its name down.
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
        """Remove what lives that were killed meant to put in the place of the log."""
        for name in await self._disk.names(self._folder):
            if ASIDE.fullmatch(name):
                await self._disk.make_folder(self._folder / REMOVED)
                await self._disk.rename(self._folder / name, self._folder / REMOVED / name)
        await self._disk.remove_folder(self._folder / REMOVED)

    async def _recover(self) -> Saved | None:
        try:
            data = await self._disk.read_bytes(self._path)
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
            # What was found may be in the page cache alone, its name as well; and what is behind it must not
            # come back.
            await self._disk.truncate_durably(self._path, end)
            await self._disk.sync_folder(self._folder)
        self._writer = Writer(end)
        return saved

    async def _keep_private(self) -> None:
        """Make a log private if other users can read it, because it holds the whole state of the cluster."""
        try:
            mode = await self._disk.keep_private(self._path)
        except PermissionError:
            logger.warning("others can read %s, and its owner is another user", self._path)
        else:
            if mode:
                logger.warning("others could read %s, its mode was %s; it is 0600 now", self._path, mode)

    async def append(self, batches: Sequence[tuple[Record, ...]]) -> None:
        """Write these down, each in a frame of its own; they are durable on return.

        Raises:
            ConfigError: They may be, or not: the file must not be used again.
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

    async def begin_anew(self, records: tuple[Record, ...]) -> None:
        """Put a file that begins with these in the place of this one; durable on return.

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
        """Where the file is."""
        return self._folder

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path} cannot be written: {error.strerror or error}; make room or mend the disk, "
            "then start this controller again"
        )

    def __repr__(self) -> str:
        return f"<LogFile {self._path} {self._writer.position} bytes>"
