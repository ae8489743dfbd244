"""Finds the shards of a store on disks after the loss of all its servers, and reads them for a new store.

Each server lists the pieces on its disk. For each piece the reader takes the copy with the newest last entry:
the one with the highest generation and, among these, the highest position. A run in bsp has cuts, and the
reader takes the newest clock at which all pieces are there. The controllers place the new store independently
of the old one, so a server may no longer have a piece that it had.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import msgspec

from adam_async.checkpoint.checkpoint import CheckpointError, StoredPieces, take_states
from adam_async.errors import ConfigError
from adam_async.messages import ListSaved, ReadSaved, SavedList, SavedStore, ShardStates, pack, unpack
from adam_async.messages.saved_shards import MOST_LISTS, MOST_RECORD_BYTES, MOST_SAVED_STORES, read_saved_list
from adam_async.parameter_server.piece_states import Catalogue, chunks_of, pieces_by_name
from adam_async.parameter_server.server_disk import read_saved_stores
from adam_async.parameter_server.shard import Shard
from adam_async.persistence.records import Order, StateName
from adam_async.run.cluster_map import DISK, ClusterMap
from adam_async.run.config import Waits
from adam_async.run.run_record import RunRecord, newest, read_run_record
from adam_async.run.shard_table import ShardSpec, ShardTable, shard_sizes, shard_table
from adam_async.run.store_checks import MAX_SHARDS, check_placed_store
from adam_async.run.store_record import ArrayRecord, StoreRecord
from adam_async.run.training_program import start_of
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.disk import Disk
from transport import Link, RemoteError, RemoteProtocolError, TransportError

logger = logging.getLogger(__name__)

MOST_FAULTS = 8
"""Maximum number of faults of stores and pieces in one error, and per server in a survey's log."""

SEARCH_S = 10.0
"""Maximum time in seconds to search for missing pieces of a store: servers with them may still start."""

PAUSE_S = 0.5
"""Pause between two surveys of the disks, in seconds."""

MOST_RECORDS = 4
"""Maximum number of different records of one run that a survey keeps: the newest ones."""

MOST_LISTED_SHARDS = 4 * MAX_SHARDS
"""Maximum number of shards of all stores with one name on a server, because a reader makes tables of them.
The reader ignores a store beyond this number."""


MOST_LISTED_RECORD_BYTES = 2 * MOST_RECORD_BYTES
"""Maximum total size in bytes of all runs' records on a server: in memory they take up to thirty times as
much. The reader ignores a store beyond this size."""


