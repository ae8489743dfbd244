"""Pure: checks that all controllers apply the same entries, and that a new leader has all of them (I7)."""

from collections.abc import Sequence
from zlib import crc32

from adam_async.controller.consensus import Apply, Core, Effect, Entry, Event, Restore, Role
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.simulation.scenario import Violation


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
