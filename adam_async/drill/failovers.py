"""Pure: the failovers that successive cluster maps show, with and without a fault as their cause.

A failover replaces a primary that leaves the members in sync. A handover keeps the old primary in sync, so it
is no failover.
"""

from collections.abc import Mapping

from adam_async.run.bundle_record import BundleRecord


class FailoverCount:
    """Counts failovers. The caller feeds maps in their order, and names the servers that have a fault."""

    def __init__(self) -> None:
        self.caused = 0
        """Number of failovers from a server with a fault."""
        self.false: list[str] = []
        """Description of each failover from a server without a fault."""
        self._bundles: Mapping[str, BundleRecord] = {}
        self._faulty: set[str] = set()

    def begin_fault(self, server: str) -> None:
        """Note that a server has a fault from now on."""
        self._faulty.add(server)

    def end_fault(self, server: str) -> None:
        """Note that a server is back, with all copies in sync."""
        self._faulty.discard(server)

    def observe(self, bundles: Mapping[str, BundleRecord]) -> None:
        """Compare the bundles of a newer map with those of the last one."""
        for key, now in bundles.items():
            was = self._bundles.get(key)
            if was is None or was.store != now.store or was.primary is None:
                continue
            if was.primary == now.primary or was.primary in now.in_sync:
                continue
            server = was.primary[0]
            if server in self._faulty:
                self.caused += 1
            else:
                successor = now.primary[0] if now.primary else "no server"
                self.false.append(f"{key} from {server} to {successor}, generation {now.generation}")
        self._bundles = dict(bundles)
