"""Pure: a leader's view of the nodes' logs, and its waiting requests."""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from zlib import crc32

from adam_async.controller.consensus.log import Log
from adam_async.controller.consensus.membership import Members, Settings
from adam_async.controller.consensus.messages import Append, Appended, Chunk, Snapshot, Taken


@dataclass(slots=True)
class Progress:
    """Known state of one node's log, and the next entries to send to the node."""

    next: int
    """Index of the next entry to send."""
    heard: float
    """Time of the node's last answer in this term, in seconds; at first, the time when tracking began."""
    match: int = 0
    """Index up to which the node has all entries on disk."""
    round: int = 0
    """Latest round that the node answered."""
    sure: bool = False
    """Whether the node's log surely equals the leader's up to `match`: then the leader awaits no answers."""
    snapshot: Snapshot | None = None
    """Snapshot in transfer to the node, because the leader's log no longer has the entries that the node
    lacks; None if there is none."""
    crc: int = 0
    offset: int = 0
    """Number of snapshot bytes that the node has received."""

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """Begin the transfer of a snapshot, which the node needs before any entries."""
        self.snapshot, self.crc, self.offset, self.sure = snapshot, crc32(snapshot.state), 0, False

    def refused(self, answer: Appended) -> bool:
        """Continue the search for the common prefix; return whether the refusal is current."""
        # During the search only the answer to the last probe counts: others are late.
        if self.snapshot is not None or not (self.sure or answer.prev_index == self.next - 1):
            return False
        # A refusal at or before `match` is late: the node has acknowledged those entries since.
        if answer.prev_index <= self.match:
            return False
        self.sure = False
        self.next = max(self.match, min(answer.prev_index - 1, answer.match)) + 1
        return True

    def matched(self, index: int) -> None:
        """Note that the node has all entries up to `index`."""
        self.match = max(self.match, index)
        if self.snapshot is None or self.match >= self.snapshot.index:
            self.snapshot, self.sure = None, True
            self.next = max(self.next, self.match + 1)


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A read whose answer waits for a confirmed round and an applied index."""

    tag: Hashable
    index: int
    round: int


@dataclass(frozen=True, slots=True)
class Handover:
    """A transfer of leadership under way."""

    tag: Hashable
    to: str
    deadline: float


class Leading:
    """A leader's state in one term.

    A *round* begins with a message to each node. Once a majority has answered a round or a later one, no
    leader of a later term existed when this round began.

    Args:
        first: Index of the term's first entry.
    """

    def __init__(self, me: str, term: int, settings: Settings, *, first: int) -> None:
        self._me = me
        self._term = term
        self._settings = settings
        self.first = first
        self.progress: dict[str, Progress] = {}
        self.waiting: dict[int, Hashable] = {}
        """Tags of uncommitted proposals by index."""
        self.reads: deque[WaitingRead] = deque()
        self.round = 0
        self.handover: Handover | None = None

    def regroup(self, members: Members, *, last_index: int, now: float) -> None:
        """Track the nodes of a changed membership."""
        self.progress = {
            node: self.progress.get(node) or Progress(last_index + 1, now) for node in members.all
        }

    def matched(self, members: Members) -> int:
        """Return the index up to which a majority has all entries."""
        return int(members.decided({node: known.match for node, known in self.progress.items()}))

    def confirmed(self, members: Members) -> int:
        """Return the latest round that a majority has answered."""
        return int(members.decided({node: known.round for node, known in self.progress.items()}))

    def heard(self, members: Members) -> float:
        """Return the latest time since which a majority of the voters has answered."""
        return members.decided({node: known.heard for node, known in self.progress.items()})

    def feed(self, node: str, log: Log, commit: int, *, force: bool) -> Iterator[Append | Chunk]:
        """Yield the messages with entries or a chunk that a node may get now; at least one if `force`."""
        known, settings = self.progress[node], self._settings
        if known.snapshot is None and log.term_at(known.next - 1) is None:
            known.begin_snapshot(log.snapshot)
            force = True
        if known.snapshot is not None:
            # One chunk per answer, or per heartbeat if an answer was lost.
            if force:
                yield self._chunk(node, known, known.snapshot)
            return
        while True:
            # Until the common prefix is known, each message is a probe, and the next one waits for its
            # answer.
            may_send = known.next - known.match <= settings.window if known.sure else force
            entries = log.load(known.next, settings.message_bytes) if may_send else ()
            if not entries and not force:
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
            force = False

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

    def note_answer(self, answer: Appended | Taken, *, now: float) -> Progress | None:
        """Record an answer's time and round; return its sender's progress, if the sender is a member."""
        known = self.progress.get(answer.sender)
        if known is not None:
            known.heard = now
            known.round = max(known.round, answer.round)
        return known

    def take_ready_reads(self, members: Members, commit: int) -> list[Hashable]:
        """Remove the reads whose round is confirmed and whose index is committed; return their tags."""
        confirmed, ready = self.confirmed(members), list[Hashable]()
        while self.reads and self.reads[0].round <= confirmed and self.reads[0].index <= commit:
            ready.append(self.reads.popleft().tag)
        return ready

    def begin_round(self, members: Members) -> bool:
        """Begin a round if reads wait for one and none is under way; return whether a round began."""
        if not self.reads or self.confirmed(members) < self.round or self.reads[-1].round <= self.round:
            return False
        self.round += 1
        if self._me in self.progress:
            self.progress[self._me].round = self.round
        return True

    def lag(self, node: str, log: Log) -> int:
        """Return the number of entries that a member lacks; 0 for a node that is not a member."""
        known = self.progress.get(node)
        return log.last_index - known.match if known is not None else 0

    def check_invariants(self, log: Log, members: Members, term: int, commit: int) -> None:
        """Assert the invariants between two events."""
        assert self.first <= log.last_index
        assert log.term_at(self.first) in (term, None)
        assert self.progress.keys() == {*members.voters, *members.learners}
        assert max([known.match for known in self.progress.values()]) <= log.last_index
        assert not self.waiting or commit < min(self.waiting)
        assert not self.waiting or max(self.waiting) <= log.last_index
        if commit < log.last_index:
            changes = [entry for entry in log.run(commit + 1, log.last_index) if entry.members is not None]
            assert len(changes) <= 1 or commit < self.first
