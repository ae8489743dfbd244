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
from adam_async.data_server.ledger_replication import CopyRefused, Keeper, Keeping, Part
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
from adam_async.run.cluster_map import ClusterMap, LendingRecord
from adam_async.run.config import Waits
from adam_async.runtime.timer import Timer
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


class Lending:
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
        self._me: Keeper = (identity.node, identity.incarnation)
        self._run = ""
        self._map = ClusterMap()
        self._keeping = Keeping(self._me, Opening())
        self._membership: Membership
        self._group: asyncio.TaskGroup
        self._tasks: dict[Keeper, asyncio.Task[None]] = {}
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
        return self._keeping.ledger.state

    @property
    def leads(self) -> bool:
        """Whether we are the lender."""
        return self._keeping.leads

    @property
    def keeps(self) -> bool:
        """Whether workers may ask us."""
        lending = self._map.lending
        return lending is not None and lending.run == self._run and self._me in lending.keepers

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
        self._keeping = Keeping(self._me, Opening(partitions=partitions))

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
        lending = cluster.lending
        if lending is None or lending.run != self._run or not lending.keepers:
            return
        if lending.keepers[0] == self._me:
            self._lead(cluster, lending)
            return
        if self._keeping.leads and lending.term > self._keeping.term:
            self._keeping.follow()
            self._end_tasks()
        for keeper in [each for each in self._tasks if each != lending.keepers[0] or not self.keeps]:
            self._end_task(keeper)
        if self.keeps and not self._keeping.leads:
            self._begin_task(lending.keepers[0], self._forward)

    def _lead(self, cluster: ClusterMap, lending: LendingRecord) -> None:
        keeping = self._keeping
        if not keeping.leads or keeping.term < lending.term:
            self._end_tasks()
            keeping.lead(lending.term, lending.keepers, now=_now())
            logger.info("%s lends in run %s, term %d", self._identity.node, self._run, lending.term)
            self._outbox.clear()
            self._settle(keeping.enter(self._open_events(), now=_now()))
            self._on_lead()
            self._timer.rearm()
        there = {
            (name, cluster.nodes[name].incarnation): cluster.nodes[name].ready == self._run
            for name in cluster.live("data")
        }
        for keeper in [keeper for keeper in keeping.copies() if keeper not in there]:
            self._end_task(keeper)  # and who is not live was struck out of the map
            self._settle(keeping.strike_out(keeper))
        for keeper, ready in there.items():
            if keeper != self._me and (ready or keeper in lending.keepers):
                self._begin_task(keeper, self._copy_for)

    # --- events ------------------------------------------------------------------------------

    def enter(self, *events: Event) -> None:
        """Have events entered: at once if we lend."""
        if self._keeping.leads:
            self._settle(self._keeping.enter(events, now=_now()))
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
        if not self._keeping.leads or body.term != self._keeping.term:
            request.fail("not-lender", f"{self._identity.node} does not lend in term {body.term}")
        elif not self._keeping.counts((peer.node, peer.incarnation)):
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
        known = self._map.lending.term if self._map.lending is not None else 0
        if body.term > known + MOST_TERMS:
            request.fail("not-lender", f"term {body.term}, and term {known} is known")
            return
        lending = self._map.lending
        if lending is None or lending.run != body.run or lending.term < body.term:
            self._wait_for_map(request, body)
        elif lending.term > body.term:
            request.fail("old-term", f"this is term {lending.term}, not {body.term}")
        elif lending.keepers[:1] != ((peer.node, peer.incarnation),):
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
        led = self._keeping.leads
        try:
            settled = self._keeping.take(body.term, part)
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
        deadline = self.state.next_deadline() if self._keeping.leads else None
        return None if deadline is None else self._keeping.time_of(deadline)

    # --- links -------------------------------------------------------------------------------

    def _begin_task(self, peer: Keeper, work: Callable[[Keeper], Any]) -> None:
        if peer not in self._tasks:
            name = f"{self._identity.node}/ledger-{peer[0]}"
            self._tasks[peer] = self._group.create_task(work(peer), name=name)

    def _end_task(self, peer: Keeper) -> None:
        task = self._tasks.pop(peer, None)
        if task is not None:
            task.cancel()

    def _end_tasks(self) -> None:
        for peer in list(self._tasks):
            self._end_task(peer)

    async def _forward(self, lender: Keeper) -> None:
        """Have our events entered by the lender, until there is another."""
        while True:
            await self._talk(lender, self._forward_on)
            await asyncio.sleep(PAUSE_S)

    async def _forward_on(self, link: Link, lender: Keeper) -> None:
        self._outbox = self._open_events()
        while True:
            news = self._news
            if not self._outbox:
                await news.wait()
                continue
            events, self._outbox = self._outbox, []
            term = self._map.lending.term if self._map.lending is not None else 0
            body = Enter(run=self._run, term=term)
            reply = await link.call(pack(body, [packed_tensor(events)]), timeout_s=self._reach_s)
            unpack(reply, Entered)

    async def _copy_for(self, keeper: Keeper) -> None:
        """Copy the ledger for somebody, until we do not lend or it is lost."""
        keeping = self._keeping
        while True:
            keeping.welcome(keeper)
            keeping.begin_anew(keeper)
            await self._talk(keeper, self._copy_on)
            if keeping.counts(keeper):
                await self._strike_out(keeper)
            self._settle(keeping.strike_out(keeper))
            await asyncio.sleep(PAUSE_S)

    async def _copy_on(self, link: Link, keeper: Keeper) -> None:
        keeping = self._keeping
        while True:
            news = self._news
            part = keeping.part_for(keeper, PART_ENTRIES)
            if part is None:
                await news.wait()
                continue
            body = CopyLedger(run=self._run, term=keeping.term)
            reply = await link.call(pack(body, [packed_tensor(part)]), timeout_s=self._reach_s)
            unpack(reply, LedgerCopied)
            self._settle(keeping.copied(keeper, part))
            lending = self._map.lending
            if keeping.counts(keeper) and lending is not None and keeper not in lending.keepers:
                await self._write_in(keeper)

    async def _talk(self, peer: Keeper, talk: Callable[[Link, Keeper], Any]) -> None:
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

    async def _write_in(self, keeper: Keeper) -> None:
        await self._change(
            lambda keepers: None if keeper in keepers else (*keepers, keeper),
            f"{keeper[0]} to have the leases",
        )

    async def _strike_out(self, keeper: Keeper) -> None:
        # Also where it is not in: what we asked for before, and may still be on its way, is void then.
        await self._change(
            lambda keepers: tuple(each for each in keepers if each != keeper), f"{keeper[0]} to be left out"
        )

    async def _change(
        self, change: Callable[[tuple[Keeper, ...]], tuple[Keeper, ...] | None], what: str
    ) -> None:
        """Change the keepers in the map; waits for the controller as long as we lend."""
        run, term = self._run, self._keeping.term

        def changed(record: LendingRecord) -> LendingRecord | None:
            if (record.run, record.term) != (run, term) or record.keepers[:1] != (self._me,):
                return None
            keepers = change(record.keepers)
            return None if keepers is None else msgspec.structs.replace(record, keepers=keepers)

        while True:
            try:
                await self._membership.update_lending(changed)
                break
            except DeadlineExceeded:
                logger.warning("%s waits for the controller: %s", self._identity.node, what)
        newest = self._membership.map.lending
        if newest is None or (newest.run, newest.term) != (run, term):
            await asyncio.get_running_loop().create_future()  # somebody else lends: `look` ends this task

    def statistics(self) -> dict[str, Any]:
        """Who lends, in which term, and how many have the ledger."""
        lending = self._map.lending
        return {
            "leads": self._keeping.leads,
            "term": self._keeping.term,
            "keepers": len(lending.keepers) if lending is not None else 0,
        }

    def __repr__(self) -> str:
        return f"<Lending of {self._identity.node}: {self._keeping!r}>"


def _now() -> float:
    return asyncio.get_running_loop().time()
