"""The cuts of a store in the cluster map: which clock all bundles have, and which naming is the newest."""

import msgspec
import pytest
from msgspec.structs import replace

from adam_async.run.cut_reports import (
    CUTS,
    NO_CLOCK,
    CutReport,
    NamedCut,
    complete_clock,
    newest_named,
    report_of,
    reports_in_sync,
)
from adam_async.run.store_record import served_word
from tests.adam_async.cluster_maps import bundle_map

HOMES = {"ps-0": ["ps-0", "ps-1"], "ps-1": ["ps-1", "ps-0"]}


def map_with(**reports):
    """A map of two bundles with two copies each; a server reports under its name with an underscore."""
    cluster = bundle_map(HOMES, copies=2)
    (store,) = cluster.stores.values()
    nodes = dict(cluster.nodes)
    for name, report in reports.items():
        node = nodes[name.replace("_", "-")]
        value = msgspec.to_builtins(report) if isinstance(report, CutReport) else report
        nodes[name.replace("_", "-")] = replace(node, info={CUTS: {served_word(store): value}})
    return replace(cluster, nodes=nodes), store


def complete(disks, **reports):
    cluster, store = map_with(**reports)
    return complete_clock(reports_in_sync(cluster, store, HOMES), disks=disks)


def test_a_clock_is_complete_once_enough_disks_have_each_bundle_at_it():
    first = CutReport(on_disk={"ps-0": (5, 9), "ps-1": (5,)})
    assert complete(1, ps_0=first) == 5
    assert complete(2, ps_0=first) == NO_CLOCK
    assert complete(2, ps_0=first, ps_1=CutReport(on_disk={"ps-0": (5,), "ps-1": (5, 9)})) == 5
    assert complete(1, ps_0=first, ps_1=CutReport(on_disk={"ps-0": (5,), "ps-1": (5, 9)})) == 9
    assert complete(1, ps_0=CutReport(on_disk={"ps-0": (5, 9)})) == NO_CLOCK
    assert complete_clock({}, disks=1) == NO_CLOCK


def test_fewer_members_in_sync_than_disks_are_enough():
    reports = {"ps-0": {"ps-0": CutReport(on_disk={"ps-0": (7,)})}}
    assert complete_clock(reports, disks=2) == 7


def test_only_the_present_incarnations_of_members_in_sync_count():
    cluster, store = map_with(ps_0=CutReport(on_disk={"ps-0": (5,), "ps-1": (5,)}))
    assert reports_in_sync(cluster, store, HOMES)["ps-1"].keys() == {"ps-0", "ps-1"}
    again = replace(cluster.nodes["ps-0"], incarnation=99)
    cluster = replace(cluster, nodes={**cluster.nodes, "ps-0": again})
    assert reports_in_sync(cluster, store, HOMES)["ps-1"].keys() == {"ps-1"}


def test_the_naming_with_the_highest_number_counts_also_of_a_server_that_is_lost():
    older, newer = NamedCut(3, 20, 10), NamedCut(4, 30, 20)
    cluster, store = map_with(ps_0=CutReport(named=newer), ps_1=CutReport(named=older))
    lost = replace(cluster.nodes["ps-0"], live=False)
    assert newest_named(replace(cluster, nodes={**cluster.nodes, "ps-0": lost}), store) == newer
    assert newest_named(map_with()[0], store) is None


@pytest.mark.parametrize(
    "value", ["text", {"handled": -1}, {"named": [1, 2]}, {"on_disk": {"ps-0": [-1]}}, {"passed": 1 << 48}]
)
def test_an_invalid_report_counts_as_none(value):
    cluster, store = map_with(ps_0=value)
    assert report_of(cluster.nodes["ps-0"], store) is None
