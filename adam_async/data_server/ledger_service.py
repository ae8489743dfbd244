"""One data server's part in leasing, whichever of them is the lender: the shell around `keeping`.

`enter` takes events, and `on_settled` is told later what came of them: from the lender they go into the
ledger at once, from another keeper over a link to the lender, and once more, to whoever lends then, if that
link or the lender is lost before they are settled. Who is no keeper enters nothing.

For each server that copies the ledger there is a task with a link to it. One that cannot be reached is struck
out of the cluster map, and then tried again as somebody new.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from adam_async.controller.client import Membership
from adam_async.data_server.ledger import Settled
from adam_async.data_server.ledger_replication import CopyRefused, LedgerReplica, LedgerReplication, Part
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.question_checks import check_entering, check_part
from adam_async.data_server.state import (
    DataState,
    Event,
    GroupsReported,
    LeaseAsked,
    Opening,
    TimePassed,
)
from adam_async.errors import DeadlineExceeded
from adam_async.messages import (
    CopyLedger,
    Enter,
    Entered,
    LedgerCopied,
    pack,
    packed_tensor,
    read_packed_tensor,
    unpack,
)
from adam_async.messages.sizes import MOST_LEDGER_BYTES
from adam_async.run.cluster_map import ClusterMap, LedgerRecord
from adam_async.run.config import Waits
from adam_async.runtime.clock import Timer
from adam_async.runtime.traffic import Traffic
from transport import Identity, Link, Network, RemoteProtocolError, Request, TransportError

logger = logging.getLogger(__name__)

PART_ENTRIES = 1024
"""Entries of one message at most: some hundred kilobytes."""

MOST_TERMS = 16
"""Maximum number of terms by which a lender may be ahead of the map that a keeper knows."""

PAUSE_S = 0.05
"""Between two attempts to reach the same server."""

Entering = LeaseAsked | GroupsReported
"""What other data servers may have entered."""


class LedgerService:
    """Enters events into the ledger of a run's leases, wherever that is led.

    Args:
        network: How to reach the other data servers.
        identity: Who we are.
        waits: Deadlines.
        traffic: Where links are counted.
        on_settled: Told of each event that is settled, with what to do about it.
        on_lead: Told when we have become the lender.
        open_events: What was entered here and is not answered, oldest first.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        *,
        network: Network,
        identity: Identity,
        waits: Waits,
        traffic: Traffic,
        on_settled: Callable[[Settled], None],
        on_lead: Callable[[], None],
        open_events: Callable[[], list[Event]],
    ) -> None:
        self._network = network
        self._identity = identity
        self._reach_s = min(waits.grace_s, waits.call_s)
        self._traffic = traffic
        self._on_settled = on_settled
        self._on_lead = on_lead
        self._open_events = open_events
        self._me: LedgerReplica = (identity.node, identity.incarnation)
        self._run = ""
        self._map = ClusterMap()
        self._ledger_replication = LedgerReplication(self._me, Opening())
        self._membership: Membership
        self._group: asyncio.TaskGroup
        self._tasks: dict[LedgerReplica, asyncio.Task[None]] = {}
        """By whom they have a link to."""
        self._news = asyncio.Event()
        self._outbox: list[Event] = []
        self._partitions = 1
        self._orders: EpochOrders
        self._early: dict[str, tuple[Request, CopyLedger]] = {}
        """Copies of terms that the map does not name yet, by sender."""
        self._timer = Timer(self._next_deadline, lambda: self.enter(TimePassed()))

    async def run(self, membership: Membership) -> None:
        """Copy the ledger, or have events entered, until cancelled."""
        self._membership = membership
        async with asyncio.TaskGroup() as group:
            self._group = group
            await self._timer.run()

    @property
    def state(self) -> DataState:
        """Who has what, as far as we have heard."""
        return self._ledger_replication.ledger.state

    @property
    def leads(self) -> bool:
        """Whether we are the lender."""
        return self._ledger_replication.leads

    @property
    def keeps(self) -> bool:
        """Whether workers may ask us."""
        ledger_record = self._map.ledger_record
        return (
            ledger_record is not None
            and ledger_record.run == self._run
            and self._me in ledger_record.ledger_replicas
        )

    def take_up(self, run: str, *, partitions: int, orders: EpochOrders) -> None:
        """Begin a run's ledger.

        Args:
            run: Its id.
            partitions: Workers of a replica that take groups.
            orders: The orders of its epochs.
        """
        self._end_tasks()
        self._outbox.clear()
        self._run = run
        self._partitions, self._orders = partitions, orders
        self._ledger_replication = LedgerReplication(self._me, Opening(partitions=partitions))

    def look(self, cluster: ClusterMap) -> None:
        """The cluster map has changed: see who lends, and who else is there."""
        self._map = cluster
        self._follow_map(cluster)
        early, self._early = self._early, {}
        for request, body in early.values():
            self._answer_early(request, body)

    def _answer_early(self, request: Request, body: CopyLedger) -> None:
        try:
            self.answer_copy(request, body)
        except RemoteProtocolError as error:
            request.fail("malformed", str(error))

    def _follow_map(self, cluster: ClusterMap) -> None:
        ledger_record = cluster.ledger_record
        if ledger_record is None or ledger_record.run != self._run or not ledger_record.ledger_replicas:
            return
        if ledger_record.ledger_replicas[0] == self._me:
            self._lead(cluster, ledger_record)
            return
        if self._ledger_replication.leads and ledger_record.term > self._ledger_replication.term:
            self._ledger_replication.follow()
            self._end_tasks()
        for ledger_replica in [
            each for each in self._tasks if each != ledger_record.ledger_replicas[0] or not self.keeps
        ]:
            self._end_task(ledger_replica)
        if self.keeps and not self._ledger_replication.leads:
            self._begin_task(ledger_record.ledger_replicas[0], self._forward)

    def _lead(self, cluster: ClusterMap, ledger_record: LedgerRecord) -> None:
        ledger_replication = self._ledger_replication
        if not ledger_replication.leads or ledger_replication.term < ledger_record.term:
            self._end_tasks()
            ledger_replication.lead(ledger_record.term, ledger_record.ledger_replicas, now=_now())
            logger.info("%s lends in run %s, term %d", self._identity.node, self._run, ledger_record.term)
            self._outbox.clear()
            self._settle(ledger_replication.enter(self._open_events(), now=_now()))
            self._on_lead()
            self._timer.rearm()
        there = {
            (name, cluster.nodes[name].incarnation): cluster.nodes[name].ready == self._run
            for name in cluster.live("data")
        }
        for ledger_replica in [
            ledger_replica for ledger_replica in ledger_replication.copies() if ledger_replica not in there
        ]:
            self._end_task(ledger_replica)  # and who is not live was struck out of the map
            self._settle(ledger_replication.strike_out(ledger_replica))
        for ledger_replica, ready in there.items():
            if ledger_replica != self._me and (ready or ledger_replica in ledger_record.ledger_replicas):
                self._begin_task(ledger_replica, self._copy_for)

    # --- events ------------------------------------------------------------------------------

    def enter(self, *events: Event) -> None:
        """Have events entered: at once if we lend."""
        if self._ledger_replication.leads:
            self._settle(self._ledger_replication.enter(events, now=_now()))
            if any(isinstance(event, LeaseAsked) for event in events):
                self._timer.rearm()
        else:
            self._outbox += events
            self._wake()

    def answer_enter(self, request: Request, body: Enter) -> None:
        """Another keeper has events for the ledger.

        Raises:
            RemoteProtocolError: They are none.
        """
        peer = request.link.peer
        if not self._is_of(request, body.run):
            return
        if not self._ledger_replication.leads or body.term != self._ledger_replication.term:
            request.fail("not-lender", f"{self._identity.node} does not lend in term {body.term}")
        elif not self._ledger_replication.counts((peer.node, peer.incarnation)):
            request.fail("not-keeper", f"{peer.node} does not have the ledger")
        else:
            events = read_packed_tensor(request.message, tuple[Entering, ...], MOST_LEDGER_BYTES)
            for event in events:
                check_entering(event, peer)
            self.enter(*events)
            request.reply(pack(Entered()))

    def answer_copy(self, request: Request, body: CopyLedger) -> None:
        """A lender sends a part of the ledger. Only the lender that the map names is believed.

        Raises:
            RemoteProtocolError: It is none.
        """
        if not self._is_of(request, body.run):
            return
        peer = request.link.peer
        record = self._map.nodes.get(peer.node)
        if (
            record is None
            or not record.live
            or (record.role, record.incarnation) != ("data", peer.incarnation)
        ):
            # A copy in a later term from a node outside the cluster would end this lending, and the run.
            request.fail(
                "not-member", f"{peer.node} is no live data server of the cluster: it has to join it"
            )
            return
        known = self._map.ledger_record.term if self._map.ledger_record is not None else 0
        if body.term > known + MOST_TERMS:
            request.fail("not-lender", f"term {body.term}, and term {known} is known")
            return
        ledger_record = self._map.ledger_record
        if ledger_record is None or ledger_record.run != body.run or ledger_record.term < body.term:
            self._wait_for_map(request, body)
        elif ledger_record.term > body.term:
            request.fail("old-term", f"this is term {ledger_record.term}, not {body.term}")
        elif ledger_record.ledger_replicas[:1] != ((peer.node, peer.incarnation),):
            request.fail("not-lender", f"{peer.node} does not lend in term {body.term}")
        else:
            self._take_copy(request, body)

    def _wait_for_map(self, request: Request, body: CopyLedger) -> None:
        """Keep a copy of a later term until the map names its lender; of each server the last one."""
        node = request.link.peer.node
        if node in self._early:
            self._early[node][0].fail("not-lender", f"{node} has sent another copy since")
        # The budget of a link that has ended does not pay for its copy any more.
        self._early = {name: kept for name, kept in self._early.items() if not kept[0].link.closed}
        self._early[node] = request, body

    def _take_copy(self, request: Request, body: CopyLedger) -> None:
        part = read_packed_tensor(request.message, Part, MOST_LEDGER_BYTES)
        orders = self._orders
        check_part(part, partitions=self._partitions, images=orders.num_images, groups=orders.num_groups)
        led = self._ledger_replication.leads
        try:
            settled = self._ledger_replication.take(body.term, part)
        except CopyRefused as refused:
            request.fail(refused.code, str(refused))
            return
        if led:
            self._end_tasks()  # we hear of the new lender before the map says so: ours copy nothing more
        request.reply(pack(LedgerCopied()))
        self._settle(settled)
        if part.opening is not None:  # what we had entered may not be in this ledger
            self._outbox = self._open_events()
            self._wake()

    def _is_of(self, request: Request, run: str) -> bool:
        if run != self._run:
            request.fail("wrong-run", f"this data server is on run {self._run}, not {run}")
        return run == self._run

    def _settle(self, settled: Sequence[Settled]) -> None:
        """Do what is settled, and let those who copy know."""
        for each in settled:
            self._on_settled(each)
        self._wake()

    def _wake(self) -> None:
        if self._tasks:
            self._news.set()
            self._news = asyncio.Event()

    def _next_deadline(self) -> float | None:
        deadline = self.state.next_deadline() if self._ledger_replication.leads else None
        return None if deadline is None else self._ledger_replication.time_of(deadline)

    # --- links -------------------------------------------------------------------------------

    def _begin_task(self, peer: LedgerReplica, work: Callable[[LedgerReplica], Any]) -> None:
        if peer not in self._tasks:
            name = f"{self._identity.node}/ledger-{peer[0]}"
            self._tasks[peer] = self._group.create_task(work(peer), name=name)

    def _end_task(self, peer: LedgerReplica) -> None:
        task = self._tasks.pop(peer, None)
        if task is not None:
            task.cancel()

    def _end_tasks(self) -> None:
        for peer in list(self._tasks):
            self._end_task(peer)

    async def _forward(self, ledger_leader: LedgerReplica) -> None:
        """Have our events entered by the lender, until there is another."""
        while True:
            await self._talk(ledger_leader, self._forward_on)
            await asyncio.sleep(PAUSE_S)

    async def _forward_on(self, link: Link, ledger_leader: LedgerReplica) -> None:
        self._outbox = self._open_events()
        while True:
            news = self._news
            if not self._outbox:
                await news.wait()
                continue
            events, self._outbox = self._outbox, []
            term = self._map.ledger_record.term if self._map.ledger_record is not None else 0
            body = Enter(run=self._run, term=term)
            reply = await link.call(pack(body, [packed_tensor(events)]), timeout_s=self._reach_s)
            unpack(reply, Entered)

    async def _copy_for(self, ledger_replica: LedgerReplica) -> None:
        """Copy the ledger for somebody, until we do not lend or it is lost."""
        ledger_replication = self._ledger_replication
        while True:
            ledger_replication.welcome(ledger_replica)
            ledger_replication.begin_anew(ledger_replica)
            await self._talk(ledger_replica, self._copy_on)
            if ledger_replication.counts(ledger_replica):
                await self._strike_out(ledger_replica)
            self._settle(ledger_replication.strike_out(ledger_replica))
            await asyncio.sleep(PAUSE_S)

    async def _copy_on(self, link: Link, ledger_replica: LedgerReplica) -> None:
        ledger_replication = self._ledger_replication
        while True:
            news = self._news
            part = ledger_replication.part_for(ledger_replica, PART_ENTRIES)
            if part is None:
                await news.wait()
                continue
            body = CopyLedger(run=self._run, term=ledger_replication.term)
            reply = await link.call(pack(body, [packed_tensor(part)]), timeout_s=self._reach_s)
            unpack(reply, LedgerCopied)
            self._settle(ledger_replication.copied(ledger_replica, part))
            ledger_record = self._map.ledger_record
            if (
                ledger_replication.counts(ledger_replica)
                and ledger_record is not None
                and ledger_replica not in ledger_record.ledger_replicas
            ):
                await self._write_in(ledger_replica)

    async def _talk(self, peer: LedgerReplica, talk: Callable[[Link, LedgerReplica], Any]) -> None:
        """Hold a conversation with another data server until it breaks."""
        address = self._map.nodes[peer[0]].address
        try:
            link = await self._network.dial(address, self._identity, timeout_s=self._reach_s)
        except TransportError as error:
            logger.info("%s: %s cannot be reached: %s", self._identity.node, peer[0], error)
            return
        self._traffic.watch(link)
        try:
            await talk(link, peer)
        except TransportError as error:
            logger.info("%s: link to %s broke: %s", self._identity.node, peer[0], error)
        finally:
            link.abort()
            self._traffic.gone(link)

    # --- the map -----------------------------------------------------------------------------

    async def _write_in(self, ledger_replica: LedgerReplica) -> None:
        await self._change(
            lambda ledger_replicas: (
                None if ledger_replica in ledger_replicas else (*ledger_replicas, ledger_replica)
            ),
            f"{ledger_replica[0]} to have the leases",
        )

    async def _strike_out(self, ledger_replica: LedgerReplica) -> None:
        # Also where it is not in: what we asked for before, and may still be on its way, is void then.
        await self._change(
            lambda ledger_replicas: tuple(each for each in ledger_replicas if each != ledger_replica),
            f"{ledger_replica[0]} to be left out",
        )

    async def _change(
        self, change: Callable[[tuple[LedgerReplica, ...]], tuple[LedgerReplica, ...] | None], what: str
    ) -> None:
        """Change the keepers in the map; waits for the controller as long as we lend."""
        run, term = self._run, self._ledger_replication.term

        def changed(record: LedgerRecord) -> LedgerRecord | None:
            if (record.run, record.term) != (run, term) or record.ledger_replicas[:1] != (self._me,):
                return None
            ledger_replicas = change(record.ledger_replicas)
            return (
                None
                if ledger_replicas is None
                else msgspec.structs.replace(record, ledger_replicas=ledger_replicas)
            )

        while True:
            try:
                await self._membership.update_ledger_record(changed)
                break
            except DeadlineExceeded:
                logger.warning("%s waits for the controller: %s", self._identity.node, what)
        newest = self._membership.map.ledger_record
        if newest is None or (newest.run, newest.term) != (run, term):
            await asyncio.get_running_loop().create_future()  # somebody else lends: `look` ends this task

    def statistics(self) -> dict[str, Any]:
        """Who lends, in which term, and how many have the ledger."""
        ledger_record = self._map.ledger_record
        return {
            "leads": self._ledger_replication.leads,
            "term": self._ledger_replication.term,
            "keepers": len(ledger_record.ledger_replicas) if ledger_record is not None else 0,
        }

    def __repr__(self) -> str:
        return f"<Lending of {self._identity.node}: {self._ledger_replication!r}>"


def _now() -> float:
    return asyncio.get_running_loop().time()
