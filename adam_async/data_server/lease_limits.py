"""Pure: how fast each replica finishes groups, and how many of them it may hold.

An epoch that ends early waits for what is leased (`epoch.py`). Groups are leased ahead of need, as many to a
slow replica as to a quick one, and would take it so many times longer. So who is less than half as fast as
the fastest one holds only what takes it as long as what it held before would take the fastest; but enough to
end a step with, for nothing is reported before that.
"""

from collections.abc import Collection
from math import ceil

from adam_async.run.ids import Replica

LAGS = 0.5
"""Part of the fastest replica's rate below which one may not hold all that it asks for."""

RECORDED = 8
"""Groups that a worker may train before it tells of them together, where a step is shorter than that."""

SURE_AFTER = 8
"""Groups that a replica has finished before its rate is known."""


class _Replica:
    """One replica's counts."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.held = self.finished = 0
        self.most = 0
        """Groups that it held at once, before it was held back."""

    def rate(self, now: float) -> float | None:
        """Groups per second, once enough is known."""
        if self.finished < SURE_AFTER or now <= self.since:
            return None
        return self.finished / (now - self.since)


class Tempo:
    """Rates of replicas in one epoch. Times are seconds on the caller's clock.

    Args:
        step: Groups of a step, after which the first of them is reported.
    """

    def __init__(self, step: int = 1) -> None:
        self._least = 3 * max(step, RECORDED) // 2
        self._replicas: dict[Replica, _Replica] = {}

    def leased(self, replica: Replica, groups: int, now: float) -> None:
        """A replica got groups: from the first ones on its time counts."""
        counts = self._replicas.setdefault(replica, _Replica(now))
        counts.held += groups
        counts.most = max(counts.most, counts.held)

    def finished(self, replica: Replica) -> None:
        """It has finished a group that it held."""
        counts = self._replicas[replica]
        counts.held -= 1
        counts.finished += 1

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget all others: whoever comes back begins anew."""
        self._replicas = {name: counts for name, counts in self._replicas.items() if name in replicas}

    def room(self, replica: Replica, now: float) -> int | None:
        """How many more groups a replica may be given; None: all that it asks for."""
        own = self._replicas.get(replica)
        rate = own.rate(now) if own is not None else None
        if own is None or rate is None:
            return None
        fastest = max(known for each in self._replicas.values() if (known := each.rate(now)) is not None)
        if rate >= LAGS * fastest:
            return None
        return max(max(self._least, ceil(own.most * rate / fastest)) - own.held, 0)
