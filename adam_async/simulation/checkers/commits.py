"""Pure: whether all controllers apply the same, over all lives, and who leads has all of it (I7)."""

from collections.abc import Sequence
from zlib import crc32

from adam_async.controller.consensus import Apply, Core, Effect, Entry, Event, Restore, Role
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.simulation.scenario import Violation


class Commits:
    """Told of every event of every core, with the machine that it is applied to.

    Attributes:
        last: Index of the last entry that was applied anywhere.
    """

    def __init__(self) -> None:
        self.last = 0
        self._entries: dict[int, Entry] = {}
        """By index, what was applied there, by whoever was first."""
        self._terms: dict[int, int] = {}
        """By index, a term in which it was committed."""
        self._states: dict[int, int] = {}
        """By index, a digest of the state after it."""
        self._applied: dict[int, int] = {}
        """By core (each life has one of its own, which is kept), the last index that was applied."""
        self._cores: dict[int, Core] = {}
        self._leaders: set[int] = set()
        """Terms whose leader was looked at."""

    def saw(
        self, core: Core, machine: ReplicatedState, event: Event | None, effects: Sequence[Effect]
    ) -> None:
        """A core took an event (None: it begins), and what came of it was done.

        Raises:
            Violation: Of I7.
        """
        if event is None:
            self._cores[id(core)] = core
            self._applied[id(core)] = core.log.snapshot.index
            self._same_state(core, machine)
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
            self._same_state(core, machine)
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

    def _same_state(self, core: Core, machine: ReplicatedState) -> None:
        index, digest = self._applied[id(core)], crc32(machine.snapshot())
        if index and self._states.setdefault(index, digest) != digest:
            raise Violation("I7", f"the state of {core.me} after entry {index} is not that of others")

    def has_all(self, core: Core) -> None:
        """See that a new leader has all that was committed in earlier terms. Raises Violation."""
        for index in range(core.log.snapshot.index + 1, self.last + 1):
            entry = self._entries.get(index)
            if entry is None or self._terms[index] >= core.term:
                continue  # one who was elected late may lack what a later leader committed
            if core.log.term_at(index) != entry.term:
                text = f"{core.me} leads in term {core.term} without the committed entry {index}"
                raise Violation("I7", text)
