"""Published files, fetched into a folder: checked, continued where they broke off, mirror after mirror.

What has come of a file is in ``NAME.part`` beside its place. A connection that breaks is taken up again at
the next byte, in this call or in a later one; a server that knows no ranges begins again. Only what
matches its checksum takes the file's name, all at once. Cancelling leaves the ``.part`` and nothing else.

A file's checksum is the one that its publisher gives, or that of its unpacked *content*: mirrors of MNIST
carry the same content compressed differently, so that a checksum of the compressed file would refuse good
copies.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from adam_async.data_server.sources.idx import gunzip
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk, Fetch, Piece

TRIES = 8
"""Times that one mirror is asked for a file, as long as each brings something new."""

OnBytes = Callable[[str, int, int | None], None]
"""Hears of a download: its URL, how many bytes are there, and of how many, as far as that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its publisher describes it."""

    name: str
    """Both in the folder and behind a mirror's address."""
    checksum: str
    """``md5:`` or ``sha256:`` and hexadecimal digits."""
    of_content: bool = False
    """Whether the checksum is that of what the gzipped file contains."""
    limit_bytes: int
    """No good copy is larger."""

    @property
    def title(self) -> str:
        """Its name in an error."""
        return self.name.removesuffix(".gz")

    @property
    def part(self) -> str:
        """Name of what has come of it so far."""
        return f"{self.name}.part"

    def mismatch(self, data: bytes) -> str | None:
        """Say why `data` is not this file; None if it is."""
        algorithm, _, expected = self.checksum.partition(":")
        try:
            content = gunzip(data, "it") if self.of_content else data
        except DataError as error:
            return str(error)
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        return None if found == expected else f"{algorithm} {found[:12]}..., expected {expected[:12]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSet:
    """The files of one data set, and where they are published."""

    name: str
    """What to call it in an error, such as ``MNIST``."""
    mirrors: tuple[str, ...]
    """Addresses in front of the names, without the last ``/``; tried in this order."""
    files: tuple[RemoteFile, ...]
    """In the order in which they are fetched: a small one first shows which mirrors are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Deadlines of a download."""

    connect_s: float = 5.0
    """Until the first bytes of a file, for all mirrors together."""
    stall_s: float = 30.0
    """Between two pieces."""
    file_s: float = 3600.0
    """For one whole file, mirrors and tries included."""


async def download(
    wanted: RemoteSet, folder: Path, *, disk: Disk, fetch: Fetch, patience: Patience | None = None
) -> str:
    """Fetch what is missing or damaged of a data set into `folder`; return the mirror that served last.

    Where nothing is to be fetched that is the first mirror. The folder is made when the first bytes arrive.

    Raises:
        DataError: No mirror had one of the files; says what each did.
        OSError: The folder cannot be read or written.
    """
    patience = patience or Patience()
    errand = _Errand(of=wanted.name, folder=folder, disk=disk, fetch=fetch, stall_s=patience.stall_s)
    mirrors = wanted.mirrors
    connect_s = patience.connect_s / max(len(mirrors), 1)
    for file in wanted.files:
        if await errand.is_there(file):
            continue
        try:
            async with asyncio.timeout(patience.file_s):
                served = await errand.from_any(file, mirrors, connect_s)
        except TimeoutError:
            raise DataError(
                f"{wanted.name} broke off at {file.title} (not whole after {patience.file_s:g} s); "
                f"try again, it continues from {folder / file.part}"
            ) from None
        # The one that has served goes first from here on, and is known to be there.
        mirrors = (served, *(each for each in mirrors if each != served))
        connect_s = patience.stall_s
    return mirrors[0]


def watched(fetch: Fetch, on_bytes: OnBytes) -> Fetch:
    """Return `fetch` with somebody who hears of every piece that passes."""

    async def watch(url: str, *, timeout_s: float, start: int = 0) -> AsyncGenerator[Piece, None]:
        async with contextlib.aclosing(fetch(url, timeout_s=timeout_s, start=start)) as pieces:
            async for piece in pieces:
                on_bytes(url, piece.offset + len(piece.data), piece.total)
                yield piece

    return watch


class _BrokenOff(Exception):
    """One try with one mirror failed; the message names the URL and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errand:
    """Fetching the files of one data set."""

    of: str
    folder: Path
    disk: Disk
    fetch: Fetch
    stall_s: float

    async def is_there(self, file: RemoteFile) -> bool:
        """Whether a file is there, and whole."""
        try:
            data = await self.disk.read_bytes(self.folder / file.name)
        except FileNotFoundError:
            return False
        return await self.disk.run(file.mismatch, data) is None

    async def from_any(self, file: RemoteFile, mirrors: tuple[str, ...], connect_s: float) -> str:
        """Fetch a file from the first mirror that has it; return that mirror."""
        failures: list[str] = []
        for mirror in mirrors:
            failure = await self._from_one(file, f"{mirror}/{file.name}", connect_s)
            if failure is None:
                return mirror
            failures.append(failure)
        raise DataError(f"{self.of} broke off at {file.title} ({'; '.join(failures) or 'no mirrors'})")

    async def _from_one(self, file: RemoteFile, url: str, connect_s: float) -> str | None:
        """Fetch a file from one mirror; return why it failed, if it did."""
        part, failure = self.folder / file.part, ""
        for _ in range(TRIES):
            held = await self.disk.run(_size, part)
            try:
                await self._receive(file, url, held, connect_s)
            except _BrokenOff as broken:
                failure = str(broken)
                if await self.disk.run(_size, part) <= held:
                    break
                continue
            data = await self.disk.read_bytes(part)
            mismatch = await self.disk.run(file.mismatch, data)
            if mismatch is None:
                # What was checked is what is written: somebody else may be writing to the part.
                await self.disk.write_atomic(self.folder / file.name, [data])
                await self.disk.run(part.unlink, True)
                return None
            await self.disk.run(part.unlink, True)
            failure = f"{url} does not contain {file.title} of {self.of} ({mismatch})"
            if held == 0:
                break
            # What was there before may have been the wrong half: once more from the start.
        return failure

    async def _receive(self, file: RemoteFile, url: str, held: int, connect_s: float) -> None:
        """Bring the part of a file, of which `held` bytes are there, to the end of what the server has."""
        part, wait_s, came = self.folder / file.part, connect_s, False
        async with contextlib.aclosing(self.fetch(url, timeout_s=self.stall_s, start=held)) as pieces:
            while True:
                try:
                    async with asyncio.timeout(wait_s):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise _BrokenOff(f"{url}: no answer in time, after {held} bytes") from None
                except OSError as error:
                    raise _BrokenOff(f"{url}: {error}") from None
                if piece is None:
                    break
                end = piece.offset + len(piece.data)
                if max(end, piece.total or 0) > file.limit_bytes:
                    await self.disk.run(part.unlink, True)
                    raise _BrokenOff(f"{url} sends more than the {file.limit_bytes} bytes expected")
                if piece.offset not in (0, held):
                    raise _BrokenOff(f"{url} sends bytes from {piece.offset} on, asked for those from {held}")
                if not came:
                    await self.disk.make_folder(self.folder)
                await self.disk.write_from(part, piece.offset, piece.data)
                held, wait_s, came = end, self.stall_s, True
        if not came:
            raise _BrokenOff(f"{url} sends nothing")


def _size(path: Path) -> int:
    """Bytes of a file; 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
