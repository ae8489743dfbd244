"""The progress during the wait for roles: missing roles, compiled kernels, then the plan of the model."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.driver import readiness as module
from adam_async.driver.readiness import Readiness
from adam_async.errors import DeadlineExceeded
from adam_async.model.network import Network
from adam_async.run.config import Config, Waits
from adam_async.run.progress import Progress
from adam_async.run.training_program import read_training
from tests.adam_async.cluster.test_elastic import joiner
from tests.adam_async.runs import cluster_of, tiny_dataset, until

WAITS = Waits(dial_s=20.0, call_s=20.0, patience_s=20.0, prepare_s=60.0, drain_s=20.0)


def readiness_of(cluster, **options) -> tuple[Readiness, Progress]:
    """Return the wait for the roles of a run in a cluster of one server, one data server and one worker."""
    progress = Progress()
    readiness = Readiness(
        config=Config(threads=1, waits=WAITS, **options),
        membership=cluster.driver._membership,
        queries=cluster.driver._counts,
        progress=progress,
    )
    return readiness, progress


@pytest.mark.parametrize(
    ("options", "phase", "missing"),
    [
        ({"replicas": 2}, "1 of 2 workers", "1 of 2 workers"),
        ({"replicas": 2, "partitions": 2}, "3 of 4 workers", "3 of 4 workers (2 for each of 2 replica(s))"),
        (
            {"replicas": 3, "servers": 2},
            "1 of 2 parameter servers, 2 of 3 workers",
            "1 of 2 parameter servers, 2 of 3 workers",
        ),
        ({"data_servers": 3}, "2 of 3 data servers", "2 of 3 data servers"),
    ],
)
async def test_missing_roles_are_shown_during_the_wait_for_workers(options, phase, missing) -> None:
    async with cluster_of(Config(epochs=1, threads=1)) as cluster, asyncio.TaskGroup() as group:
        readiness, progress = readiness_of(cluster, **options)
        waiting = group.create_task(readiness.wait_for_workers(), name="waiting")
        await until(lambda: progress.missing == missing)
        assert progress.phase == f"waiting for {phase}"
        waiting.cancel()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("1 of 2 workers", "worker --join"),
        ("a parameter server", "ps --controller"),
        ("2 of 3 data servers", "data --controller"),
    ],
)
def test_a_role_that_a_person_starts_is_shown_with_its_command(missing: str, words: str) -> None:
    both = "tcp://10.0.0.1:7000,tcp://10.0.0.2:7000"
    end = f"start one with: adam-async {words} {both}"
    assert how_to_start([missing], "tcp://10.0.0.1:7000") == f" (at most 60 s); {end}"
    assert how_to_start([missing], "tcp://10.0.0.1:7000", processes=True) == ""
    assert how_to_start([missing], "local://controller") == ""


def test_each_of_several_missing_roles_is_shown_with_its_command() -> None:
    text = how_to_start(["a data server", "2 of 3 workers"], "tcp://10.0.0.1:7000")
    both = "tcp://10.0.0.1:7000,tcp://10.0.0.2:7000"
    assert text.endswith(f"adam-async data --controller {both} and adam-async worker --join {both}")


def how_to_start(missing: list[str], address: str, **options: Any) -> str:
    """Return the commands for the missing roles of a cluster with this first controller."""
    membership: Any = SimpleNamespace(controllers=(address, "tcp://10.0.0.2:7000"))
    config = Config(waits=WAITS, **options)
    readiness = Readiness(config=config, membership=membership, queries=None, progress=Progress())  # type: ignore[arg-type]
    return readiness._how_to_start(missing)


async def test_no_role_is_missing_after_the_wait() -> None:
    async with cluster_of(Config(epochs=1, threads=1)) as cluster:
        readiness, progress = readiness_of(cluster, replicas=2)
        await readiness.wait_for_data()
        assert (progress.phase, progress.missing) == ("preparing", "")
        progress.phase = "loading 0001"
        waiting = asyncio.create_task(readiness.wait_for_workers(), name="waiting")
        await until(lambda: progress.missing == "1 of 2 workers")
        async with joiner(cluster, "worker-9"):
            await waiting
        assert (progress.phase, progress.missing) == ("loading 0001", "")


@pytest.mark.thorough
async def test_the_error_of_slow_kernels_names_the_option_for_a_longer_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def compile_without_end(_: Network, progress) -> None:
        progress(3, 35)
        over.wait()

    monkeypatch.setattr(Network, "warm_up", compile_without_end)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    waits = msgspec.structs.replace(WAITS, prepare_s=1.5)
    async with cluster_of(Config(epochs=1, threads=1, waits=waits)) as cluster:
        try:
            with pytest.raises(DeadlineExceeded) as caught:
                await cluster.train()
        finally:
            over.set()
    message = "worker-0 (not ready); the run was preparing kernels 3/35; where roles only need longer, raise "
    assert message + "prepare_s under [waits] in the file of --config" in str(caught.value)


async def test_how_the_model_is_cut_is_known_when_training_begins() -> None:
    config = Config(model="digits", epochs=1, threads=1, partitions=2)
    async with LocalCluster(config, dataset=tiny_dataset()) as cluster:
        await cluster.train()
        run, progress = cluster.driver.map.run, cluster.driver.progress
        assert run is not None
        assert progress.plan is not None
        assert msgspec.json.encode(progress.plan) == msgspec.json.encode(read_training(run).plan)


async def test_a_model_that_is_not_cut_has_no_plan() -> None:
    async with cluster_of(Config(epochs=1, threads=1)) as cluster:
        await cluster.train()
        assert cluster.driver.progress.plan is None
