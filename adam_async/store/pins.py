"""The pins of a store: states under names, which its servers keep on disks until a client removes them.

A client puts a pin into the log of each bundle, and waits until enough servers report that they have saved
its shards. A pin is valid if the disks have all its bundles. After a loss of all servers it belongs to the
store that comes back under the same name.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.saved_shards import PAUSE_S, FoundStore, SavedShards
from adam_async.checkpoint.shard_transfer import PAUSES, ShardCopies
from adam_async.checkpoint.tensors import WholeTensors, vector_name
from adam_async.controller.client import Membership
from adam_async.errors import AdamError, DeadlineExceeded, StoreError, counted
from adam_async.messages import (
    MOST_PINS,
    ListPins,
    PinFacts,
    PinShards,
    PinState,
    ShardsPinned,
    pack,
    read_pin_list,
    unpack,
)
from adam_async.run.cluster_map import DISK, ClusterMap
from adam_async.run.config import Waits
from adam_async.run.run_copies import lacks_copies
from adam_async.run.shard_table import ShardSpec, ShardTable, holders
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import Within
from adam_async.store.arguments import fault_of_pin_name
from transport import Link, RemoteError, TransportError

Connect = Callable[[str], AbstractAsyncContextManager[Link]]
"""Function that opens a link to an address, for a block."""


class PinSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One pin of a store."""

    name: str
    valid: bool
    """Whether the disks have all its bundles. Otherwise the pin is being made, or its servers are away."""
    made_ms: int
    """Time at which its servers began to save the pin, in milliseconds since 1970."""
    bytes: int
    """Size of the values and rule states on disks, in bytes; each bundle counts once."""
    servers: tuple[str, ...]
    """Servers that have a part of the pin."""


def check_pin_name(name: str) -> str:
    """Return the name of a pin. Raises StoreError: it is none."""
    if fault := fault_of_pin_name(name):
        raise StoreError(fault)
    return name


async def list_pins(
    name: str, cluster: ClusterMap, connect: Connect, waits: Waits
) -> dict[str, tuple[PinState, ...]]:
    """Ask each live server for a store's pins on its disk; return the answers, by server."""
    answers: dict[str, tuple[PinState, ...]] = {}

    async def ask(node: str) -> None:
        with contextlib.suppress(TransportError, ValueError):  # a node may publish an invalid address
            async with connect(cluster.nodes[node].address) as link:
                reply = await link.call(pack(ListPins(name=name)), timeout_s=waits.call_s)
                answers[node] = read_pin_list(reply)

    async with asyncio.TaskGroup() as group:
        for node in cluster.live("ps"):
            group.create_task(ask(node), name=f"pins-{node}")
    return dict(sorted(answers.items()))


class _Found(NamedTuple):
    """A pin, as listed by the servers."""

    facts: list[PinFacts]
    """Facts on its bundles from each server, which may be false."""
    saved: dict[str, set[str]]
    """Servers that have saved each bundle."""

    @property
    def is_valid(self) -> bool:
        """Whether the disks have all bundles."""
        return any(facts.homes and {*facts.homes} <= self.saved.keys() for facts in self.facts)


def _by_pin(answers: Mapping[str, Sequence[PinState]]) -> dict[int, _Found]:
    pins: dict[int, _Found] = {}
    for node, states in answers.items():
        for state in states:
            found = pins.setdefault(state.facts.pin, _Found([], {}))
            found.facts.append(state.facts)
            if not (state.fault or state.writes):
                found.saved.setdefault(state.facts.home, set()).add(node)
    return pins


def pin_summaries(answers: Mapping[str, Sequence[PinState]]) -> list[PinSummary]:
    """Return a store's pins by name; if several have one name, the newest valid one."""
    sizes = {(s.facts.pin, s.facts.home): s.facts.nbytes for states in answers.values() for s in states}
    found: dict[str, PinSummary] = {}
    for pin, each in _by_pin(answers).items():
        facts, saved = each.facts[0], each.saved
        mine = PinSummary(
            name=facts.name,
            valid=each.is_valid,
            made_ms=facts.began_ms,
            bytes=sum([sizes[pin, home] for home in saved]),
            servers=tuple(sorted({node for nodes in saved.values() for node in nodes})),
        )
        known = found.get(facts.name)
        if known is None or (known.valid, known.made_ms) < (mine.valid, mine.made_ms):
            found[facts.name] = mine
    return [found[name] for name in sorted(found)]


def _absent(store: str, pin: str, answers: Mapping[str, Sequence[PinState]]) -> StoreError:
    there = ", ".join([repr(each.name) for each in pin_summaries(answers)]) or "none"
    return StoreError(f"store {store!r} has no pin {pin!r} on the disks of its servers; its pins: {there}")


