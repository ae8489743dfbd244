"""Pure: checks that a healed core answers its clients in time and keeps its leader (I15)."""

from collections.abc import Callable, Iterable

from adam_async.simulation.scenario import Violation


class Progress:
    """Open questions of clients, and the time limit of their answers.

    Args:
        clock: Time of the simulation, in seconds.
        within_s: Time limit of an answer after the core is healed, in seconds.

    Attributes:
        answered: Number of answers to clients of the core since its repair.
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
        """Record a request of a client, in place of an open one of its earlier incarnation."""
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
