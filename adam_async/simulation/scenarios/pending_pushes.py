"""The pushes of clients that wait for their answers, and the time limit of these answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adam_async.simulation.nodes import World
from adam_async.simulation.scenario import settle
from adam_async.simulation.scenarios.bundle_watch import BundleWatch

HEALED_S = 10.0
"""Time limit of all pending pushes after the end of the faults, in seconds."""


class PendingPushes:
    """Pending pushes of all clients, over all incarnations of their machines."""

    def __init__(self, world: World, bundles: BundleWatch) -> None:
        self._world = world
        self._bundles = bundles
        self._clients: dict[int, str] = {}
        """Client of each pending push, by the number of the push."""
        self._pushes = 0

    @contextmanager
    def noted(self, client: str) -> Iterator[None]:
        """Note a push as pending until the end of the block, and then as answered."""
        self._pushes += 1
        number = self._pushes
        self._clients[number] = client
        self._bundles.pending = len(self._clients)
        yield
        self._clients.pop(number, None)
        self._bundles.pending = len(self._clients)
        self._bundles.acknowledged += 1

    def forget(self, client: str) -> None:
        """Forget the pushes of a client's incarnation that was killed, or of a store that failed."""
        for number in [number for number, name in self._clients.items() if name == client]:
            del self._clients[number]
        self._bundles.pending = len(self._clients)

    async def answered(self, excused: Callable[[str], bool] = lambda client: False) -> None:
        """Wait for the answers to all pushes that are pending now.

        Args:
            excused: Whether a client waits for other events than answers of servers.

        Raises:
            Violation: A push is pending for `HEALED_S`.
        """
        pending = set(self._clients)

        def left() -> str:
            clients = {self._clients[number] for number in pending & self._clients.keys()}
            late = sorted(client for client in clients if not excused(client))
            return f"pushes of {', '.join(late)} are pending; {self._bundles.lacking()}" if late else ""

        await settle(self._world, left, within_s=HEALED_S, invariant="pending pushes end")
