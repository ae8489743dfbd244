"""Records of the folders that controllers use on hosts, so that a launch removes those of a killed launch.

The record of a launch is a file on the launching machine. Its name is the name of the state folder, and its
lines are the hosts that may have the folder. The launch holds the file's lock until it ends, and the
operating system releases the lock of a killed process. So no controller needs the folder of a record with a
free lock.
"""

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)

MOST_RECORD_BYTES = 1 << 20
"""Maximum size of a record, in bytes."""

_NAME = re.compile(r"[0-9a-f]{8,64}")


class StateRecords:
    """The records of the launches from this machine.

    Args:
        folder: Folder of the records, made if missing.
        disk: The disk.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    @asynccontextmanager
    async def held(self, name: str, hosts: Sequence[str]) -> AsyncIterator[None]:
        """Write a record of this launch, and hold its lock. A record that cannot be written causes a warning.

        Args:
            name: Name of the state folder, in hexadecimal digits.
            hosts: Names of the hosts that may have the folder.
        """
        path = self._folder / name
        # The file gets its name after its lock, so that no other launch treats the record as an ended one.
        made = self._folder / f".{name}"
        async with AsyncExitStack() as stack:
            try:
                await self._disk.write_atomic(made, [_text(hosts)])
                await stack.enter_async_context(self._disk.hold(made))
                await self._disk.rename(made, path)
            except OSError as error:
                logger.warning(
                    "no record in %s (%s): if this process is killed, the state of its controllers stays on "
                    "their hosts; set XDG_CACHE_HOME to a writable folder",
                    self._folder,
                    error,
                )
            yield

    async def ended(self) -> Mapping[str, tuple[str, ...]]:
        """Return the hosts of each record whose launch has ended, by the name of the state folder."""
        found: dict[str, tuple[str, ...]] = {}
        names: list[str] = []
        with suppress(OSError):  # no folder before the first record
            names = await self._disk.names(self._folder)
        for name in names:
            path = self._folder / name
            # A name with other characters could make a host remove another folder.
            if not _NAME.fullmatch(name):
                continue
            # An error means that the launch still runs, or that another launch removes the record.
            with suppress(OSError, UnicodeDecodeError):
                async with self._disk.hold(path):
                    lines = await self._disk.read_part(path, 0, MOST_RECORD_BYTES)
                    found[name] = tuple(lines.decode().split("\n")[:-1])
        return found

    async def leave(self, name: str, hosts: Sequence[str]) -> None:
        """Reduce a record to these hosts; without hosts remove the record."""
        path = self._folder / name
        try:
            if hosts:
                await self._disk.write_atomic(path, [_text(hosts)])
            else:
                await self._disk.remove_file(path)
        except OSError as error:
            logger.warning("record %s cannot be changed, so a later launch reads it again: %s", path, error)

    def __repr__(self) -> str:
        return f"<StateRecords in {self._folder}>"


def _text(hosts: Sequence[str]) -> bytes:
    return "".join(f"{host}\n" for host in hosts).encode()
