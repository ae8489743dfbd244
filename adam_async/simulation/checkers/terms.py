"""Pure: whether the terms of a group of controllers are kept, over all lives of its nodes (I7, I4).

What a node said to another one it has promised: its term, its vote, the entries that it acknowledged. A node
that comes back with the same disk must know all of it. A disk has an identity, and so an empty one is
another node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from adam_async.controller.consensus import Core, Effect, Event, Message, Received, Role, Send
from adam_async.controller.consensus.messages import Appended, AskVote, Vote
from adam_async.simulation.scenario import Violation


@dataclass(slots=True)
class _Disk:
    """What is known of one identity."""

    core: Core
    term: int
    commit: int
    end: tuple[int, int]
    """Index and term of its last entry."""
    said: int = 0
    """The latest term in which it said anything."""
    voted: tuple[int, str] = (0, "")
    """The last term in which it said whom it votes for, and whom."""
    acknowledged: tuple[int, int] | None = None
    """The last entry that it said it has; None after a newer leader put others in its place."""


class Terms:
    """Told of every event of every core.

    Attributes:
        leaders: Who led in each term.
    """

    def __init__(self) -> None:
        self.leaders: dict[int, str] = {}
        self._disks: dict[str, _Disk] = {}

    def saw(self, core: Core, event: Event | None, effects: Sequence[Effect]) -> None:
        """A core took an event.

        Args:
            core: As it is now.
            event: None when it begins.
            effects: What came of the event.

        Raises:
            Violation: Of I7 or I4.
        """
        end = core.log.last_index, core.log.last_term
        disk = self._disks.get(core.me)
        if disk is None:
            disk = self._disks[core.me] = _Disk(core, core.term, core.commit, end)
        elif disk.core is not core:
            _came_back(disk, core)
            disk.core = core
        else:
            _went_on(disk, core, event, end)
        for effect in effects:
            if type(effect) is Send:
                _promised(disk, core, effect.message)
        disk.term, disk.commit, disk.end = core.term, core.commit, end
        if core.role is Role.LEADER:
            self.led(core.term, core.me)

    def led(self, term: int, node: str) -> None:
        """A node leads in a term. Raises Violation if another one did."""
        other = self.leaders.setdefault(term, node)
        if other != node:
            raise Violation("I7", f"{node} and {other} both lead in term {term}")


def _came_back(disk: _Disk, core: Core) -> None:
    """A node begins with the disk of an earlier life."""
    if core.term < disk.said:
        raise Violation("I7", f"{core.me} is back in term {core.term}, and has spoken in {disk.said}")
    term, candidate = disk.voted
    if candidate and core.term == term and core.vote != candidate:
        raise Violation("I7", f"{core.me} voted for {candidate} in term {term}, and knows of {core.vote}")
    if disk.acknowledged is not None and not _has(core, disk.acknowledged):
        index, term = disk.acknowledged
        raise Violation("I7", f"{core.me} acknowledged entry {index} of term {term}, and is back without it")


def _went_on(disk: _Disk, core: Core, event: Event | None, end: tuple[int, int]) -> None:
    """The same life goes on."""
    if core.term < disk.term:
        raise Violation("I7", f"{core.me} went back from term {disk.term} to {core.term}")
    if core.commit < disk.commit:
        raise Violation("I7", f"what is committed at {core.me} went back from {disk.commit} to {core.commit}")
    if end != disk.end:
        if type(event) is Received and event.message.term < disk.term:
            raise Violation("I4", f"{core.me} in term {disk.term} took entries of {event.message}")
        if disk.acknowledged is not None and not _has(core, disk.acknowledged):
            if core.term <= disk.acknowledged[1]:
                raise Violation("I7", f"{core.me} dropped entry {disk.acknowledged} for nobody newer")
            disk.acknowledged = None


def _has(core: Core, entry: tuple[int, int]) -> bool:
    index, term = entry
    return index < core.log.snapshot.index or core.log.term_at(index) == term


def _promised(disk: _Disk, core: Core, message: Message) -> None:
    """A node said something."""
    disk.said = max(disk.said, message.term)
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
