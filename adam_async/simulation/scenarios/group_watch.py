"""Follows the epochs of a simulated run, and compares the groups on its shards with the ledger."""

import asyncio

from adam_async.data_server.state import DataState
from adam_async.parameter_server.shard import Shard
from adam_async.run.group_ranges import NO_GROUPS
from adam_async.simulation.checkers.group_sets import EpochGroups, check_groups, epoch_groups
from adam_async.simulation.nodes import World
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.training_cluster import APPLY_S, TrainingCluster

LOOK_S = 0.05
"""Interval between two looks at the ledger, in seconds; the next epoch begins after an evaluation."""

Key = tuple[str, int]
"""Run, and number of the epoch."""


class GroupWatch:
    """Compares each ended epoch of the run.

    Attributes:
        compared: Epochs that were compared.
    """

    def __init__(self, world: World, cluster: TrainingCluster, ledger: Ledger) -> None:
        self._world = world
        self._cluster = cluster
        self._counts = ledger.counts
        self._ended: dict[Key, tuple[float, EpochGroups]] = {}
        """Time and ledger of the ended epochs that are not compared yet."""
        self.compared: set[Key] = set()
        cluster.epoch_ended = self._note
        frozen = [layer.name for layer in cluster.setup.spec.layers if dict(layer.options).get("frozen")]
        self._frozen = tuple(f"{name}." for name in frozen)

    async def watch(self) -> None:
        """Look at the ledger and the shards at intervals. Raises Violation."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Compare the epochs that have ended. Raises Violation."""
        run = self._cluster.map.run
        for key, (since, groups) in list(self._ended.items()):
            if run is None or key[0] != run.id:
                del self._ended[key]  # another run has replaced this one
                continue
            try:
                self._compare(key, groups)
            except Violation:
                # A new primary applies the entries of the lost one before it answers.
                if not self._cluster.setup.has_copies or self._world.now > since + APPLY_S:
                    raise

    def check_end(self) -> None:
        """Check that each epoch of the newest run is compared. Raises Violation."""
        self.look()
        if self._ended:
            raise Violation(
                "every epoch is compared", f"{[*self._ended]} have ended, and no shards were compared"
            )

    def _note(self, run: str, state: DataState) -> None:
        """Note the ledger of an ended epoch; each ledger replica reports the same one."""
        epoch, key = self._cluster.map.epoch, (run, state.epoch)
        if key not in self.compared and epoch is not None and (epoch.run, epoch.number) == key:
            groups = epoch_groups(state, before=epoch.finished)
            assert groups is not None
            self._ended.setdefault(key, (self._world.now, groups))

    def _compare(self, key: Key, groups: EpochGroups) -> None:
        shards = self._shards()
        if shards is None:
            return
        sets = {
            f"shard {number}": shard.tables.groups.get(key[1], NO_GROUPS) for number, shard in shards.items()
        }
        check_groups(f"{key[0]}/{key[1]}", groups, sets, self._counts)
        self.compared.add(key)
        del self._ended[key]

    def _shards(self) -> dict[int, Shard] | None:
        """Return the shards of the run that take gradients, of its primaries; None if one does not run."""
        cluster, bundles = self._cluster.map, self._cluster.bundles
        run = cluster.run_store
        found: dict[int, Shard] = {}
        for key, bundle in cluster.bundles.items():
            if run is None or bundle.store != run.id:
                continue
            if bundle.primary is None or not bundles.runs(bundle.primary):
                return None
            served = bundles.servers[bundle.primary[0]].served.get((bundle.store, key.rpartition("/")[2]))
            if served is None:
                return None
            for shard in served.state.shards.values():
                if not shard.spec.tensor.startswith(self._frozen):
                    found[int(shard.spec.id)] = shard
        return found or None
