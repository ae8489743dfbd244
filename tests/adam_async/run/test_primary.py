"""The primary of a bundle, with its address, as the map has it."""

import msgspec

from adam_async.run.run_copies import Primary, lacks_copies, primary_of
from adam_async.run.store_record import BundleRecord, bundle_key
from tests.adam_async.cluster_maps import Cluster, bundle_map, store_record


def test_the_primary_of_a_bundle_is_found_by_the_id_of_its_store_wherever_it_has_moved():
    cluster = Cluster()
    cluster.join("ps-0", "ps-1", incarnation=3, address="local://here")
    store = cluster.open("main", store_record("store-1"))
    assert primary_of(cluster.map, store.id, "ps-0") == Primary("ps-0", 3, "local://here")
    assert primary_of(cluster.map, "store-2", "ps-0") is None
    for members, expected in (
        ((("ps-1", 3), ("ps-0", 3)), Primary("ps-1", 3, "local://here")),
        ((("ps-1", 2),), None),
        ((), None),
    ):
        bundles = {bundle_key("main", "ps-0"): BundleRecord(store=store.id, in_sync=members)}
        assert primary_of(msgspec.structs.replace(cluster.map, bundles=bundles), store.id, "ps-0") == expected


def test_a_bundle_lacks_copies_while_it_has_a_primary_and_too_few_members_in_sync_for_a_push():
    names = ("ps-0", "ps-1", "ps-2")
    for least, count, expected in ((0, 1, True), (0, 2, False), (1, 1, False), (3, 2, True), (0, 0, False)):
        cluster = bundle_map({"ps-0": names[:count]}, copies=3, min_in_sync=least)
        assert lacks_copies(cluster, "run-1", "ps-0") is expected, (least, count)
    assert not lacks_copies(cluster, "run-2", "ps-0")
    assert not lacks_copies(cluster, "run-1", "ps-9")
