"""Pure: whether a core that is healed gets on with its work, and stays calm (I15)."""

from collections.abc import Callable, Iterable

from adam_async.simulation.scenario import Violation


class Progress:
    """What those who have a right to an answer wait for.

    Args:
        clock: Seconds of the simulation.
        within_s: How long an answer may take, once all that it needs is well.

    Attributes:
        answered: Questions of those in the core that were answered since it is well.
        healed: Since when it is.
    """

    def __init__(self, clock: Callable[[], float], within_s: float) -> None:
        self.answered = 0
        self._clock = clock
        self._within_s = within_s
        self._core: frozenset[str] = frozenset()
        self.healed = 0.0
        self._owed: dict[str, float] = {}
        self._leader: object = None

    def heal(self, askers: Iterable[str]) -> None:
        """From now on all is well that these need: what they are owed has to come within the time."""
        self._core, self.healed, self.answered = frozenset(askers), self._clock(), 0

    def owe(self, asker: str) -> None:
        """Somebody asks; what an earlier life of it asked is nobody's any more."""
        self._owed[asker] = self._clock()

    def pay(self, asker: str, *, answered: bool) -> None:
        """An answer came, or the asker has given up."""
        self.check()
        del self._owed[asker]
        if asker in self._core:
            self.answered += answered

    def check(self) -> None:
        """See that nobody in the core has waited too long. Raises Violation."""
        now = self._clock()
        for asker, since in self._owed.items():
            waited = now - max(since, self.healed)
            if asker in self._core and waited > self._within_s:
                raise Violation("I15", f"{asker} has waited for {waited:.3f} s with a core that is well")

    def leads(self, leader: object) -> None:
        """See that the leader is the one that it was at the first call. Raises Violation."""
        if self._leader is None:
            self._leader = leader
        if leader != self._leader:
            raise Violation("I15", f"a core that is well went from {self._leader} to {leader}")
