"""Reads every byte of checkpoints, and reports damage by its file and offset.

A resumed run checks the one checkpoint that it reads; a verification checks all of them, before one is
needed. A verification reads files in pieces, so a file of any size needs little memory. It checks the size
and the SHA-256 of each file. It also checks that all values are finite, because training does not recover
from other values.

Summaries of checkpoints come from their manifests and the sizes of their files; no tensor is read.
"""

from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.files import candidates_in, named_checkpoint
from adam_async.checkpoint.manifest import (
    BLOCK_BYTES,
    CRC_KEY,
    INDEX_FILE,
    MANIFEST_FILE,
    CheckpointError,
    FileRecord,
    Manifest,
)
from adam_async.checkpoint.names import age_order
from adam_async.checkpoint.reader import check_digest, check_size, checkpoint_manifest, file_facts
from adam_async.parameter_server.store_disk import PREFIX
from adam_async.persistence.scan import segment_name
from adam_async.runtime.clock import utc_time
from adam_async.runtime.disk import Disk

PIECE_BYTES = 4 << 20
"""Number of bytes that are read at a time."""

HEADER_BYTES = 64 << 20
"""Maximum size of the header of a file of tensors in bytes; a tensor has about 100."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a checkpoint."""

    file: str
    """Name of the file in the folder of the checkpoint."""
    offset: int | None = None
    """Offset of the problem in the file, in bytes; None if the whole file is missing or wrong."""
    text: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, read to its last byte."""

    name: str
    whole: bool
    files: int
    """Number of files, the manifest included; 0 if the manifest cannot be read."""
    bytes: int
    """Size of all files except the manifest, in bytes, according to the manifest."""
    problems: tuple[Problem, ...] = ()


async def verify_checkpoint(folder: Path, disk: Disk) -> Verification:
    """Read all files of one checkpoint."""
    try:
        manifest = await checkpoint_manifest(folder, disk)
    except CheckpointError as error:
        damage = Problem(file=MANIFEST_FILE, text=str(error))
        return Verification(name=folder.name, whole=False, files=0, bytes=0, problems=(damage,))
    problems = [
        problem
        for record in manifest.files
        if (problem := await _verify_file(folder / record.name, record, disk)) is not None
    ]
    return Verification(
        name=folder.name,
        whole=not problems,
        files=len(manifest.files) + 1,
        bytes=sum(record.bytes for record in manifest.files),
        problems=tuple(problems),
    )


async def _verify_file(path: Path, record: FileRecord, disk: Disk) -> Problem | None:
    """Read one file; returns its first problem."""
    contents = _Contents(record.bytes, has_tensors=record.name != INDEX_FILE)
    try:
        await check_size(path, record, disk)
        async with aclosing(disk.read_pieces(path, PIECE_BYTES)) as pieces:
            async for piece in pieces:
                await disk.run(contents.feed, piece)
                if contents.read > record.bytes:  # another program writes the file
                    break
        check_digest(path, contents.digest.hexdigest(), record)
    except CheckpointError as error:
        if not contents.problem:
            return Problem(file=record.name, text=str(error))
        text = f"{error}; {contents.problem}"
        return Problem(file=record.name, offset=contents.offset, text=text)
    except OSError as error:
        why = error.strerror or str(error)
        return Problem(file=record.name, offset=contents.read, text=f"{path} cannot be read: {why}")
    if contents.problem:
        text = f"{path}: {contents.problem}"
        return Problem(file=record.name, offset=contents.offset, text=text)
    return None


class _TensorEntry(msgspec.Struct, frozen=True):
    """The description of one tensor in the header of a safetensors file."""

    dtype: Literal["F32", "F64", "I64"]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Values of one tensor in a file, from offset `start` to `stop` in the data after the header."""

    name: str
    dtype: np.dtype[Any]
    start: int
    stop: int
    crcs: str
    """CRC-32 of each block, as 8 hexadecimal digits."""


_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}


