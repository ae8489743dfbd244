"""Follows the epochs of a simulated run, and compares the groups on its shards with the results."""

import asyncio
from math import fsum

from adam_async.parameter_server.shard import Shard
from adam_async.run.cluster_map import EpochRecord
from adam_async.run.group_ranges import common
from tests.simulation.checkers.group_sets import (
    EpochGroups,
    check_groups,
    check_losses,
    check_steps,
    epoch_groups,
)
from tests.simulation.scenario import Ledger, Violation, World
from tests.simulation.scenarios.fence_watch import FenceWatch
from tests.simulation.scenarios.training_cluster import APPLY_S, TrainingCluster

LOOK_S = 0.05
"""Interval in seconds between two looks at the map; shards keep ended epochs' sets longer."""

Key = tuple[str, int]
"""Run, and number of the epoch."""


class GroupWatch:
    """Compares each ended epoch of the run.

    Args:
        only_groups: Whether shards take gradients only from groups; hostile peers may push others.

    Attributes:
        compared: Epochs that were compared.
    """

    def __init__(
        self, world: World, cluster: TrainingCluster, ledger: Ledger, *, only_groups: bool = True
    ) -> None:
        self._only_groups = only_groups
        self._world = world
        self._cluster = cluster
        self._counts = ledger.counts
        self._fences = FenceWatch(cluster, ledger)
        self._ended: dict[Key, tuple[float, EpochGroups]] = {}
        """Time and groups of the ended epochs that are not compared yet."""
        self._epochs: dict[Key, EpochRecord] = {}
        self.compared: set[Key] = set()
        frozen = [layer.name for layer in cluster.setup.spec.layers if dict(layer.options).get("frozen")]
        self._frozen = tuple(f"{name}." for name in frozen)

    async def watch(self) -> None:
        """Look at the map and the shards at intervals. Raises Violation."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Compare the epochs that have ended, and check answered questions for groups. Raises Violation."""
        self._fences.look()
        run = self._cluster.map.run
        self._note()
        for key, (since, groups) in list(self._ended.items()):
            if run is None or key[0] != run.id:
                del self._ended[key]  # another run has replaced the old run
                continue
            try:
                self._compare(key, groups)
            except Violation:
                # A new primary applies the lost primary's entries before it answers.
                if not self._cluster.setup.has_copies or self._world.now > since + APPLY_S:
                    raise

    def check_end(self) -> None:
        """Check that each epoch of the newest run is compared. Raises Violation."""
        self.look()
        for key, (_, groups) in list(self._ended.items()):
            self._compare(key, groups)
        if self._ended:
            raise Violation(
                "every epoch is compared", f"{[*self._ended]} have ended, and no shards were compared"
            )

    def _note(self) -> None:
        """Note the epoch in progress, and the groups of ended epochs."""
        cluster = self._cluster.map
        epoch, known = cluster.epoch, {*self.compared, *self._ended}
        if epoch is not None and (epoch.run, epoch.number) not in known:
            self._epochs[epoch.run, epoch.number] = epoch
        for key, epoch in list(self._epochs.items()):
            if cluster.run is not None and key[0] == cluster.run.id and cluster.ended >= epoch.number:
                self._ended[key] = (self._world.now, epoch_groups(epoch, cluster.result(epoch.number)))
                del self._epochs[key]

    def _compare(self, key: Key, groups: EpochGroups) -> None:
        shards = self._shards()
        if shards is None:
            return
        sets = {f"shard {number}": shard.tables.groups.get(key[1], ()) for number, shard in shards.items()}
        for number, shard in shards.items() if self._only_groups else ():
            single = self._cluster.setup.config.push_every == 1
            loaded = self._cluster.loaded_groups(key[0], number)
            check_steps(f"shard {number}", shard, loaded=loaded, single=single)
        check_groups(f"{key[0]}/{key[1]}", groups, sets, self._counts)
        self._compare_losses(key, groups)
        self.compared.add(key)
        del self._ended[key]

    def _compare_losses(self, key: Key, groups: EpochGroups) -> None:
        """Compare an epoch's loss with its groups' losses; workers may have trained the groups again.

        A resumed run has the losses of the run before, too.
        """
        run, epoch = key
        losses = [
            each
            for (of, number), each in self._cluster.losses.items()
            if of == epoch and common(groups.trained, number, number + 1)
        ]
        least, most = (fsum(map(chosen, losses)) for chosen in (min, max))
        check_losses(f"{run}/{epoch}", self._cluster.map.result(epoch), least=least, most=most)

    def _shards(self) -> dict[int, Shard] | None:
        """Return the run's shards that take gradients, from its primaries; None if one does not run."""
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
