"""The record of a run has the logs of all bundles; otherwise it is an error with the reason."""

import msgspec
import pytest

from adam_async.driver.readiness import Readiness
from adam_async.driver.recorder import Recorder
from adam_async.driver.role_queries import RoleQueries
from adam_async.errors import ConfigError, RecordError
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config, Waits
from adam_async.run.counts import Counts
from adam_async.run.store_record import bundle_key
from adam_async.run.training_program import ResumeRecord, TrainingProgram
from adam_async.runtime.channel import Endpoint
from dataflow import ComputePool
from tests.adam_async.cluster_maps import training
from tests.adam_async.role_counts import counts_of
from tests.adam_async.runs import cluster_of, local_network
from transport import Identity

MODEL = Network(digits())
RUN = TrainingProgram(config=Config(record=True), spec=digits().to_dict())
IDENTITY = Identity(role="driver", node="driver", incarnation=1)


def recorder(pool: ComputePool, program: TrainingProgram = RUN, run: str = "run") -> Recorder:
    queries = RoleQueries(Endpoint(local_network(), IDENTITY), waits=Waits(dial_s=0.05))
    return Recorder(run=run, program=program, model=MODEL, data={}, queries=queries, pool=pool)


async def test_a_resumed_run_is_not_recorded() -> None:
    resumed = msgspec.structs.replace(RUN, resumed=ResumeRecord(epoch=2, clock=7))

    async with ComputePool(threads=1) as pool:
        with pytest.raises(ConfigError, match="this one is resumed: leave out record"):
            recorder(pool, resumed)


async def test_a_server_that_cannot_be_asked_is_named() -> None:
    cluster = training(servers=1).map
    assert cluster.run is not None

    async with ComputePool(threads=1) as pool:
        record = await recorder(pool, run=cluster.run.id).gather(cluster, {}, {})

    assert isinstance(record, RecordError)
    assert str(record).startswith("the run was not recorded: ps-0 did not send the log of bundle ps-0")


async def test_a_bundle_without_a_primary_is_named() -> None:
    cluster = training(servers=2).map
    assert cluster.run is not None
    key = bundle_key(cluster.run.id, "ps-0")
    bundle = msgspec.structs.replace(cluster.bundles[key], in_sync=())
    moved = msgspec.structs.replace(cluster, bundles={**cluster.bundles, key: bundle})

    async with ComputePool(threads=1) as pool:
        record = await recorder(pool, run=cluster.run.id).gather(moved, {}, {})

    assert isinstance(record, RecordError)
    assert str(record) == "the run was not recorded: bundle ps-0 has no primary"


def statistics_of(*kernels: str | None) -> dict[str, Counts]:
    """Statistics of workers with these kernels; None leaves them out."""
    return {
        f"worker-{number}": counts_of(
            "worker",
            kernels=None if name is None else {"set": name, "compiled": 0, "of": 0, "numpy_groups": 0},
        )
        for number, name in enumerate(kernels)
    }


async def test_workers_with_different_kernels_make_no_record() -> None:
    async with ComputePool(threads=1) as pool:
        weights = MODEL.initial_weights(Dice(0))
        record = await recorder(pool).gather(ClusterMap(), weights, statistics_of("numpy", "numba"))

    assert isinstance(record, RecordError)
    assert "workers ran different kernels (numba, numpy); name one by kernels" in str(record)


async def test_workers_without_kernels_make_no_record() -> None:
    async with ComputePool(threads=1) as pool:
        record = await recorder(pool).gather(ClusterMap(), {}, statistics_of(None))

    assert isinstance(record, RecordError)
    assert "no worker reported its kernels" in str(record)


async def test_a_run_that_is_not_recorded_has_no_record() -> None:
    async with cluster_of(Config(epochs=1)) as cluster:
        result = await cluster.train()

    assert result.record is None


async def test_workers_with_several_threads_are_named_before_a_recorded_run_is_submitted() -> None:
    async with cluster_of(Config(threads=2, weights="copy")) as cluster:
        readiness = Readiness(
            config=Config(threads=1, weights="copy", record=True),
            membership=cluster.driver._membership,
            queries=cluster.driver._counts,
            progress=cluster.driver.progress,
        )
        with pytest.raises(ConfigError, match="worker-0 have more: start them with --threads 1"):
            await readiness.wait_for_workers()
