"""The copies of a run's shards, read from the cluster map."""

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.run_copies import copies_of
from tests.adam_async.cluster_maps import bundle_map


def test_copies_name_the_primary_and_those_in_sync_and_the_bundles_that_lack_some() -> None:
    copies = copies_of(bundle_map({"ps-0": ("ps-0", "ps-1"), "ps-1": ("ps-2",)}, joining={"ps-1": ("ps-0",)}))

    assert copies is not None
    assert (copies.copies, copies.min_in_sync) == (2, 2)
    assert [(each.home, each.primary, each.in_sync, each.joining) for each in copies.bundles] == [
        ("ps-0", "ps-0", ("ps-0", "ps-1"), ()),
        ("ps-1", "ps-2", ("ps-2",), ("ps-0",)),
    ]
    assert [each.home for each in copies.lagging] == ["ps-1"]


def test_a_bundle_whose_copies_are_all_lost_has_no_primary() -> None:
    copies = copies_of(bundle_map({"ps-0": ()}))
    assert copies is not None
    assert copies.bundles[0].primary == ""


def test_there_are_no_copies_before_a_run_has_its_servers() -> None:
    assert copies_of(ClusterMap()) is None
    assert copies_of(bundle_map({})) is None
