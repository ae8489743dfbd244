"""One data server's part in the ledger of leases, as leader or replica: a shell of `ledger_replication`.

`enter` takes events, and `on_settled` gets their results later. On the ledger leader events enter the ledger
at once. A ledger replica forwards events to the leader. If the link or the leader is lost before the events
are settled, the replica forwards them again, to a new leader if there is one. A server that is no replica
enters no events.

The leader has a task with a link for each server that copies the ledger. The leader removes an unreachable
server from the ledger replicas of the cluster map, and then tries to add it as a new one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from adam_async.controller.client import Membership
from adam_async.data_server.ledger import Settled
from adam_async.data_server.ledger_replication import CopyRefused, LedgerReplica, LedgerReplication, Part
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.question_checks import check_entering, check_part
from adam_async.data_server.state import DataState, Event, GroupsReported, LeaseAsked, Opening, TimePassed
from adam_async.data_server.statistics import LedgerStatistics
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
from adam_async.messages.bounds import MOST_LEDGER_BYTES
from adam_async.run.cluster_map import ClusterMap, LedgerRecord
from adam_async.run.config import Waits
from adam_async.runtime.channel import Channel, Endpoint
from adam_async.runtime.clock import Timer
from transport import (
    Identity,
    Link,
    LocalProtocolError,
    RemoteProtocolError,
    Request,
    RetrySchedule,
    TransportError,
)

logger = logging.getLogger(__name__)

PART_ENTRIES = 1024
"""Maximum number of entries in one message: some hundred kilobytes."""

MOST_TERMS = 16
"""Maximum number of terms by which a leader may be ahead of a replica's map."""

PAUSES = RetrySchedule(first_s=0.05, longest_s=0.05)
"""Pauses between two links to the same server, in seconds."""

Entering = LeaseAsked | GroupsReported
"""Events that other data servers may enter."""


