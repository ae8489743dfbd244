"""The cuts on the disks of servers that lose their power: a complete cut stays, and a disk has few cuts."""

from adam_async.parameter_server.server_disk import ServerDisk
from tests.simulation.scenario import Violation

MOST_CUTS = 3
"""Maximum number of a bundle's cuts on a disk: two, and the last values of a run that has ended."""


class KeptCuts:
    """The clocks of each store's cuts.

    Attributes:
        read: Number of bundle cuts on opened disks.
    """

    def __init__(self) -> None:
        self._complete: dict[str, int] = {}
        """Newest clock that the map has shown as complete, by store."""
        self._opened: dict[str, set[int]] = {}
        """By store, clocks that all disks had which were opened since the last loss of power."""
        self.read = 0

    def complete(self, store: str, clock: int) -> None:
        """Note that the map shows a clock as complete. Raises Violation: an earlier map had a later clock."""
        if clock < self._complete.get(store, clock):
            text = f"{store} is complete at clock {clock}, after clock {self._complete[store]}"
            raise Violation("a cut stays", text)
        self._complete[store] = clock

    def lost(self) -> None:
        """Note that all servers lose their power: their disks are opened next."""
        self._opened.clear()

    def opened(self, name: str, disk: ServerDisk) -> None:
        """Check the cuts on a disk that was opened. Raises Violation."""
        for store in disk:
            clocks: dict[str, list[int]] = {}
            for cut in store.cuts.saved() if store.cuts is not None else ():
                clocks.setdefault(cut.home, []).append(cut.clock)
                self.read += 1
            if any(len(several) > MOST_CUTS for several in clocks.values()):
                raise Violation("few cuts", f"{name} has {clocks} of {store.id}")
            least = self._complete.get(store.id)
            if least is None:
                continue
            common = self._opened.setdefault(store.id, {*clocks.get(name, ())})
            common &= {*clocks.get(name, ())}
            if max(common, default=-1) < least:
                text = f"{store.id} was complete at clock {least}, and the disks up to {name} have {common}"
                raise Violation("a cut stays", text)
