"""Pure: checks that all controllers apply the same entries, and that a new leader has all of them (I7).

Controllers keep their promises over all incarnations (I7, I4). Each message promises its term; some messages
also promise a vote or acknowledged entries. A node that restarts with the same disk must still have the state
that it has promised. A disk has an identity, so a node with an empty disk counts as another node.

A healed core answers its clients in time and keeps its leader (I15).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

from adam_async.controller.consensus import (
    Apply,
    Core,
    Effect,
    Entry,
    Event,
    Message,
    Received,
    Restore,
    Role,
    Send,
)
from adam_async.controller.consensus.messages import Appended, AskVote, Vote
from adam_async.controller.replicated_state import ReplicatedState
from tests.simulation.scenario import Violation


class Commits:
    """Checks every event of every core, with its replicated state.

    Attributes:
        last: Index of the last entry that any core applied.
    """

    def __init__(self) -> None:
        self.last = 0
        self._entries: dict[int, Entry] = {}
        """First entry that any core applied, by index."""
        self._terms: dict[int, int] = {}
        """Term of the first core that applied the entry, by index."""
        self._states: dict[int, int] = {}
        """Digest of the state after the entry, by index."""
        self._applied: dict[int, int] = {}
        """Last applied index, by `id` of a core. `_cores` keeps the core of each incarnation, so no `id` is
        used again."""
        self._cores: dict[int, Core] = {}
        self._leaders: set[int] = set()
        """Terms whose leader was checked."""

    def saw(
        self, core: Core, replicated_state: ReplicatedState, event: Event | None, effects: Sequence[Effect]
    ) -> None:
        """Check a core after an event (None: its start) and its effects.

        Raises:
            Violation: The core breaks I7.
        """
        if event is None:
            self._cores[id(core)] = core
            self._applied[id(core)] = core.log.snapshot.index
            self._same_state(core, replicated_state)
        news = False
        for effect in effects:
            if type(effect) is Apply:
                news = True
                for entry in effect.entries:
                    self._apply(core, entry)
            elif type(effect) is Restore:
                news = True
                self._applied[id(core)] = effect.snapshot.index
        if news:
            self._same_state(core, replicated_state)
        if core.role is Role.LEADER and core.term not in self._leaders:
            self._leaders.add(core.term)
            self.has_all(core)

    def _apply(self, core: Core, entry: Entry) -> None:
        before = self._applied[id(core)]
        if entry.index != before + 1:
            raise Violation("I7", f"{core.me} applied entry {entry.index} after {before}")
        self._applied[id(core)] = entry.index
        known = self._entries.setdefault(entry.index, entry)
        self._terms.setdefault(entry.index, core.term)
        if known is not entry and known != entry:
            raise Violation("I7", f"{core.me} applied {entry}, where {known} was committed")
        self.last = max(self.last, entry.index)

    def _same_state(self, core: Core, replicated_state: ReplicatedState) -> None:
        index, digest = self._applied[id(core)], crc32(replicated_state.snapshot())
        if index and self._states.setdefault(index, digest) != digest:
            raise Violation("I7", f"the state of {core.me} after entry {index} is not that of others")

    def has_all(self, core: Core) -> None:
        """Check that a new leader has all entries committed in earlier terms. Raises Violation."""
        for index in range(core.log.snapshot.index + 1, self.last + 1):
            entry = self._entries.get(index)
            if entry is None or self._terms[index] >= core.term:
                continue  # a leader elected late may lack the entries that a later leader committed
            if core.log.term_at(index) != entry.term:
                text = f"{core.me} leads in term {core.term} without the committed entry {index}"
                raise Violation("I7", text)


@dataclass(slots=True)
class _Disk:
    """One identity's promises and state."""

    core: Core
    term: int
    commit: int
    end: tuple[int, int]
    """Index and term of the identity's last entry."""
    sent: int = 0
    """Latest term of the identity's messages."""
    voted: tuple[int, str] = (0, "")
    """Term and candidate of the identity's last vote."""
    acknowledged: tuple[int, int] | None = None
    """Last acknowledged entry; None after a newer leader replaced it."""


class Terms:
    """Checks every event of every core."""

    def __init__(self) -> None:
        self.leaders: dict[int, str] = {}
        self._disks: dict[str, _Disk] = {}

    def saw(self, core: Core, event: Event | None, effects: Sequence[Effect]) -> None:
        """Check a core after an event.

        Args:
            event: The event; None at the core's start.

        Raises:
            Violation: The core breaks I7 or I4.
        """
        end = core.log.last_index, core.log.last_term
        disk = self._disks.get(core.me)
        if disk is None:
            disk = self._disks[core.me] = _Disk(core, core.term, core.commit, end)
        elif disk.core is not core:
            _check_restart(disk, core)
            disk.core = core
        else:
            _check_progress(disk, core, event, end)
        for effect in effects:
            if type(effect) is Send:
                _record_promise(disk, core, effect.message)
        disk.term, disk.commit, disk.end = core.term, core.commit, end
        if core.role is Role.LEADER:
            self.led(core.term, core.me)

    def led(self, term: int, node: str) -> None:
        """Record the leader of a term. Raises Violation if another node led in the term."""
        other = self.leaders.setdefault(term, node)
        if other != node:
            raise Violation("I7", f"{node} and {other} both lead in term {term}")


