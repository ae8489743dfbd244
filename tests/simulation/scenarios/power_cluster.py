"""Simulated servers that keep their stores on disks, over all losses of power; their clients.

The clients open a store that comes back from the disks again, under its name.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from adam_async.errors import AdamError, StoreError
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.disk_ports import DiskPorts
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.pins import PINNED
from adam_async.parameter_server.replication.log import Entry
from adam_async.parameter_server.server_disk import ServerDisk, is_saved
from adam_async.persistence.keys import FlushSettings, State
from adam_async.store.arguments import OpenArguments
from adam_async.store.store import ParameterStore
from tests.simulation.checkers.saved_pins import LoggedStates, SavedPins
from tests.simulation.checkers.saved_pushes import Losses, SavedPushes, SavedStates
from tests.simulation.checkers.store_pushes import StorePushes
from tests.simulation.plan import Setting
from tests.simulation.scenario import Ledger, Node, Violation, World
from tests.simulation.scenarios.cluster import SERVERS, SINCE_1970_S, Cluster
from tests.simulation.scenarios.pushes import SLOTS
from tests.simulation.scenarios.store_clients import Array, OpenStore, StoreClients
from transport import TransportError

SHARDS = Path("/shards")
"""Folder of a server."""

LOOK_S = 0.05
"""Interval between two checks of the primaries, in seconds."""

SEGMENT_BYTES = (4 << 10, 32 << 10, 64 << 20)
"""Sizes of a segment file to draw from, in bytes; the small ones make compaction frequent."""

QUARANTINE = "damaged files set aside"
TORN = "torn tails cut off"
REPLAYED = "disks with entries to apply again"
READ_BACK = "states read back"


class PowerCluster(Cluster):
    """Controllers, and servers with disks.

    Args:
        settings: Settings of the plan.

    Attributes:
        disks: Open disk of each server's newest incarnation, by name.
        states: States that servers gave to their disks, and that came back.
        failing: Servers whose disk fails, so that they may end.
        rotten: Servers whose disk has lost bytes, each once for each loss.
        logged: The bundles with a log, as functions of their logs.
    """

    def __init__(self, world: World, ledger: Ledger, settings: Mapping[str, Setting]) -> None:
        self.disks: dict[str, ServerDisk] = {}
        self.states = SavedStates()
        self.failing: set[str] = set()
        self.rotten: list[str] = []
        self.logged = LoggedStates()
        self._flush = FlushSettings(
            flush_s=float(settings["flush_s"]), segment_bytes=int(settings["segment_bytes"])
        )
        super().__init__(world, ledger)

    async def _run_server(self, node: Node) -> None:
        try:
            await super()._run_server(node)
        except* (AdamError, OSError):
            if node.name not in self.failing:
                raise

    @asynccontextmanager
    async def _server_disk(self, node: Node) -> AsyncIterator[ServerDisk | None]:
        loop = self._world.loop
        async with node.open_disk() as states, node.open_disk() as entries:
            ports = DiskPorts(
                states=states,
                entries=entries,
                clock=loop.time,
                wall_clock=lambda: SINCE_1970_S + self._world.now,
                settings=self._flush,
                observe=self._saved,
            )
            async with ServerDisk(SHARDS, ports).opened() as disk:
                await self._opened(node.name, disk)
                yield disk

    # --- observations ------------------------------------------------------------------------

    def _saved(self, state: State, store: str) -> None:
        """Note a state that a server gives to its disk. Raises Violation."""
        self.states.taken(state, store)
        if store.startswith(PINNED):
            self.logged.saved(state, store)

    def _applies(self, copy: BundleCopy, entry: Entry, parts: Sequence[Part]) -> None:
        """Follow the next entry of a copy. Raises Violation."""
        self.bundles.applies(copy, entry, parts)
        served = self.servers[copy.me[0]].served[copy.record.store, copy.home]
        self.logged.applies(copy, served.store, entry, parts)

    async def _opened(self, name: str, disk: ServerDisk) -> None:
        """Check the states on a disk that was opened. Raises Violation."""
        self.disks[name] = disk
        counts = self._ledger.counts
        for store in disk:
            recovery = store.recovery
            counts[TORN] += len(recovery.torn)
            counts[QUARANTINE] += len(recovery.damages)
            counts[REPLAYED] += any(recovery.entries.values())
            if recovery.damages and name not in self.failing:
                raise Violation("no false damage", f"on the disk of {name}, {recovery.damage_text()}")
            states = [await store._segments.read_state(key) for key in recovery.states]
            self.states.opened(name, store.id, states)
        counts[READ_BACK] = self.states.compared

    def is_saved(self, losses: Losses) -> bool:
        """Return whether the primaries of an open store have reported that the store is on their disks."""
        cluster = self.bundles.map
        stores = [store for store in cluster.stores.values() if store.phase == "open"]
        return any(is_saved(cluster, store) and not losses.has_ended(store.id) for store in stores)

    async def watch_primaries(self, losses: Losses) -> None:
        """Note at intervals whether all shards of the open stores have their primaries."""
        while True:
            await asyncio.sleep(LOOK_S)
            cluster = self.bundles.map
            stores = {store.id for store in cluster.stores.values() if store.phase == "open"}
            primaries = [each.primary for each in cluster.bundles.values() if each.store in stores]
            losses.looked(all_led=all(each is not None and self.bundles.is_well(each) for each in primaries))

    def lost(self, losses: Losses) -> None:
        """Note that the stores in the map have lost servers that they cannot spare."""
        for store in self.bundles.map.stores.values():
            losses.ended(store.id)


PIN_CHANCE, GIVE_UP, PINS_OF_CLIENT = 0.4, 0.3, 3
"""Share of the steps after which a client uses a pin, share of these in which it gives one up, and number of
names of a client."""

COLD = "cold"
"""Name of an array to which clients seldom push after the start, in some plans."""

COLD_ROWS = 32
"""Number of rows of the cold array, which is one shard. The shard has more than a quarter of the
bytes of all arrays, so one of the four bundles has this shard alone. The piece of that bundle seldom changes
while a server is away."""

FIRST = 3
"""Number of pushes to the cold array that come soon after the start, so that its values differ from the
initial ones."""

WARM_SHARE, COLD_SHARE = 0.2, 0.002
"""Share of the pushes that go to the cold array until it has `FIRST` pushes, and share afterwards."""


class PowerClients(StoreClients):
    """All clients of a run.

    Args:
        losses: The losses of servers, and the pushes that they may cost.
    """

    def __init__(
        self,
        world: World,
        cluster: PowerCluster,
        ledger: Ledger,
        settings: Mapping[str, Setting],
        losses: Losses,
    ) -> None:
        self._losses = losses
        self._newest: dict[str, SavedPushes] = {}
        """Pushes to each group since the newest return of the store."""
        self._is_durable = settings["ack"] == "durable"
        self._pin_dice = world.dice.fork("pins")
        self._power = cluster
        self.pins = SavedPins()
        """The pins of all clients."""
        cold = {COLD: {COLD: Array(rows=COLD_ROWS, split=False)}} if settings["cold"] else {}
        workload = replace(SLOTS, groups={**SLOTS.groups, **cold}, pace_s=float(settings["pace_s"]))
        super().__init__(world, cluster, ledger, settings, workload)

    # --- pins --------------------------------------------------------------------------------

    async def _pull_alone(self, opened: OpenStore) -> None:
        await super()._pull_alone(opened)
        if self._pin_dice.chance(PIN_CHANCE):
            try:
                await self._use_pins(opened)
            except (AdamError, TransportError) as error:
                self._ledger.note("pin", opened.name, str(error))

    async def _use_pins(self, opened: OpenStore) -> None:
        """Make a pin of this client, read one of any client, or give one of this client up."""
        dice, store = self._pin_dice, ParameterStore(opened.link)
        name = f"{opened.name}-{dice.below(PINS_OF_CLIENT)}"
        if name not in self.pins.names:
            await self._make_pin(opened, name)
        elif dice.chance(GIVE_UP):
            self.pins.forget(name)
            await store.unpin(name)
        elif self.pins.names:
            await self._read_pin(opened, dice.choose(self.pins.names))

    async def _make_pin(self, opened: OpenStore, name: str) -> None:
        store, facts = ParameterStore(opened.link), opened.link.store
        if any(pin.name == name for pin in await store.pins()):
            await store.unpin(name)  # the outcome of an earlier call is unknown
        acknowledged = {group: pushes.before().acknowledged for group, pushes in opened.pushes.items()}
        rotten = len({*self._power.rotten})
        await store.pin(name)
        begun = {
            group: frozenset(range(self._workload.columns - pushes.room))
            for group, pushes in opened.pushes.items()
        }
        self.pins.returned(
            name,
            servers=facts.min_in_sync_in_force,
            rotten=rotten,
            acknowledged={} if self._slack == 0 else acknowledged,
            begun=begun,
        )
        await self._read_pin(opened, name)

    async def _read_pin(self, opened: OpenStore, name: str) -> None:
        values = await ParameterStore(opened.link).read_pin(name)
        groups = self._workload.groups.items()
        self.pins.values(
            name,
            {
                group: np.concatenate([values[array].astype(np.float64) for array in arrays])
                for group, arrays in groups
            },
        )

    async def _read_once(self, opened: OpenStore) -> None:
        await super()._read_once(opened)
        rotten = len({*self._power.rotten})
        for name in self.pins.names:
            try:
                await self._read_pin(opened, name)
            except StoreError as error:
                if self.pins.must_be_there(name, rotten):
                    raise Violation("pin kept", f"pin {name} cannot be read: {error}") from error

    def _arguments(self, controllers: str, *, reader: bool) -> OpenArguments:
        arguments = super()._arguments(controllers, reader=reader)
        if reader:
            return arguments
        # All servers must be back before the store is: the newest states may be on any of them.
        return msgspec.structs.replace(arguments, durable=self._is_durable, servers=len(SERVERS))

    def _check_new(self, id: str) -> None:
        """Accept a store without pushes: the last reader may be the first that opens a returned store."""

    def _new_pushes(self, id: str) -> dict[str, StorePushes]:
        workload = self._workload
        self._newest = {
            group: SavedPushes(
                id,
                group,
                rows=workload.rows(group),
                columns=workload.columns,
                losses=self._losses,
                summed=self._slack == 0,
                before=self._newest.get(group),
            )
            for group in workload.groups
        }
        return {**self._newest}

    def _draw_group(self, opened: OpenStore) -> str:
        warm = [group for group in opened.left if group != COLD]
        if COLD in opened.left:
            begun = self._workload.columns - opened.pushes[COLD].room
            if not warm or opened.dice.chance(WARM_SHARE if begun < FIRST else COLD_SHARE):
                return COLD
        return opened.dice.choose(warm)
