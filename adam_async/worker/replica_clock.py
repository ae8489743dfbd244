"""Pure: the arithmetic of a replica's clock: which step a group is in, and what that step may read.

Theory of operation
-------------------
Step c of a replica has c steps behind it; its push carries clock c + 1. Groups join steps as they are
admitted, in the order of their leases, `push_every` to a step, so that the same groups make the same step in
every run. Where replicas *meet*, which the data server tells, the step that is being filled ends short, and
the clock goes on to where all meet without any pushes in between: it *jumps*.

Under ``ssp:S`` the values that step c reads contain all pushes of live replicas up to clock c - S. A replica
that keeps to that is never more than S steps ahead of the slowest one when it begins a step, and S + 1 when
its push is counted.

Under ``bsp`` step c reads the values of clock c - lag and no later ones, for sums of different clocks are
different numbers. Where replicas met the pipeline is empty: the first step there, `base`, reads the values
of clock `base` itself, and so does the next one if sums lag behind; a run that is resumed where they met
goes on as if it had never ended. So that nobody misses the values of a clock, a push of clock p leaves only
when those of clock p - 1 are here: until then no server can have gone beyond them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group belongs."""

    step: int
    """Steps that lie behind it."""
    index: int
    """Its position among the groups of the step."""


class ReplicaClock:
    """Gives groups their places, and says what their step may read.

    Args:
        start: Steps that the replica has behind it.
        push_every: Groups of a full step.
        slack: Steps by which the replica may lead the slowest one; with `synchronous`, by which sums may lag.
        synchronous: Whether a step reads the values of exactly one clock.
    """

    def __init__(self, *, start: int, push_every: int, slack: int, synchronous: bool) -> None:
        self._push_every = push_every
        self._slack = slack
        self._synchronous = synchronous
        self.step = start
        """The step that the next group joins."""
        self.groups = 0
        """Groups that it has."""
        self.base = start
        """Where replicas met last."""

    def meet(self, clock: int) -> bool:
        """All replicas meet at this clock. Returns whether a step was being filled, which ends short."""
        short = self.groups > 0
        if short:
            self.step += 1
            self.groups = 0
        self.step = max(self.step, clock)
        self.base = max(self.base, clock)
        return short

    @property
    def needs(self) -> int:
        """Clock of the values that the next step reads: with `synchronous` exactly, else at least."""
        needed = self.step - self._slack
        return max(needed, self.base) if self._synchronous else needed

    def leaves(self, step: int, landed: int) -> bool:
        """Whether a step that is complete may be pushed, when values of clock `landed` are here."""
        return landed >= step if self._synchronous else True

    def join(self) -> Place:
        """Give the next group its place."""
        place = Place(self.step, self.groups)
        self.groups += 1
        if self.groups == self._push_every:
            self.step += 1
            self.groups = 0
        return place

    def __repr__(self) -> str:
        return f"<ReplicaClock at step {self.step} with {self.groups} groups, met at {self.base}>"
