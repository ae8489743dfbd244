"""Pure: the rate at which each replica finishes groups, and the number of groups that it may have.

An epoch that ends early waits for its leases (`epoch.py`). From shares, groups are leased ahead of need, as
many to a slow replica as to a fast one, and the slow replica takes longer for them. A replica below half the
rate of the fastest one therefore has only as many groups as it finishes in the time that the fastest one
would need for the largest number that the slow one held at once. The limit is at least one and a half steps,
rounded down, because a report needs a whole step.
"""

from collections.abc import Collection
from math import ceil

from adam_async.run.ids import Replica

LAGS = 0.5
"""Fraction of the fastest replica's rate below which a replica is limited."""

RECORDED = 8
"""Number of groups that a worker may report together, if a step has fewer groups."""

SURE_AFTER = 8
"""Minimum number of finished groups for a known rate of a replica."""


class _Replica:
    """One replica's counts."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.held = self.finished = 0
        self.most = 0
        """Largest number of groups that the replica held at once."""

    def rate(self, now: float) -> float | None:
        """Return the rate in groups per second; None after too few groups."""
        if self.finished < SURE_AFTER or now <= self.since:
            return None
        return self.finished / (now - self.since)


class LeaseLimits:
    """Rates and limits of the replicas in one epoch. Times are seconds on the caller's clock."""

    def __init__(self, step: int = 1) -> None:
        self._least = 3 * max(step, RECORDED) // 2
        self._replicas: dict[Replica, _Replica] = {}

    def leased(self, replica: Replica, groups: int, now: float) -> None:
        """Count groups leased to a replica; its time counts from the first lease on."""
        counts = self._replicas.setdefault(replica, _Replica(now))
        counts.held += groups
        counts.most = max(counts.most, counts.held)

    def finished(self, replica: Replica) -> None:
        """Count a finished group of a replica."""
        counts = self._replicas[replica]
        counts.held -= 1
        counts.finished += 1

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget all replicas except these; a replica that returns begins from nothing."""
        self._replicas = {name: counts for name, counts in self._replicas.items() if name in replicas}

    def room(self, replica: Replica, now: float) -> int | None:
        """Return the maximum number of further groups for a replica; None: no limit."""
        own = self._replicas.get(replica)
        rate = own.rate(now) if own is not None else None
        if own is None or rate is None:
            return None
        fastest = max(known for each in self._replicas.values() if (known := each.rate(now)) is not None)
        if rate >= LAGS * fastest:
            return None
        return max(max(self._least, ceil(own.most * rate / fastest)) - own.held, 0)