@dataclass(slots=True, eq=False)
class FoundStore:
    """A store on the disks of some servers.

    Attributes:
        name: Name of the store.
        record: Record of the store as it was placed.
        arrays: Arrays of the store.
        began_ms: Time at which the store began, in milliseconds since 1970. Of two stores with one name, the
            store with the larger time is newer.
        copies: Copies of each piece, by home and piece number: generation and position of the last entry, and
            the servers that have the copy. With cuts, the position is the clock.
        records: Different records of the run on the servers, by digest: order and record.
    """

    name: str
    record: StoreRecord
    arrays: tuple[ArrayRecord, ...]
    began_ms: int
    copies: dict[tuple[str, int], dict[Order, list[str]]] = field(default_factory=dict)
    records: dict[bytes, tuple[tuple[int, int], RunRecord]] = field(default_factory=dict)

    @property
    def catalogue(self) -> Catalogue:
        """The store, as recorded on a server's disk."""
        return Catalogue(self.name, self.record, self.arrays, self.began_ms / 1000)

    @property
    def table(self) -> ShardTable:
        return shard_table(self.arrays, shard_bytes=self.record.shard_bytes)

    def has_record(self, record: StoreRecord, arrays: Sequence[ArrayRecord]) -> bool:
        """Return whether a store with the same id has the same record and placement."""
        mine, theirs = ((each.fixed, each.buckets, each.generation) for each in (self.record, record))
        return (mine, self.arrays) == (theirs, arrays)

    @property
    def run(self) -> RunRecord | None:
        """The run's newest record; None in a client's store, or if no server has the record."""
        # A server that changes its record twice in a version of the map has the order of the next version.
        by_order = sorted(self.records.values(), key=lambda each: (each[0], each[1].ended), reverse=True)
        return newest(record for _, record in by_order)

    def pieces(self) -> dict[StateName, tuple[ShardSpec, ...]]:
        """Return the shards of each piece, by home and number."""
        return pieces_by_name(self.record, self.table.shards)

    @property
    def best(self) -> dict[tuple[str, int], tuple[Order, str]]:
        """The copy of each piece that counts, with its first server; with cuts, all copies have one clock.

        Pieces are missing if no server has them. If no cut is whole, those of the newest one count.
        """
        if not self.record.takes_cuts:
            return {key: (order := max(copies), copies[order][0]) for key, copies in self.copies.items()}
        cuts = {order for copies in self.copies.values() for order in copies}
        pieces = self.pieces()
        whole = [cut for cut in cuts if all(cut in self.copies.get(key, ()) for key in pieces)]
        cut = max(whole or cuts, default=(0, 0))
        return {key: (cut, copies[cut][0]) for key, copies in self.copies.items() if cut in copies}

    def missing(self) -> tuple[str, ...]:
        """Return the homes of the bundles that have pieces which no server has; empty if none is missing."""
        best = self.best
        return tuple(sorted({key[0] for key in self.pieces() if key not in best}))

    @property
    def is_whole(self) -> bool:
        """Whether no piece is missing and, in a run's store, its record is there."""
        return not self.missing() and (self.run is not None or not self.record.program)


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """The stores of a name on the disks of all servers.

    Attributes:
        stores: The stores, the newest first.
        servers: Servers that have listed the stores on their disks.
        absent: Servers with a disk that have not, each with the reason.
        followed: Ids, by server, of stores that are not listed because a disk still follows or reads them.
        faults: Faults of invalid stores and pieces, which do not count, each with its server.
    """

    stores: tuple[FoundStore, ...]
    servers: tuple[str, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    followed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def unlisted(self, without: str) -> dict[str, str]:
        """Return the servers whose disks may have further stores, each with the reason.

        Args:
            without: Id of a store that does not count.
        """
        ids = {node: ", ".join({*of_node} - {without}) for node, of_node in self.followed.items()}
        return {**self.absent, **{node: f"it still serves or reads {id}" for node, id in ids.items() if id}}

    @property
    def faults_text(self) -> str:
        """The faults for the end of an error; empty without faults."""
        return "".join([f"; {fault}" for fault in self.faults[:MOST_FAULTS]])


class SavedShards:
    """Asks servers for the shards on their disks.

    Args:
        endpoint: The asking role.
    """

    def __init__(self, endpoint: Endpoint, *, waits: Waits) -> None:
        self._endpoint = endpoint
        self.waits = waits
        self._known: dict[str, set[str]] = {}
        """Faults of the last survey, by store name; only new faults are logged."""

    async def find(
        self, name: str, maps: Callable[[], ClusterMap], *, without: str = "", patient: bool = False
    ) -> FoundStore | None:
        """Return the newest store with a name, or a run's newest if the name is empty; None if no store
        counts.

        Args:
            maps: Returns the newest cluster map.
            without: Id of a store that does not count.
            patient: Whether to search for `SEARCH_S` even if no disk has a store that counts, because servers
                that have one may still start.

        Raises:
            CheckpointError: The disks have only a part of the store, or a server has not listed its disk's
                stores.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + SEARCH_S
        while has_disks(cluster := maps()):
            is_last = loop.time() > ends_at  # before the survey: an answer may take longer than the search
            survey = await self.survey(name, cluster)
            stores = [store for store in survey.stores if store.record.id != without]
            unlisted = survey.unlisted(without)
            found, is_ready = newest_whole(stores, None if is_last else survey.servers)
            # Otherwise a new store could replace one that only an absent server has.
            if is_ready and not unlisted and (found is not None or is_last or not patient):
                return found
            if is_last and unlisted:
                node, why = next(iter(unlisted.items()))
                raise CheckpointError(
                    f"{', '.join(unlisted)} did not list the stores on the disk, {node}: {why}; start it "
                    f"again with its folder, or end it to go on without its disk{survey.faults_text}"
                )
            if is_last and found is not None:
                raise CheckpointError(_what_is_missing(found, survey))
            await asyncio.sleep(PAUSE_S)
        return None

    async def survey(self, name: str, cluster: ClusterMap, *, pin: str = "") -> Survey:
        """Return the stores with a name on live servers' disks, or the runs' stores if the name is empty.

        Args:
            pin: Name of a pin: the result has the pins with this name, each as a separate store.
        """
        answers: dict[str, tuple[SavedList, tuple[SavedStore, ...], tuple[str, ...]]] = {}
        absent: dict[str, str] = {}

        async def ask(node: str) -> None:
            try:
                answers[node] = await self._list(name, cluster.nodes[node].address, pin)
            except (TransportError, ValueError) as error:  # a node may publish an invalid address
                if cluster.nodes[node].info.get(DISK):
                    absent[node] = str(error) or type(error).__name__

        servers = cluster.live("ps")
        async with asyncio.TaskGroup() as group:
            for node in servers:
                group.create_task(ask(node), name=f"{self._endpoint.identity.node}/saved-{node}")
        found: dict[str, list[FoundStore]] = {}
        faults: dict[str, list[str]] = {}
        for node in sorted(answers):
            room, record_room = MOST_LISTED_SHARDS, MOST_LISTED_RECORD_BYTES
            of_node = faults[node] = [f"{node} lists {fault}" for fault in answers[node][2]]
            for saved in answers[node][1]:
                await asyncio.sleep(0)  # a long record takes long to decode, and links need the loop
                record_room -= len(saved.run)
                shards, fault = 0, f"the records of runs have over {MOST_LISTED_RECORD_BYTES} bytes"
                if record_room >= 0:
                    shards, fault = _merge(found, node, saved, name, room=room)
                if fault:
                    of_node.append(f"{node} lists store {saved.id!r}: {fault}")
                room -= shards
        self._log(name, faults)
        return Survey(
            stores=tuple(sorted(chain(*found.values()), key=lambda each: -each.began_ms)),
            servers=tuple(node for node in servers if node in answers and answers[node][0].keeps),
            absent=dict(sorted(absent.items())),
            followed={node: answers[node][0].followed for node in sorted(answers)},
            faults=tuple(chain(*faults.values())),
        )

    def _log(self, name: str, faults: Mapping[str, Sequence[str]]) -> None:
        """Log the new faults of each server. A survey is soon repeated, so the log gets each fault once."""
        known = self._known.get(name, set())
        for of_node in faults.values():
            new = [fault for fault in of_node if fault not in known]
            for fault in new[:MOST_FAULTS]:
                logger.warning("%s", fault)
        self._known[name] = set(chain(*faults.values()))

    async def _list(
        self, name: str, address: str, pin: str
    ) -> tuple[SavedList, tuple[SavedStore, ...], tuple[str, ...]]:
        """Return a server's stores, newest first, in as many lists as they need."""
        stores: list[SavedStore] = []
        faults: list[str] = []
        async with self.connect(address) as link:
            for _ in range(MOST_LISTS):
                known = tuple([each.id for each in stores[:MOST_SAVED_STORES]])
                ask = ListSaved(name=name, known=known, pin=pin)
                reply = await link.call(pack(ask), timeout_s=self.waits.call_s)
                answer, (listed, wrong) = unpack(reply, SavedList), read_saved_list(reply)
                stores += listed
                faults += wrong
                if not answer.more or not listed:
                    break
            else:
                faults.append(f"more stores than fit into {MOST_LISTS} lists")
        return answer, tuple(stores[:MOST_SAVED_STORES]), tuple(faults)

    def connect(self, address: str) -> AbstractAsyncContextManager[Link]:
        """Open a link to an address, for a block. Raises TransportError."""
        endpoint = self._endpoint
        return endpoint.network.connect(address, endpoint.identity, timeout_s=self.waits.dial_s)

    def shards(self, store: FoundStore, cluster: ClusterMap) -> "DiskShards":
        """Return the shards of a store, each on the servers with its newest copy."""
        return DiskShards(
            store, {node: each.address for node, each in cluster.nodes.items()}, self.connect, self.waits
        )


class DiskShards:
    """The shards of a store on the disks of the servers; see `ShardSource`.

    A server that cannot give a piece is not asked for it again: the next server that lists the same copy
    replaces it.

    Args:
        addresses: Addresses of the servers, by node.
        connect: Opens a link to an address, for a block.
    """

    def __init__(
        self,
        store: FoundStore,
        addresses: Mapping[str, str],
        connect: Callable[[str], AbstractAsyncContextManager[Link]],
        waits: Waits,
    ) -> None:
        self._store = store
        self._addresses = addresses
        self._connect = connect
        self._waits = waits
        self._orders = {name: order for name, (order, _) in store.best.items()}
        self._servers = {name: [*store.copies[name][order]] for name, order in self._orders.items()}
        """Servers with the copy of each piece that counts, without those that could not give it."""
        self._pieces = StoredPieces(store.catalogue)
        self._piece_of = self._pieces.piece_of()

    @property
    def table(self) -> ShardTable:
        return self._pieces.table

    async def shards_of(self, specs: Sequence[ShardSpec]) -> AsyncGenerator[Sequence[Shard], None]:
        """Yield some shards, those of one message at a time: in place a bundle is one piece.

        Raises:
            CheckpointError: No server can give a piece: it is damaged or gone, or a server does not answer.
        """
        wanted: dict[StateName, list[ShardSpec]] = {}
        for spec in specs:
            wanted.setdefault(self._piece_of[spec.id], []).append(spec)
        left = {name: [*chunks_of(some, self._pieces.arrays)] for name, some in wanted.items()}
        while left:
            of_server: dict[str, list[StateName]] = {}
            for name in left:
                of_server.setdefault(self._servers[name][0], []).append(name)
            for node, names in of_server.items():
                try:
                    async with self._connect(self._addresses[node]) as link:
                        for name in names:
                            try:
                                while chunks := left[name]:
                                    yield await self._read(link, name, chunks[0])
                                    del chunks[0]
                                del left[name]
                            except (RemoteError, RemoteProtocolError) as error:  # costs no other piece
                                self._turn_from(node, name, error)
                except TransportError as error:
                    for name in [name for name in names if self._servers[name][0] == node]:
                        self._turn_from(node, name, error)

    def _turn_from(self, node: str, name: StateName, error: Exception) -> None:
        """Take the next server of a piece. Raises CheckpointError: there is none."""
        others = self._servers[name][1:]
        if not others:
            what = f"store {self._store.name!r} cannot be read from the disks"
            raise CheckpointError(f"{what}: {error}") from error
        logger.warning("%s does not give piece %d of %s: %s", node, name.shard, name.home, error)
        self._servers[name] = others

    async def _read(self, link: Link, name: StateName, numbers: tuple[int, ...]) -> Sequence[Shard]:
        bundle = self._pieces.bundle([self.table.shards[number] for number in numbers])
        clock = self._orders[name][1] if self._store.record.takes_cuts else 0
        ask = ReadSaved(
            store=self._store.record.id, home=name.home, piece=name.shard, shards=numbers, clock=clock
        )
        reply = await link.call(pack(ask), timeout_s=self._waits.call_s)
        take_states(bundle, numbers, unpack(reply, ShardStates), reply.tensors)
        return list(bundle.shards.values())


def has_disks(cluster: ClusterMap) -> bool:
    """Return whether a server keeps shards on a disk."""
    return any(cluster.nodes[node].info.get(DISK) for node in cluster.live("ps"))


def newest_whole(
    stores: Sequence[FoundStore], answered: Collection[str] | None
) -> tuple[FoundStore | None, bool]:
    """Return the newest store that counts, and whether it is whole; None and True if none counts.

    The servers begin a store before it is whole on their disks, and the store that it replaces stays. A store
    that has never been whole does not count. The record of a run states whether its store has been whole. A
    client's store counts as never whole if there is an older whole store, and if the servers with missing
    pieces have listed that they lack them.

    Args:
        stores: The stores with one name, or of runs, newest first.
        answered: Servers that have listed their stores; None if no further server's answer may come.
    """
    is_one_whole = any(store.is_whole for store in stores)
    # The clocks of servers may differ, so a run that a whole one continues does not count, whenever it began.
    runs = [store.run for store in stores if store.is_whole]
    continued = {id for run in runs if run is not None for id in start_of(run.program).runs}
    for store in stores:
        if store.record.program in continued:
            continue
        if store.is_whole:
            return store, True
        missing, run = {*store.missing()}, store.run
        if store.record.program:
            has_been_whole = not missing or (run is not None and run.is_whole)
            may_have_been = answered is not None and not missing <= {*answered}
        else:
            has_been_whole = not is_one_whole
            may_have_been = answered is None or not missing <= {*answered}
        if has_been_whole or may_have_been:
            return store, False
    return None, True


def _what_is_missing(store: FoundStore, survey: Survey) -> str:
    missing, servers = store.missing(), ", ".join(survey.servers) or "no server"
    what = f"the shards of {', '.join(missing)}" if missing else "the record"
    homes = {home for home, _ in store.pieces()}
    name, remedy = f"run {store.record.program}", f" (--servers {len(homes)})"
    if not store.record.program:
        name, remedy = f"store {store.name!r}", ", or drop it with create='new'"
    return (
        f"{what} of {name} {'are' if missing else 'is'} not on the disks of {servers}: start all servers "
        f"with their folders, as many as before{remedy}{survey.faults_text}"
    )


async def stores_of_runs(folder: Path, disk: Disk) -> tuple[FoundStore, ...]:
    """Return the stores of runs in a folder with a folder for each server, the newest first.

    The servers may be running. Invalid stores and pieces do not count.

    Raises:
        ConfigError, DataError: See `parameter_server.store_disk.read_saved_store`; or the folder cannot be
            read.
    """
    found: dict[str, list[FoundStore]] = {}
    try:
        for server in await disk.folders(folder):
            for saved in await read_saved_stores(folder / server, disk):
                _merge(found, server, saved, "")
    except FileNotFoundError:  # there is no run yet, or a server removes an earlier run
        return ()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error
    return tuple(sorted(chain(*found.values()), key=lambda each: -each.began_ms))


def _merge(
    found: dict[str, list[FoundStore]],
    node: str,
    saved: SavedStore,
    name: str,
    *,
    room: int = MOST_LISTED_SHARDS,
) -> tuple[int, str]:
    """Add one server's pieces to the store with the same record, among the stores with its id.

    Returns the store's number of shards, and an empty text. If a store is unreadable or has more shards than
    `room`, it counts as absent from the server, and the function returns 0 and the reason.
    """
    try:
        record = msgspec.json.decode(saved.record, type=StoreRecord)
        arrays = msgspec.json.decode(saved.arrays, type=tuple[ArrayRecord, ...])
        check_placed_store(record, arrays)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError):
        return 0, "its record or arrays are invalid"
    is_asked_for = saved.name == name if name else record.program
    if not is_asked_for or record.id != saved.id:
        return 0, "it has another name, or its record is that of another store"
    shards = shard_sizes(arrays, record.shard_bytes).total()
    if shards > room:
        return 0, f"it has {shards} shards, and there is room for {room} of {MOST_LISTED_SHARDS} on a server"
    stores = found.setdefault(saved.id, [])
    store = next((each for each in stores if each.has_record(record, arrays)), None)
    if store is None:
        store = FoundStore(saved.name, record, arrays, saved.began_ms)
        stores.append(store)
    store.began_ms = max(store.began_ms, saved.began_ms)
    if record.changed > store.record.changed:
        store.record = record  # it may have other vectors
    for piece in saved.pieces:
        order = (piece.generation, piece.position)
        store.copies.setdefault((piece.home, piece.piece), {}).setdefault(order, []).append(node)
    if not saved.run:
        return shards, ""
    # Most servers have the same record, whose results take far more memory than its bytes.
    digest = blake2b(saved.run, digest_size=16).digest()
    known = store.records.get(digest)
    orders = [order for order, _ in store.records.values()]
    if known is None and len(orders) == MOST_RECORDS and saved.run_order < min(orders):
        return shards, ""
    try:
        run = known[1] if known is not None else read_run_record(saved.run)
    except ValueError as error:
        return shards, str(error)
    if run.program.id != record.program:
        return shards, f"it has the record of run {run.program.id!r}"
    store.records[digest] = max(saved.run_order, known[0] if known is not None else (0, 0)), run
    if len(store.records) > MOST_RECORDS:
        del store.records[min(store.records, key=lambda each: store.records[each][0])]
    return shards, ""
