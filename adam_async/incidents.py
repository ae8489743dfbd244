"""What happened in a run beside training: deaths, returns, and whatever else somebody noted."""

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from adam_async.cluster_map import ClusterMap


class Incidents:
    """The events of a run, with the seconds since it began, for its report."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._begin = 0.0
        self._alive: dict[str, int] = {}
        self._ever: set[str] = set()

    def begin(self, *, anew: bool) -> None:
        """A run begins; with `anew` what was noted before it belongs to an earlier one."""
        if anew:
            self._events.clear()
        self._begin = asyncio.get_running_loop().time()

    def note(self, what: str) -> None:
        """Add an incident, with the time."""
        at = asyncio.get_running_loop().time() - self._begin if self._begin else 0.0
        self._events.append({"s": round(at, 3), "event": what})

    @property
    def noted(self) -> tuple[dict[str, Any], ...]:
        """All of them, in their order."""
        return tuple(self._events)

    async def follow(self, maps: AsyncIterable[ClusterMap]) -> None:
        """Note deaths and returns, until cancelled."""
        async for cluster in maps:
            for name, node in cluster.nodes.items():
                known = self._alive.get(name)
                if not node.live and known == node.incarnation:
                    self.note(f"{name} {'left' if node.left else 'died'}")
                    del self._alive[name]
                elif node.live and known != node.incarnation:
                    if name in self._ever:
                        self.note(f"{name} came back as a new incarnation")
                    self._alive[name] = node.incarnation
                    self._ever.add(name)

    def __repr__(self) -> str:
        return f"<Incidents {len(self._events)} noted>"
