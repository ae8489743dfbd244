"""Pure: nodes that may be lost: whose link to the leader broke, and who have not found a new leader yet.

A timer and nothing more: that a node is lost, and what it had goes to others, is decided by an entry of the
log (`machine.Lost`). Only the leader suspects anybody. Times are absolute seconds on the caller's clock.
"""

import math
from collections.abc import Iterable

from adam_async.run.cluster_map import ClusterMap

Life = tuple[str, int]
"""Node and incarnation."""


class Suspicion:
    """Who is suspected, and until when it may come back.

    Args:
        grace_s: How long a node whose link broke may stay away, in seconds.
        find_s: How much longer it may take when the leader is new, and all have to find it.
    """

    def __init__(self, *, grace_s: float, find_s: float) -> None:
        self._grace_s = grace_s
        self._find_s = find_s
        self._until: dict[Life, float] = {}
        self._found_by = -math.inf
        """When everybody has had the time to find us."""

    def led(self, cluster: ClusterMap, here: Iterable[Life], *, now: float) -> None:
        """We lead from now on: whoever is live has to come here, but for those who are here."""
        lives = [(name, node.incarnation) for name, node in cluster.nodes.items() if node.live]
        present = set(here)
        self._found_by = now + self._grace_s + self._find_s if lives else -math.inf
        self._until = {life: self._found_by for life in lives if life not in present}

    def resigned(self) -> None:
        """Others lead, or nobody."""
        self._until.clear()
        self._found_by = -math.inf

    def link_lost(self, node: str, incarnation: int, *, now: float) -> None:
        """A node's last link broke: suspect it unless it comes back in time.

        One that was here when we began to lead may just have gone to look for the leader elsewhere.
        """
        self._until[node, incarnation] = max(now + self._grace_s, self._found_by)

    def link_back(self, node: str, incarnation: int) -> None:
        """A suspected node was heard again."""
        self._until.pop((node, incarnation), None)

    def stood_still(self, *, now: float) -> None:
        """We did not run for a while: who came back meanwhile knocks now, and has a whole grace for it."""
        self._until = {life: max(until, now + self._grace_s) for life, until in self._until.items()}

    def due(self, cluster: ClusterMap, *, now: float) -> list[Life]:
        """Lives that stayed away too long and still count as live.

        One that does not is suspected all the same until its time is over: its seat may yet be agreed on.
        """
        self._until = {
            life: until for life, until in self._until.items() if until > now or _is_live(cluster, life)
        }
        return [life for life, until in self._until.items() if until <= now]

    def next_deadline(self) -> float | None:
        """When `due` may next have news; None while nobody is suspected."""
        return min(self._until.values(), default=None)


def _is_live(cluster: ClusterMap, life: Life) -> bool:
    node = cluster.nodes.get(life[0])
    return node is not None and node.live and node.incarnation == life[1]
