"""Pure: the log of one node: a snapshot, and the entries after it.

The membership in force is the last one in the log, committed or not, so it changes with what is put and what
is cut off. Entries are put over what was there: from the first of them on, the old ones are gone.
"""

from collections.abc import Iterable, Sequence

from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Entry, Snapshot

ENTRY_BYTES = 32
"""What an entry is taken to need beside its command, when messages are filled."""


class Log:
    """Entries by index, without gaps.

    Args:
        snapshot: What stands for all entries up to its index.
        entries: Those after it.

    Attributes:
        last_index: Of the last entry.
        members: The membership in force.
    """

    def __init__(self, snapshot: Snapshot, entries: Iterable[Entry] = ()) -> None:
        self.snapshot = snapshot
        self._entries: list[Entry] = []
        self._changes: list[Entry] = []
        """Those that have a membership."""
        self.last_index = snapshot.index
        self.members = snapshot.members
        self.put(tuple(entries))

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self.snapshot.term

    @property
    def members_index(self) -> int:
        """Where the membership in force stands in the log; the snapshot's index if it is in there."""
        return self._changes[-1].index if self._changes else self.snapshot.index

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that are kept."""
        return tuple(self._entries)

    def term_at(self, index: int) -> int | None:
        """The term of the entry at `index`; None if it is not there, or no longer."""
        position = index - self.snapshot.index - 1
        if 0 <= position < len(self._entries):
            return self._entries[position].term
        return self.snapshot.term if position == -1 else None

    def members_at(self, index: int) -> Members:
        """The membership of the entries up to `index`."""
        for change in reversed(self._changes):
            if change.index <= index and change.members is not None:
                return change.members
        return self.snapshot.members

    def has_voter_since(self, index: int, node: str) -> bool:
        """Whether a node is a voter in the membership at `index`, or in one that follows in the log."""
        later = (change.members for change in self._changes if change.index > index and change.members)
        return any(node in members.voters for members in (self.members_at(index), *later))

    def run(self, first: int, last: int) -> tuple[Entry, ...]:
        """The entries from `first` to `last`, both included, as far as they are there."""
        base = self.snapshot.index + 1
        return tuple(self._entries[max(0, first - base) : max(0, last + 1 - base)])

    def load(self, first: int, limit_bytes: int) -> tuple[Entry, ...]:
        """Entries from `first` on that fit into a message; at least one, if there is one."""
        begin = end = first - self.snapshot.index - 1
        room = limit_bytes
        while end < len(self._entries):
            room -= ENTRY_BYTES + len(self._entries[end].command or b"")
            if room < 0 and end > begin:
                break
            end += 1
        return tuple(self._entries[begin:end])

    def before_term_of(self, index: int, floor: int) -> int:
        """The last index before `index` with another term than there, but not below `floor`."""
        term = self.term_at(index)
        while index > floor and self.term_at(index) == term:
            index -= 1
        return index

    def put(self, entries: Sequence[Entry]) -> None:
        """Put entries over what is there, from the index of the first on."""
        if not entries:
            return
        position = entries[0].index - self.snapshot.index - 1
        assert 0 <= position <= len(self._entries), (entries[0].index, self.snapshot.index, self.last_index)
        self._entries[position:] = entries
        while self._changes and self._changes[-1].index >= entries[0].index:
            self._changes.pop()
        self._changes.extend([entry for entry in entries if entry.members is not None])
        self._look()

    def install(self, snapshot: Snapshot) -> None:
        """Let a later snapshot stand for what it covers; keep what follows it, if the log agrees with it."""
        agrees = self.term_at(snapshot.index) == snapshot.term
        kept = self.run(snapshot.index + 1, self.last_index) if agrees else ()
        self.snapshot = snapshot
        self._entries = list(kept)
        self._changes = [entry for entry in kept if entry.members is not None]
        self._look()

    def _look(self) -> None:
        """Note what is asked for at every event."""
        self.last_index = self.snapshot.index + len(self._entries)
        self.members = self.members_at(self.last_index)
