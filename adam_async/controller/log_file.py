"""The file of one controller: what its consensus core must not forget (`consensus.records`), on a disk.

One file at a time, appended to and forced down; when the core has put a snapshot in place of its entries, a
new file that begins with all there is takes the place of the old one. A lock beside it keeps a second process
out. Whatever fails, fails the controller: nothing may be promised after a write whose fate is unknown.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adam_async.consensus import Saved, Writer, recover
from adam_async.consensus.records import Record
from adam_async.errors import ConfigError
from adam_async.ports import Disk

NAME = "controller.log"


class LogFile:
    """The file in one folder.

    Args:
        disk: Where.
        folder: Made if it is not there; of one controller alone.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._path = folder / NAME
        self._writer = Writer()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Saved | None]:
        """Read it, or begin it, and keep others out for as long as the block lasts.

        Yields what was saved; None if nothing was.

        Raises:
            ConfigError: Another process has it, or it cannot be read or made.
            DamagedLog: It was damaged after it was written.
        """
        async with AsyncExitStack() as stack:
            try:
                await self._disk.make_folder(self._folder)
                # A life that was killed may have made it, and not forced its name down.
                await self._disk.sync_folder(self._folder.parent)
                await stack.enter_async_context(self._disk.hold(self._folder / "lock"))
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
            yield saved

    async def _recover(self) -> Saved | None:
        try:
            data = await self._disk.read_bytes(self._path)
        except FileNotFoundError:
            data = b""
        saved, end = recover(data, origin=str(self._path))
        if data:
            # What was found may be in the page cache alone, its name as well; and what is behind it must not
            # come back.
            await self._disk.truncate_durably(self._path, end)
            await self._disk.sync_folder(self._folder)
        self._writer = Writer(end)
        return saved

    async def append(self, batches: Sequence[tuple[Record, ...]]) -> None:
        """Write these down, each in a frame of its own; they are durable on return.

        Raises:
            ConfigError: They may be, or not: the file must not be used again.
        """
        position = self._writer.position
        data = b"".join([self._writer.frame(records) for records in batches])
        try:
            await self._disk.append_durably(self._path, position, data)
        except OSError as error:
            raise self._unwritable(error) from error
        self._writer.durable(self._writer.position)

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
