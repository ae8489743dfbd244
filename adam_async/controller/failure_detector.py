"""Pure: suspects nodes whose link to the leader broke, or which have not found a new leader yet.

The detector only tracks deadlines; only a log entry makes a node lost (`replicated_state.Lost`). Only the
leader suspects nodes. Times are absolute seconds on the caller's clock.
"""

import math
from collections.abc import Iterable

from adam_async.run.cluster_map import ClusterMap

Incarnation = tuple[str, str, int]
"""Role, node and incarnation. Keys prove only the role: a peer may claim any node and incarnation."""


class FailureDetector:
    """Suspected nodes, and the deadlines of their return.

    Args:
        grace_s: Time for a node to return after its link broke, in seconds.
        find_s: Additional time to find a new leader, in seconds.
    """

    def __init__(self, *, grace_s: float, find_s: float) -> None:
        self._grace_s = grace_s
        self._find_s = find_s
        self._until: dict[Incarnation, float] = {}
        self._found_by = -math.inf
        """Deadline for all nodes to find this leader."""

    def led(self, cluster: ClusterMap, here: Iterable[Incarnation], *, now: float) -> None:
        """Begin to lead: suspect every live node without a link here."""
        incarnations = [
            (node.role, name, node.incarnation) for name, node in cluster.nodes.items() if node.live
        ]
        present = set(here)
        self._found_by = now + self._grace_s + self._find_s if incarnations else -math.inf
        self._until = {
            incarnation: self._found_by for incarnation in incarnations if incarnation not in present
        }

    def resigned(self) -> None:
        """Stop leading: suspect no node."""
        self._until.clear()
        self._found_by = -math.inf

    def link_lost(self, incarnation: Incarnation, *, now: float) -> None:
        """Suspect a node whose last link broke.

        A node linked before this leader's election may have left to search for the leader, so its deadline is
        not before the search's.
        """
        self._until[incarnation] = max(now + self._grace_s, self._found_by)

    def link_back(self, incarnation: Incarnation) -> None:
        """Clear the suspicion of a node with a link."""
        self._until.pop(incarnation, None)

    def stood_still(self, *, now: float) -> None:
        """Give every suspect a full grace period after a stall of this process.

        Connections that nodes opened during the stall may still be queued.
        """
        self._until = {
            incarnation: max(until, now + self._grace_s) for incarnation, until in self._until.items()
        }

    def due(self, cluster: ClusterMap, *, now: float) -> list[Incarnation]:
        """Return the nodes past their deadline that the map has as live.

        A node that the map does not have as live stays suspected until its deadline: its join may still be
        uncommitted.
        """
        self._until = {
            incarnation: until
            for incarnation, until in self._until.items()
            if until > now or _is_live(cluster, incarnation)
        }
        return [incarnation for incarnation, until in self._until.items() if until <= now]

    def next_deadline(self) -> float | None:
        """Return the next deadline of a suspect; None without suspects."""
        return min(self._until.values(), default=None)


def _is_live(cluster: ClusterMap, incarnation: Incarnation) -> bool:
    role, name, number = incarnation
    node = cluster.nodes.get(name)
    return node is not None and node.live and (node.role, node.incarnation) == (role, number)
