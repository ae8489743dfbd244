"""A program that no role can read, or that names code that no role allows, costs its own run, and no role."""

import dataclasses
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.driver.takeover import submit
from adam_async.errors import RoleFailed, TransformFailed
from adam_async.model.named import digits
from adam_async.run.config import Config
from adam_async.run.training_program import ProgramRecord, TrainingProgram
from tests.adam_async.runs import NETWORKS, cluster_of


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("blob", [b"", b"\xff no MessagePack"], ids=["none", "garbage"])
async def test_a_run_with_an_unreadable_blob_fails_with_the_reason_and_the_next_one_trains(network, blob):
    async with cluster_of(Config(epochs=1, threads=1), NETWORKS[network]()) as cluster:
        driver = cluster.driver
        await driver.wait_for_data()
        await submit(
            driver._membership,
            ProgramRecord(
                id="bad", driver=driver._identity.node, incarnation=driver._identity.incarnation, blob=blob
            ),
        )
        over = await driver._membership.wait_for(
            lambda m: m.run is not None and m.run.phase == "failed", "the end of the run", 20.0
        )
        assert "the data server cannot serve the run: data-0: run bad cannot be read" in over.run.reason
        result = await cluster.train()
        assert [epoch.epoch for epoch in result.epochs] == [1]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that roles could import, and must not."""
    (tmp_path / "a_trap.py").write_text("def spring(image, draws):\n    return image\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "a_trap:spring"


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{"kind": "a_trap:spring"}], "does not allow: .*--allow-transform a_trap:spring"),
        ([{"kind": "nothing"}], "step 1 has the kind 'nothing'; known kinds"),
        ([{"kind": "shift", "pixels": -1}], "pixels = -1, expected"),
        ([{"kind": "pad", "pixels": 30_000}], r"step 1 \(pad\) makes images of .*, expected at most"),
        ([{"kind": "pad", "pixels": 1}], "the transforms make images of .* but test images stay"),
    ],
    ids=["a function", "an unknown kind", "a bad option", "a huge pad", "another shape"],
)
async def test_a_data_server_refuses_transforms_without_an_import_and_serves_the_next_run(
    network, steps, said, trap
):
    async with cluster_of(Config(epochs=1, threads=1, augment=True), NETWORKS[network]()) as cluster:
        driver = cluster.driver
        await driver.wait_for_data()
        config = msgspec.structs.replace(cluster.config, epochs=1)
        program = TrainingProgram(config=config, spec=digits().to_dict(), transforms=tuple(steps))
        await submit(driver._membership, program.record("bad", driver._membership.member))
        with pytest.raises(RoleFailed, match=f"the data server cannot serve the run: data-0: .*{said}"):
            await driver._readiness.wait_training("bad")
        assert "a_trap" not in sys.modules
        result = await cluster.train()
        assert [epoch.epoch for epoch in result.epochs] == [1]


async def test_the_driver_that_submits_a_refused_function_learns_the_option_that_allows_it(trap):
    config = Config(epochs=1, threads=1, augment=True)
    async with cluster_of(config, transforms=[{"kind": "flip"}]) as cluster:
        driver, inputs = cluster.driver, cluster.driver._inputs
        # The driver of another machine, which has the function itself.
        driver._inputs = dataclasses.replace(
            inputs, transforms=[{"kind": trap}], functions={trap: lambda image, draws: image}
        )
        with pytest.raises(
            RoleFailed, match=r"cannot serve the run: data-0: .*--allow-transform a_trap:spring"
        ):
            await cluster.train()
        assert "a_trap" not in sys.modules
        driver._inputs = inputs
        result = await cluster.train()
        assert [epoch.epoch for epoch in result.epochs] == [1]


def _darker(image, draws, *, by=1):
    return image // np.uint8(by)


@pytest.mark.parametrize("data_servers", [1, 2])
async def test_a_function_that_fails_on_an_image_ends_its_run_by_name_and_no_data_server(data_servers):
    config = Config(epochs=1, threads=1, augment=True, data_servers=data_servers)
    async with cluster_of(config, transforms=[{"kind": "darker"}], functions={"darker": _darker}) as cluster:
        driver, inputs = cluster.driver, cluster.driver._inputs
        driver._inputs = dataclasses.replace(inputs, transforms=[{"kind": "darker", "by": "much"}])
        with pytest.raises(TransformFailed, match=r"^step 1: the function 'darker' failed"):
            await cluster.train()
        over = driver.map.run
        assert over is not None
        assert "cannot serve the run: data-" in over.reason
        assert "step 1: the function 'darker' failed" in over.reason
        driver._inputs = inputs
        result = await cluster.train()
        assert [epoch.epoch for epoch in result.epochs] == [1]
        assert len(driver.map.live("data")) == data_servers


async def test_a_cache_that_a_data_server_cannot_have_is_refused_and_the_next_run_trains():
    async with cluster_of(Config(epochs=1, threads=1)) as cluster:
        driver = cluster.driver
        await driver.wait_for_data()
        config = msgspec.structs.replace(cluster.config, cache="8000T")
        program = TrainingProgram(config=config, spec=digits().to_dict())
        await submit(driver._membership, program.record("bad", driver._membership.member))
        refused = (
            "the data server cannot serve the run: data-0: .*a cache of .* bytes, and this data server has"
        )
        with pytest.raises(RoleFailed, match=refused):
            await driver._readiness.wait_training("bad")
        result = await cluster.train()
        assert [epoch.epoch for epoch in result.epochs] == [1]
