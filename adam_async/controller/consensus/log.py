"""Pure: one node's log: a snapshot, the entries after it, and the chunks of a snapshot in transfer.

The membership in force is the last one in the log, committed or not, so adding or removing entries can change
it. New entries replace all old ones from the first new index on.
"""

from collections.abc import Iterable, Sequence
from zlib import crc32

from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Chunk, Entry, Snapshot

ENTRY_BYTES = 32
"""Assumed size in a message of an entry without its command, in bytes."""


class Log:
    """Entries by index, without gaps.

    Args:
        snapshot: Snapshot in place of all entries up to its index.

    Attributes:
        last_index: Index of the last entry.
        members: The membership in force.
    """

    def __init__(self, snapshot: Snapshot, entries: Iterable[Entry] = ()) -> None:
        self.snapshot = snapshot
        self._entries: list[Entry] = []
        self._changes: list[Entry] = []
        """Entries of the log that change the membership, in order."""
        self.last_index = snapshot.index
        self.members = snapshot.members
        self.put(tuple(entries))

    @property
    def last_term(self) -> int:
        """Term of the last entry; the snapshot's term if no entry follows it."""
        return self._entries[-1].term if self._entries else self.snapshot.term

    @property
    def members_index(self) -> int:
        """Index of the entry with the membership in force; the snapshot's index if no entry has one."""
        return self._changes[-1].index if self._changes else self.snapshot.index

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries after the snapshot."""
        return tuple(self._entries)

    def term_at(self, index: int) -> int | None:
        """Return the term of the entry at `index`; None if the log does not hold it."""
        position = index - self.snapshot.index - 1
        if 0 <= position < len(self._entries):
            return self._entries[position].term
        return self.snapshot.term if position == -1 else None

    def members_at(self, index: int) -> Members:
        """Return the membership in force at `index`."""
        for change in reversed(self._changes):
            if change.index <= index and change.members is not None:
                return change.members
        return self.snapshot.members

    def snapshot_at(self, index: int, state: bytes) -> Snapshot | None:
        """Return the snapshot of a state at `index`; None if the log does not hold the entry."""
        term = self.term_at(index)
        return Snapshot(index, term, self.members_at(index), state) if term is not None else None

    def has_voter_since(self, index: int, node: str) -> bool:
        """Return whether a node is a voter in the membership at `index`, or in a later one in the log."""
        later = (change.members for change in self._changes if change.index > index and change.members)
        return any(node in members.voters for members in (self.members_at(index), *later))

    def run(self, first: int, last: int) -> tuple[Entry, ...]:
        """Return the entries from `first` to `last`, both included, as far as the log has them."""
        base = self.snapshot.index + 1
        return tuple(self._entries[max(0, first - base) : max(0, last + 1 - base)])

    def load(self, first: int, limit_bytes: int) -> tuple[Entry, ...]:
        """Return as many entries from `first` on as a message has room for; at least one, if there is one."""
        begin = end = first - self.snapshot.index - 1
        room = limit_bytes
        while end < len(self._entries):
            room -= ENTRY_BYTES + len(self._entries[end].command or b"")
            if room < 0 and end > begin:
                break
            end += 1
        return tuple(self._entries[begin:end])

    def before_term_of(self, index: int, floor: int) -> int:
        """Return the last index before `index` with another term, but at least `floor`."""
        term = self.term_at(index)
        while index > floor and self.term_at(index) == term:
            index -= 1
        return index

    def put(self, entries: Sequence[Entry]) -> None:
        """Replace all entries from the index of the first new one on."""
        if not entries:
            return
        position = entries[0].index - self.snapshot.index - 1
        assert 0 <= position <= len(self._entries), (entries[0].index, self.snapshot.index, self.last_index)
        self._entries[position:] = entries
        while self._changes and self._changes[-1].index >= entries[0].index:
            self._changes.pop()
        self._changes.extend([entry for entry in entries if entry.members is not None])
        self._update()

    def install(self, snapshot: Snapshot) -> None:
        """Replace the entries up to a later snapshot; keep later ones if the log agrees with the snapshot."""
        # Unless the log has the snapshot's last entry, the entries after it may be of another history.
        kept = self.run(snapshot.index + 1, self.last_index) if self._has_end_of(snapshot) else ()
        self.snapshot = snapshot
        self._entries = list(kept)
        self._changes = [entry for entry in kept if entry.members is not None]
        self._update()

    def _has_end_of(self, snapshot: Snapshot) -> bool:
        """Return whether the log holds the last entry that the snapshot replaces."""
        return self.term_at(snapshot.index) == snapshot.term

    def _update(self) -> None:
        """Update `last_index` and `members`, which every event reads."""
        self.last_index = self.snapshot.index + len(self._entries)
        self.members = self.members_at(self.last_index)


class IncomingSnapshot:
    """Assembles one state from its chunks; a chunk of another state discards the earlier chunks."""

    def __init__(self) -> None:
        self._which: tuple[int, int, int, int] | None = None
        self._state = bytearray()

    def whole(self, chunk: Chunk) -> bytes | None:
        """Return the state if this chunk completes it and the checksum is right; otherwise None."""
        if not self._follows(chunk) or chunk.offset + len(chunk.data) < chunk.size:
            return None
        known = self._state if _which(chunk) == self._which else b""
        state = bytes(known) + chunk.data
        return state if crc32(state) == chunk.crc else None

    def take(self, chunk: Chunk) -> int:
        """Keep a chunk that follows the last. Returns the number of bytes kept; 0 after a damaged state."""
        follows = self._follows(chunk)
        if _which(chunk) != self._which:
            self._which = _which(chunk)
            self._state.clear()
        if follows:
            self._state += chunk.data
        if len(self._state) >= chunk.size:
            self.forget()
        return len(self._state)

    def _follows(self, chunk: Chunk) -> bool:
        return chunk.offset == (len(self._state) if _which(chunk) == self._which else 0)

    def forget(self) -> None:
        """Discard the chunks kept so far."""
        self._which = None
        self._state = bytearray()


def _which(chunk: Chunk) -> tuple[int, int, int, int]:
    return (chunk.index, chunk.index_term, chunk.size, chunk.crc)
