"""Pure: records the answers to all clients of the controllers, and checks them at the end of a run (I6)."""

from collections.abc import Callable, Iterable
from zlib import crc32

import msgspec

from adam_async.run.cluster_map import ClusterMap
from tests.simulation.linearizability import (
    Get,
    History,
    NotLinearizable,
    Read,
    Sight,
    WatchBroken,
    check,
    check_watch,
)
from tests.simulation.scenario import Violation

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class Histories:
    """All operations, and all versions of the map that clients received.

    Args:
        clock: Time of the simulation, in seconds.

    Attributes:
        operations: Operations on the keys that only clients set.
        group: Name of the one group of controllers.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.operations = History(clock=clock)
        self.group = ""
        self._sights: list[Sight] = []

    def shown(self, watcher: str, group: str, cluster: ClusterMap, *, whole: bool) -> None:
        """Record a version of the map that a watcher received, whole or as changes.

        Raises:
            Violation: The map belongs to another group, so this group has lost its state.
        """
        self.group = self.group or group
        if group != self.group:
            raise Violation("I6", f"{watcher} found group {group} in place of {self.group}")
        digest = f"{crc32(_ENCODER.encode(cluster)):08x}"
        self._sights.append(Sight(watcher=watcher, version=cluster.version, digest=digest, whole=whole))

    def begin_reads(self, client: str, keys: Iterable[str]) -> dict[str, int]:
        """Record the start of a read of several nodes' keys; return a handle for each key's read."""
        return {key: self.operations.begin(client, key, Get()) for key in keys}

    def end_reads(self, handles: dict[str, int], cluster: ClusterMap) -> None:
        """Record the map that answers a read of several keys."""
        for key, handle in handles.items():
            record = cluster.nodes.get(key.removeprefix("nodes/"))
            if record is None:
                self.operations.end(handle, Read(version=0, value=None))
            else:
                self.operations.end(handle, Read(version=record.changed, value=str(record.info["n"])))

    def check(self) -> None:
        """Check that one order explains all operations, and that watches had no gaps.

        Raises:
            Violation: The history breaks I6.
            Undecided: The search took too long.
        """
        try:
            check(self.operations.operations())
            check_watch(self._sights)
        except (NotLinearizable, WatchBroken) as error:
            raise Violation("I6", str(error)) from None


def check_kept(cluster: ClusterMap, name: str, acknowledged: int, *, field: str = "n") -> None:
    """Check that a map has a node's last acknowledged write to a field of its record. Raises Violation."""
    record = cluster.nodes.get(name)
    kept = record.info[field] if record is not None else 0
    if kept < acknowledged:
        raise Violation("I6", f"write {acknowledged} of {name} is acknowledged; the map has {kept}")
