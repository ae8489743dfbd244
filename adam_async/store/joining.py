"""The opening of a store by a client: it joins the cluster, finds or creates the store, and loads its values.

If the creator, or a server with the only values of some shards, is lost before the store is open, a client
that opens the store with arrays creates it again.

A store may come back from the disks of its servers: found by its name, and loaded into a new store. All its
servers were lost, so a client creates it again, with another id. The store's values and its rules' state come
from the disks; versions and clocks begin at 0, and each client begins with a new session. A store that begins
with a pin is loaded in the same way. If its shards have other borders, they are cut again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.saved_shards import SEARCH_S, FoundStore, SavedShards
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.tensors import RecutShards, ShardSource, WholeTensors
from adam_async.client.parameter_client import SessionIdentity
from adam_async.controller.client import Membership
from adam_async.errors import AdamError, DeadlineExceeded, RunFailed, ShardUnavailable, StoreError, counted
from adam_async.run.arrays import ArraySpec
from adam_async.run.cluster_map import ClusterMap, replica_generation
from adam_async.run.config import DEFAULT_COPIES
from adam_async.run.shard_table import ShardTable, shard_table
from adam_async.run.store_record import ArrayRecord, StoreRecord, VectorRecord, joined_arrays, served_word
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import Within
from adam_async.store.arguments import OpenArguments, consistency_of
from adam_async.store.arrays import flat_values
from adam_async.store.pins import find_pin
from adam_async.store.saved_file import SavedFile, read_store
from transport import TransportError

logger = logging.getLogger(__name__)

CREATE_TRIES = 3
"""Number of attempts to create a store that another client creates at the same time."""

DELETE_S = 2.0
"""Maximum time to delete a store that did not open, in seconds."""

NOTICE_S = 2.0
"""Time after which a log line names a wait for the controllers or servers, in seconds."""

CREATE_PAUSE_S = 0.2
"""Maximum wait in seconds for another client's store after a refused attempt to create it."""


ONLY_ON_DISKS = (
    ". A store that is only on the disks of servers is one of the cluster once a client that is no reader "
    "opens it; create='new' drops it"
)
"""End of the text that refuses an absent store, for calls that do not look on the disks."""


