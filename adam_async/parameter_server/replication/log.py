"""Pure: the log of one member: the entries that another member may still need."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. Position and generation identify it and all entries before it."""

    position: int
    """Number of the entry, from 1."""
    generation: int
    """Generation of the primary that formed it."""
    content: Any
    """Content of the entry, which the log never reads."""
    nbytes: int
    """Size of the content, in bytes."""


class Log:
    """Entries from `start` + 1 to `last`.

    ``start <= applied <= committed <= last``. The log has dropped the entries up to `start`.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.last = start
        """Position of the last entry."""
        self.committed = start
        """Position of the last entry that may be applied."""
        self.applied = start
        """Position of the last entry that the shell has applied."""
        self.nbytes = 0
        """Size of all entries, in bytes."""
        self._entries: dict[int, Entry] = {}

    def __repr__(self) -> str:
        return f"<Log {self.start} < {self.applied} <= {self.committed} <= {self.last}>"

    def at(self, position: int) -> Entry | None:
        """Return an entry; None outside the log."""
        return self._entries.get(position)

    def after(self, position: int) -> list[Entry]:
        """Return the entries after a position, which is `start` or later."""
        return [self._entries[each] for each in range(position + 1, self.last + 1)]

    def bytes_between(self, start: int, last: int) -> int:
        """Return the size of the entries after `start`, up to `last`, in bytes."""
        return sum(self._entries[each].nbytes for each in range(max(start, self.start) + 1, last + 1))

    def append(self, generation: int, content: Any, nbytes: int) -> Entry:
        """Add an entry of this member, the primary."""
        entry = Entry(self.last + 1, generation, content, nbytes)
        self._add(entry)
        return entry

    def put(self, entry: Entry) -> None:
        """Take an entry of the primary that is not committed here; its position is at most `last` + 1.

        Another entry at this position is dropped, with all entries after it, which depend on it.
        """
        known = self._entries.get(entry.position)
        if known is not None and known.generation == entry.generation:
            return
        self._drop_from(entry.position)
        self._add(entry)

    def commit(self, position: int) -> tuple[Entry, ...]:
        """Commit the entries up to a position; return the newly committed ones."""
        new = tuple(self._entries[each] for each in range(self.committed + 1, position + 1))
        self.committed = max(self.committed, position)
        return new

    def truncate(self, position: int) -> None:
        """Drop the entries up to a position, as far as they are applied here."""
        while self.start < min(position, self.applied):
            self.start += 1
            self.nbytes -= self._entries.pop(self.start).nbytes

    def _add(self, entry: Entry) -> None:
        self._entries[entry.position] = entry
        self.last = entry.position
        self.nbytes += entry.nbytes

    def _drop_from(self, position: int) -> None:
        for each in range(position, self.last + 1):
            self.nbytes -= self._entries.pop(each).nbytes
        self.last = min(self.last, position - 1)
