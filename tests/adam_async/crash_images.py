"""A disk model that remembers each of its states, and all that a crash may make of one.

A state is taken before and after each change; so for each write there is one in which it is not synced, and
one in which all before the next change is. With it goes a note of the caller's on what was written and
promised by then.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Generic, TypeVar

from tests.simulation.disk_model import SECTOR_BYTES, DiskModel, Inode, Write
from tests.simulation.disk_model import Entries as Names
from tests.simulation.random_streams import RandomStream

ROOT = Path("/")
SMALL = 4
"""Up to so many pending operations each subset of them is tried."""
DRAWN = 12
"""Beyond it, so many that are drawn."""

Note = TypeVar("Note")


@dataclass(frozen=True)
class Image(Generic[Note]):
    """A state of a disk model, and the note of the moment."""

    root: Inode
    noted: Note

    @property
    def unsynced(self) -> int:
        """Pending operations."""
        return sum(len(inode.pending) for inode in inodes(self.root))


class TracedDiskModel(DiskModel, Generic[Note]):
    """A disk model that keeps images of itself, and says when something happens.

    Args:
        note: Returns the note for an image.
    """

    def __init__(self, note: Callable[[], Note], **options) -> None:
        super().__init__(RandomStream("traced"), **options)
        self.images: list[Image[Note]] = []
        self._happened: dict[str, asyncio.Event] = {}
        self._note = note

    def look(self) -> None:
        """Keep an image."""
        self.images.append(Image(copy.deepcopy(self.find(ROOT)), self._note()))

    async def until(self, change: str) -> None:
        """Wait for the next change of this kind."""
        event = self._happened[change] = asyncio.Event()
        await event.wait()

    def _traced(self, kind: str, *arguments):
        self.look()
        result = getattr(super(), kind)(*arguments)
        self.look()
        if kind in self._happened:
            self._happened[kind].set()
        return result

    def create(self, path):
        return self._traced("create", path)

    def truncate(self, inode, size):
        return self._traced("truncate", inode, size)

    def append(self, inode, data):
        return self._traced("append", inode, data)

    def make_folder(self, path):
        return self._traced("make_folder", path)

    def rename(self, path, target):
        return self._traced("rename", path, target)

    def remove(self, path):
        return self._traced("remove", path)


def disk_model_of(root: Inode) -> DiskModel:
    """A disk model that holds what an image does, on which a crash loses nothing more than was taken away."""
    disk_model = DiskModel(RandomStream("image"), lost=0.0, torn=0.0)
    own = disk_model.find(ROOT)
    own.names, own.kept_names, own.pending = root.names, root.kept_names, root.pending
    return disk_model


def inodes(root: Inode) -> list[Inode]:
    """All that is on a disk, as programs see it or as it may be after a crash."""
    found, waiting = [], [root]
    while waiting:
        inode = waiting.pop()
        if not any(inode is known for known in found):
            found.append(inode)
            named = [
                child for each in inode.pending if isinstance(each, Names) for child in each.changes.values()
            ]
            waiting.extend(
                child
                for child in (*(inode.names or {}).values(), *inode.kept_names.values(), *named)
                if child
            )
    return found


def _sectors(write: Write) -> list[Write]:
    pieces, start = [], 0
    while start < len(write.data):
        stop = start + SECTOR_BYTES - (write.offset + start) % SECTOR_BYTES
        pieces.append(Write(write.offset + start, write.data[start:stop]))
        start = stop
    return pieces


def crashed(image: Image[Note], dice: random.Random) -> Iterator[DiskModel]:
    """Disks as a crash may leave them: any pending operations there, the last write torn, or garbage."""
    places = [
        (at, number) for at, inode in enumerate(inodes(image.root)) for number in range(len(inode.pending))
    ]
    subsets = chain.from_iterable(combinations(places, count) for count in range(len(places) + 1))
    if len(places) > SMALL:
        drawn = [tuple(place for place in places if dice.random() < 0.5) for _ in range(DRAWN)]
        subsets = [(), tuple(places), *drawn]
    for subset in subsets:
        root = copy.deepcopy(image.root)
        for at, inode in enumerate(inodes(root)):
            inode.pending = [each for number, each in enumerate(inode.pending) if (at, number) in subset]
        yield _crash(root)
    for spoil in (_first_half, _last_half, _random_half, _garbage, _garbage_behind):
        root = copy.deepcopy(image.root)
        spoiled = [inode for inode in inodes(root) if inode.pending and isinstance(inode.pending[-1], Write)]
        for inode in spoiled:
            inode.pending[-1:] = spoil(inode.pending[-1], dice)
        if spoiled:
            yield _crash(root)


def _crash(root: Inode) -> DiskModel:
    disk_model = disk_model_of(root)
    disk_model.crash()
    return disk_model


def _first_half(write: Write, dice: random.Random) -> list[Write]:
    pieces = _sectors(write)
    return pieces[: len(pieces) // 2]


def _last_half(write: Write, dice: random.Random) -> list[Write]:
    pieces = _sectors(write)
    return pieces[len(pieces) // 2 + 1 :]


def _random_half(write: Write, dice: random.Random) -> list[Write]:
    return [piece for piece in _sectors(write) if dice.random() < 0.5]


def _garbage(write: Write, dice: random.Random) -> list[Write]:
    return [
        Write(piece.offset, dice.randbytes(len(piece.data))) if dice.random() < 0.5 else piece
        for piece in _sectors(write)
    ]


def _garbage_behind(write: Write, dice: random.Random) -> list[Write]:
    return [write, Write(write.offset + len(write.data), dice.randbytes(700))]