class Joining:
    """The opening of a store by one client.

    Args:
        name: Name of the store.
        arguments: Arguments of the store's caller.
        endpoint: Endpoint of the client.
        membership: Membership of the client; the caller runs it.
        entropy: Returns a number of random bytes.
    """

    def __init__(
        self,
        name: str,
        arguments: OpenArguments,
        endpoint: Endpoint,
        membership: Membership,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._endpoint = endpoint
        self._node = endpoint.identity.node
        self._membership = membership
        self._entropy = entropy
        self._waits = arguments.waits
        self._created = 0
        """Number of stores that this client has tried to create."""
        self._saved = SavedShards(endpoint, waits=arguments.waits)
        self._found: FoundStore | None = None
        """Store on the servers' disks that this client creates again without arrays of its own; else None."""
        self._origin: SavedFile | None = None
        """Pin or file with which the store begins, once it is found."""

    async def join(self) -> tuple[StoreRecord, tuple[ArrayRecord, ...]]:
        """Return the open store and its arrays.

        Raises:
            StoreError: The store exists and differs, or does not exist, or has failed.
            DeadlineExceeded: The store was not open within `prepare_s`; the error names the phase.
        """
        arguments, membership = self._arguments, self._membership
        what = "the controllers to accept this client"
        await membership.wait_for(lambda _: membership.joined, what, self._waits.start_s + self._waits.call_s)
        ends_at = asyncio.get_running_loop().time() + self._waits.prepare_s
        while True:
            store = membership.map.stores.get(self._name)
            if store is None or store.phase == "failed":
                if not arguments.reader and (arguments.arrays is None or arguments.has_origin):
                    arguments = await self._look_for_values()
                store = await self._create(store)
            elif arguments.create == "new":
                raise StoreError(
                    f"store {self._name!r} exists: choose another name, delete it, or leave create out"
                )
            arrays = joined_arrays(self._name, store, membership.map.arrays)
            if arguments.arrays is not None:
                _compare(self._name, arguments, store, arrays)
            try:
                opened = await self._wait_open(store, arrays, ends_at)
            except BaseException:
                if store.creator == self._node:
                    await self._delete(store)
                raise
            if opened is not None:
                return opened, arrays

    async def _look_for_values(self) -> OpenArguments:
        """Look for the store on the disks, else for its pin or file; return the arguments with arrays."""
        arguments, membership, found = self._arguments, self._membership, None
        if arguments.create != "new":
            found = await find_saved(self._saved, self._name, lambda: membership.map)
        if arguments.arrays is None:
            self._found = found
        if not arguments.has_origin or found is not None:
            return arguments
        # Before the creation: a refusal leaves no store.
        origin = self._origin = await self._find_origin()
        if arguments.arrays is None:
            record = origin.record
            self._arguments = msgspec.structs.replace(
                arguments,
                arrays={each.name: ArraySpec(each.shape, each.dtype, each.split) for each in origin.arrays},
                rule={each.name: record.rules[each.rule] for each in origin.arrays},
                consistency=consistency_of(record.slack, is_summed=record.summed_weight > 0),
                replicas=arguments.replicas or record.replicas,
                shard_bytes=record.shard_bytes,
            )
        return self._arguments

    async def _find_origin(self) -> SavedFile:
        """Return the pin or the file. Raises StoreError: an absent origin, other arrays or rules."""
        arguments, membership = self._arguments, self._membership
        if arguments.init is not None:
            whose, found = str(arguments.init), await read_store(Path(arguments.init))
        else:
            store, pin = arguments.pinned
            on_disks = await find_pin(self._saved, store, pin, lambda: membership.map, search_s=SEARCH_S)
            source = self._saved.shards(on_disks, membership.map)
            whose = f"pin {pin!r} of store {store!r}"
            found = SavedFile(on_disks.record, on_disks.arrays, source)
        if arguments.arrays is not None:
            cure = "give those of it, or leave arrays out"
            _compare_arrays(arguments, found.record, found.arrays, whose, cure)
        return found

    async def _delete(self, store: StoreRecord) -> None:
        """Delete a store that this client created and that did not open."""
        try:
            async with asyncio.timeout(DELETE_S):
                await self._membership.delete_store(self._name, store.id)
        except (AdamError, TimeoutError, TransportError) as error:
            logger.info("%s leaves store %s behind: %r", self._node, store.id, error)

    @property
    def _may_create(self) -> bool:
        if self._found is not None:
            return True
        return (
            self._arguments.create != "never"
            and (self._arguments.arrays is not None or self._arguments.has_origin)
            and not self._arguments.reader
        )

    async def _create(self, failed: StoreRecord | None) -> StoreRecord:
        arguments, membership = self._arguments, self._membership
        if not self._may_create:
            there = ", ".join(map(repr, sorted(membership.map.stores)[:8])) or "none"
            why = f"failed: {failed.reason}" if failed is not None else "does not exist"
            hint = ONLY_ON_DISKS if arguments.reader and failed is None else ""
            raise StoreError(f"store {self._name!r} {why}; stores of this cluster: {there}{hint}")
        if self._found is not None:
            return await self._create_again(self._found)
        if arguments.is_summed and not arguments.replicas:
            raise StoreError(
                f"store {self._name!r} does not exist, and with consistency='bsp' its creator needs "
                "replicas=N, the number of clients of the first step"
            )
        state = [len(rule.state_names) for rule in arguments.rules]
        copies = await self._copies()
        if arguments.min_in_sync > copies:
            raise StoreError(
                f"min_in_sync is {arguments.min_in_sync}, and store {self._name!r} would have "
                f"{'1 copy' if copies == 1 else f'{copies} copies'}: set copies"
            )
        record = StoreRecord(
            id=f"{self._node}-{self._name}{f'-{self._created}' if self._created else ''}",
            creator=self._node,
            rules=arguments.rules,
            arrays=len(arguments.records),
            nbytes=sum(record.nbytes for record in arguments.records),
            state_arrays=max(state),
            pieces=0,
            shard_bytes=arguments.shard_bytes,
            servers=arguments.servers,
            copies=copies,
            min_in_sync=arguments.min_in_sync,
            slack=arguments.slack,
            summed_weight=1 if arguments.is_summed else 0,
            durable=arguments.durable,
            replicas=max(arguments.replicas, 1),
        )
        self._created += 1
        store = await self._create_once(record, arguments.records)
        if arguments.create == "new" and store.id != record.id:
            raise StoreError(f"store {self._name!r} was just created by another client")
        return store

    async def _create_again(self, found: FoundStore) -> StoreRecord:
        """Create a store from its record on the disks of the servers."""
        record = msgspec.structs.replace(
            found.record,
            id=f"{self._node}-{self._name}{f'-{self._created}' if self._created else ''}",
            creator=self._node,
            pieces=0,
            servers=0,
            phase="placing",
            buckets=(),
        )
        self._created += 1
        return await self._create_once(record, found.arrays)

    async def _copies(self) -> int:
        """Return a new store's number of copies; by default it depends on the live servers.

        Raises:
            DeadlineExceeded: No server, or fewer than the wanted ones, were live within `prepare_s`.
        """
        arguments, membership = self._arguments, self._membership
        if arguments.copies is not None:
            return arguments.copies
        if len(membership.controllers) == 1:
            return 1
        wanted = max(arguments.servers, 1)
        cluster = await membership.wait_for(
            lambda cluster: len(cluster.live("ps")) >= wanted,
            f"{counted(wanted, 'server')} for store {self._name!r}; start one with adam-async ps",
            self._waits.prepare_s,
        )
        return min(DEFAULT_COPIES, len(cluster.live("ps")))

    async def _create_once(self, record: StoreRecord, arrays: Sequence[ArrayRecord]) -> StoreRecord:
        """Create the store, or return the store that another client creates at the same time."""
        name, membership = self._name, self._membership

        def is_there(cluster: ClusterMap) -> bool:
            return name in cluster.stores and cluster.stores[name].phase != "failed"

        for tries_left in reversed(range(CREATE_TRIES)):
            try:
                await membership.create_store(name, record, arrays)
                return membership.map.stores[name]
            except RunFailed as refusal:
                # Two creators may have replaced each other's lists of arrays: both try again.
                try:
                    cluster = await membership.wait_for(is_there, f"store {name!r}", CREATE_PAUSE_S)
                except DeadlineExceeded:
                    if not tries_left:
                        raise refusal from refusal.__cause__
                    continue
                return cluster.stores[name]
        raise AssertionError("the last try returns or raises")

    async def _wait_open(
        self, store: StoreRecord, arrays: Sequence[ArrayRecord], ends_at: float
    ) -> StoreRecord | None:
        """Wait until the store is open; its creator loads its values.

        Returns None if the creator or a server was lost earlier and this client can create the store again:
        then its opening begins anew. A second client must not load the same store, because it would mix its
        values with the first client's.
        """
        arguments, membership = self._arguments, self._membership
        key = (self._name, store.id)
        try:
            if store.creator == self._node:
                await self._load(await self._placed(key, ends_at), arrays, key)
            while True:
                now = _present(membership.map, key)
                if now.phase == "open":
                    return now
                if not _is_live(membership.map, now.creator):
                    if self._may_create and arguments.create == "auto":
                        await membership.delete_store(self._name, now.id)
                        return None
                    raise StoreError(
                        f"the creator of store {self._name!r} left before it had loaded the values: open it "
                        "with arrays, which creates it anew"
                    )
                await self._wait_change(key, now, ends_at)
        except StoreError as error:
            there = membership.map.stores.get(self._name)
            if there is None or not self._may_create or (there.id == store.id and not there.lost):
                raise
            logger.warning("%s opens store %r again: %s", self._node, self._name, error)
            return None

    async def _placed(self, key: tuple[str, str], ends_at: float) -> StoreRecord:
        """Wait until the controllers have placed a store."""
        while True:
            now = _present(self._membership.map, key)
            if now.phase != "placing":
                return now
            await self._wait_change(key, now, ends_at)

    async def _wait_change(self, key: tuple[str, str], now: StoreRecord, ends_at: float) -> None:
        """Wait until a store changes, or its creator becomes or ceases to be live."""
        membership = self._membership
        changed = partial(
            _has_changed, key=key, version=now.changed, creator_was_live=_is_live(membership.map, now.creator)
        )
        what = f"store {key[0]!r} to open: {_state_of(now, membership.map)}"
        loop = asyncio.get_running_loop()
        left_s = max(ends_at - loop.time(), 0.001)
        notice = loop.call_later(NOTICE_S, logger.warning, "%s waits %.0f s for %s", self._node, left_s, what)
        try:
            await membership.wait_for(changed, what, left_s)
        finally:
            notice.cancel()

    async def _load(self, store: StoreRecord, arrays: Sequence[ArrayRecord], key: tuple[str, str]) -> None:
        """Load the first values into the servers, until all shards have values.

        Raises:
            DeadlineExceeded: Some shards had no values within `prepare_s`.
            StoreError: A server was lost, or another client deleted the store.
        """
        copies = ShardCopies(self._endpoint, changes=self._membership.changes, waits=self._waits)
        try:
            async with Within(self._waits.prepare_s, f"servers to load store {self._name!r}"):
                table = shard_table(arrays, shard_bytes=store.shard_bytes)
                source, vectors = await self._first_values(store, arrays, table)
                if vectors and not store.vectors:  # with their numbers, by which the source names them
                    await self._membership.change_vectors(self._name, store.id, lambda _: vectors)
                await copies.load(store, source if source.table == table else RecutShards(source, table))
        except CheckpointError as error:
            raise StoreError(str(error)) from error
        except (ShardUnavailable, TransportError) as error:
            _present(self._membership.map, key)
            raise StoreError(f"store {self._name!r} cannot be loaded: {error}") from error

    async def _first_values(
        self, store: StoreRecord, arrays: Sequence[ArrayRecord], table: ShardTable
    ) -> tuple[ShardSource, tuple[VectorRecord, ...]]:
        """Return this name's shards on the servers' disks, else the caller's.

        The second result is the vectors that these shards have.

        Raises:
            StoreError: The disks have a part of the store, or it has other arrays, rules or consistency.
        """
        arguments, membership = self._arguments, self._membership
        found = self._found
        if found is None and arguments.create != "new":
            found = await find_saved(self._saved, self._name, lambda: membership.map, without=store.id)
        if found is not None:
            if arguments.arrays is not None:
                _compare(self._name, arguments, found.record, found.arrays)
            logger.warning("store %r goes on from the disks of its servers", self._name)
            return self._saved.shards(found, membership.map), found.record.vectors
        if arguments.has_origin:
            origin = self._origin or await self._find_origin()
            return origin.source, origin.record.vectors
        assert arguments.arrays is not None
        given = {each.name: _first_values(arguments.arrays[each.name], each) for each in arrays}
        return WholeTensors(arrays, table, values=given), ()

    async def take_place(self, store: StoreRecord) -> SessionIdentity:
        """Return this client's session; unless it is a reader, get a place among the store's clients."""
        incarnation, replica = self._endpoint.identity.incarnation, -1
        membership, node = self._membership, self._node
        if not self._arguments.reader:
            await membership.set_node(store=store.id)
            cluster = await membership.wait_for(
                lambda cluster: node in cluster.nodes and bool(cluster.nodes[node].placed),
                f"a place among the clients of store {self._name!r}",
                self._waits.call_s,
            )
            placed = cluster.nodes[node]
            replica = placed.replica
            incarnation = replica_generation([(placed.incarnation, placed.placed)], 1)
        return SessionIdentity(
            store=store.id,
            session=int.from_bytes(self._entropy(7), "little"),
            incarnation=incarnation,
            replica=replica,
            generation=store.generation,
        )


def _first_values(given: Any, record: ArrayRecord) -> NDArray[Any]:
    if isinstance(given, ArraySpec):
        return np.zeros(record.size, record.dtype)
    return flat_values(record, given, "the first value")


def _compare(name: str, arguments: OpenArguments, store: StoreRecord, arrays: Sequence[ArrayRecord]) -> None:
    """Compare the arrays of a client with the arrays of the store.

    Raises:
        StoreError: A name, shape, type, rule or the consistency differs; the error names the first
            difference.
    """
    cure = "give the arrays and rules of the store, or open another store, under another name"
    _compare_arrays(arguments, store, arrays, f"store {name!r}", cure)
    used = consistency_of(store.slack, is_summed=store.summed_weight > 0)
    asked = consistency_of(arguments.slack, is_summed=arguments.is_summed)
    if used != asked:
        raise StoreError(
            f"store {name!r} has consistency {used}, not {asked}: open it with {used!r}, or open "
            "another store, under another name"
        )


def _compare_arrays(
    arguments: OpenArguments, store: StoreRecord, arrays: Sequence[ArrayRecord], whose: str, cure: str
) -> None:
    """Compare a client's arrays with those of a store or pin, see `_compare`."""
    there = {array.name: array for array in arrays}
    for mine in arguments.records:
        other = there.pop(mine.name, None)
        shown = f"array {mine.name[:80]!r}"
        if other is None:
            raise StoreError(f"{whose} has no {shown}; it has {counted(len(arrays), 'array')}: {cure}")
        if (other.shape, other.dtype) != (mine.shape, mine.dtype):
            raise StoreError(
                f"{shown} is {other.dtype}{other.shape} in {whose}, and {mine.dtype}{mine.shape} here: {cure}"
            )
        used_rule, my_rule = store.rules[other.rule], arguments.rules[mine.rule]
        if msgspec.structs.replace(used_rule, rate=my_rule.rate) != my_rule:
            raise StoreError(f"{shown} has rule {used_rule.text} in {whose}, and {my_rule.text} here: {cure}")
    if there:
        raise StoreError(
            f"{whose} has the further array {next(iter(there))[:80]!r}, which is absent here: {cure}"
        )


def _present(cluster: ClusterMap, key: tuple[str, str]) -> StoreRecord:
    """Return the record of a store that is neither deleted nor failed.

    Raises:
        StoreError: The store failed, or was deleted.
    """
    name, id = key
    store = cluster.stores.get(name)
    if store is None or store.id != id:
        raise StoreError(f"store {name!r} was deleted")
    if store.phase == "failed":
        raise StoreError(f"store {name!r} failed: {store.reason}")
    return store


def _state_of(store: StoreRecord, cluster: ClusterMap) -> str:
    """Return the condition that a store waits for before it opens."""
    servers = len(cluster.live("ps"))
    if store.phase == "placing":
        return (
            f"it needs {counted(max(store.servers, store.copies), 'server')}, and {servers} are live; "
            "start one with adam-async ps"
        )
    serving = sum(served_word(store) in cluster.nodes[name].serves for name in set(store.buckets))
    return f"{serving} of {len(set(store.buckets))} servers have all values that {store.creator} loads"


def _has_changed(cluster: ClusterMap, key: tuple[str, str], version: int, creator_was_live: bool) -> bool:
    name, id = key
    store = cluster.stores.get(name)
    if store is None or store.id != id or store.changed != version:
        return True
    creator = cluster.nodes.get(store.creator)
    return creator_was_live and (creator is None or not creator.live)


def _is_live(cluster: ClusterMap, node: str) -> bool:
    record = cluster.nodes.get(node)
    return record is not None and record.live


async def find_saved(
    saved: SavedShards, name: str, maps: Callable[[], ClusterMap], *, without: str = ""
) -> FoundStore | None:
    """Return the newest store of a name on the disks of the servers; see `SavedShards.find`.

    Raises:
        StoreError: The disks have only a part of the store.
    """
    try:
        return await saved.find(name, maps, without=without)
    except CheckpointError as error:
        raise StoreError(str(error)) from error
