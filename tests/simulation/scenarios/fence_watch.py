"""Asks the bundles of a simulated run for their groups after each loss, and checks that answers are final."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from adam_async.messages import ReadGroupSets, read_group_sets
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import StoreRecord
from tests.simulation.checkers.fences import Fence
from tests.simulation.scenario import Ledger
from tests.simulation.scenarios.training_cluster import TrainingCluster
from transport import Message, Request

ANSWERED = "bundles asked for groups after a loss"
"""Name of a count."""


class _Question:
    """A `Request` of no link, whose answer is a call."""

    def __init__(self, answered: Callable[[Message], None]) -> None:
        self._answered = answered
        self.is_open = True
        self.link = SimpleNamespace(shares=False)

    def charge(self, nbytes: int, then: Callable[[], object]) -> None:
        then()

    def reply(self, message: Message, *, lent: bool = False) -> None:
        self._answered(message)

    def fail(self, code: str, text: str) -> None:
        """Drop a refusal: the watch asks again."""


class FenceWatch:
    """Each bundle's newest answer, and the replica generations that had ended before it."""

    def __init__(self, cluster: TrainingCluster, ledger: Ledger) -> None:
        self._cluster = cluster
        self._counts = ledger.counts
        self._version = 0
        """Version of the newest map."""
        self._named: set[int] = set()
        """Replica generations that the map has named."""
        self._fences: dict[str, tuple[frozenset[int], Fence]] = {}

    def look(self) -> None:
        """Check the answers so far, and ask the bundles that have not answered since a loss."""
        cluster = self._cluster.map
        store, epoch = cluster.run_store, cluster.epoch
        if store is None or store.in_place or epoch is None or epoch.run != store.program:
            return
        # Another controller may have an older map, in which a generation has not begun yet.
        if cluster.version < self._version:
            return
        self._version = cluster.version
        live = set(cluster.replica_generations().values())
        self._named |= live
        ended = frozenset(self._named - live)
        for home in sorted(set(store.buckets)):
            self._look_at(home, store, cluster, epoch.number, ended)

    def _look_at(
        self, home: str, store: StoreRecord, cluster: ClusterMap, epoch: int, ended: frozenset[int]
    ) -> None:
        record, bundles = cluster.bundle(store.id, home), self._cluster.bundles
        if record is None or record.primary is None or not bundles.runs(record.primary):
            return
        served = bundles.servers[record.primary[0]].served.get((store.id, home))
        if served is None or not served.is_primary:
            return
        name = f"bundle {home} of {store.id}"
        asked, fence = self._fences.get(name, (frozenset(), None))
        if fence is not None:
            fence.check(served.state.shards)
        if not ended - asked:
            return

        def answered(message: Message) -> None:
            read_group_sets(message.tensors)
            self._fences[name] = ended, Fence(name, ended, served.state.shards)
            self._counts[ANSWERED] += 1

        question = ReadGroupSets(
            store=store.id, generation=store.generation, home=home, epoch=epoch, map_version=cluster.version
        )
        served.answer(cast(Request, _Question(answered)), question)
