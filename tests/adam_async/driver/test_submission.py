"""A program with a blob that no role can read costs its own run, and no role."""

import pytest

from adam_async.driver.submission import submit
from adam_async.errors import RunFailed
from adam_async.run.config import Config
from adam_async.run.program_record import ProgramRecord
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


async def test_an_unknown_kind_is_refused_with_the_known_ones():
    async with cluster_of(Config(epochs=1, threads=1)) as cluster:
        driver = cluster.driver
        await driver.wait_for_data()
        record = ProgramRecord(
            id="soup", driver=driver._identity.node, incarnation=driver._identity.incarnation, kind="cooking"
        )
        with pytest.raises(RunFailed, match="unknown kind of program 'cooking'; known: training"):
            await submit(driver._membership, record)
        assert driver.map.run is None
