"""The shards of a server as the owner of a segment store has them, and the states that recovery may return.

The content of a shard is a function of its name and its version, and the version one of the bundle's history
and a position. So each recovered state can be checked without the code that wrote it.
"""

import asyncio
import random
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from adam_async.persistence.contents import Contents, contents_of
from adam_async.persistence.records import EntryKey, FlushSettings, Identity, State, StateKey, StateName
from adam_async.persistence.scan import Scan, scan, segment_name
from adam_async.persistence.store import SegmentStore

HOME = Path("/home/ps-0")
IDENTITY = Identity(run="run-1", contents=3)
SMALL = FlushSettings(flush_s=1.0, dirty_bytes=1 << 20, segment_bytes=8192, batch_bytes=2048)


@cache
def content(name: StateName, version: int) -> tuple[bytes, ...]:
    """Return the content of a shard in two parts, of up to 700 bytes; the second may be empty."""
    dice = random.Random(f"{name} {version}")
    return (
        f"{name.home}/{name.shard} v{version}".encode(),
        dice.randbytes(random.Random(str(name)).randrange(700)),
    )


@dataclass
class OwnedBundle:
    """A bundle: its history of entries, and how far it is applied."""

    home: str
    shards: int = 6
    generation: int = 1
    history: list[tuple[int, ...]] = field(default_factory=list)
    """By entry: the shards that it changes."""
    applied: int = 0
    versions: dict[tuple[int, int], int] = field(default_factory=dict)

    def grow(self, dice: random.Random) -> int:
        """Add an entry; return its position. The first and the last shard change only at the beginning."""
        position = len(self.history) + 1
        shards = dice.sample(range(1, self.shards), dice.randrange(1, 4))
        self.history.append((*shards, self.shards, 0) if position < 4 else tuple(shards))
        return position

    def version(self, shard: int, position: int) -> int:
        """Return the number of entries up to a position that change a shard."""
        known = self.versions.get((shard, position))
        if known is None:
            known = self.versions[shard, position] = sum(shard in entry for entry in self.history[:position])
        return known

    def names(self) -> list[StateName]:
        """Return the names of its states."""
        return [StateName(self.home, shard) for shard in range(self.shards + 1)]

    def state(self, shard: int) -> State:
        """Return a state as it is applied now."""
        version = self.version(shard, self.applied)
        key = StateKey(self.home, shard, self.generation, self.applied, version)
        return State(key, content(key.name, version))

    def entry(self, position: int) -> tuple[EntryKey, tuple[bytes, ...]]:
        """Return the key and the content of an entry."""
        dice = random.Random(f"{self.home} {position}")
        key = EntryKey(self.home, position, self.generation)
        return key, (repr(self.history[position - 1]).encode(), dice.randbytes(dice.randrange(300)))


class Owner:
    """The bundles of a server."""

    def __init__(self, *homes: str) -> None:
        self.bundles = {home: OwnedBundle(home) for home in homes}
        self.unready: set[StateName] = set()
        """States that the owner does not hand over now."""
        self.takes = 0

    async def take(self, name: StateName) -> State | None:
        """Copy a state."""
        self.takes += 1
        return None if name in self.unready else self.bundles[name.home].state(name.shard)

    def apply(self, store: SegmentStore, home: str, position: int) -> None:
        """Apply an entry, and mark its shards."""
        bundle = self.bundles[home]
        bundle.applied = position
        for shard in bundle.history[position - 1]:
            store.mark(StateName(home, shard), 1000)
        store.applied(home, position)

    def update(self, store: SegmentStore, home: str, shard: int, updates: int = 1) -> None:
        """Apply entries that change one shard."""
        bundle = self.bundles[home]
        for _ in range(updates):
            bundle.history.append((shard,))
            self.apply(store, home, len(bundle.history))


def store_of(disk, owner, *, entries_disk=None, path=HOME, notice=print, settings=SMALL, identity=IDENTITY):
    """Return a store that is not opened, in the running loop."""
    loop = asyncio.get_running_loop()
    return SegmentStore(
        disk,
        entries_disk or disk,
        path,
        identity,
        take=owner.take,
        clock=loop.time,
        wall_clock=lambda: 1e9 + loop.time(),
        notice=notice,
        settings=settings,
    )


def files_of(disk_model, folder: Path = HOME) -> dict[str, bytes]:
    """Return the segment files of a disk model."""
    try:
        names = disk_model.folder(folder)[1]
    except FileNotFoundError:
        return {}
    return {name: bytes(names[name].data) for name in sorted(names) if segment_name(name)}


@lru_cache(maxsize=512)
def known_scan(name: str, data: bytes) -> Scan:
    """Read a file; crashes leave most files as they were."""
    return scan(name, data, IDENTITY.run)


def contents_in(files: dict[str, bytes]) -> Contents:
    """Read files without a store."""
    names = [segment_name(each) for each in files]
    scans = [known_scan(str(name), files[str(name)]) for name in sorted(names) if not name.is_quarantined]
    assert not any(each.unknown for each in scans)
    return contents_of(scans, names)


def content_at(files: dict[str, bytes], location) -> tuple[bytes, ...]:
    """Return the content of a record, in its parts."""
    data, parts, begin = files[location.segment], [], location.content
    for size in location.sizes:
        parts.append(data[begin : begin + size])
        begin += size
    return tuple(parts)


def check_states(files: dict[str, bytes], contents: Contents, owner: Owner) -> None:
    """Assert that each recovered state and entry is one that the owner wrote."""
    for name, (key, location) in contents.states.items():
        bundle = owner.bundles[name.home]
        assert key.version == bundle.version(name.shard, key.position)
        assert content_at(files, location) == content(name, key.version)
    for key, location in contents.entries.items():
        expected = owner.bundles[key.home].entry(key.position)
        assert (key, content_at(files, location)) == expected
