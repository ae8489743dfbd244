"""Pure: checks that controllers keep their promises over all incarnations (I7, I4).

Each message promises its term; some messages also promise a vote or acknowledged entries. A node that
restarts with the same disk must still have the state of all its promises. A disk has an identity, so a node
with an empty disk counts as another node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from adam_async.controller.consensus import Core, Effect, Event, Message, Received, Role, Send
from adam_async.controller.consensus.messages import Appended, AskVote, Vote
from adam_async.simulation.scenario import Violation


@dataclass(slots=True)
class _Disk:
    """Promises and state of one identity."""

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
