"""Pure: what all clients of the controllers were told, to be checked at the end of a run (I6)."""

import itertools
from collections.abc import Callable
from zlib import crc32

import msgspec

from adam_async.run.cluster_map import ClusterMap
from adam_async.simulation.linearizability import (
    History,
    NotLinearizable,
    Sight,
    WatchBroken,
    check,
    check_watch,
)
from adam_async.simulation.scenario import Violation

MOST_STEPS = 1_000_000
"""Of the search for an order of all operations; what takes longer is refused as undecided."""

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class Histories:
    """All operations, and all versions of the map that anybody was shown.

    Args:
        clock: Seconds of the simulation.

    Attributes:
        operations: On the keys that only clients set.
        group: Which group of controllers it is; there is one in a run.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.operations = History(clock=clock)
        self.group = ""
        self._sights: list[Sight] = []

    def shown(self, watcher: str, group: str, cluster: ClusterMap, *, whole: bool) -> None:
        """Somebody was shown a version of the map, all of it or what changed.

        Raises:
            Violation: It is the map of another group: this one has forgotten everything.
        """
        self.group = self.group or group
        if group != self.group:
            raise Violation("I6", f"{watcher} met group {group} in place of {self.group}")
        digest = f"{crc32(_ENCODER.encode(cluster)):08x}"
        self._sights.append(Sight(watcher=watcher, version=cluster.version, digest=digest, whole=whole))

    def check(self) -> None:
        """See that there is one order of all operations, and that watches had no gaps.

        Raises:
            Violation: Of I6.
            Undecided: The search took too long.
        """
        steps = itertools.count()
        try:
            check(self.operations.operations(), clock=lambda: float(next(steps)), limit_s=float(MOST_STEPS))
            check_watch(self._sights)
        except (NotLinearizable, WatchBroken) as error:
            raise Violation("I6", str(error)) from None
