"""Pure: checks that disks return only states that servers gave to them, and none older than before.

states = SavedStates()
states.taken(state, "store-1")               # each state that goes to a disk
states.opened("ps-1", "store-1", found)      # the states on a disk, whenever a server opens it
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from adam_async.persistence.keys import Part, State, StateKey, StateName
from adam_async.simulation.scenario import Violation


class SavedStates:
    """The states of all stores and disks of a run.

    Attributes:
        compared: Number of states that came back and were compared.
    """

    def __init__(self) -> None:
        self.compared = 0
        self._taken: dict[tuple[str, StateKey], set[bytes]] = {}
        """Digests of the states by store and key. A key may have several: counts that are not in the log may
        differ between servers."""
        self._orders: dict[tuple[str, str, StateName], tuple[int, int]] = {}
        """Generation and position of each state at the last opening, by server and store."""

    def taken(self, state: State, store: str) -> None:
        """Note a state of a store that goes to a disk."""
        self._taken.setdefault((store, state.key), set()).add(_digest(state.parts))

    def opened(self, server: str, store: str, found: Iterable[tuple[StateKey, Sequence[Part]]]) -> None:
        """Check the states of a store on a disk that a server opens.

        Raises:
            Violation: No server had one of the states, or a state is older than at the last opening.
        """
        for key, parts in found:
            self.compared += 1
            text = f"the state {key} of {store} on the disk of {server}"
            if _digest(parts) not in self._taken.get((store, key), ()):
                raise Violation("recovered state", f"{text} is none that a server had")
            at = (server, store, key.name)
            before = self._orders.get(at, (0, 0))
            if key.order < before:
                raise Violation("older state", f"{text} is older than {before}, which was there before")
            self._orders[at] = key.order

    def forget(self, server: str) -> None:
        """Forget the states on a disk that has lost bytes."""
        for at in [at for at in self._orders if at[0] == server]:
            del self._orders[at]


def _digest(parts: Iterable[Part]) -> bytes:
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