def _check_restart(disk: _Disk, core: Core) -> None:
    """Check a node that starts with the disk of an earlier incarnation."""
    if core.term < disk.sent:
        raise Violation("I7", f"{core.me} restarts in term {core.term} after messages of term {disk.sent}")
    term, candidate = disk.voted
    if candidate and core.term == term and core.vote != candidate:
        raise Violation(
            "I7", f"{core.me} voted for {candidate} in term {term}, and restarts with {core.vote}"
        )
    if disk.acknowledged is not None and not _has(core, disk.acknowledged):
        index, term = disk.acknowledged
        raise Violation("I7", f"{core.me} acknowledged entry {index} of term {term}, and restarts without it")


def _check_progress(disk: _Disk, core: Core, event: Event | None, end: tuple[int, int]) -> None:
    """Check a running core."""
    if core.term < disk.term:
        raise Violation("I7", f"{core.me} went back from term {disk.term} to {core.term}")
    if core.commit < disk.commit:
        raise Violation("I7", f"the commit index of {core.me} went back from {disk.commit} to {core.commit}")
    if end != disk.end:
        if type(event) is Received and event.message.term < disk.term:
            raise Violation("I4", f"{core.me} in term {disk.term} took entries of {event.message}")
        if disk.acknowledged is not None and not _has(core, disk.acknowledged):
            if core.term <= disk.acknowledged[1]:
                raise Violation("I7", f"{core.me} dropped entry {disk.acknowledged} without a newer leader")
            disk.acknowledged = None


def _has(core: Core, entry: tuple[int, int]) -> bool:
    index, term = entry
    return index < core.log.snapshot.index or core.log.term_at(index) == term


def _record_promise(disk: _Disk, core: Core, message: Message) -> None:
    """Record the promise of a message. Raises Violation if the vote contradicts an earlier one."""
    disk.sent = max(disk.sent, message.term)
    candidate = ""
    if type(message) is Vote and message.granted and not message.pre:
        candidate = message.to
    elif type(message) is AskVote and not message.pre:
        candidate = core.me
    elif type(message) is Appended and message.ok and message.term == core.term:
        entry_term = core.log.term_at(message.match)
        if entry_term is not None and (disk.acknowledged is None or message.match >= disk.acknowledged[0]):
            disk.acknowledged = message.match, entry_term
    if candidate:
        term, other = disk.voted
        if term == message.term and other != candidate:
            raise Violation("I7", f"{core.me} voted for {other} and {candidate} in term {term}")
        if term <= message.term:
            disk.voted = message.term, candidate


class Progress:
    """Open questions of clients, and the time limit for their answers.

    Args:
        clock: Time of the simulation, in seconds.
        within_s: Time limit of an answer after the core is healed, in seconds.

    Attributes:
        answered: Number of answers to the core's clients since it was repaired.
        healed: Time of the core's repair, in seconds.
    """

    def __init__(self, clock: Callable[[], float], within_s: float) -> None:
        self.answered = 0
        self._clock = clock
        self._within_s = within_s
        self._core: frozenset[str] = frozenset()
        self.healed = 0.0
        self._asked: dict[str, float] = {}
        self._leader: object = None

    def heal(self, clients: Iterable[str]) -> None:
        """Start the time limit of answers to these clients, which can reach the core from now on."""
        self._core, self.healed, self.answered = frozenset(clients), self._clock(), 0

    def begin(self, client: str) -> None:
        """Record a client's request, which replaces an open one of its earlier incarnation."""
        self._asked[client] = self._clock()

    def end(self, client: str, *, answered: bool) -> None:
        """Record the answer to a client, or that the client stopped waiting. Raises Violation."""
        self.check()
        del self._asked[client]
        if client in self._core:
            self.answered += answered

    def check(self) -> None:
        """Check that no client of the core has waited too long. Raises Violation."""
        now = self._clock()
        for client, since in self._asked.items():
            waited = now - max(since, self.healed)
            if client in self._core and waited > self._within_s:
                raise Violation("I15", f"{client} has waited for {waited:.3f} s with a healed core")

    def leads(self, leader: object) -> None:
        """Check that the leader is the leader of the first call. Raises Violation."""
        if self._leader is None:
            self._leader = leader
        if leader != self._leader:
            raise Violation("I15", f"the leader of a healed core changed from {self._leader} to {leader}")
