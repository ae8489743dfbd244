"""Pure: the arithmetic of a replica's clock: the step that a group joins, and the values that it reads.

Theory of operation
-------------------
Step c of a replica begins when the replica's clock is c; its push has clock c + 1. Groups join steps,
`push_every` to a step. Under ``asp`` they join when they are trained, and a step may read any values. Under
``ssp`` and ``bsp`` they join at their admission, in the order of their leases, so the same groups make the
same step in every run. At a *sync clock*, which the data server sends, all replicas have the same clock: the
open step ends short, and the clock *skips* to the sync clock without pushes in between.

Under ``ssp:S`` the values that step c reads contain all pushes of live replicas up to clock c - S. A replica
is therefore at most S steps ahead of the slowest replica when it begins a step, and S + 1 steps when its push
is counted.

Under ``bsp`` step c reads the values of clock c - lag and no later ones, because the sums of different clocks
differ. At a sync clock the pipeline is empty: the first step there, `base`, reads the values of clock `base`
itself, and so does the next step if sums lag. A run that resumes at a sync clock continues as an
uninterrupted one. A push of clock p waits until the values of clock p - 1 are installed. Until then no server
can have a later clock, so each replica gets the values of each clock.
"""


class ReplicaClock:
    """Adds groups to steps, and decides the values that a step may read.

    Args:
        start: Clock of the replica at the beginning.
        push_every: Number of groups of a full step.
        pull_every: Number of steps per pull.
        slack: Number of steps by which the replica may be ahead of the slowest replica; with `synchronous`,
            number of steps by which sums may lag. None: no bound, as in asp.
        synchronous: Whether a step reads the values of exactly one clock.
    """

    def __init__(
        self,
        *,
        push_every: int,
        start: int = 0,
        pull_every: int = 1,
        slack: int | None = None,
        synchronous: bool = False,
    ) -> None:
        self.push_every = push_every
        self.pull_every = pull_every
        self.bounded = slack is not None
        self.synchronous = synchronous
        self._slack = slack
        self.step = start
        """Number of the step that the next group joins."""
        self.groups = 0
        """Number of groups of the open step."""
        self.base = start
        """The last sync clock."""

    def sync_at(self, clock: int) -> bool:
        """Skip to a sync clock. Returns whether a step was open; the call ends that step short."""
        short = self.groups > 0
        if short:
            self.step += 1
            self.groups = 0
        self.step = max(self.step, clock)
        self.base = max(self.base, clock)
        return short

    @property
    def needs(self) -> int:
        """Clock of the values that the next group reads: exact with `synchronous`, otherwise the minimum."""
        assert self._slack is not None, "without a bound a step needs no clock"
        needed = self.step - self._slack
        return max(needed, self.base) if self.synchronous else needed

    def leaves(self, step: int, landed: int) -> bool:
        """Return whether a complete step may be pushed after the values of clock `landed`."""
        return landed >= step if self.synchronous else True

    def join(self) -> tuple[int, int]:
        """Add the next group to a step; returns the number of the step, and the group's position in it."""
        position = self.step, self.groups
        self.groups += 1
        if self.groups == self.push_every:
            self.step += 1
            self.groups = 0
        return position

    def __repr__(self) -> str:
        return f"<ReplicaClock at step {self.step} with {self.groups} groups, sync clock {self.base}>"
