"""The part of a server that keeps stores on its disk: it follows the map, and answers reads of saved stores.

The server writes a store from its placement on. When all pieces of the store were written once, the server
reports the store in the cluster map. When the primaries of all bundles have reported a store, the servers
remove the saved stores that it replaces: those of another run, or of the same name. The first durable push
also waits for these reports; otherwise a loss could bring the earlier store back.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from adam_async.controller.client import Membership
from adam_async.controller.role import reply_or_fail, reply_when_room
from adam_async.errors import ConfigError, DataError, DeadlineExceeded, RunFailed
from adam_async.messages import (
    ListPins,
    ListSaved,
    PinList,
    PinShards,
    ReadSaved,
    SavedList,
    ShardsPinned,
    pack,
    packed_tensor,
    pin_state_bytes,
)
from adam_async.messages.saved_shards import MOST_SAVED_BYTES, MOST_SAVED_STORES
from adam_async.parameter_server.piece_states import catalogue_of
from adam_async.parameter_server.pins import Pins
from adam_async.parameter_server.server_disk import SAVED, ServerDisk, is_saved
from adam_async.parameter_server.store_cuts import CUTS
from adam_async.parameter_server.store_disk import StoreDisk
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import DiskCounts
from adam_async.run.run_record import begun, followed
from adam_async.run.store_record import StoreRecord, served_word
from transport import LinkClosed, Message, Request

logger = logging.getLogger(__name__)

LATER_S = 0.002
"""Minimum time between the beginnings of a store and of its replacement, in seconds."""


class SavedStores:
    """The stores on the disk of one server.

    Args:
        disk: The disk; None if the server has none.
        node: Name of the server.
        membership: Returns the membership of the server.
        spawn: Starts a task of the server, by name.
        notice: Reports a text to the operator.
    """

    def __init__(
        self,
        disk: ServerDisk | None,
        *,
        node: str,
        membership: Callable[[], Membership],
        spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        notice: Callable[[str], None],
    ) -> None:
        self._disk = disk
        self._node = node
        self._membership = membership
        self._spawn = spawn
        self._seen: ClusterMap | None = None
        self._removing: set[StoreDisk] = set()
        self._unreported = asyncio.Event()
        """Event that is set while the map lacks some changes of cuts."""
        self._reporting: asyncio.Task[None] | None = None
        if disk is not None:
            disk.ports.notice = notice

    # --- stores that are served --------------------------------------------------------------

    def begin(self, name: str, store: StoreRecord, cluster: ClusterMap) -> StoreDisk | None:
        """Begin the disk of a store that the server takes up, and return it; None without a disk."""
        if self._disk is None:
            if store.durable:
                raise ConfigError("its pushes go to disks, and this server has none: start it with --dir DIR")
            return None
        found = self._disk.of(store.id)
        found.on_complete = lambda: self._spawn("saved", self._report())
        found.on_cut = self._cut_changed
        found.begin(catalogue_of(cluster, name, store, began=self._begins(name, store)), self._spawn)
        run = cluster.run
        if run is not None and run.id == store.program and found.run is None:
            earlier = [each.run for each in self._disk if each.run is not None]
            found.note_run(begun(run, earlier), cluster.version)
        self.note_run(cluster)
        return found

    def note_run(self, cluster: ClusterMap) -> None:
        """Take the record of the run from the map.

        Call this before a bundle sees the same version. Otherwise shards on the disk could have groups of an
        epoch that the record lacks.
        """
        run = cluster.run
        found = self._disk.find(run.id) if self._disk is not None and run is not None else None
        if found is not None and found.run is not None:
            found.note_run(followed(found.run, cluster, is_whole=found.is_whole), cluster.version)

    def _begins(self, name: str, store: StoreRecord) -> float:
        """Return the beginning of a store in seconds since 1970: a time after the stores that it replaces.

        The newest whole store of a name counts; the clock may have been set back in between.
        """
        assert self._disk is not None
        began = self._disk.ports.wall_clock()
        for each in self._disk:
            old = each.catalogue
            if old is None or each.id == store.id:
                continue
            if old.name == name or (old.record.program and store.program):
                began = max(began, old.began + LATER_S)
        return began

    async def _report(self) -> None:
        assert self._disk is not None
        is_reported = False
        while not is_reported:
            cluster = self._membership().map
            found = (cluster.store(each.id) for each in self._disk if each.is_complete)
            words = sorted({served_word(store) for store in found if store is not None})
            try:
                await self._membership().set_info(**{SAVED: words})
                is_reported = True
            except DeadlineExceeded as error:  # durable pushes wait for this report
                logger.warning("%s reports the stores on its disk again: %s", self._node, error)
            except (RunFailed, LinkClosed) as error:
                logger.error("%s cannot report the stores on its disk: %s", self._node, error)
                return

    def _cut_changed(self) -> None:
        """Report all stores' cuts in the map, several quick changes together."""
        self._unreported.set()
        if self._reporting is None or self._reporting.done():
            self._reporting = self._spawn("cuts", self._report_cuts())

    async def _report_cuts(self) -> None:
        assert self._disk is not None
        while self._unreported.is_set():
            self._unreported.clear()
            followed = [each for each in self._disk if each.cuts is not None and each.is_followed]
            reports = {
                served_word(each.catalogue.record): msgspec.to_builtins(each.cuts.report)
                for each in followed
                if each.cuts is not None and each.catalogue is not None
            }
            try:
                await self._membership().set_info(**{CUTS: reports})
            except DeadlineExceeded as error:  # until then the disks keep the cuts that they have
                logger.warning("%s reports its cuts again: %s", self._node, error)
                self._unreported.set()
            except (RunFailed, LinkClosed) as error:
                logger.error("%s cannot report its cuts: %s", self._node, error)
                return

    def follow(self, cluster: ClusterMap) -> None:
        """Follow the cuts; note the stores that are whole on the disks; remove replaced and deleted ones."""
        if self._disk is None:
            return
        for store in cluster.stores.values():
            found = self._disk.find(store.id)
            if found is not None and found.cuts is not None and found.is_serving:
                found.cuts.follow(cluster, partial(self._is_primary, cluster, store.id))
            if found is not None and is_saved(cluster, store):
                found.whole()
                self.note_run(cluster)
        before, self._seen = self._seen, cluster
        gone = self._disk.superseded(cluster)
        if before is not None:
            gone += self._deleted(before, cluster)
        for each in gone:
            if each not in self._removing:
                self._removing.add(each)
                removing = self._spawn(f"removes-{each.id}", self._disk.forget(each))
                removing.add_done_callback(partial(lambda gone, _: self._removing.discard(gone), each))

    def _is_primary(self, cluster: ClusterMap, store: str, home: str) -> bool:
        record = cluster.bundle(store, home)
        return record is not None and record.primary is not None and record.primary[0] == self._node

    def _deleted(self, before: ClusterMap, cluster: ClusterMap) -> list[StoreDisk]:
        """Return the stores of clients that were deleted between two versions of one map.

        A controller that was started again without its folder begins with an empty map. This deletes nothing,
        because the map does not have this server yet.
        """
        assert self._disk is not None
        mine, known = cluster.nodes.get(self._node), before.nodes.get(self._node)
        if mine is None or known is None or mine.incarnation != known.incarnation:
            return []
        if cluster.version <= before.version or cluster.placements < before.placements:
            return []
        ids = {store.id for store in cluster.stores.values()}
        # Between two distant versions, a client may have replaced a failed store, read its states, and left.
        is_next = cluster.version == before.version + 1
        found: list[StoreDisk] = []
        for name, store in before.stores.items():
            if store.program or store.id in ids:
                continue
            if store.phase == "open" and before.pushers(store):
                # Until the disks have all of a restored store, they keep the store that it replaces.
                found += [each for each in self._disk.of_name(name) if each.id not in ids]
                self._spawn(f"pins-{store.id}", self._disk.pins.remove(-1, name))
            # A store deleted during its loading has values for only some of its shards.
            elif store.phase == "open" or (
                store.phase in ("loading", "failed") and is_next and name not in cluster.stores
            ):
                found += [each for each in self._disk if each.id == store.id]
                # A restoration that ended early leaves the pins to the store that it was to replace.
                if store.phase == "open" and is_saved(before, store):
                    self._spawn(f"pins-{store.id}", self._disk.pins.remove(-1, name))
        return found

    async def end(self) -> None:
        """Write the last changes of all stores, at the end of the server."""
        if self._disk is not None:
            await self._disk.end()

    def counts(self, id: str) -> DiskCounts | None:
        """Return the counts of a store; None if the disk does not follow the store."""
        found = self._disk.find(id) if self._disk is not None else None
        if found is None or not found.is_serving:
            return None
        counts = found.statistics()
        return DiskCounts(
            updates=counts.updates,
            writes=counts.writes,
            bytes=counts.state_bytes,
            amplification=round(counts.amplification, 3),
            rounds=counts.rounds,
            syncs=counts.syncs,
            disk_bytes=counts.disk_bytes,
            age_s=round(age_s, 3) if (age_s := found.age_s()) is not None else None,
            period_s=round(counts.period_s, 3),
            as_of=counts.on_disk_as_of,
            full=counts.is_full,
        )

    @property
    def pins(self) -> Pins | None:
        """Pins on the disk; None without a disk."""
        return self._disk.pins if self._disk is not None else None

    # --- stores that were lost, and pins -------------------------------------------------------

    def answer(self, request: Request, body: ListSaved | ReadSaved | ListPins | PinShards) -> None:
        """Answer later: the disk has to be read."""
        name = f"saved for {request.link.peer.node}"
        if isinstance(body, ListPins):
            states = self.pins.states(body.name) if self.pins is not None else []
            nbytes = sum([pin_state_bytes(each) for each in states])
            reply_when_room(request, nbytes, lambda: pack(PinList(), [packed_tensor(tuple(states))]))
            return
        if isinstance(body, PinShards):
            self._spawn(name, self._remove_pin(request, body))
            return
        if isinstance(body, ListSaved):
            if not body.pin or self.pins is None:
                self._spawn(name, self._list(request, body))
                return
            pins = self.pins
            # The heads of the pins come into memory, so they are charged before they are read.
            nbytes = pins.listed_bytes(body.name, body.pin)
            request.charge(nbytes, lambda: self._spawn(name, self._list_pins(request, body, pins)))
            return
        if self.pins is not None and self.pins.has(body.store, body.home):
            self._spawn(name, self._read_pin(request, body, self.pins))
            return
        try:
            nbytes = self._readable(body).bytes_of(body.home, body.piece, body.shards)
        except DataError as error:
            request.fail("not-saved", f"{self._node}: {error}")
            return
        # The whole piece comes into memory, so it is charged before it is read.
        request.charge(nbytes, lambda: self._spawn(name, self._read(request, body)))

    async def _remove_pin(self, request: Request, body: PinShards) -> None:
        if self.pins is not None:
            await self.pins.remove(body.pin)
        reply_or_fail(request, pack(ShardsPinned()))

    async def _list_pins(self, request: Request, body: ListSaved, pins: Pins) -> None:
        found = await pins.saved(body.name, body.pin)
        reply_or_fail(request, pack(SavedList(keeps=True), [packed_tensor(tuple(found))]))

    async def _list(self, request: Request, body: ListSaved) -> None:
        found = self._disk.of_name(body.name) if self._disk is not None else []
        cluster = self._membership().map
        for each in found:
            if not each.is_saved and _is_over(cluster, each.id):
                await each.retire(is_over=True)
        found = [each for each in found if each.id not in body.known]
        # Packing brings the list into memory, so charge it before.
        nbytes = sum([each.saved_bytes for each in _listed(found)])
        reply_when_room(request, nbytes, lambda: self._packed_list(found))

    def _packed_list(self, stores: Sequence[StoreDisk]) -> Message:
        listed, followed = _listed(stores), [each.id for each in stores if not each.is_saved]
        body = SavedList(
            keeps=self._disk is not None,
            followed=tuple(followed[:MOST_SAVED_STORES]),
            more=len(listed) + len(followed) < len(stores),
        )
        return pack(body, [packed_tensor(tuple([each.saved() for each in listed]))])

    def _readable(self, body: ReadSaved) -> StoreDisk:
        """Return the disk of a lost store. Raises DataError: this server does not have the pin."""
        found = self._disk.find(body.store) if self._disk is not None else None
        if found is None or not found.is_saved:
            raise DataError(f"no store {body.store} to read is on its disk")
        return found

    async def _read_pin(self, request: Request, body: ReadSaved, pins: Pins) -> None:
        """Read shards of a pin, once there is room for them."""
        where = body.store, body.home, body.piece, body.shards

        async def read() -> None:
            try:
                states, tensors = await pins.read(*where)
            except (ConfigError, DataError) as error:
                request.fail("not-saved", f"{self._node}: {error}")
            else:
                reply_or_fail(request, pack(states, tensors))

        try:
            nbytes = await pins.bytes_of(*where[:3])
        except (ConfigError, DataError) as error:
            request.fail("not-saved", f"{self._node}: {error}")
            return
        request.charge(nbytes, lambda: self._spawn(f"saved for {request.link.peer.node}", read()))

    async def _read(self, request: Request, body: ReadSaved) -> None:
        try:
            where = body.home, body.piece, body.shards, body.clock
            states, tensors = await self._readable(body).read(*where)
        except (ConfigError, DataError) as error:
            request.fail("not-saved", f"{self._node}: {error}")
            return
        reply_or_fail(request, pack(states, tensors))


def _listed(stores: Sequence[StoreDisk]) -> list[StoreDisk]:
    """Return as many of the newest saved stores as one list has room for, at least one."""
    listed: list[StoreDisk] = []
    room = MOST_SAVED_BYTES
    for each in sorted([each for each in stores if each.is_saved], key=lambda each: -each.began):
        room -= each.saved_bytes
        if listed and (room < 0 or len(listed) == MOST_SAVED_STORES):
            break
        listed.append(each)
    return listed


def _is_over(cluster: ClusterMap, id: str) -> bool:
    """Return whether a store no longer changes: it failed, its run is over, or it left the map."""
    store, run = cluster.store(id), cluster.run
    if store is None or store.phase == "failed":
        return True
    return bool(store.program) and (run is None or run.id != store.program or run.over)
