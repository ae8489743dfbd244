"""What happened in a run beside training: deaths, returns, successors, and whatever else somebody noted."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable
from typing import Any

from adam_async.driver.silence import HEARD, SILENT
from adam_async.run.cluster_map import ClusterMap

EVENTS_KEPT = 1 << 12
"""Maximum number of events kept of a run."""


class Incidents:
    """The events of a run, with the seconds since it began, for its report.

    Args:
        said: Called with each event at the moment when it is noted.
    """

    def __init__(self, said: Callable[[str], None] = lambda _: None) -> None:
        self._said = said
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._dropped = 0
        self._begin = 0.0
        self._alive: dict[str, int] = {}
        self._ever: set[str] = set()
        self._explained: set[str] = set()  # dead, and somebody has noted how
        self._silent: set[str] = set()
        self._run = ""
        self._places: dict[tuple[int, int], str] = {}

    def begin(self, *, anew: bool) -> None:
        """A run begins; with `anew` what was noted before it belongs to an earlier one."""
        if anew:
            self._events.clear()
            self._dropped = 0
        self._begin = asyncio.get_running_loop().time()

    def note(self, what: str) -> None:
        """Add an incident, with the time.

        Who knows the cause of a death notes ``NODE died: CAUSE``; it is not noted again when the map has it.
        """
        node, died, _ = what.partition(" died: ")
        if died:
            self._explained.add(node)
        for words, change in ((SILENT, self._silent.add), (HEARD, self._silent.discard)):
            node, found, _ = what.partition(words)
            if found:
                change(node)
        at = asyncio.get_running_loop().time() - self._begin if self._begin else 0.0
        self._dropped += len(self._events) == EVENTS_KEPT
        self._events.append({"s": round(at, 3), "event": what})
        self._said(what)

    @property
    def noted(self) -> tuple[dict[str, Any], ...]:
        """The newest events, in their order; the first one says how many earlier ones were dropped."""
        if not self._dropped:
            return tuple(self._events)
        return {"s": 0.0, "event": f"{self._dropped} earlier events were dropped"}, *self._events

    async def follow(self, maps: AsyncIterable[ClusterMap]) -> None:
        """Note deaths, returns, and who takes the place of another worker, until cancelled."""
        async for cluster in maps:
            for name in (self._ever | self._explained) - cluster.nodes.keys():
                # The controllers forgot the node, so it is a new one if it comes back.
                if name in self._alive and name not in self._explained:
                    self._note_loss(name)
                self._ever.discard(name)
                self._explained.discard(name)
                self._silent.discard(name)
                self._alive.pop(name, None)
            for name, node in cluster.nodes.items():
                known = self._alive.get(name)
                if not node.live and known == node.incarnation:
                    if node.left:
                        self.note(f"{name} left")
                    elif name not in self._explained:
                        self._note_loss(name)
                    del self._alive[name]
                elif node.live and known != node.incarnation:
                    if name in self._ever and node.role != "driver":  # each run of a command has a new one
                        self.note(f"{name} came back as a new incarnation")
                    self._alive[name] = node.incarnation
                    self._ever.add(name)
                    self._explained.discard(name)
                    self._silent.discard(name)
            self._note_successors(cluster)

    def _note_loss(self, node: str) -> None:
        """Note that the controllers count a node as dead. A silent one may be alive."""
        self.note(f"{node} counts as dead, after its silence" if node in self._silent else f"{node} died")
        self._silent.discard(node)

    def _note_successors(self, cluster: ClusterMap) -> None:
        """Note workers that were given a place in the run that another one had."""
        run = cluster.run.id if cluster.run is not None else ""
        if run != self._run:
            self._run = run
            self._places.clear()
        for name, node in sorted(cluster.nodes.items()):
            if node.role != "worker" or not node.live or node.replica < 0:
                continue
            place = node.replica, node.partition
            if self._places.setdefault(place, name) != name:
                part = f"part {node.partition} of " if cluster.partitions > 1 else ""
                self.note(f"{name} takes {part}replica {node.replica}")
                self._places[place] = name

    def __repr__(self) -> str:
        return f"<Incidents {len(self._events)} noted>"
