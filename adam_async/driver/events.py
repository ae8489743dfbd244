"""Events of a run: deaths, returns and successors of roles, and the notes of its driver.

Notices pass events to the program around the driver; the controllers get events that cost the run something.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, Callable
from typing import Any

from adam_async.controller.bundle_rules import other_numerics
from adam_async.controller.client import Membership
from adam_async.driver.role_counts import HEARD, SILENT
from adam_async.errors import AdamError
from adam_async.run.cluster_map import MOST_REASON, NOTICE, ClusterMap
from adam_async.run.run_copies import BundleCopies, copies_of
from transport import TransportError

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1 << 12
"""Maximum number of events that a run keeps."""


class RunEvents:
    """The events of a run, with the seconds since it began, for its report."""

    def __init__(self, on_event: Callable[[str], None] = lambda _: None) -> None:
        self._on_event = on_event
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._dropped = 0
        self._begin = 0.0
        self._alive: dict[str, int] = {}
        self._ever: set[str] = set()
        self._explained: set[str] = set()  # dead nodes with a noted cause of death
        self._silent: set[str] = set()
        self._run = ""
        self._places: dict[tuple[int, int], str] = {}
        self._copies: dict[str, BundleCopies] = {}
        """Bundles of the run, by home."""
        self._waiting: set[str] = set()
        """Homes of bundles whose pushes wait for more copies."""
        self._rounds_otherwise: dict[str, str] = {}
        """Servers with other numerics than a primary of the run, and the differences."""
        self._notices: dict[str, str] = {}
        """Last notice of each parameter server."""
        self._complete: set[str] = set()
        """Homes of bundles that have had all copies in sync."""

    def begin(self, *, anew: bool) -> None:
        """Begin a run; with `anew`, drop the events of an earlier run."""
        if anew:
            self._events.clear()
            self._dropped = 0
        self._begin = asyncio.get_running_loop().time()

    def note(self, what: str) -> None:
        """Add an event, with its time.

        The event ``NODE died: CAUSE`` has the cause of a death, so the map's report of this death adds no
        second event.
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
        self._on_event(what)

    @property
    def noted(self) -> tuple[dict[str, Any], ...]:
        """The newest events in order; if earlier ones were dropped, the first event has their number."""
        if not self._dropped:
            return tuple(self._events)
        return {"s": 0.0, "event": f"{self._dropped} earlier events were dropped"}, *self._events

    async def follow(self, maps: AsyncIterable[ClusterMap]) -> None:
        """Note deaths and returns of roles, successors of workers, and changes of copies until cancelled."""
        async for cluster in maps:
            for name in (self._ever | self._explained) - cluster.nodes.keys():
                # The controllers have forgotten the node, so it returns as a new node.
                if name in self._alive and name not in self._explained:
                    self._note_loss(name)
                self._ever.discard(name)
                self._explained.discard(name)
                self._silent.discard(name)
                self._alive.pop(name, None)
            for name, node in cluster.nodes.items():
                if node.role == "driver":  # the driver of these events, or an operator
                    continue
                known = self._alive.get(name)
                if not node.live and known == node.incarnation:
                    if node.left:
                        self.note(f"{name} left")
                    elif name not in self._explained:
                        self._note_loss(name)
                    del self._alive[name]
                elif node.live and known != node.incarnation:
                    if name in self._ever:
                        self.note(f"{name} came back as a new incarnation")
                    self._alive[name] = node.incarnation
                    self._ever.add(name)
                    self._explained.discard(name)
                    self._silent.discard(name)
            self._note_successors(cluster)
            self._note_copies(cluster)
            self._note_notices(cluster)
            self._note_numerics(cluster)

    def _note_notices(self, cluster: ClusterMap) -> None:
        """Note each new notice of a parameter server, for example the notice that it cannot join."""
        notices = {name: str(cluster.nodes[name].info.get(NOTICE, "")) for name in cluster.live("ps")}
        for name, notice in notices.items():
            if notice and notice != self._notices.get(name, notice):
                self.note(notice)
        self._notices = notices

    def _note_numerics(self, cluster: ClusterMap) -> None:
        """Note each server with a copy of the run's shards whose values may differ by rounding."""
        store = cluster.run_store
        for home in sorted(set(store.buckets)) if store is not None else ():
            bundle = cluster.bundle(store.id, home) if store is not None else None
            for node, differences in other_numerics(cluster, bundle).items() if bundle is not None else ():
                if self._rounds_otherwise.get(node) != differences:
                    self._rounds_otherwise[node] = differences
                    self.note(f"the copies of {node} may round otherwise than their primary: {differences}")

    def _note_copies(self, cluster: ClusterMap) -> None:
        """Note primaries that moved, and shards that begin or cease to lack copies."""
        found = copies_of(cluster)
        if found is None or found.copies == 1:
            return
        for now in found.bundles:
            was = self._copies.get(now.home)
            if now.in_sync:
                self._copies[now.home] = now
            was_complete = now.home in self._complete
            if len(now.in_sync) >= found.copies:
                self._complete.add(now.home)
            if was is None or not now.in_sync:
                continue
            shards, before, after = f"the shards of {now.home}", len(was.in_sync), len(now.in_sync)
            if now.primary != was.primary:
                self.note(f"primary of {shards} moved from {was.primary} to {now.primary}")
            if after < found.min_in_sync <= before:
                self.note(
                    f"pushes to {shards} wait: {after} in sync, {found.min_in_sync} needed (min_in_sync)"
                )
                self._waiting.add(now.home)
            if after >= found.min_in_sync and now.home in self._waiting:
                self.note(f"pushes to {shards} go on: {after} in sync")
                self._waiting.discard(now.home)
            if before < found.copies <= after and was_complete:
                self.note(f"{shards} have {found.copies} copies in sync again")

    def _note_loss(self, node: str) -> None:
        """Note that the controllers count a node as dead. A silent node may be alive."""
        self.note(f"{node} counts as dead, after its silence" if node in self._silent else f"{node} died")
        self._silent.discard(node)

    def _note_successors(self, cluster: ClusterMap) -> None:
        """Note workers that took over the place of another worker in the run."""
        run = cluster.run.id if cluster.run is not None else ""
        if run != self._run:
            self._run = run
            self._places.clear()
            for memory in (self._copies, self._waiting, self._complete, self._rounds_otherwise):
                memory.clear()
        for name, node in sorted(cluster.nodes.items()):
            if node.role != "worker" or not node.live or node.replica < 0:
                continue
            place = node.replica, node.partition
            if self._places.setdefault(place, name) != name:
                part = f"part {node.partition} of " if cluster.partitions > 1 else ""
                self.note(f"{name} takes {part}replica {node.replica}")
                self._places[place] = name


class Notices:
    """Notices of one driver.

    Attributes:
        on_event: Called with each event of the run as it is noted.

    The caller runs `run` as a task of its group.
    """

    def __init__(self, membership: Membership) -> None:
        self.on_event: Callable[[str], None] | None = None
        self._membership = membership
        self._unsent: asyncio.Queue[str] = asyncio.Queue()

    def event(self, what: str) -> None:
        """Report an event to the listener."""
        if self.on_event is not None:
            self.on_event(what)

    def warn(self, what: str) -> None:
        """Report an event that costs the run something to the controllers; without a listener, log it."""
        if self.on_event is None:
            logger.warning("%s", what)
        self._unsent.put_nowait(what)

    async def run(self) -> None:
        """Send notices until cancelled."""
        while True:
            notice = await self._unsent.get()
            try:
                await self._membership.set_info(**{NOTICE: notice[:MOST_REASON]})
            except (AdamError, TransportError) as error:
                logger.info("a notice did not reach the controllers: %s", error)
