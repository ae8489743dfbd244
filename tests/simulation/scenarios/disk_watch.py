"""Observed disks of simulated servers, over all losses of power."""

from adam_async.parameter_server.pins import PINNED
from adam_async.parameter_server.server_disk import ServerDisk
from adam_async.persistence.records import State
from tests.simulation.checkers.saved_pins import LoggedStates
from tests.simulation.checkers.saved_pushes import SavedStates
from tests.simulation.scenario import Ledger, Violation

QUARANTINE = "damaged files set aside"
TORN = "torn tails cut off"
REPLAYED = "disks with entries to apply again"
READ_BACK = "states read back"


class DiskWatch:
    """The disks of all servers of a run.

    Attributes:
        states: States that servers gave to their disks, and states that came back.
        logged: The bundles with a log, computed from their logs.
        failing: Servers whose disk fails, so that they may end.
        rotten: Servers whose disk has lost bytes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.states = SavedStates()
        self.logged = LoggedStates()
        self.failing: set[str] = set()
        self.rotten: set[str] = set()
        self._counts = ledger.counts

    def saved(self, state: State, store: str) -> None:
        """Note a state that a server gives to its disk. Raises Violation."""
        self.states.taken(state, store)
        if store.startswith(PINNED):
            self.logged.saved(state, store)

    async def opened(self, name: str, disk: ServerDisk) -> None:
        """Check the states on a disk that was opened. Raises Violation."""
        for store in disk:
            recovery = store.recovery
            self._counts[TORN] += len(recovery.torn)
            self._counts[QUARANTINE] += len(recovery.damages)
            self._counts[REPLAYED] += any(recovery.entries.values())
            if recovery.damages and name not in self.failing:
                raise Violation("no false damage", f"on the disk of {name}, {recovery.damage_text()}")
            states = [await store._segments.read_state(key) for key in recovery.states]
            self.states.opened(name, store.id, states)
        self._counts[READ_BACK] = self.states.compared
