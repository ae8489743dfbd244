"""The workload `train`: pairs of runs, without and with faults."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adam_async.cluster.processes import ProcessCluster
from adam_async.errors import AdamError, ConfigError, DataError, first_cause
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config
from adam_async.run.result import RunResult
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.child_process import ChildProcess
from tests.drill.hosts import launcher_of
from tests.drill.injection import PATIENCE_S, Injector, MapWatch
from tests.drill.judging import Observations, PairObservation
from tests.drill.network_namespaces import NamespaceNetwork
from tests.drill.plan import PlannedFault
from tests.drill.training_audit import WorkerSlots, audit_run


@dataclass(frozen=True, slots=True)
class DrilledStep:
    """A step of the user's that the runs train: import path, arguments, and folders of modules."""

    path: str
    args: Mapping[str, Any]
    folders: Sequence[Path] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingDrill:
    """Settings of a drill with training.

    Attributes:
        config: Configuration of each run; pair n uses its seed plus n.
        plans: Faults of each pair.
        every_s: Minimum time between the starts of two faults, in seconds.
        environment: Environment of the processes.
        on_fault: Called with a line for each fault and each run.
        on_line: Called with the events of the clusters and the stderr of their processes.
        network: Hosts of the servers, if the plans have cuts.
        step: Step to train in place of a network.
    """

    config: Config
    plans: Sequence[Sequence[PlannedFault]]
    every_s: float
    environment: Mapping[str, str]
    on_fault: Callable[[str], None]
    on_line: Callable[[str], None]
    network: NamespaceNetwork | None
    step: DrilledStep | None = None

    async def run(self) -> Observations:
        """Train, inject the faults, and return what was observed.

        Raises:
            ConfigError: An option does not fit the data.
            DataError: The data are missing or damaged.
        """
        seen = Observations(planned=sum(map(len, self.plans)))
        try:
            for number, plan in enumerate(self.plans):
                seed = self.config.seed + number
                without = await self._train(seed, (), seen)
                faults = len(seen.faults)
                with_faults = await self._train(seed, plan, seen)
                seen.pairs.append(
                    PairObservation(
                        seed=seed,
                        faults=len(seen.faults) - faults,
                        accuracy_without=without.test_accuracy,
                        accuracy_with=with_faults.test_accuracy,
                        images_per_s_without=images_per_s(without),
                        images_per_s_with=images_per_s(with_faults),
                    )
                )
        except (ConfigError, DataError):
            raise
        except AdamError as error:
            seen.failure = str(error)
        return seen

    async def _train(self, seed: int, plan: Sequence[PlannedFault], seen: Observations) -> RunResult:
        result = await self._run(msgspec.structs.replace(self.config, seed=seed), plan, seen)
        kind = f"{len(plan)} faults" if plan else "no faults"
        self.on_fault(
            f"seed {seed}, {kind}: {result.test_accuracy:.2%}, {images_per_s(result):,.0f} images/s"
        )
        return result

    async def _run(self, config: Config, plan: Sequence[PlannedFault], seen: Observations) -> RunResult:
        """Train one run; the injection ends with the training.

        Raises:
            AdamError: The run failed.
        """
        watch, slots = MapWatch(store_in_progress), WorkerSlots()
        launcher = launcher_of(self.environment, self.network)
        try:
            async with (
                ProcessCluster(
                    config,
                    environment=self.environment,
                    on_line=self.on_line,
                    launcher=launcher,
                    step=None if self.step is None else self.step.path,
                    step_args=None if self.step is None else self.step.args,
                    step_path=() if self.step is None else self.step.folders,
                ) as cluster,
                asyncio.TaskGroup() as group,
            ):
                following = group.create_task(_follow(cluster, watch, slots), name="drill/maps")
                injecting = group.create_task(self._inject(cluster, watch, plan, seen), name="drill/faults")
                try:
                    result = await cluster.train()
                finally:
                    following.cancel()
                    injecting.cancel()
        except ExceptionGroup as errors:
            raise first_cause(errors) from None
        finally:
            seen.failovers += watch.failovers.caused
            seen.false_failovers += watch.failovers.false
        audit_run(result.statistics, slots, f"seed {config.seed}", seen)
        return result

    async def _inject(
        self, cluster: ProcessCluster, watch: MapWatch, plan: Sequence[PlannedFault], seen: Observations
    ) -> None:
        def child(server: str) -> ChildProcess:
            process = cluster.children[server]
            assert isinstance(process, ChildProcess), "a drill starts child processes"
            return process

        injector = Injector(watch, child, partial(_resumed, watch), self.network, self.on_fault)
        try:
            if plan:
                await injector.run(plan, self.every_s)
        except AdamError as error:
            seen.failure = seen.failure or str(error)
        finally:
            seen.faults += injector.faults


async def _resumed(watch: MapWatch, lost: Mapping[str, int], fault_s: float) -> dict[str, float]:
    """Return the seconds from a fault to each bundle's new primary in the map; see `injection.Resumed`."""
    loop = asyncio.get_running_loop()
    found: dict[str, float] = {}
    for home, generation in lost.items():
        await watch.until(
            lambda home=home, generation=generation: (  # type: ignore[misc]
                home in watch.bundles and watch.bundles[home].generation > generation
            ),
            f"a new primary of the shards of {home}",
            PATIENCE_S,
        )
        found[home] = loop.time() - fault_s
    return found


def store_in_progress(cluster: ClusterMap) -> StoreRecord | None:
    """Return the store of the run in progress."""
    return cluster.run_store if cluster.in_progress else None


def images_per_s(result: RunResult) -> float:
    """Return the training images per second of training, over all epochs."""
    seconds = sum(epoch.train_s for epoch in result.epochs)
    return sum(epoch.images for epoch in result.epochs) / seconds if seconds else 0.0


async def _follow(cluster: ProcessCluster, watch: MapWatch, slots: WorkerSlots) -> None:
    async for newest in cluster.driver.maps():
        watch.see(newest)
        slots.observe(newest)
