"""Clients of a store that comes back from the disks of its servers: they open it again under its name."""

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.run.arrays import ArraySpec
from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.checkers.saved_pushes import Losses, SavedPushes
from adam_async.simulation.checkers.store_pushes import StorePushes
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Setting
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.power_cluster import PowerCluster
from adam_async.simulation.scenarios.push_clients import COLUMNS, ROWS, PushClients, array_names
from adam_async.simulation.scenarios.push_cluster import SERVERS
from adam_async.store.arrays import InitialArrays
from adam_async.store.wish import StoreWish

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


class PowerClients(PushClients):
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
        """Pushes to each array since the newest return of the store, by array."""
        self._is_durable = settings["ack"] == "durable"
        rows = dict.fromkeys(array_names(), ROWS)
        self._rows = {**rows, COLD: COLD_ROWS} if settings["cold"] else rows
        """Number of rows of each array."""
        super().__init__(world, cluster, ledger, settings)

    def _wish(self) -> StoreWish:
        # All servers must be back before the store is: the newest states may be on any of them.
        return msgspec.structs.replace(super()._wish(), durable=self._is_durable, servers=len(SERVERS))

    def _new_pushes(self, id: str) -> dict[str, StorePushes]:
        self._newest = {
            name: SavedPushes(
                id,
                name,
                rows=rows,
                columns=COLUMNS,
                losses=self._losses,
                summed=self._slack == 0,
                before=self._newest.get(name),
            )
            for name, rows in self._rows.items()
        }
        return {**self._newest}

    def _initial(self) -> InitialArrays:
        arrays = super()._initial()
        if COLD in self._rows:
            return {**arrays, COLD: ArraySpec((COLD_ROWS, COLUMNS), split=False)}
        return arrays

    def _draw_array(self, arrays: Mapping[str, StorePushes], dice: RandomStream) -> str:
        if COLD in arrays and not arrays[COLD].full:
            begun = COLUMNS - arrays[COLD].room
            if dice.chance(WARM_SHARE if begun < FIRST else COLD_SHARE):
                return COLD
        return super()._draw_array(arrays, dice)

    def _versions_of(self, array: str, of_shards: NDArray[np.int64]) -> NDArray[np.int64]:
        if array == COLD:
            return np.repeat(of_shards[-1:], COLD_ROWS)
        return super()._versions_of(array, of_shards)

    def _check_known(self, id: str) -> None:
        """Accept a store without pushes: the last reader may be the first that opens a returned store."""
