"""The parameter-server role: the bundles of stores that the controllers place on this server.

The server takes up a bundle when the bundle's record in the cluster map names the server as a member. The
server drops the bundle when the store leaves the map, or when the server is no longer a member. The client or
driver loads a new store's values into the primaries. Each primary then reports that it serves the store. A
server that joins later gets the values from the primary. `ServedStore` has the shards of a bundle and answers
questions. A server's bundles take turns in rounds of the loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeGuard

import msgspec

from adam_async.controller.client import Confirmation
from adam_async.controller.role import Role, RoleSettings
from adam_async.errors import ConfigError, DeadlineExceeded, RunFailed, binding, counted
from adam_async.messages import (
    USERS,
    Body,
    GetRecord,
    GetStatistics,
    KeepStill,
    ListPins,
    ListSaved,
    LoadShards,
    MapShards,
    PinShards,
    Pull,
    Push,
    ReadGroupSets,
    ReadSaved,
    ReadShards,
    ReportSteps,
    Standing,
    Tick,
    UnmapShards,
)
from adam_async.messages.replication import Begin
from adam_async.parameter_server.bundle_copy import BACK_OFF_S
from adam_async.parameter_server.members_watch import PAUSE_S
from adam_async.parameter_server.replication.local_copy import Message as ReplicationMessage
from adam_async.parameter_server.saved_stores import SavedStores
from adam_async.parameter_server.served_store import ServedStore, words_of
from adam_async.parameter_server.server_disk import ServerDisk
from adam_async.parameter_server.server_links import CopiesPath, ServerLinks
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import count_server, count_store, most_updates
from adam_async.parameter_server.storage import StoragePool
from adam_async.parameter_server.store_host import Observe, StoreHost
from adam_async.run.cluster_map import COPIES, DISK, ELSEWHERE, MOST_REASON, NOTICE, NUMERICS, ClusterMap
from adam_async.run.counts import ServerCounts, StoreCounts
from adam_async.run.store_record import BundleRecord, Member, StoreRecord, bundle_key, joined_arrays
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import Timer
from dataflow import ComputePool, MakePool
from transport import BufferPool, Link, LinkClosed, Request

logger = logging.getLogger(__name__)

NO_MEMORY = "it has no memory for them"
"""Reason of a server that could not allocate its shards."""

STORES_COUNTED = 16
"""Maximum number of stores in a server's metrics."""

TURN_WORK = 1 << 20
"""Work that ends a round of the loop, see `PIECE_WORK`: four gradients of a shard of 2^18 values."""

STORE_TYPES = (
    *(Push, Pull, Tick, ReportSteps, ReadShards, LoadShards, GetRecord, ReadGroupSets, PinShards),
    *(MapShards, UnmapShards, KeepStill),
)
"""Types of the questions about a store; each question names the store."""


