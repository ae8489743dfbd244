"""The folders of stores on the disk of one server: their removal, and the stores that others supersede."""

import msgspec
import pytest

from adam_async.parameter_server.server_disk import SAVED, is_saved, opened_disk
from adam_async.parameter_server.store_disk import REMOVED
from adam_async.run.store_record import served_word
from tests.adam_async.cluster_maps import bundle_map


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


@pytest.mark.parametrize("last", [False, True])
def test_a_store_supersedes_another_one_once_all_primaries_have_reported_it(last):
    cluster = bundle_map({"ps-0": ["ps-0"], "ps-1": ["ps-1"]}, copies=1)
    (store,) = cluster.stores.values()
    for name, has in {"ps-0": True, "ps-1": last}.items():
        node = msgspec.structs.replace(cluster.nodes[name], info={SAVED: [served_word(store)] if has else []})
        cluster = msgspec.structs.replace(cluster, nodes={**cluster.nodes, name: node})
    assert is_saved(cluster, store) is last
