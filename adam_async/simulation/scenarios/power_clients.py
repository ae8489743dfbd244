"""Clients of a store that comes back from the disks of its servers: they open it again under its name."""

from collections.abc import Mapping

import msgspec

from adam_async.simulation.checkers.saved_pushes import Losses, SavedPushes
from adam_async.simulation.checkers.store_pushes import StorePushes
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Setting
from adam_async.simulation.scenario import Ledger
from adam_async.simulation.scenarios.power_cluster import PowerCluster
from adam_async.simulation.scenarios.push_clients import COLUMNS, ROWS, PushClients, array_names
from adam_async.simulation.scenarios.push_cluster import SERVERS
from adam_async.store.wish import StoreWish


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
        """Pushes to each array, to the newest return of the store."""
        self._is_durable = settings["ack"] == "durable"
        super().__init__(world, cluster, ledger, settings)

    def _wish(self) -> StoreWish:
        # All servers must be back before the store is: the newest states may be on any of them.
        return msgspec.structs.replace(super()._wish(), durable=self._is_durable, servers=len(SERVERS))

    def _new_pushes(self, id: str) -> dict[str, StorePushes]:
        self._newest = {
            name: SavedPushes(
                id,
                name,
                rows=ROWS,
                columns=COLUMNS,
                losses=self._losses,
                summed=self._slack == 0,
                before=self._newest.get(name),
            )
            for name in array_names()
        }
        return {**self._newest}

    def _check_known(self, id: str) -> None:
        """Take a store that no client has pushed to: it comes back from the disks for the last reader."""
