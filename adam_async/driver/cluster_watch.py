"""Polls all roles of a cluster, for a driver or an operator: counts, status, silences and waits as events.

A stopped process and an unplugged cable look the same to the watch: the link stays up without messages, and
breaks much later.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from adam_async.controller.client import Membership
from adam_async.driver.events import RunEvents
from adam_async.driver.readiness import POLL_S
from adam_async.driver.role_queries import RoleQueries
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import ASKED, ClusterStatus, status_of
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts, Counts
from adam_async.run.events import StatusSeen, StoreCounted, counted
from adam_async.run.run_copies import primary_of
from transport import TransportError

RATES_S = 3.0
"""Time in seconds over which rates are measured: three polls, one of which may be late."""

STORES_ASKED = 16
"""Maximum number of stores whose counts a poll asks for, the first ones by name."""


class ClusterWatch:
    """Polls the roles of a cluster.

    Args:
        queries: Asks the roles; None: the member may not ask, and the status has only the cluster map.
        run: Returns the id of the run.
        events: Takes silences and waits.
        stream: Takes the counts and the status of each poll.
        asks_stores: Whether polls also ask for the counts of clients' stores.

    Attributes:
        counts: Counts of the roles at the last poll. A silent role keeps its last counts, so that sums do not
            fall while it is silent.
    """

    def __init__(
        self,
        queries: RoleQueries | None,
        membership: Membership,
        *,
        run: Callable[[], str],
        events: RunEvents,
        stream: EventStream,
        waits: Waits,
        asks_stores: bool = False,
    ) -> None:
        self._queries = queries
        self._membership = membership
        self._run = run
        self._events = events
        self._stream = stream
        self._waits = waits
        self._asks_stores = asks_stores
        self._recent: deque[tuple[float, Mapping[str, Counts]]] = deque()
        self.silence = Silence(events)
        self.counts: Mapping[str, Counts] = {}

    async def run(self) -> None:
        """Poll every `POLL_S`, and note incidents of the cluster map, until cancelled."""
        node = self._membership.node
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.follow(self._membership.changes()), name=f"{node}/events")
            while True:
                await self.poll()
                await asyncio.sleep(POLL_S)

    async def poll(self, *, with_ended: bool = False) -> ClusterStatus:
        """Ask all roles at once, for `POLL_S` at most, and publish their counts and the status.

        The asking member itself is not in the status.

        Args:
            with_ended: Include nodes that have left or were lost.
        """
        loop, cluster = asyncio.get_running_loop(), self._membership.map
        asked_at = loop.time()
        answers = await self._answers(cluster)
        now = loop.time()
        cluster = self._membership.map
        live = [node for role in ASKED for node in cluster.live(role)]
        if self._queries is not None:
            self.silence.observe(live, answers, asked_at=asked_at, now=now)
        known = {**self.counts, **answers}
        controllers = {node: each for node, each in answers.items() if isinstance(each, ControllerCounts)}
        self.counts = controllers | {node: known[node] for node in live if node in known}
        status = status_of(
            cluster,
            self.counts,
            leading=self._membership.leading,
            controllers=len(self._membership.controllers) if controllers else 0,
            with_ended=with_ended,
            earlier=self._earlier(now),
            waits=self._waits,
            asking=self._membership.node,
        )
        self._recent.append((now, self.counts))
        self._events.waits(status.condition.waits)
        for counts in answers.values():
            if (event := counted(counts)) is not None:
                self._stream.publish(event)
        self._stream.publish(StatusSeen(status=status))
        return status

    async def _answers(self, cluster: ClusterMap) -> dict[str, Counts]:
        if self._queries is None:
            return {}
        roles = [(name, cluster.nodes[name].address) for role in ASKED for name in cluster.live(role)]
        controllers = [("", address) for address in self._membership.controllers]
        async with asyncio.TaskGroup() as group:
            for store in sorted(cluster.stores)[:STORES_ASKED] if self._asks_stores else ():
                if not cluster.stores[store].program:
                    group.create_task(self._ask_store(store, cluster), name=f"asks-{store}")
            return await self._queries.answers([*roles, *controllers], self._run(), within_s=POLL_S)

    async def _ask_store(self, name: str, cluster: ClusterMap) -> None:
        """Publish the counts of a store on each server that leads a bundle of it."""
        assert self._queries is not None
        store = cluster.stores[name]
        primaries = {primary_of(cluster, store.id, home) for home in set(store.buckets)}
        for primary in sorted(filter(None, primaries)):
            try:
                async with asyncio.timeout(POLL_S):
                    counts = await self._queries.store_counts(primary.address, store.id)
            except (TransportError, TimeoutError, ValueError):
                continue  # the server's loss or silence is an incident
            if counts.shards:
                self._stream.publish(StoreCounted(store=name, node=primary.node, counts=counts))

    def _earlier(self, now: float) -> Mapping[str, Counts]:
        """Return the counts of the poll `RATES_S` ago; if all are newer, of the oldest."""
        recent = self._recent
        while len(recent) > 1 and recent[1][0] <= now - RATES_S:
            recent.popleft()
        return recent[0][1] if recent else {}


POLLS = 2
"""Number of polls in a row without an answer that make an event; a busy machine may miss one."""


@dataclass(slots=True)
class _Silent:
    since: float
    polls: int = 0


class Silence:
    """Live roles that do not answer. Times are seconds of the loop's clock.

    Args:
        events: Takes each silence as an incident.
    """

    def __init__(self, events: RunEvents) -> None:
        self._events = events
        self._silent: dict[str, _Silent] = {}

    def observe(
        self, asked: Collection[str], answered: Collection[str], *, asked_at: float, now: float
    ) -> None:
        """Take the result of one poll.

        Args:
            asked: Polled nodes. The method forgets a silent node that is no longer polled: the node is lost,
                and the map reports it.
        """
        self._silent = {node: each for node, each in self._silent.items() if node in asked}
        for node in asked:
            if node in answered:
                silent = self._silent.pop(node, None)
                if silent is not None and silent.polls >= POLLS:
                    text = f"{node} answers again, after {now - silent.since:.0f} s"
                    self._events.ends("silent", node, text)
                continue
            silent = self._silent.setdefault(node, _Silent(since=asked_at))
            silent.polls += 1
            if silent.polls == POLLS:
                text = f"{node} has not answered for {now - silent.since:.0f} s"
                self._events.begins("silent", node, text)

    def shown(self, now: float) -> tuple[str, ...]:
        """Return each node whose silence is an event, with the length of its silence."""
        silent = ((node, each) for node, each in sorted(self._silent.items()) if each.polls >= POLLS)
        return tuple(f"{node} for {now - each.since:.0f} s" for node, each in silent)
