"""A watch of maps ends its waits with the map that satisfies them."""

import asyncio

import pytest

from adam_async.errors import DeadlineExceeded
from adam_async.run.cluster_map import ClusterMap
from tests.drill.injection import MapWatch


async def test_a_wait_ends_with_the_first_map_that_satisfies_it() -> None:
    watch = MapWatch(lambda _: None)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(watch.until(lambda: watch.map.version >= 3, "version 3", 5.0))
        for version in (1, 2, 3):
            await asyncio.sleep(0)
            assert not waiting.done()
            watch.see(ClusterMap(version=version))

    assert waiting.done()


async def test_a_wait_beyond_its_deadline_has_a_name() -> None:
    watch = MapWatch(lambda _: None)

    with pytest.raises(DeadlineExceeded, match="a map that never comes"):
        await watch.until(lambda: False, "a map that never comes", 0.01)


def test_no_store_is_not_whole() -> None:
    watch = MapWatch(lambda cluster: cluster.run_store)
    watch.see(ClusterMap(version=1))

    assert (watch.is_whole, watch.copies, dict(watch.bundles)) == (False, 0, {})