class LedgerService:
    """Enters events into the ledger of a run's leases, on the leader or on a replica.

    Args:
        open_events: Returns the events entered here without an answer, oldest first.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        waits: Waits,
        *,
        on_settled: Callable[[Settled], None],
        on_lead: Callable[[], None],
        open_events: Callable[[], list[Event]],
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity = endpoint.identity
        self._reach_s = min(waits.grace_s, waits.call_s)
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
        """Tasks with a link, by the server at the other end."""
        self._wakeup = asyncio.Event()
        self._outbox: list[Event] = []
        self._partitions = 1
        self._orders: EpochOrders
        self._early: dict[str, tuple[Request, CopyLedger]] = {}
        """Copies of terms ahead of the map, by sender."""
        self._timer = Timer(self._next_deadline, lambda: self.enter(TimePassed()))

    async def run(self, membership: Membership) -> None:
        """Copy the ledger, or forward events, until cancelled."""
        self._membership = membership
        async with asyncio.TaskGroup() as group:
            self._group = group
            await self._timer.run()

    @property
    def state(self) -> DataState:
        """State of the leases, up to the last entry that this server has."""
        return self._ledger_replication.ledger.state

    @property
    def leads(self) -> bool:
        """Whether this server is the ledger leader."""
        return self._ledger_replication.leads

    @property
    def keeps(self) -> bool:
        """Whether this server is a ledger replica of the run, and may serve workers."""
        record = self._map.ledger_record
        return record is not None and record.run == self._run and self._me in record.ledger_replicas

    def take_up(self, run: str, *, partitions: int, orders: EpochOrders) -> None:
        """Begin a run's ledger."""
        self._end_tasks()
        self._outbox.clear()
        self._run = run
        self._partitions, self._orders = partitions, orders
        self._ledger_replication = LedgerReplication(self._me, Opening(partitions=partitions))

    def map_changed(self, cluster: ClusterMap) -> None:
        """Follow the cluster map: its ledger leader and its data servers."""
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
        leader = ledger_record.ledger_replicas[0]
        for other in [each for each in self._tasks if each != leader or not self.keeps]:
            self._end_task(other)
        if self.keeps and not self._ledger_replication.leads:
            self._begin_task(leader, self._forward)

    def _lead(self, cluster: ClusterMap, ledger_record: LedgerRecord) -> None:
        ledger_replication = self._ledger_replication
        if not ledger_replication.leads or ledger_replication.term < ledger_record.term:
            self._end_tasks()
            ledger_replication.lead(ledger_record.term, ledger_record.ledger_replicas, now=_now())
            logger.info(
                "%s leads the ledger of run %s, term %d", self._identity.node, self._run, ledger_record.term
            )
            self._outbox.clear()
            self._settle(ledger_replication.enter(self._open_events(), now=_now()))
            self._on_lead()
            self._timer.rearm()
        there = {
            (name, cluster.nodes[name].incarnation): cluster.nodes[name].ready == self._run
            for name in cluster.live("data")
        }
        for gone in [each for each in ledger_replication.copies() if each not in there]:
            self._end_task(gone)  # the controllers have removed the replica from the map
            self._settle(ledger_replication.strike_out(gone))
        for ledger_replica, ready in there.items():
            if ledger_replica != self._me and (ready or ledger_replica in ledger_record.ledger_replicas):
                self._begin_task(ledger_replica, self._copy_for)

    # --- events ------------------------------------------------------------------------------

    def enter(self, *events: Event) -> None:
        """Enter events: at once on the leader, otherwise through the leader."""
        if self._ledger_replication.leads:
            self._settle(self._ledger_replication.enter(events, now=_now()))
            if any(isinstance(event, LeaseAsked) for event in events):
                self._timer.rearm()
        else:
            self._outbox += events
            self._wake()

    def answer_enter(self, request: Request, body: Enter) -> None:
        """Enter the events of another ledger replica.

        Raises:
            RemoteProtocolError: The message holds no valid events.
        """
        peer = request.link.peer
        if not self._is_of(request, body.run):
            return
        if not self._ledger_replication.leads or body.term != self._ledger_replication.term:
            request.fail(
                "not-ledger-leader", f"{self._identity.node} does not lead the ledger in term {body.term}"
            )
        elif not self._ledger_replication.counts((peer.node, peer.incarnation)):
            request.fail("not-ledger-replica", f"{peer.node} does not have the ledger")
        else:
            events = read_packed_tensor(request.message, tuple[Entering, ...], MOST_LEDGER_BYTES)
            for event in events:
                check_entering(event, peer)
            self.enter(*events)
            request.reply(pack(Entered()))

    def answer_copy(self, request: Request, body: CopyLedger) -> None:
        """Take a part of the ledger from the leader that the map names; refuse parts of other servers.

        Raises:
            RemoteProtocolError: The message holds no valid part.
        """
        if not self._is_of(request, body.run):
            return
        peer = request.link.peer
        if not self._is_live_data_server(peer):
            # A copy in a later term from a node outside the cluster would end this leadership, and the run.
            request.fail(
                "not-member", f"{peer.node} is no live data server of the cluster: it has to join it"
            )
            return
        known = self._map.ledger_record.term if self._map.ledger_record is not None else 0
        if body.term > known + MOST_TERMS:
            request.fail("not-ledger-leader", f"term {body.term}, and term {known} is known")
            return
        ledger_record = self._map.ledger_record
        if ledger_record is None or ledger_record.run != body.run or ledger_record.term < body.term:
            self._wait_for_map(request, body)
        elif ledger_record.term > body.term:
            request.fail("old-term", f"this is term {ledger_record.term}, not {body.term}")
        elif ledger_record.ledger_replicas[:1] != ((peer.node, peer.incarnation),):
            request.fail("not-ledger-leader", f"{peer.node} does not lead the ledger in term {body.term}")
        else:
            self._take_copy(request, body)

    def _is_live_data_server(self, peer: Identity) -> bool:
        record = self._map.nodes.get(peer.node)
        return (
            record is not None
            and record.live
            and (record.role, record.incarnation) == ("data", peer.incarnation)
        )

    def _wait_for_map(self, request: Request, body: CopyLedger) -> None:
        """Keep a copy of a later term until the map names its leader; keep only the last copy of each
        server."""
        node = request.link.peer.node
        if node in self._early:
            self._early[node][0].fail("not-ledger-leader", f"{node} has sent another copy since")
        # The budget of an ended link no longer includes its copy.
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
            self._end_tasks()  # the new leader's copy came before the new map: copy no more entries
        request.reply(pack(LedgerCopied()))
        self._settle(settled)
        if part.opening is not None:  # a new ledger may lack the events entered here
            self._outbox = self._open_events()
            self._wake()

    def _is_of(self, request: Request, run: str) -> bool:
        if run != self._run:
            request.fail("wrong-run", f"this data server is on run {self._run}, not {run}")
        return run == self._run

    def _settle(self, settled: Sequence[Settled]) -> None:
        """Report settled events, and wake the copying tasks."""
        for each in settled:
            self._on_settled(each)
        self._wake()

    def _wake(self) -> None:
        if self._tasks:
            self._wakeup.set()
            self._wakeup = asyncio.Event()

    def _next_deadline(self) -> float | None:
        deadline = self.state.next_deadline() if self._ledger_replication.leads else None
        return None if deadline is None else self._ledger_replication.time_of(deadline)

    # --- links -------------------------------------------------------------------------------

    def _begin_task(
        self, peer: LedgerReplica, work: Callable[[LedgerReplica], Coroutine[Any, Any, None]]
    ) -> None:
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
        """Forward events to the ledger leader, until the leader changes."""
        channel = self._channel_to(ledger_leader)
        while True:
            await self._use_link(channel, ledger_leader, self._forward_on)
            await channel.pause()

    async def _forward_on(self, link: Link, ledger_leader: LedgerReplica) -> None:
        self._outbox = self._open_events()
        while True:
            wakeup = self._wakeup
            if not self._outbox:
                await wakeup.wait()
                continue
            events, self._outbox = self._outbox, []
            term = self._map.ledger_record.term if self._map.ledger_record is not None else 0
            body = Enter(run=self._run, term=term)
            reply = await link.call(pack(body, [packed_tensor(events)]), timeout_s=self._reach_s)
            unpack(reply, Entered)

    async def _copy_for(self, ledger_replica: LedgerReplica) -> None:
        """Copy the ledger to a server, until this server stops leading or the other server is lost."""
        ledger_replication = self._ledger_replication
        channel = self._channel_to(ledger_replica)
        while True:
            ledger_replication.welcome(ledger_replica)
            ledger_replication.begin_anew(ledger_replica)
            await self._use_link(channel, ledger_replica, self._copy_on)
            if ledger_replication.counts(ledger_replica):
                await self._strike_out(ledger_replica)
            self._settle(ledger_replication.strike_out(ledger_replica))
            await channel.pause()

    async def _copy_on(self, link: Link, ledger_replica: LedgerReplica) -> None:
        ledger_replication = self._ledger_replication
        while True:
            wakeup = self._wakeup
            part = ledger_replication.part_for(ledger_replica, PART_ENTRIES)
            if part is None:
                await wakeup.wait()
                continue
            body = CopyLedger(run=self._run, term=ledger_replication.term)
            reply = await link.call(pack(body, [packed_tensor(part)]), timeout_s=self._reach_s)
            unpack(reply, LedgerCopied)
            self._settle(ledger_replication.copied(ledger_replica, part))
            record = self._map.ledger_record
            known = record is None or ledger_replica in record.ledger_replicas
            if ledger_replication.counts(ledger_replica) and not known:
                await self._write_in(ledger_replica)

    def _channel_to(self, peer: LedgerReplica) -> Channel:
        return Channel(self._endpoint, peer=peer[0], address="", peer_role="data", pauses=PAUSES)

    async def _use_link(
        self, channel: Channel, peer: LedgerReplica, work: Callable[[Link, LedgerReplica], Awaitable[None]]
    ) -> None:
        """Dial another data server at its address in the map, and use the link until it breaks."""
        channel.address = self._map.nodes[channel.peer].address
        try:
            link = await channel.dial(self._reach_s)
        except TransportError as error:
            logger.info("%s: %s cannot be reached: %s", self._identity.node, channel.peer, error)
            return
        try:
            await work(link, peer)
        except LocalProtocolError:
            raise  # no other link would take the message
        except TransportError as error:
            logger.info("%s: link to %s broke: %s", self._identity.node, channel.peer, error)
        finally:
            channel.drop()

    # --- the map -----------------------------------------------------------------------------

    async def _write_in(self, ledger_replica: LedgerReplica) -> None:
        await self._change(
            lambda before: None if ledger_replica in before else (*before, ledger_replica),
            f"{ledger_replica[0]} to become a ledger replica",
        )

    async def _strike_out(self, ledger_replica: LedgerReplica) -> None:
        # Also if the map does not have the replica, because an earlier change in progress is then void.
        await self._change(
            lambda before: tuple(each for each in before if each != ledger_replica),
            f"{ledger_replica[0]} to be removed",
        )

    async def _change(
        self, change: Callable[[tuple[LedgerReplica, ...]], tuple[LedgerReplica, ...] | None], what: str
    ) -> None:
        """Change the ledger replicas in the map; wait for the controllers while this server leads."""
        run, term = self._run, self._ledger_replication.term

        def changed(newest: ClusterMap) -> LedgerRecord | None:
            """Return the changed record, if this server still leads the ledger of this run."""
            record = newest.ledger_record
            if record is None or (record.run, record.term) != (run, term):
                return None
            if record.ledger_replicas[:1] != (self._me,):
                return None
            after = change(record.ledger_replicas)
            return None if after is None else msgspec.structs.replace(record, ledger_replicas=after)

        while True:
            try:
                await self._membership.update("lending", changed)
                break
            except DeadlineExceeded:
                logger.warning("%s waits for the controller: %s", self._identity.node, what)
        newest = self._membership.map.ledger_record
        if newest is None or (newest.run, newest.term) != (run, term):
            # Another server leads: `map_changed` ends this task.
            await asyncio.get_running_loop().create_future()

    def statistics(self) -> LedgerStatistics:
        """Return whether this server leads the ledger, the term, and the number of replicas."""
        ledger_record = self._map.ledger_record
        return LedgerStatistics(
            leads=self._ledger_replication.leads,
            term=self._ledger_replication.term,
            ledger_replicas=len(ledger_record.ledger_replicas) if ledger_record is not None else 0,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
