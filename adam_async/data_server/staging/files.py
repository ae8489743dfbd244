"""The files of a staging: the list of a source's files, reads with deadlines, and the copy.

The copy is a folder with the source's own names. Incomplete files are in its ``.staging``, which no loader
reads: ``NUMBER.START.part`` is an incomplete file, and ``notes`` has a line of JSON for each whole file
(path, size, time of the source's file, checksum). A file gets its name once all its bytes are durable, and
its note after that. A later start keeps a file if it has a note and the right size, and its source is
unchanged.

A folder belongs to one server at a time: this server locks ``.staging/lock`` while it stages into the folder
and serves from it. Should a file system grant a lock twice, two rules keep the files whole: part names
contain a number that no two starts share, and a part's size is checked before it gets its name.

A source may hang, as network file systems do, and a thread that hangs in a read cannot be ended. So only the
source's own disks read it, and a disk that misses a deadline is replaced.
"""

import asyncio
import contextlib
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec

from adam_async.data_server.staging.plan import DIGEST_BYTES, File
from adam_async.errors import DataError, failing_as
from adam_async.runtime.disk import Disk

ASIDE = ".staging"
PART = ".part"
PIECE_BYTES = 1 << 20
"""Size of one read, message and write, in bytes."""

DEEPEST = 64
"""Maximum depth of folders; a greater depth means a link that leads back up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of a source."""

    root: Path
    """Folder of the paths: the source, or the folder of a single-file source."""
    files: tuple[File, ...]
    times: Mapping[str, int]
    """Each file's time of last change by path, in nanoseconds."""
    single: bool

    @property
    def size(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size for file in self.files)


async def find(source: Path, disk: Disk) -> Found:
    """List a source's files without reading them; leave out names that begin with ``.``.

    Raises:
        DataError: The source is missing, empty or unreadable, or has other entries than ordinary files.
    """
    try:
        single = not await disk.run(source.is_dir)
        if single:
            root = source.parent
            _, found = await disk.run(_looked_at, root, [source.name])
        else:
            root, found = source, await _below(source, disk)
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror or error}") from None
    if not found:
        raise DataError(f"{source} holds no files; name the folder or file that is to be staged")
    rows = sorted(found)
    return Found(
        root=root,
        files=tuple(File(path, size) for path, size, _ in rows),
        times={path: time for path, _, time in rows},
        single=single,
    )


async def _below(folder: Path, disk: Disk) -> list[tuple[str, int, int]]:
    """Return the path below the folder, the size and the time of every file in it."""
    found: list[tuple[str, int, int]] = []
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        if inner.count("/") >= DEEPEST:
            raise DataError(f"{folder / inner} lies too deep; does a link in it lead back up?")
        names = [name for name in await disk.names(folder / inner) if not name.startswith(".")]
        folders, files = await disk.run(_looked_at, folder, [f"{inner}{name}" for name in names])
        waiting += [f"{path}/" for path in folders]
        found += files
    return found


