"""Content of a disk: the page cache, the durable state, and a crash's effects on both.

Each file and folder has two states: the page cache, which programs see, and the durable state. An
operation changes the cache and joins a list of pending operations; a sync applies the list to the durable
state. Syncing a file makes its bytes durable but not its name, because the name belongs to the folder.

At a crash each pending operation is lost or becomes durable, independently of the others; a write may also
become durable in only some of its sectors. So a later write may survive and an earlier one be lost, names may
exist without bytes, and bytes without names. A rename within a folder is durable as a whole or not at all.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from tests.simulation.random_streams import RandomStream

SECTOR_BYTES = 512
"""Size of a sector in bytes: the unit of torn writes and damage."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at an offset."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    """A new size."""

    size: int


@dataclass(frozen=True, slots=True)
class Entries:
    """Names set, or removed (None), in one operation."""

    changes: dict[str, "Inode | None"]


@dataclass(slots=True, eq=False)
class Inode:
    """A file, or a folder (which has `names`)."""

    names: "dict[str, Inode] | None" = None
    kept_names: "dict[str, Inode]" = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    kept: bytearray = field(default_factory=bytearray)
    pending: list[Write | Truncate | Entries] = field(default_factory=list)

    def sync(self) -> None:
        """Make all pending operations durable."""
        for operation in self.pending:
            if isinstance(operation, Entries):
                _set_names(self.kept_names, operation)
            else:
                _change_bytes(self.kept, operation)
        self.pending.clear()

    def change(self, operation: Write | Truncate | Entries) -> None:
        """Change the page cache."""
        self.pending.append(operation)
        if isinstance(operation, Entries):
            assert self.names is not None
            _set_names(self.names, operation)
        else:
            _change_bytes(self.data, operation)


def _set_names(names: dict[str, Inode], entries: Entries) -> None:
    for name, inode in entries.changes.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _change_bytes(data: bytearray, operation: Write | Truncate) -> None:
    size = operation.size if isinstance(operation, Truncate) else operation.offset + len(operation.data)
    if isinstance(operation, Truncate):
        del data[size:]
    data.extend(bytes(max(0, size - len(data))))
    if isinstance(operation, Write):
        data[operation.offset : size] = operation.data


def _sectors(write: Write) -> list[Write]:
    """Cut a write at the borders of sectors."""
    pieces, start = [], 0
    while start < len(write.data):
        offset = write.offset + start
        stop = start + SECTOR_BYTES - offset % SECTOR_BYTES
        pieces.append(Write(offset, write.data[start:stop]))
        start = stop
    return pieces


def _has_unsynced(names: dict[str, Inode]) -> bool:
    """Return whether a file of a folder, or below it, has pending operations."""
    return any(
        inode.pending if inode.names is None else _has_unsynced(inode.names) for inode in names.values()
    )