@dataclass(slots=True, eq=False)
class _Contents:
    """The contents of one file, checked piece by piece.

    Attributes:
        size: Size of the file in bytes, by the manifest.
        has_tensors: Whether the file has the safetensors format.
        read: Number of bytes that were read.
        problem: First problem of the contents and its place, in words; empty without one.
        offset: Offset of the problem in the file, in bytes.
    """

    size: int
    has_tensors: bool
    digest: Any = field(default_factory=sha256)
    read: int = 0
    problem: str = ""
    offset: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _data_at: int = 0
    _tensors: deque[_Tensor] = field(default_factory=deque)
    _position: int = 0
    _crc: int = 0
    _rest: bytes = b""
    _bad: int = 0
    _first: str = ""
    _damaged: bool = False

    def feed(self, piece: bytes) -> None:
        """Check the next bytes of the file."""
        self.read += len(piece)
        self.digest.update(piece)
        if not self.has_tensors:
            return
        if not self._data_at:
            self._head += piece
            if not self._read_header():
                return
            piece, self._head = bytes(self._head[self._data_at :]), bytearray()
        self._scan(memoryview(piece))

    def _read_header(self) -> bool:
        """Read the header, once all its bytes are there; returns whether the values can be scanned."""
        if len(self._head) < 8:
            if self.read >= self.size:
                self._give_up(0, f"the file has {self.size} bytes, and a file of tensors at least 8")
            return False
        length = int.from_bytes(self._head[:8], "little")
        if length > min(HEADER_BYTES, self.size - 8):
            self._give_up(0, f"the header would have {length:,} bytes, and the file has {self.size:,}")
            return False
        if len(self._head) < 8 + length:
            return False
        try:
            raw = msgspec.json.decode(self._head[8 : 8 + length], type=dict[str, msgspec.Raw])
            metadata = raw.pop("__metadata__", None)
            crcs = msgspec.json.decode(metadata, type=dict[str, str]) if metadata is not None else {}
            entries = {name: msgspec.json.decode(each, type=_TensorEntry) for name, each in raw.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._give_up(8, f"the header cannot be read: {error}")
            return False
        self._data_at = 8 + length
        return self._take(entries, crcs)

    def _take(self, entries: dict[str, _TensorEntry], crcs: dict[str, str]) -> bool:
        """Take the tensors of the header, which must fill the file without gaps."""
        at = 0
        for name, entry in entries.items():
            dtype = _DTYPES[entry.dtype]
            start, stop = entry.data_offsets
            if start != at or stop - start != prod(entry.shape) * dtype.itemsize:
                self._give_up(8, f"the header gives {name[:80]!r} the bytes {start:,} to {stop:,}")
                return False
            self._tensors.append(_Tensor(name, dtype, start, stop, crcs.get(CRC_KEY + name, "")))
            at = stop
        if self._data_at + at != self.size:
            self._give_up(8, f"the tensors of the header end at byte {self._data_at + at:,}")
            return False
        if bare := [
            tensor.name for tensor in self._tensors if not tensor.crcs and tensor.stop > tensor.start
        ]:
            self._give_up(8, f"the header has no CRC-32 of {bare[0][:80]!r}")
            return False
        return True

    def _give_up(self, offset: int, problem: str) -> None:
        self.problem, self.offset, self.has_tensors = problem, offset, False
        self._tensors.clear()
        self._head.clear()

    def _scan(self, data: memoryview) -> None:
        """Check the next values, in parts that end where a block or a tensor ends."""
        while self._tensors and data:
            tensor = self._tensors[0]
            block, done = divmod(self._position - tensor.start, BLOCK_BYTES)
            left = min(BLOCK_BYTES - done, tensor.stop - self._position)
            part, data = data[:left], data[left:]
            self._count(tensor, part)
            self._crc = crc32(part, self._crc)
            self._position += len(part)
            if len(part) == left:
                self._end_block(tensor, block)
            if self._position == tensor.stop:
                self._tensors.popleft()

    def _end_block(self, tensor: _Tensor, block: int) -> None:
        found, self._crc = f"{self._crc:08x}", 0
        wanted = tensor.crcs[8 * block : 8 * block + 8]
        if found != wanted and not self._damaged:
            self._damaged = True
            self.offset = self._data_at + tensor.start + block * BLOCK_BYTES
            stop = self._data_at + self._position
            where = f"bytes {self.offset:,} to {stop:,}, in {tensor.name[:80]}"
            self.problem = f"{where}, differ from their CRC-32 in the header"

    def _count(self, tensor: _Tensor, part: memoryview) -> None:
        """Count values that are not finite; a value may lie in two pieces."""
        if tensor.dtype.kind != "f":
            return
        begin = self._data_at + self._position - len(self._rest)
        values = self._rest + part
        count = len(values) // tensor.dtype.itemsize
        self._rest = values[count * tensor.dtype.itemsize :]
        bad: NDArray[np.intp] = np.flatnonzero(~np.isfinite(np.frombuffer(values, tensor.dtype, count)))
        if not bad.size or self._damaged:
            return
        if not self._bad:
            self.offset = begin + int(bad[0]) * tensor.dtype.itemsize
            self._first = tensor.name
        self._bad += bad.size
        self.problem = (
            f"{self._bad:,} values are not finite, the first one at byte {self.offset:,}, in "
            f"{self._first[:80]}: the training diverged"
        )


MOST_SHOWN = 80
"""Maximum length of a text of a manifest in a summary, in characters."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    name: str
    epoch: int
    """Epoch of the checkpoint, taken within the epoch or at its end."""
    groups: int
    """Number of trained groups of `epoch`."""
    whole: bool
    """Whether the manifest is undamaged and every file has the size in the manifest. `verify_checkpoint` also
    reads the files."""
    latest: bool = False
    """Whether a resumed run reads this checkpoint first."""
    run: str = ""
    mode: str = ""
    """Consistency of the run, such as ``bsp``."""
    model: str = ""
    """Name of the model, or ``step package.module:factory``."""
    written: str = ""
    """Time of the last change of the manifest, in UTC."""
    bytes: int = 0
    """Size of all files in bytes."""
    problem: str = ""
    """The damage, in words; empty without any."""


async def checkpoints_in(
    path: Path, disk: Disk, *, most: int | None = None
) -> tuple[Path, list[str], list[str]]:
    """Find the checkpoints that a path names.

    Args:
        path: A folder of checkpoints, or one checkpoint.
        most: See `candidates_in`.

    Returns:
        The folder, the names of its checkpoints in the order in which a resumed run reads them, and the
        problems of the folder itself.

    Raises:
        CheckpointError: The folder cannot be read, or has no checkpoint.
    """
    folder, name = named_checkpoint(path)
    if name:
        try:
            await disk.names(path)
        except OSError as error:
            raise CheckpointError(f"no checkpoint {path}: {error.strerror or error}") from None
        return folder, [name], []
    names, problems = await candidates_in(folder, disk, most=most)
    if names:
        return folder, names, problems
    if await _is_of_store(folder, disk):
        raise CheckpointError(
            f"{folder} has the shards of a store, not checkpoints: the same train --store command goes on "
            "from them, and adam-async store save writes the values of a store that runs "
            "(docs/how-to/keep-a-store-on-disk.md)"
        )
    raise CheckpointError(f"no checkpoint in {folder}: train --checkpoint DIR writes them")


async def _is_of_store(folder: Path, disk: Disk) -> bool:
    """Return whether a folder is that of `train --store`, of one server, or of one store."""
    names = [*await disk.names(folder)]
    for each in await disk.folders(folder):
        names += await disk.folders(folder / each)
    return any(name.startswith(PREFIX) or segment_name(name) is not None for name in names)


async def summary_of(folder: Path, disk: Disk, *, latest: bool) -> Summary:
    """Summarise one checkpoint."""
    epoch, groups = age_order(folder.name)
    place = Summary(name=folder.name, epoch=epoch, groups=groups, whole=False, latest=latest)
    try:
        manifest = await checkpoint_manifest(folder, disk)
        facts = await file_facts(folder / MANIFEST_FILE, disk)
    except CheckpointError as error:
        return msgspec.structs.replace(place, problem=str(error))
    problem = ""
    try:
        for record in manifest.files:
            await check_size(folder / record.name, record, disk)
    except CheckpointError as error:
        problem = str(error)
    return msgspec.structs.replace(
        place,
        whole=not problem,
        run=manifest.run[:MOST_SHOWN],
        mode=str(manifest.config.get("consistency", "asp"))[:MOST_SHOWN],
        model=_model_of(manifest)[:MOST_SHOWN],
        written=utc_time(facts.modified_s),
        bytes=facts.size + sum(record.bytes for record in manifest.files),
        problem=problem,
    )


def _model_of(manifest: Manifest) -> str:
    step = manifest.spec.get("step")
    return f"step {step.get('name')}" if isinstance(step, dict) else str(manifest.spec.get("name", ""))
