"""Pure: what a leader knows of the others, and who waits for it."""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from zlib import crc32

from adam_async.controller.consensus.log import Log
from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Append, Chunk, Snapshot
from adam_async.controller.consensus.settings import Settings


@dataclass(slots=True)
class Progress:
    """What one node is known to have, and what it is sent next."""

    next: int
    """The first entry that it has not been sent."""
    heard: float
    """When it last answered in this term."""
    match: int = 0
    """It has all entries up to here, durably."""
    round: int = 0
    """The latest round that it answered."""
    sure: bool = False
    """Whether its log is known to be the same up to `match`, so that entries may be sent ahead of answers."""
    snapshot: Snapshot | None = None
    """What it is being sent because the entries that it lacks are gone."""
    crc: int = 0
    offset: int = 0
    """It has the snapshot up to here."""

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """Send this before any entries."""
        self.snapshot, self.crc, self.offset, self.sure = snapshot, crc32(snapshot.state), 0, False

    def matched(self, index: int) -> None:
        """It has all entries up to here."""
        self.match = max(self.match, index)
        if self.snapshot is None or self.match >= self.snapshot.index:
            self.snapshot, self.sure = None, True
            self.next = max(self.next, self.match + 1)


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A read that may be answered when its round is confirmed and this index applied."""

    tag: Hashable
    index: int
    round: int


@dataclass(frozen=True, slots=True)
class Handover:
    """Leadership is on its way to another."""

    tag: Hashable
    to: str
    deadline: float


class Leading:
    """One term of leading.

    A *round* begins with a word to everybody. Once a majority has answered it, or a later one, nobody else
    had become leader when it began.

    Args:
        me: Who leads.
        term: In which it does.
        settings: Sizes of what is sent.
        first: Index of the first entry of this term.
    """

    def __init__(self, me: str, term: int, settings: Settings, *, first: int) -> None:
        self._me = me
        self._term = term
        self._settings = settings
        self.first = first
        self.progress: dict[str, Progress] = {}
        self.waiting: dict[int, Hashable] = {}
        """By index, who proposed what is not committed."""
        self.reads: deque[WaitingRead] = deque()
        self.round = 0
        self.handover: Handover | None = None

    def regroup(self, members: Members, *, last_index: int, now: float) -> None:
        """The membership has changed."""
        self.progress = {
            node: self.progress.get(node) or Progress(last_index + 1, now) for node in members.all
        }

    def matched(self, members: Members) -> int:
        """A majority has all entries up to here."""
        return int(members.decided({node: known.match for node, known in self.progress.items()}))

    def confirmed(self, members: Members) -> int:
        """A majority has answered this round."""
        return int(members.decided({node: known.round for node, known in self.progress.items()}))

    def heard(self, members: Members) -> float:
        """A majority has answered since then."""
        return members.decided({node: known.heard for node, known in self.progress.items()})

    def feed(self, node: str, log: Log, commit: int, *, speak: bool) -> Iterator[Append | Chunk]:
        """Say what a node lacks and may be sent now; with `speak`, at least something."""
        known, settings = self.progress[node], self._settings
        if known.snapshot is None and log.term_at(known.next - 1) is None:
            known.begin_snapshot(log.snapshot)
            speak = True
        if known.snapshot is not None:
            if speak:
                yield self._chunk(node, known, known.snapshot)
            return
        while True:
            may_send = known.next - known.match <= settings.window if known.sure else speak
            entries = log.load(known.next, settings.message_bytes) if may_send else ()
            if not entries and not speak:
                return
            yield Append(
                sender=self._me,
                to=node,
                term=self._term,
                prev_index=known.next - 1,
                prev_term=log.term_at(known.next - 1) or 0,
                entries=entries,
                commit=commit,
                round=self.round,
            )
            if not known.sure:
                return
            known.next += len(entries)
            speak = False

    def _chunk(self, node: str, known: Progress, snapshot: Snapshot) -> Chunk:
        return Chunk(
            sender=self._me,
            to=node,
            term=self._term,
            index=snapshot.index,
            index_term=snapshot.term,
            members=snapshot.members,
            size=len(snapshot.state),
            crc=known.crc,
            offset=known.offset,
            data=snapshot.state[known.offset : known.offset + self._settings.chunk_bytes],
            round=self.round,
        )