class ParameterServer(Role):
    """One parameter server, for the duration of its `async with`.

    Args:
        settings: Place of the server in the cluster. The timeline also gets the applied batches and step
            reports.
        buffers: Memory for the copies of values in answers.
        storage_pool: Memory of the shards, which roles of one process may share.
        make_pool: Makes the pool that loads compiled kernels of rules; without it, NumPy applies the rules.
        make_memory_pool: Makes the pool for memory that clients read.
        available_bytes: Returns the memory in bytes that shards could use; None: it is neither reported nor
            checked.
        numerics: Facts that decide the last bits of the server's results; see `cluster_map.NUMERICS`.
        observe: Follows the entries of bundles with a log.
        copies: Path to the other servers; None: they use the clients' listener.
        elsewhere: Address of a second listener, for data servers in other processes that cannot reach the
            first one; empty: they can.
        disk: Open disk for the states of the server's stores; None: the states are only in memory.
        at_once: Whether pushes that meet idle shards take the short way; see `at_once.py`.
        rules: User rules that the server may apply; None: none.

    Cancelling the block ends the server between two rounds of work; queued pushes are not acknowledged.
    """

    in_place: Collection[str] = (Push.__name__,)

    def __init__(
        self,
        settings: RoleSettings,
        *,
        buffers: BufferPool,
        storage_pool: StoragePool | None = None,
        make_pool: MakePool | None = None,
        make_memory_pool: MakePool = ComputePool,
        available_bytes: Callable[[], int] | None = None,
        numerics: Mapping[str, str] | None = None,
        observe: Observe | None = None,
        copies: CopiesPath | None = None,
        elsewhere: str = "",
        disk: ServerDisk | None = None,
        at_once: bool = True,
        rules: RuleSource | None = None,
    ) -> None:
        info: dict[str, Any] = {"memory_bytes": available_bytes()} if available_bytes is not None else {}
        if numerics is not None:
            info[NUMERICS] = numerics
        if disk is not None:
            info[DISK] = True
        super().__init__(settings, info=info)
        self._buffers = buffers
        self._make_pool, self._make_memory_pool = make_pool, make_memory_pool
        self._compiling = asyncio.Lock()
        self._observe = observe
        self._copies = copies
        self._elsewhere = elsewhere
        self._at_once = at_once
        self._rules = rules or RuleSource()
        self._storage_pool = storage_pool or StoragePool()
        self.served: dict[tuple[str, str], ServedStore] = {}
        """Bundles by store id and home."""
        self._without: dict[str, tuple[str, str]] = {}
        """Stores of the map that this server cannot hold, by id, with code and text of the refusals."""
        self._busy: deque[ServedStore] = deque()
        """Stores with work for a later round, each once."""
        self._draining = False
        self._declined: set[tuple[str, str]] = set()
        """Bundles that this server is about to leave, by the id of the store and the home."""
        self._saved = SavedStores(
            disk,
            node=self._identity.node,
            membership=lambda: self._membership,
            spawn=self._spawn,
            notice=self._notice,
        )
        self._loaded = asyncio.Event()
        self._timer = Timer(self._next_deadline, self._due)
        self._links: ServerLinks

    async def _listen_further(self, stack: AsyncExitStack) -> None:
        """Open the listeners for other servers and for data servers elsewhere, and note their addresses."""
        if self._elsewhere:
            self._info[ELSEWHERE] = await self._listen_at(self._elsewhere, stack)
        path = self._copies
        if path is None:
            return
        with binding(path.address, "choose another with --copies-bind"):
            listener = await stack.enter_async_context(
                path.network.listen(path.address, self._identity, self._on_link)
            )
        self._info[COPIES] = listener.address

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        self._links = ServerLinks(
            self._endpoint,
            pieces=Endpoint(self._copies.pieces, self._identity, self._traffic) if self._copies else None,
            spawn=self._spawn,
            now=self._loop.time,
            on_message=self._on_message,
            on_link=self._on_entries_link,
            on_tick=self._on_tick,
            entries_wait=self._entries_wait,
        )
        return {
            "follow": self._follow(),
            "timer": self._timer.run(),
            "ready": self._announce(),
            "beats": self._links.run(),
        }

    async def _goodbye(self) -> None:
        for served in self.served.values():
            served.end_compilation()
            served.bundle.end_pin()
        if self._saved.pins is not None:
            self._saved.pins.end()
        # The stores fail with the departure of this server, and leave it.
        await self._saved.end()
        for served in self.served.values():
            if served.mapped is not None:  # not before: the last changes have the steps of workers that leave
                served.mapped.end(lets_go=False)
        await super()._goodbye()

    def unready(self) -> str:
        """Return why the server is not ready; empty if it serves, with all its copies in sync."""
        if reason := super().unready():
            return reason
        home = self._membership.unready_copy()
        return f"{self._identity.node} joins the shards of {home}" if home else ""

    def store(self, id: str) -> ServedStore | None:
        """Return the bundle of a store whose home this server is."""
        return self.served.get((id, self._identity.node))

    @property
    def state(self) -> ServerState | None:
        """State of the newest run's store; None until all shards have values."""
        states = self._states()
        return states[-1] if states else None

    def _states(self) -> list[ServerState]:
        """Return the states of the bundles that this server leads in the newest run's store."""
        of_runs = [each for each in self.served.values() if each.store.program and each.complete]
        return [each.state for each in of_runs if each.store.id == of_runs[-1].store.id]

    def _standings(self) -> Mapping[str, Standing]:
        names = {store.id: name for name, store in self._membership.map.stores.items()}
        return {
            bundle_key(names[id], home): served.copy.standing
            for (id, home), served in self.served.items()
            if served.copy is not None and id in names
        }

    # --- stores --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take up each bundle with a copy here, drop those that have left, and follow the others."""
        async for cluster in self._membership.changes():
            await self._map_changed(cluster)  # whose locals would keep the shards of a deleted store

    async def _map_changed(self, cluster: ClusterMap) -> None:
        self._saved.note_run(cluster)
        for key in [key for key, served in self.served.items() if not _is_needed(cluster, served.store)]:
            self.served.pop(key).end()
            self._loaded.set()
        self._without = {
            id: refusal for id, refusal in self._without.items() if cluster.store(id) is not None
        }
        for name, store in cluster.stores.items():
            if not _is_needed(cluster, store):
                continue
            for home in sorted(set(store.buckets)):
                record = cluster.bundle(store.id, home)
                served = self.served.get((store.id, home))
                is_new = served is None and (store.id, home) not in self._declined
                if is_new and record is not None and self._me in record.members:
                    served = self._take_up(name, store, home, record, cluster)
                    await asyncio.sleep(0)  # heartbeats must not wait for all stores
                if served is not None:
                    served.map_changed(cluster)
        self._follow_members(cluster)
        self._saved.follow(cluster)

    @property
    def _me(self) -> Member:
        return self._identity.node, self._identity.incarnation

    def _follow_members(self, cluster: ClusterMap) -> None:
        """Keep links to the servers with copies of the same bundles."""
        copies = [served.copy for served in self.served.values() if served.copy is not None]
        peers = {member for copy in copies for member in copy.peers | copy.away}
        addresses = {
            member: cluster.copies_address(member[0])
            for member in sorted(peers)  # in one order: a simulated run must not depend on hashes
            if (node := cluster.nodes.get(member[0])) is not None and node.incarnation == member[1]
        }
        entries = {member for copy in copies if copy.is_primary for member in copy.peers}
        self._links.follow(addresses, entries)

    def _take_up(
        self, name: str, store: StoreRecord, home: str, record: BundleRecord, cluster: ClusterMap
    ) -> ServedStore | None:
        """Allocate the shards of a bundle; None if this server has no room for them.

        Other stores are not affected, and the client that loads this store learns the reason.
        """
        try:
            arrays = joined_arrays(name, store, cluster.arrays)
            served = ServedStore(store, arrays, home, record, self._host_of(name, store, home, cluster))
        except (MemoryError, ConfigError) as error:
            why = NO_MEMORY if isinstance(error, MemoryError) else str(error)
            if self._me in record.joining:
                self._decline(store.id, home, why)
                return None
            text = f"{self._identity.node} cannot hold its shards of store {name!r}: {why}"
            if store.id not in self._without:  # each change of the map tries again
                self._notice(text)
            if isinstance(error, MemoryError):
                text = f"{text}: add servers, or delete a store"
            self._without[store.id] = "no-room" if isinstance(error, MemoryError) else "unfit", text
            return None
        self._without.pop(store.id, None)
        self.served[store.id, home] = served
        for member in record.members:
            self._links.begin_again(member, (store.id, home))
        if served.complete:  # the bundle has no shards
            self._loaded.set()
        return served

    def _host_of(self, name: str, store: StoreRecord, home: str, cluster: ClusterMap) -> StoreHost:
        return StoreHost(
            me=self._me,
            waits=self._waits,
            buffers=self._buffers,
            storage_pool=self._storage_pool,
            timeline=self._timeline,
            make_pool=self._make_pool,
            make_memory_pool=self._make_memory_pool,
            compiling=self._compiling,
            now=self._loop.time,
            spawn=self._spawn,
            drain_soon=self._drain_soon,
            rearm=self._timer.rearm,
            loaded=self._loaded.set,
            left=self._removed,
            fail=self._callbacks.fail,
            declines=self._declines,
            links=self._links,
            call_soon=lambda callback: self._loop.call_soon(self._callbacks.run, callback),
            set_record=partial(self._set_bundle, home),
            next_member=partial(self._membership.next_member, store.id, home),
            is_live=self._is_live,
            notice=self._notice,
            observe=self._observe,
            disk=self._saved.begin(name, store, cluster),
            pins=self._saved.pins,
            at_once=self._at_once,
            rules=self._rules,
        )

    def _removed(self, served: ServedStore) -> None:
        """Drop a bundle whose primary removed this server from the copies."""
        if self._membership.joined:  # a server that ends needs no line
            logger.warning(
                "%s was removed from the copies of the shards of %s in store %s: it was silent or too slow, "
                "for example frozen; it gets a new copy if the store lacks one",
                *(self._identity.node, served.home, served.store.id),
            )
        self._left(served)

    def _left(self, served: ServedStore) -> None:
        if self.served.pop((served.store.id, served.home), None) is not None:
            served.end()

    def _is_live(self, member: Member) -> bool:
        record = self._membership.map.nodes.get(member[0])
        return record is not None and record.live and record.incarnation == member[1]

    def _declines(self, served: ServedStore) -> None:
        self._left(served)
        self._decline(served.store.id, served.home, NO_MEMORY)

    def _decline(self, store: str, home: str, why: str) -> None:
        """Leave the joining members of a bundle that this server cannot hold, and name the reason."""
        if (store, home) in self._declined:
            return
        self._declined.add((store, home))
        cure = ": free memory there, add servers, or delete a store" if why == NO_MEMORY else ""
        self._notice(
            f"{self._identity.node} does not join the shards of {home} in store {store}: {why}; it is "
            f"invited again after {PAUSE_S:g} s{cure}"
        )
        self._spawn(f"leaves-{home}", self._leave_joining(store, home))

    async def _leave_joining(self, store: str, home: str) -> None:
        """Leave the joining members, and repeat this until the map has the outcome."""
        while True:
            record = self._membership.map.bundle(store, home)
            if record is None or self._me not in record.joining:
                break
            left = tuple(member for member in record.joining if member != self._me)
            new = msgspec.structs.replace(record, joining=left)
            outcome = await self._set_bundle(home, new, record.changed)
            if outcome is None:
                return
            if outcome == "unknown":
                await asyncio.sleep(BACK_OFF_S)
        self._declined.discard((store, home))

    def _notice(self, text: str) -> None:
        """Report a text to the operator."""
        logger.warning("%s", text)
        report = self._set_notice(text[:MOST_REASON])
        try:
            self._spawn("notice", report)
        except RuntimeError:  # the server ends: the last round of its disk may give a notice, too
            report.close()

    async def _set_notice(self, text: str) -> None:
        try:
            await self._membership.set_info(**{NOTICE: text})
        except (RunFailed, DeadlineExceeded, LinkClosed) as error:
            logger.info("%s could not report a notice: %s", self._identity.node, error)

    # --- copies --------------------------------------------------------------------------------

    async def _set_bundle(self, home: str, record: BundleRecord, expected: int) -> Confirmation | None:
        """Change the record of a bundle. Returns None if this server ends."""
        try:
            return await self._membership.update_bundle(home, expected, record, timeout_s=self._waits.call_s)
        except RunFailed as error:
            logger.error("%s cannot change bundle %s: %s", self._identity.node, home, error)
            return "unknown"
        except LinkClosed:
            return None

    def _on_message(self, sender: Member, message: ReplicationMessage, tensors: Sequence[Any]) -> None:
        bundle = message.store, message.home
        if isinstance(message, Begin):
            self._links.began(sender, bundle)
        served = self.served.get(bundle)
        if served is not None and served.copy is not None:
            served.copy.received(sender, message, tensors)

    def _on_entries_link(self, member: Member, is_up: bool) -> None:
        for served in tuple(self.served.values()):
            if served.copy is not None:  # the member may join the bundle while the link is there
                served.copy.link(member, is_up=is_up)

    def _on_tick(self) -> None:
        for served in tuple(self.served.values()):
            if served.copy is not None:
                served.copy.tick()
        self._follow_members(self._membership.map)

    def _entries_wait(self) -> bool:
        return any(served.copy is not None and served.copy.is_sending for served in self.served.values())

    async def _announce(self) -> None:
        """Report the stores with values for all their shards here."""
        while True:
            await self._loaded.wait()
            self._loaded.clear()
            serves = words_of(self.served.values())
            try:
                await self._membership.set_node(serves=serves)
            except RunFailed as error:
                logger.error(
                    "%s cannot report %s: %s", self._identity.node, counted(len(serves), "store"), error
                )
            except DeadlineExceeded:
                self._loaded.set()  # no controller led; the values are here, so the report is repeated

    # --- questions -----------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        if link.peer.role == "ps":
            self._traffic.watch(link)
            try:
                await self._links.attend(link)
            finally:
                self._traffic.gone(link)
            return
        try:
            await super()._on_link(link)
        finally:
            for served in self.served.values():
                served.link_closed()

    def _answer(self, request: Request, body: Body) -> None:
        if type(body) is Push:
            served = self.served.get((body.store, self._identity.node))
            if served is not None and served.short.take(request, body):
                return
        if isinstance(body, ListSaved | ReadSaved | ListPins) or _is_for_disk(body):
            self._saved.answer(request, body)
            return
        if not isinstance(body, STORE_TYPES):
            super()._answer(request, body)
            return
        if isinstance(body, GetRecord):
            served = self._bundle_of(request, body.run, body.home)
        elif isinstance(body, LoadShards | MapShards | UnmapShards | KeepStill):
            served = self._store_of(request, body.store, ())
        elif isinstance(body, ReadGroupSets | PinShards):
            served = self._bundle_of(request, body.store, body.home)
        else:
            served = self._store_of(request, body.store, body.shards)
        if served is not None:
            served.answer(request, body)

    def _report_statistics(self, request: Request, body: GetStatistics) -> None:
        """Answer with the counts of the store that the request names; drivers otherwise get all counts."""
        is_user, served = request.link.peer.role in USERS, self.served.values()
        led = [each for each in served if each.store.id == body.run and each.is_primary]
        if led and (is_user or not led[0].store.program):
            led[0].reports.answer(request, lambda: count_store([each.state for each in led], StoreCounts()))
        elif not is_user:
            super()._report_statistics(request, body)
        elif self._store_of(request, body.run, ()) is not None:
            request.fail("not-primary", f"{self._identity.node} is no primary of store {body.run}")

    def _store_of(self, request: Request, id: str, shards: Sequence[int]) -> ServedStore | None:
        """Return the bundle of a store with these shards.

        Without the bundle, refuse the request and return None. A message without shards is for the bundle
        whose home this server is.
        """
        served = self.store(id)
        if served is not None and (served.store.copies == 1 or not shards):
            return served
        of_store = next((each for each in self.served.values() if each.store.id == id), None)
        return self._bundle_of(request, id, of_store.home_of(shards) if of_store is not None else "")

    def _bundle_of(self, request: Request, id: str, home: str) -> ServedStore | None:
        """Return the bundle of a store by its home; if there is none, refuse the request and return None."""
        served = self.served.get((id, home))
        if served is not None:
            return served
        if id in self._without:
            request.fail(*self._without[id])
        elif any(store == id for store, _ in self.served):
            request.fail("not-primary", f"{self._identity.node} has no copy of bundle {home or 'of its own'}")
        elif self.served:
            here = ", ".join(sorted({id for id, _ in self.served})[:8])
            request.fail("wrong-run", f"this server has stores {here}, not {id}")
        else:
            request.fail("not-ready", f"{self._identity.node} has not taken up a store")
        return None

    def _next_deadline(self) -> float | None:
        found = [each.next_deadline() for each in self.served.values()]
        return min((deadline for deadline in found if deadline is not None), default=None)

    def _due(self) -> None:
        for served in tuple(self.served.values()):
            served.give_up()

    # --- rounds --------------------------------------------------------------------------------

    def _drain_soon(self, served: ServedStore) -> None:
        if served not in self._busy:
            self._busy.append(served)
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._callbacks.run, self._drain)

    def _drain(self) -> None:
        """Do one round's work for the store that has waited longest; the next round takes the others."""
        served = self._busy.popleft()
        self._draining = False
        if self.served.get((served.store.id, served.home)) is served and served.apply_some(TURN_WORK):
            self._busy.append(served)
        if self._busy and not self._draining:
            self._draining = True
            self._loop.call_soon(self._callbacks.run, self._drain)

    # --- inspection ----------------------------------------------------------------------------

    def statistics(self) -> ServerCounts:
        """Return the counts of the server, and of its shards in the current or last run."""
        states = self._states()
        counts = count_server(states) if states else ServerCounts()
        if states:
            counts.disk = self._saved.counts(states[0].store)
            served = self.store(states[0].store)  # None if this server leads only other servers' bundles
            of_run = served.mapped if served is not None else None
            if of_run is not None:
                counts.steps_cut = of_run.steps_cut
                counts.steps_in_place = most_updates(states) - of_run.steps_cut
        return self._with_common(counts)

    def store_counts(self) -> Mapping[str, StoreCounts]:
        """Return, by store name, the counts of the client stores whose bundles this server leads."""
        found: dict[str, StoreCounts] = {}
        for name, store in sorted(self._membership.map.stores.items()):
            led = [each for each in self.served.values() if each.store.id == store.id and each.is_primary]
            if led and not store.program and len(found) < STORES_COUNTED:
                found[name] = StoreCounts(node=self._identity.node)
                for _ in count_store([each.state for each in led], found[name]):
                    pass
        return found

    def __repr__(self) -> str:
        return f"<ParameterServer {self._identity.node} at {self.address} with {len(self.served)} bundles>"


def _is_for_disk(body: Body) -> TypeGuard[PinShards]:
    """Return whether a pin is to be removed from the disk of this server, also without its bundle."""
    return isinstance(body, PinShards) and body.removes and not body.home


def _is_needed(cluster: ClusterMap, store: StoreRecord) -> bool:
    """Return whether a server keeps a store: the map has the store with the same placement, and the store has
    not failed.

    The store of a failed run is kept too, because a driver reads it. A store that was created again under the
    same id has another placement.
    """
    now = cluster.store(store.id)
    if now is None or now.generation != store.generation:
        return False
    return now.phase in ("loading", "open") or bool(now.program)
