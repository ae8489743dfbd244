"""Pure: the dirty shards of a folder: those with updates that no round has taken."""

from dataclasses import dataclass

from adam_async.persistence.keys import StateName


@dataclass(frozen=True, slots=True)
class Mark:
    """A dirty shard."""

    since: float
    """Time of the first update that no round has taken, in seconds of the loop's clock."""
    nbytes: int
    """Size of its state, in bytes."""


class DirtyStates:
    """The dirty shards of one folder."""

    def __init__(self) -> None:
        self._marks: dict[StateName, Mark] = {}
        self.nbytes = 0
        """Size of the states of the dirty shards, in bytes."""

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, name: StateName) -> bool:
        return name in self._marks

    def names(self) -> list[StateName]:
        """Return the dirty shards."""
        return list(self._marks)

    def oldest(self) -> float | None:
        """Return the time of the oldest update that no round has taken; None if there is none."""
        return min([mark.since for mark in self._marks.values()], default=None)

    def add(self, name: StateName, mark: Mark) -> None:
        """Mark a shard; an earlier mark keeps its time."""
        known = self._marks.get(name)
        if known is not None:
            self.nbytes -= known.nbytes
            mark = Mark(min(known.since, mark.since), mark.nbytes)
        self._marks[name] = mark
        self.nbytes += mark.nbytes

    def pop(self, name: StateName) -> Mark | None:
        """Remove the mark of a shard, before the shard is copied: later updates mark it again."""
        mark = self._marks.pop(name, None)
        if mark is not None:
            self.nbytes -= mark.nbytes
        return mark

    def forget(self, home: str) -> None:
        """Remove the marks of a bundle."""
        for name in [name for name in self._marks if name.home == home]:
            self.pop(name)
