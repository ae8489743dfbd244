"""Incidents of a run: losses, returns, successors, moved primaries, missing copies; notes of its driver.

An incident has a beginning and an end in the stream of events. An incident's sentences, and all notes, are
the `events` of the report. The controllers get the notes of what costs the run something.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, Collection
from typing import Any

from adam_async.controller.bundle_rules import other_numerics
from adam_async.controller.client import Membership
from adam_async.errors import AdamError
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import MOST_REASON, NOTICE, ClusterMap
from adam_async.run.condition import Wait
from adam_async.run.events import Incident, IncidentBegins, IncidentEnds, Noted
from adam_async.run.run_copies import BundleCopies, RunCopies, copies_of, store_copies
from transport import TransportError

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1 << 12
"""Maximum number of events that a run keeps."""


class RunEvents:
    """A run's incidents and notes, for its stream; their sentences with the seconds since it began.

    Args:
        stream: Takes them.
        stores: Names of clients' stores whose copies are watched, too; None for all.
    """

    def __init__(self, stream: EventStream, *, stores: Collection[str] | None = ()) -> None:
        self._stream = stream
        self._stores = stores
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._open: dict[tuple[Incident, str], float] = {}
        """Beginning of each incident in progress, in seconds since 1970, by kind and subject."""
        self._waited: Collection[tuple[str, str]] = ()
        """Waits at the poll before: roles, and things that they wait for."""
        self._dropped = 0
        self._begin = 0.0
        self._alive: dict[str, int] = {}
        self._ever: set[str] = set()
        self._explained: set[str] = set()  # dead nodes with a noted cause of death
        self._run = ""
        self._places: dict[tuple[int, int], str] = {}
        self._copies: dict[str, BundleCopies] = {}
        """Bundles, by the subject of their incidents."""
        self._rounds_otherwise: dict[str, str] = {}
        """Servers with other numerics than a primary of the run, and the differences."""
        self._notices: dict[str, str] = {}
        """Last notice of each parameter server."""
        self._complete: set[str] = set()
        """Subjects of bundles that have had all copies in sync."""

    def begin(self, *, anew: bool) -> None:
        """Begin a run; with `anew`, drop an earlier run's events."""
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
            self.begins("lost", node, what)
            return
        self._add(what)

    def _add(self, what: str) -> None:
        """Add an event, also one with the words of a peer, which could have the form of a death."""
        self._keep(what)
        self._stream.publish(Noted(text=what))

    def _keep(self, what: str) -> None:
        at = asyncio.get_running_loop().time() - self._begin if self._begin else 0.0
        self._dropped += len(self._events) == EVENTS_KEPT
        self._events.append({"s": round(at, 3), "event": what})

    def begins(
        self,
        incident: Incident,
        subject: str,
        text: str = "",
        *,
        at: float = 0.0,
        deadline_s: float | None = None,
        cure: str = "",
    ) -> None:
        """Begin an incident; if the same one is in progress, add only its sentence.

        Args:
            subject: Node, or home of a bundle.
            text: Sentence for the report; empty for none.
            at: Time at which the incident began, in seconds since 1970; 0: now.
        """
        if text:
            self._keep(text)
        if (incident, subject) in self._open:
            if text:
                self._stream.publish(Noted(text=text))
            return
        at = self._open[incident, subject] = at or self._stream.now()
        self._stream.publish(
            IncidentBegins(
                at=at, incident=incident, subject=subject, text=text, deadline_s=deadline_s, cure=cure
            )
        )

    def ends(self, incident: Incident, subject: str, text: str = "") -> None:
        """End an incident if it is in progress; add its sentence in any case."""
        if text:
            self._keep(text)
        began = self._open.pop((incident, subject), None)
        if began is not None:
            lasted_s = max(self._stream.now() - began, 0.0)
            self._stream.publish(
                IncidentEnds(incident=incident, subject=subject, lasted_s=lasted_s, text=text)
            )
        elif text:
            self._stream.publish(Noted(text=text))

    def waits(self, waits: Collection[Wait]) -> None:
        """Take the waits at a poll: a wait seen at two polls in a row is an incident until it ends."""
        found = {(each.who, each.what): each for each in waits}
        lasting = {each.who: each for key, each in found.items() if key in self._waited}
        for who, each in lasting.items():
            self.begins("wait", who, deadline_s=each.deadline_s, cure=each.cure)
        for incident, subject in list(self._open):
            if incident == "wait" and subject not in lasting:
                self.ends("wait", subject)
        self._waited = found

    @property
    def noted(self) -> tuple[dict[str, Any], ...]:
        """The newest events in order; if earlier ones were dropped, the first event says how many."""
        if not self._dropped:
            return tuple(self._events)
        return {"s": 0.0, "event": f"{self._dropped} earlier events were dropped"}, *self._events

    async def follow(self, maps: AsyncIterable[ClusterMap]) -> None:
        """Until cancelled, note deaths and returns of roles, successors of workers, and changes of copies."""
        async for cluster in maps:
            for name in (self._ever | self._explained) - cluster.nodes.keys():
                # The controllers have forgotten the node, so it returns as a new node.
                if name in self._alive and name not in self._explained:
                    self._note_loss(name)
                self._ever.discard(name)
                self._explained.discard(name)
                self.ends("lost", name)
                self._alive.pop(name, None)
            for name, node in cluster.nodes.items():
                if node.role in ("driver", "reader"):  # the driver of these events, or an operator
                    continue
                known = self._alive.get(name)
                if not node.live and known == node.incarnation:
                    if node.left:
                        self._add(f"{name} left")
                    elif name not in self._explained:
                        self._note_loss(name, at=node.lost_at)
                    del self._alive[name]
                elif node.live and known != node.incarnation:
                    if known is not None:  # an observer may see a loss and its end in one map
                        self.begins("lost", name)
                    if name in self._ever:
                        self.ends("lost", name, f"{name} came back as a new incarnation")
                    self._alive[name] = node.incarnation
                    self._ever.add(name)
                    self._explained.discard(name)
                    self.ends("silent", name)
            self._note_successors(cluster)
            self._note_copies(cluster)
            self._note_notices(cluster)
            self._note_numerics(cluster)

    def _note_notices(self, cluster: ClusterMap) -> None:
        """Note each new notice of a parameter server, for example that it cannot join."""
        notices = {name: str(cluster.nodes[name].info.get(NOTICE, "")) for name in cluster.live("ps")}
        for name, notice in notices.items():
            if notice and notice != self._notices.get(name, notice):
                self._add(notice)
        self._notices = notices

    def _note_numerics(self, cluster: ClusterMap) -> None:
        """Note each server with a copy of the run's shards whose values may differ by rounding."""
        store = cluster.run_store
        for home in sorted(set(store.buckets)) if store is not None else ():
            bundle = cluster.bundle(store.id, home) if store is not None else None
            for node, differences in other_numerics(cluster, bundle).items() if bundle is not None else ():
                if self._rounds_otherwise.get(node) != differences:
                    self._rounds_otherwise[node] = differences
                    self._add(f"the copies of {node} may round otherwise than their primary: {differences}")

    def _note_copies(self, cluster: ClusterMap) -> None:
        """Note primaries that moved, and shards that begin or cease to lack copies."""
        of_stores = [
            (name, store_copies(cluster, store))
            for name, store in cluster.stores.items()
            if not store.program and (self._stores is None or name in self._stores)
        ]
        for owner, found in (("", copies_of(cluster)), *of_stores):
            if found is not None and found.copies > 1:
                for bundle in found.bundles:
                    self._note_bundle(owner, bundle, found)

    def _note_bundle(self, owner: str, now: BundleCopies, found: RunCopies) -> None:
        """Note the changes of one bundle of the run, or of a store."""
        subject = f"{owner}/{now.home}" if owner else now.home
        was = self._copies.get(subject)
        if now.in_sync:
            self._copies[subject] = now
        was_complete = subject in self._complete
        if len(now.in_sync) >= found.copies:
            self._complete.add(subject)
        if was is None:
            return
        if not now.in_sync or now.primary != was.primary:
            self.begins("failover", subject, at=self._open.get(("lost", was.primary), 0.0))
        if not now.in_sync:
            return
        of = f" of store {owner!r}" if owner else ""
        shards, before, after = f"the shards of {now.home}{of}", len(was.in_sync), len(now.in_sync)
        if now.primary != was.primary:
            self.ends("failover", subject, f"primary of {shards} moved from {was.primary} to {now.primary}")
        if after < found.min_in_sync <= before:
            text = f"pushes to {shards} wait: {after} in sync, {found.min_in_sync} needed (min_in_sync)"
            self.begins("pushes", subject, text)
        if after >= found.min_in_sync and ("pushes", subject) in self._open:
            self.ends("pushes", subject, f"pushes to {shards} go on: {after} in sync")
        if was_complete and after < found.copies:
            self.begins("copies", subject)
        if before < found.copies <= after and was_complete:
            self.ends("copies", subject, f"{shards} have {found.copies} copies in sync again")

    def _note_loss(self, node: str, at: float = 0.0) -> None:
        """Note that the controllers count a node as dead. A silent node may be alive."""
        silent = ("silent", node) in self._open
        self.ends("silent", node)
        text = f"{node} counts as dead, after its silence" if silent else f"{node} died"
        self.begins("lost", node, text, at=at)

    def _note_successors(self, cluster: ClusterMap) -> None:
        """Note workers that took over the place of another worker in the run."""
        run = cluster.run.id if cluster.run is not None else ""
        if run != self._run:
            self._run = run
            self._places.clear()
            for memory in (self._copies, self._complete, self._rounds_otherwise):
                memory.clear()
            for incident, subject in list(self._open):
                if incident in ("failover", "copies", "pushes"):
                    self.ends(incident, subject)
        for name, node in sorted(cluster.nodes.items()):
            if node.role != "worker" or not node.live or node.replica < 0:
                continue
            place = node.replica, node.partition
            before = self._places.setdefault(place, name)
            if before != name:
                part = f"part {node.partition} of " if cluster.partitions > 1 else ""
                self.ends("lost", before, f"{name} takes {part}replica {node.replica}")
                self._places[place] = name


class Notices:
    """Reports notices of one driver to the controllers. The caller runs `run` as a task of its group."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._unsent: asyncio.Queue[str] = asyncio.Queue()

    def report(self, what: str) -> None:
        """Report an event that costs the run something."""
        self._unsent.put_nowait(what)

    async def run(self) -> None:
        """Send notices until cancelled."""
        while True:
            notice = await self._unsent.get()
            try:
                await self._membership.set_info(**{NOTICE: notice[:MOST_REASON]})
            except (AdamError, TransportError) as error:
                logger.info("a notice did not reach the controllers: %s", error)
