"""The folders of stores on the disk of one server: their removal, and the stores that others supersede."""

import pytest

from adam_async.parameter_server.server_disk import SAVED, is_saved, opened_disk
from adam_async.parameter_server.store_disk import REMOVED
from adam_async.run.bundle_record import BundleRecord
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.store_record import StoreRecord, served_word


async def test_a_removal_that_a_crash_cuts_short_leaves_no_store(tmp_path, monkeypatch):
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        store = disk.of("store")
        await store.reopen()

        async def fail_midway(folder):
            if folder.exists():
                raise OSError("the power fails")

        monkeypatch.setattr(disk.ports.states, "remove_folder", fail_midway)
        with pytest.raises(OSError, match="the power fails"):
            await store.remove()
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert names == [REMOVED + store.folder.name]
    async with opened_disk(tmp_path, flush_s=1.0) as disk:
        assert list(disk) == []
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def cluster_of(store, reported):
    nodes = {
        name: NodeRecord(role="ps", address="", incarnation=1, info={SAVED: [served_word(store)] if has else []})
        for name, has in reported.items()
    }
    bundles = {
        f"bundles/{store.id}/{name}": BundleRecord(
            store=store.id, generation=1, primary=(name, 1), in_sync=((name, 1),)
        )
        for name in reported
    }
    return ClusterMap(nodes=nodes, bundles=bundles, stores={"name": store})


@pytest.mark.parametrize("last", [False, True])
def test_a_store_supersedes_another_one_once_all_primaries_have_reported_it(last):
    store = StoreRecord(id="s", creator="c", buckets=("ps-0", "ps-1"), phase="open")
    assert is_saved(cluster_of(store, {"ps-0": True, "ps-1": last}), store) is last
