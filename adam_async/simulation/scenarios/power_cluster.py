"""Simulated servers that keep their stores on disks, over all losses of power."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from adam_async.errors import AdamError
from adam_async.parameter_server.disk_ports import DiskPorts
from adam_async.parameter_server.server_disk import ServerDisk, is_saved
from adam_async.persistence.settings import FlushSettings
from adam_async.simulation.checkers.saved_pushes import Losses
from adam_async.simulation.checkers.saved_states import SavedStates
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Setting
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.push_cluster import PushCluster

SHARDS = Path("/shards")
"""Folder of a server."""

LOOK_S = 0.05
"""Interval between two checks of the primaries, in seconds."""

SINCE_1970_S = 1.8e9
"""Wall-clock time at the beginning of a run, in seconds since 1970."""

SEGMENT_BYTES = (4 << 10, 32 << 10, 64 << 20)
"""Sizes of a segment file to draw from, in bytes; the small ones make compaction frequent."""

QUARANTINE = "damaged files set aside"
TORN = "torn tails cut off"
REPLAYED = "disks with entries to apply again"
READ_BACK = "states read back"


class PowerCluster(PushCluster):
    """Controllers, and servers with disks.

    Args:
        settings: Settings of the plan.

    Attributes:
        disks: Open disk of each server's newest incarnation, by name.
        states: States that servers gave to their disks, and that came back.
        failing: Servers whose disk fails, so that they may end.
    """

    def __init__(self, world: World, ledger: Ledger, settings: Mapping[str, Setting]) -> None:
        self.disks: dict[str, ServerDisk] = {}
        self.states = SavedStates()
        self.failing: set[str] = set()
        self._world = world
        self._ledger = ledger
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
                observe=self.states.taken,
            )
            async with ServerDisk(SHARDS, ports).opened() as disk:
                await self._opened(node.name, disk)
                yield disk

    # --- observations ------------------------------------------------------------------------

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
            states = [await store.read_saved(key) for key in recovery.states]
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