class DiskModel:
    """A disk with its file system. Paths are absolute; the root folder exists.

    Args:
        dice: Random stream for the effects of crashes.
        lost: Share of pending operations that a crash loses.
        torn: Share of the other pending writes that a crash makes durable in some sectors only.
        garbage: Share of such writes' sectors that get random bytes.
    """

    def __init__(
        self,
        dice: RandomStream,
        *,
        capacity_bytes: int = 1 << 30,
        lost: float = 0.4,
        torn: float = 0.3,
        garbage: float = 0.2,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._dice = dice
        self._lost, self._torn, self._garbage = lost, torn, garbage
        self._root = Inode(names={})
        self.holders: dict[PurePath, Callable[[], bool]] = {}
        """Locked files, each with a function that returns whether the holder of the lock is alive."""

    # --- operations of programs --------------------------------------------------------------

    def find(self, path: PurePath) -> Inode:
        """Return a file or folder. Raises FileNotFoundError or NotADirectoryError."""
        inode = self._root
        for part in path.parts[1:]:
            if inode.names is None:
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            try:
                inode = inode.names[part]
            except KeyError:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path)) from None
        return inode

    def folder(self, path: PurePath) -> tuple[Inode, dict[str, Inode]]:
        """Return a folder and its names."""
        inode = self.find(path)
        if inode.names is None:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return inode, inode.names

    def file(self, path: PurePath) -> Inode:
        """Return a file. Raises IsADirectoryError for a folder."""
        inode = self.find(path)
        if inode.names is not None:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        return inode

    def create(self, path: PurePath) -> Inode:
        """Return an empty file: a new one, or the existing file with that name, truncated."""
        parent, names = self.folder(path.parent)
        if path.name in names:
            inode = self.file(path)
            self.truncate(inode, 0)
            return inode
        inode = Inode()
        parent.change(Entries({path.name: inode}))
        return inode

    def truncate(self, inode: Inode, size: int) -> None:
        """Truncate a file."""
        self.used_bytes -= len(inode.data) - size
        inode.change(Truncate(size))

    def append(self, inode: Inode, data: bytes) -> None:
        """Append to a file. Raises OSError if the disk is full, after writing the bytes that fit."""
        room = self.capacity_bytes - self.used_bytes
        if data[:room]:
            inode.change(Write(len(inode.data), data[:room]))
            self.used_bytes += len(data[:room])
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")

    def make_folder(self, path: PurePath) -> list[Inode]:
        """Make a folder and its missing parents. Returns the parents of the new folders."""
        if not path.name:
            return []
        changed = self.make_folder(path.parent)
        parent, names = self.folder(path.parent)
        if path.name not in names:
            parent.change(Entries({path.name: Inode(names={})}))
            changed.append(parent)
        else:
            self.folder(path)
        return changed

    def rename(self, path: PurePath, target: PurePath) -> None:
        """Rename a file or folder, which may replace a file or an empty folder."""
        inode = self.find(path)
        source, _ = self.folder(path.parent)
        parent, names = self.folder(target.parent)
        replaced = names.get(target.name)
        if replaced is inode:
            return
        if replaced is not None:
            if (replaced.names is None) != (inode.names is None):
                raise OSError(
                    errno.EISDIR if replaced.names is not None else errno.ENOTDIR, "Not of one kind"
                )
            if replaced.names:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
            self.used_bytes -= len(replaced.data)
        if source is parent:
            parent.change(Entries({path.name: None, target.name: inode}))
        else:
            parent.change(Entries({target.name: inode}))
            source.change(Entries({path.name: None}))

    def remove(self, path: PurePath) -> None:
        """Remove a file, or a folder with its content."""
        inode = self.find(path)
        for name in list(inode.names or ()):
            self.remove(path / name)
        self.used_bytes -= len(inode.data)
        self.folder(path.parent)[0].change(Entries({path.name: None}))

    # --- crashes and damage ------------------------------------------------------------------

    def has_unsynced(self, folder: PurePath) -> bool:
        """Return whether a file in a folder, or below it, has changes that a crash may lose."""
        try:
            return _has_unsynced(self.folder(folder)[1])
        except FileNotFoundError:
            return False

    def crash(self) -> None:
        """Lose some pending operations, and make the others durable, some writes only in part."""
        self._settle(self._root)
        self.used_bytes = sum(len(inode.data) for _, inode in self._files())

    def _settle(self, inode: Inode) -> None:
        for operation in inode.pending:
            if self._dice.chance(self._lost):
                continue
            if isinstance(operation, Entries):
                _set_names(inode.kept_names, operation)
            elif isinstance(operation, Write) and self._dice.chance(self._torn):
                self._tear(inode.kept, operation)
            else:
                _change_bytes(inode.kept, operation)
        inode.pending.clear()
        inode.data[:] = inode.kept
        if inode.names is not None:
            inode.names = dict(inode.kept_names)
            for name in sorted(inode.names):
                self._settle(inode.names[name])

    def _tear(self, kept: bytearray, write: Write) -> None:
        for piece in _sectors(write):
            if self._dice.chance(self._garbage):
                piece = Write(piece.offset, self._dice.bytes(len(piece.data)))
            elif self._dice.chance(0.5):
                continue
            _change_bytes(kept, piece)

    def rot(self, may_damage: Callable[[Path, int], bool]) -> int:
        """Flip one bit in each sector that may be damaged; return how many."""
        damaged = 0
        for path, inode in self._files():
            for start in range(0, len(inode.kept), SECTOR_BYTES):
                if may_damage(path, start // SECTOR_BYTES):
                    stop = min(start + SECTOR_BYTES, len(inode.kept))
                    at, bit = start + self._dice.below(stop - start), 1 << self._dice.below(8)
                    inode.kept[at] ^= bit
                    if at < len(inode.data):
                        inode.data[at] ^= bit
                    damaged += 1
        return damaged

    def _files(self) -> list[tuple[Path, Inode]]:
        found: list[tuple[Path, Inode]] = []
        folders = [(Path("/"), self._root)]
        while folders:
            folder, inode = folders.pop()
            for name in sorted(inode.names or ()):
                child = (inode.names or {})[name]
                (found if child.names is None else folders).append((folder / name, child))
        return found