def _looked_at(folder: Path, paths: Sequence[str]) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Return the folders among some paths; and path, size and time of the files. Blocks on the disk."""
    folders: list[str] = []
    files: list[tuple[str, int, int]] = []
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise DataError(f"{path!r} in {folder} is not a name in UTF-8; rename it") from None
        status = (folder / path).stat()
        if stat.S_ISDIR(status.st_mode):
            folders.append(path)
        elif stat.S_ISREG(status.st_mode):
            files.append((path, status.st_size, status.st_mtime_ns))
        else:
            raise DataError(f"{folder / path} is a pipe, socket or device, expected an ordinary file")
    return folders, files


class Source:
    """Reads a shared source, a few files at a time. Use the object with `async with`."""

    def __init__(self, root: Path, open_disk: Callable[[], Disk], *, readers: int, read_s: float) -> None:
        self._root = root
        self._open_disk = open_disk
        self._read_s = read_s
        self._idle: asyncio.Queue[Disk | None] = asyncio.Queue()
        for _ in range(readers):
            self._idle.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        # A stack: a cancellation while one disk closes must not leave the others open.
        async with contextlib.AsyncExitStack() as stack:
            while not self._idle.empty():
                disk = self._idle.get_nowait()
                if disk is not None:
                    stack.push_async_callback(disk.aclose)

    async def pieces(self, file: File) -> AsyncGenerator[bytes, None]:
        """Yield a file piece by piece, once a reader is idle.

        Raises:
            OSError: The file is unreadable, or a piece missed its deadline (`TimeoutError`).
        """
        disk = await self._idle.get() or self._open_disk()
        hangs = False
        try:
            async with contextlib.aclosing(disk.read_pieces(self._root / file.path, PIECE_BYTES)) as pieces:
                while True:
                    try:
                        async with asyncio.timeout(self._read_s):
                            piece = await anext(pieces, None)
                    except TimeoutError:
                        hangs = True
                        raise TimeoutError(f"nothing was read within {self._read_s:g} s") from None
                    if piece is None:
                        return
                    yield piece
        finally:
            self._idle.put_nowait(None if hangs else disk)
            if hangs:
                await disk.aclose()


class WrongBytes(Exception):
    """The received bytes differ from the file; the message has the difference."""


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int
    time: int
    checksum: str


class Copy:
    """The local copy of a source.

    Args:
        folder: Folder of the copy, which contains all writes.
        start: Number of this server start, unique over all starts.
    """

    def __init__(self, folder: Path, found: Found, disk: Disk, *, start: int) -> None:
        self.folder = folder
        self._found = found
        self._disk = disk
        self._start = start
        self._aside = folder / ASIDE
        self._notes = self._aside / "notes"
        self._noted = 0
        self._noting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Make the folder, and lock it against other servers for the duration of the block.

        Raises:
            DataError: Another server has locked the folder, or the folder is unusable.
        """
        async with contextlib.AsyncExitStack() as stack:
            with self._in_folder():
                await self._disk.make_folder(self._aside)
                try:
                    await stack.enter_async_context(self._disk.hold(self._aside / "lock"))
                except BlockingIOError:
                    raise DataError(
                        f"{self.folder} is in use: another data server stages into it or serves from it; "
                        "give each server a folder of its own, or end the other one first"
                    ) from None
            yield

    async def take_up(self) -> dict[int, str]:
        """Read the files of an earlier start in the locked folder; return the checksums of whole ones.

        Raises:
            DataError: The folder has other files than the source, or cannot be used.
        """
        files = self._found.files
        with self._in_folder():
            there = {path: size for path, size, _ in await _below(self.folder, self._disk)}
            numbers = {file.path: number for number, file in enumerate(files)}
            strange = next((path for path in sorted(there) if path not in numbers), None)
            if strange is not None:
                raise DataError(
                    f"{self.folder / strange} is not in {self._found.root}; move it away, or stage into an "
                    "empty folder"
                )
            kept = [
                note
                for note in await self._read_notes()
                if note.path in there
                and there[note.path] == note.size == files[numbers[note.path]].size
                and note.time == self._found.times[note.path]
            ]
            text = b"".join(msgspec.json.encode(note) + b"\n" for note in kept)
            await self._disk.write_atomic(self._notes, [text])
            for name in await self._disk.names(self._aside):
                if name.endswith(PART):
                    await self._disk.run((self._aside / name).unlink)
        self._noted = len(text)
        return {numbers[note.path]: note.checksum for note in kept}

    def _in_folder(self) -> contextlib.AbstractContextManager[None]:
        return failing_as(DataError, f"{self.folder} cannot be used")

    async def _read_notes(self) -> list[_Note]:
        try:
            text = await self._disk.read_bytes(self._notes)
        except FileNotFoundError:
            return []
        notes: dict[str, _Note] = {}
        for line in text.splitlines():
            # The last line may be incomplete; a damaged line only costs a copy.
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                note = msgspec.json.decode(line, type=_Note)
                notes[note.path] = note
        return list(notes.values())

    async def write(self, number: int, pieces: AsyncIterable[bytes]) -> str:
        """Write a file under a temporary name without syncing it; return its checksum.

        Raises:
            WrongBytes: The pieces are more or fewer bytes than the manifest names.
            OSError: The file cannot be written, or `pieces` raised the error.
        """
        file, part = self._found.files[number], self._part(number)
        checksum, written = blake2b(digest_size=DIGEST_BYTES), 0
        await self._disk.write_from(part, 0, b"")
        async for piece in pieces:
            if written + len(piece) > file.size:
                raise WrongBytes(f"it has more than the {file.size} bytes that it had when the staging began")
            await self._disk.write_from(part, written, piece)
            await self._disk.run(checksum.update, piece)
            written += len(piece)
        if written < file.size:
            raise WrongBytes(
                f"ends after {written} of the {file.size} bytes that it had when the staging began"
            )
        return checksum.hexdigest()

    async def keep(self, number: int, checksum: str) -> None:
        """Give a file with a temporary name its final name, durably.

        Raises:
            OSError: The disk is full, or does not hold the written bytes.
        """
        file, part = self._found.files[number], self._part(number)
        path = self.folder / file.path
        await self._disk.sync_file(part)
        size = (await self._disk.run(part.stat)).st_size
        if size != file.size:
            raise OSError(f"{part} holds {size} bytes instead of {file.size}; does another program write it?")
        await self._disk.make_folder(path.parent)
        await self._disk.rename(part, path)
        note = _Note(path=file.path, size=file.size, time=self._found.times[file.path], checksum=checksum)
        line = msgspec.json.encode(note) + b"\n"
        async with self._noting:
            await self._disk.write_from(self._notes, self._noted, line)
            self._noted += len(line)

    async def read(self, number: int, offset: int) -> bytes:
        """Return the piece of a whole file that begins at `offset`."""
        path = self.folder / self._found.files[number].path
        return await self._disk.read_part(path, offset, offset + PIECE_BYTES)

    def _part(self, number: int) -> Path:
        return self._aside / f"{number}.{self._start:x}{PART}"
