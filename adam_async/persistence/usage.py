"""Pure: which states and entries use which files of a folder; a store's counts and ages.

A state is in use until a newer one with its name is appended, an entry until a round of states covers it. A
file without a state or an entry in use is superfluous. A file with little in use is a victim of compaction:
its states are appended again, so that it becomes superfluous. At most half of a victim is in use, so
compaction frees at least as many bytes as it writes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adam_async.persistence.contents import Contents, Location
from adam_async.persistence.records import STATES, EntryKey, StateKey, StateName
from adam_async.persistence.scan import segment_name

MOST_UNUSED = 2
"""Size of the state files, per byte in use, above which compaction begins, plus the size of one file."""


class Usage:
    """A folder's states, and the use of its files.

    Args:
        contents: The contents at the opening.
    """

    def __init__(self, contents: Contents) -> None:
        self.states: dict[StateName, tuple[StateKey, Location]] = {}
        """Key and place of each name's newest state."""
        self.sizes: dict[str, int] = {}
        """Size of each file, in bytes."""
        self.live_bytes = 0
        """Size of the newest states, in bytes."""
        self._names: dict[str, set[StateName]] = {}
        """Names of the states in use, by file."""
        self._entries: dict[str, dict[str, tuple[int, int]]] = {}
        """Greatest position and number of an entry, by file and home."""
        self._live: dict[str, int] = {}
        for segment, size in contents.files.items():
            self.grew(segment, size)
        for key, location in contents.states.values():
            if location.segment in contents.files:
                self.put(key, location)
        for entry, location in contents.entries.items():
            if location.segment in contents.files:
                self.put_entry(entry, contents.number, location.segment)

    def grew(self, segment: str, size: int) -> None:
        """Note the size of a file."""
        self.sizes[segment] = size

    def removed(self, segment: str) -> None:
        """Note that a file is gone."""
        self.sizes.pop(segment, None)
        self._names.pop(segment, None)
        self._live.pop(segment, None)
        self._entries.pop(segment, None)

    def put(self, key: StateKey, location: Location) -> None:
        """Record a new state, which replaces the older one with its name."""
        self._drop(key.name)
        self.states[key.name] = key, location
        self._names.setdefault(location.segment, set()).add(key.name)
        self._live[location.segment] = self._live.get(location.segment, 0) + location.nbytes
        self.live_bytes += location.nbytes

    def put_entry(self, key: EntryKey, number: int, segment: str) -> None:
        """Note a new entry."""
        entries = self._entries.setdefault(segment, {})
        position, known = entries.get(key.home, (0, 0))
        entries[key.home] = max(position, key.position), max(known, number)

    def forget(self, home: str) -> None:
        """Note that the states of a bundle are no longer in use."""
        for name in [name for name in self.states if name.home == home]:
            self._drop(name)

    def _drop(self, name: StateName) -> None:
        if name in self.states:
            _, location = self.states.pop(name)
            self._names[location.segment].discard(name)
            self._live[location.segment] -= location.nbytes
            self.live_bytes -= location.nbytes

    def superfluous(
        self, current: Collection[str], floors: Mapping[str, int], forgotten: Mapping[str, int]
    ) -> list[str]:
        """Return the files without a state or entry in use, except those that still grow.

        Args:
            current: Files that still grow.
            floors: Position up to which entries are not needed, by home.
            forgotten: Number up to which entries are not needed, by home.
        """
        return [
            segment
            for segment in self.sizes
            if segment not in current
            and not self._names.get(segment)
            and all(
                position <= floors.get(home, -1) or number <= forgotten.get(home, 0)
                for home, (position, number) in self._entries.get(segment, {}).items()
            )
        ]

    @property
    def state_files_bytes(self) -> int:
        """Total size of the state files, in bytes."""
        return sum([size for segment, size in self.sizes.items() if _has_states(segment)])

    def victims(self, current: Collection[str], spare_bytes: int) -> list[StateName]:
        """Return the states to append again, in order.

        Args:
            current: Files that still grow.
            spare_bytes: Size in bytes of superseded states that may stay beyond what `MOST_UNUSED` allows.
        """
        excess = self.state_files_bytes - MOST_UNUSED * self.live_bytes - spare_bytes
        found: list[StateName] = []
        by_use = sorted(
            (self._live.get(segment, 0) / size, segment)
            for segment, size in self.sizes.items()
            if size and segment not in current and self._names.get(segment)
        )
        for share, segment in by_use:
            if excess <= 0 or share > 1 / MOST_UNUSED:
                break
            found += sorted(self._names[segment])
            excess -= self.sizes[segment] - self._live[segment]
        return found


def _has_states(segment: str) -> bool:
    name = segment_name(segment)
    return name is not None and name.kind == STATES


@dataclass(slots=True, kw_only=True)
class RoundCounts:
    """Counts of a store's rounds since its opening."""

    rounds: int = 0
    """Number of complete rounds of states."""
    updates: int = 0
    """Number of updates of shards, as marked by the owner."""
    writes: int = 0
    """Number of states written because of updates."""
    state_bytes: int = 0
    """Size of the states written because of updates, in bytes."""
    compaction_writes: int = 0
    """Number of states written again because their files were mostly superfluous."""
    compaction_bytes: int = 0
    """Size of the states written again, in bytes."""
    round_s: float = 0.0
    """Duration of the last round, in seconds."""


@dataclass(slots=True, kw_only=True)
class SegmentStatistics(RoundCounts):
    """Counts since the opening of a store, and its state now."""

    written_bytes: int = 0
    """Number of all bytes written to files of states, with heads and records."""
    syncs: int = 0
    """Number of calls of ``fdatasync``."""
    disk_bytes: int = 0
    """Size of all files now, in bytes."""
    live_bytes: int = 0
    """Size of the newest states in the files, in bytes."""
    dirty: int = 0
    """Number of shards with updates that no round has taken."""
    dirty_age_s: float = 0.0
    """Age in seconds of the oldest update that no round has taken; 0 if there is none."""
    in_round: bool = False
    """Whether a round is in progress: its states are neither dirty nor on disk."""
    period_s: float = 0.0
    """Present time between the beginnings of two rounds, in seconds: more than `flush_s` if the disk is too
    slow."""
    on_disk_as_of: float | None = None
    """Wall-clock time up to which all updates are on disk, in seconds since 1970; None if unknown."""
    is_full: bool = False
    """Whether the last write found no space on the disk."""

    @property
    def amplification(self) -> float:
        """Number of bytes written to state files per byte of updated states; 1 before any update."""
        return self.written_bytes / self.state_bytes if self.state_bytes else 1.0