async def find_pin(
    saved: SavedShards, store: str, pin: str, maps: Callable[[], ClusterMap], *, search_s: float = 0.0
) -> FoundStore:
    """Return the newest valid pin of a name.

    Args:
        maps: Returns the newest cluster map.
        search_s: Time in which servers with parts of the pin may still start, in seconds.

    Raises:
        StoreError: The disks lack the pin, or some of its bundles.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + search_s
    while True:
        survey = await saved.survey(store, cluster := maps(), pin=pin)
        found = next((each for each in survey.stores if each.is_whole), None)
        if found is not None:
            return found
        may_come = survey.stores or survey.absent or not cluster.live("ps")
        if not may_come or loop.time() >= ends_at:
            break
        await asyncio.sleep(PAUSE_S)
    if survey.stores:
        missing = ", ".join(survey.stores[0].missing())
        raise StoreError(
            f"the disks lack the shards of {missing} of pin {pin!r} of store {store!r}: start all its "
            f"servers with their folders{survey.faults_text}"
        )
    raise _absent(store, pin, await list_pins(store, cluster, saved.connect, saved.waits))


class StorePins:
    """The pins of a store, for one client.

    Args:
        name: Name of the store.
        table: Its shards.
        entropy: Returns a number of random bytes.
    """

    def __init__(
        self,
        name: str,
        store: StoreRecord,
        table: ShardTable,
        *,
        endpoint: Endpoint,
        membership: Membership,
        waits: Waits,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._name = name
        self._store = store
        self._table = table
        self._saved = SavedShards(endpoint, waits=waits)
        self._membership = membership
        self._waits = waits
        self._entropy = entropy
        self._copies = ShardCopies(endpoint, changes=membership.changes, waits=waits)

    async def _answers(self) -> dict[str, tuple[PinState, ...]]:
        """Return the pins by server, once a server has answered. Raises DeadlineExceeded: none has."""
        what = f"a server to list the pins of store {self._name!r}"
        async with Within(self._waits.patience_s, what):
            for pause_s in PAUSES.waits():
                cluster = self._membership.map
                if answers := await list_pins(self._name, cluster, self._saved.connect, self._waits):
                    return answers
                await asyncio.sleep(pause_s)
        raise AssertionError("the pauses have no end")

    async def summaries(self) -> list[PinSummary]:
        """See `ParameterStore.pins`."""
        return pin_summaries(await self._answers())

    # --- making ------------------------------------------------------------------------------

    async def make(self, name: str) -> None:
        """See `ParameterStore.pin`."""
        self._check_folders()
        await self._make_room(name)
        pin, deadline_s = int.from_bytes(self._entropy(7), "little"), self._waits.checkpoint_s
        what = f"the servers of store {self._name!r} to save pin {name!r}"
        try:
            async with asyncio.timeout(deadline_s) as limit:
                await self._send(name, pin)
                await self._until_saved(pin)
        except (AdamError, TimeoutError, TransportError) as error:
            with contextlib.suppress(AdamError, TimeoutError, TransportError):
                async with asyncio.timeout(self._waits.call_s):
                    await self._remove(name, pin)
            if isinstance(error, TimeoutError) and limit.expired():
                raise DeadlineExceeded(what, deadline_s) from None
            raise

    def _homes(self) -> list[str]:
        return list(holders(self._table, self._store.buckets))

    def _check_folders(self) -> None:
        """Check that enough servers of each bundle keep shards on a disk. Raises StoreError."""
        cluster, least = self._membership.map, self._store.min_in_sync_in_force
        for home in self._homes():
            members = self._in_sync(home)
            without = [node for node in sorted(members) if not cluster.nodes[node].info.get(DISK)]
            if without and len(members) - len(without) < least:
                raise StoreError(
                    f"store {self._name!r} cannot be pinned: {', '.join(without)} has no folder; start it "
                    "again with --dir DIR, or open a store at 'local' with dir=FOLDER"
                )

    def _in_sync(self, home: str) -> set[str]:
        bundle = self._membership.map.bundle(self._store.id, home)
        return {node for node, _ in bundle.in_sync} if bundle is not None else set()

    def _check_servers(self, home: str) -> None:
        """Check that no further server must start before a bundle takes entries. Raises StoreError."""
        cluster, least = self._membership.map, self._store.min_in_sync_in_force
        servers = len(cluster.live("ps"))
        if servers < least and lacks_copies(cluster, self._store.id, home):
            raise StoreError(
                f"store {self._name!r} cannot be pinned: min_in_sync is {least}, and the cluster has "
                f"{counted(servers, 'live server')}: start one with adam-async ps"
            )

    async def _make_room(self, name: str) -> None:
        """Check that a pin of this name can be made; remove unfinished pins that a loss of all servers left.

        Raises:
            StoreError: The store has a pin of this name, or as many as it may have.
        """
        answers = await self._answers()
        names = set()
        for pin, found in _by_pin(answers).items():
            # No client finishes a pin of an earlier store; all servers that may have a part have answered.
            is_over = all(
                facts.store != self._store.id and {*facts.servers} <= answers.keys() for facts in found.facts
            )
            if is_over and not found.is_valid:
                await self._remove(found.facts[0].name, pin)
            else:
                names.update([facts.name for facts in found.facts])
        if name in names:
            raise StoreError(
                f"store {self._name!r} has a pin {name!r}, perhaps an unfinished one: choose another name, "
                "or remove it with unpin"
            )
        if len(names) >= MOST_PINS:
            raise StoreError(
                f"store {self._name!r} has {len(names)} pins, {MOST_PINS} are the most: remove one with unpin"
            )

    async def _send(self, name: str, pin: int, *, removes: bool = False) -> None:
        """Put a pin, or its removal, into the logs of all bundles."""

        async def send(link: Link, specs: Sequence[ShardSpec]) -> None:
            home = self._store.buckets[specs[0].bucket]
            if not removes:
                self._check_servers(home)
            body = PinShards(store=self._store.id, home=home, name=name, pin=pin, removes=removes)
            for pause_s in PAUSES.waits():
                try:
                    unpack(await link.call(pack(body), timeout_s=self._waits.call_s), ShardsPinned)
                    return
                except RemoteError as error:
                    # A pin is valid before the slowest server has written it.
                    if error.code != "busy":
                        raise
                await asyncio.sleep(pause_s)

        try:
            await self._copies.with_primaries(self._store, self._table, send)
        except RemoteError as error:
            raise StoreError(f"store {self._name!r} cannot be pinned: {error.text}") from error

    async def _until_saved(self, pin: int) -> None:
        """Wait until enough servers have saved each bundle. Raises StoreError: they cannot."""
        homes = self._homes()
        members = {home: self._in_sync(home) for home in homes}
        for pause_s in PAUSES.waits():
            answers = await self._answers()
            saved = [self._is_saved(pin, home, answers, members[home]) for home in homes]
            if all(saved):
                return
            await asyncio.sleep(pause_s)

    def _is_saved(
        self, pin: int, home: str, answers: Mapping[str, Sequence[PinState]], members: Set[str]
    ) -> bool:
        """Return whether enough servers have saved a bundle of a pin.

        Args:
            members: Members in sync when the pin was in the log. A member that joins later does not save the
                pin.

        Raises:
            StoreError: Too few servers can still save the pin.
        """
        least, in_sync = self._store.min_in_sync_in_force, self._in_sync(home)
        states = {
            node: state
            for node, states in answers.items()
            for state in states
            if (state.facts.pin, state.facts.home) == (pin, home)
        }
        listed = {node for node, state in states.items() if not state.fault}
        if sum([not states[node].writes for node in listed]) >= least:
            return True
        # A member that leaves the copies in sync before it lists the pin does not save it any more.
        lost = dict.fromkeys(sorted(members - in_sync - listed), "the copy was lost")
        lost |= {node: state.fault for node, state in states.items() if state.fault}
        if lost and len(members - lost.keys() | listed) < least:
            why = "; ".join([f"{node}: {each}" for node, each in lost.items()])
            raise StoreError(f"store {self._name!r} cannot be pinned: {why}")
        self._check_servers(home)
        return False

    # --- removing ----------------------------------------------------------------------------

    async def remove(self, name: str) -> None:
        """See `ParameterStore.unpin`."""
        listed = await self._answers()
        found = [pin for pin, each in _by_pin(listed).items() if name in [facts.name for facts in each.facts]]
        if not found:
            raise _absent(self._name, name, listed)
        for pin in found:
            await self._remove(name, pin)

    async def _remove(self, name: str, pin: int) -> None:
        # Servers without a bundle of the present store may have the pin, too. Log entries may wait for a disk
        # that writes the pin, so each server gives the pin up before the entry comes.
        cluster = self._membership.map
        body = PinShards(store=self._store.id, home="", name=name, pin=pin, removes=True)

        async def give_up(node: str) -> None:
            # A member that does not answer gets the removal from the log, perhaps when it returns.
            with contextlib.suppress(TransportError, ValueError):
                async with self._saved.connect(cluster.nodes[node].address) as link:
                    await link.call(pack(body), timeout_s=self._waits.call_s)

        async with asyncio.TaskGroup() as group:
            for node in cluster.live("ps"):
                group.create_task(give_up(node), name=f"unpin-{node}")
        await self._send(name, pin, removes=True)

    # --- reading -----------------------------------------------------------------------------

    async def read(self, name: str, vector: str = "") -> dict[str, NDArray[Any]]:
        """See `ParameterStore.read_pin`."""
        found = await find_pin(self._saved, self._name, name, lambda: self._membership.map)
        wanted = [each for each in found.record.vectors if each.name == vector]
        if vector and not wanted:
            raise StoreError(f"pin {name!r} has no vector {vector[:80]!r}")
        tensors = WholeTensors(found.arrays, found.table, vectors=wanted)
        source = self._saved.shards(found, self._membership.map)
        try:
            async with contextlib.aclosing(source.shards_of(found.table.shards)) as parts:
                async for shards in parts:
                    for shard in shards:
                        tensors.take(shard)
        except CheckpointError as error:
            raise StoreError(f"pin {name!r} cannot be read: {error}") from error
        arrays = tensors.weights
        for each in wanted:
            names = {array: vector_name(each, array) for array in tensors.weights}
            arrays = {array: tensors.state[key] for array, key in names.items() if key in tensors.state}
        for values in arrays.values():
            values.flags.writeable = False
        return arrays
