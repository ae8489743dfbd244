"""The first map of a restarted single controller: the wait for servers, primaries, numbers, false reports."""

import itertools

import msgspec
import pytest
from msgspec.structs import replace

from adam_async.controller import learned_map
from adam_async.controller.learned_map import (
    AHEAD,
    LISTEN_S,
    LearnedMap,
    StoresReport,
    most_version,
    stores_of,
)
from adam_async.messages import Standing
from adam_async.run.store_record import ArrayRecord, BundleRecord
from tests.adam_async.cluster_maps import Cluster, store_record

A, B, C = ((f"ps-{number}", 1) for number in range(3))
KEY = "bundles/a/ps-0"
NOW_S = 1.8e9
LONGEST_S = 7.0


def cluster_of(*, copies=3, servers=1, clients=1, **fields) -> Cluster:
    """A cluster of three servers and some clients with an open store of one bundle."""
    cluster = Cluster()
    cluster.join(*(f"client-{number}" for number in range(clients)), "ps-0", "ps-1", "ps-2")
    cluster.open("a", store_record(servers=servers, copies=copies, **fields))
    if servers == 1 and copies == 3:
        cluster.set(KEY, replace(cluster.map.bundles[KEY], in_sync=(A, B, C), joining=()))
    return cluster


def report_of(cluster, standing=None, key=KEY) -> StoresReport:
    return StoresReport(map=stores_of(cluster.map), standings={key: standing} if standing else {})


def learned(**reports) -> LearnedMap:
    """The reports of some servers, by the letters of their names."""
    found = LearnedMap(0.0, LONGEST_S, most_version(NOW_S))
    for letter, report in reports.items():
        assert found.report({"a": A, "b": B, "c": C}[letter], report) == ""
    return found


def first_bundle(found: LearnedMap, key=KEY) -> BundleRecord:
    return found.first_map().bundles[key]


# --- the map -------------------------------------------------------------------------------------


def test_the_newest_map_decides_about_stores_and_clients_and_leaves_programs_out():
    cluster = cluster_of()
    old = report_of(cluster)
    cluster.set("nodes/client-0", replace(cluster.map.nodes["client-0"], store="store-1"))
    cluster.join("worker-0", "driver", "data-0", "reader-0")
    cluster.open("b", store_record("store-2", servers=1))
    found = learned(a=old, b=report_of(cluster), c=old)

    first = found.first_map()

    assert set(first.stores) == {"a", "b"}
    assert set(first.nodes) == {"ps-0", "ps-1", "ps-2", "client-0", "reader-0"}
    assert first.nodes["client-0"] == cluster.map.nodes["client-0"]  # its place, and so its generation, stays
    assert first.pushers(first.stores["a"]) == cluster.map.pushers(cluster.map.stores["a"])
    assert first.arrays == cluster.map.arrays


def test_the_numbers_of_the_first_map_are_above_all_that_a_server_may_have_seen():
    cluster = cluster_of()
    first = learned(**dict.fromkeys("abc", report_of(cluster))).first_map()

    assert first.version >= cluster.map.version + AHEAD
    assert first.placements >= cluster.map.placements
    bundle = first.bundles[KEY]
    assert cluster.map.version < bundle.generation < first.version
    assert bundle.changed == first.version
    assert first.stores["a"].generation == cluster.map.stores["a"].generation  # pushes name it


def test_a_store_deleted_in_the_newest_map_does_not_come_back():
    cluster = cluster_of()
    before = report_of(cluster)
    cluster.set("stores/a", replace(cluster.map.stores["a"], phase="deleted"))

    first = learned(a=before, b=report_of(cluster), c=before).first_map()

    assert (first.stores, first.bundles, first.arrays) == ({}, {}, {})


def test_a_store_that_is_placed_or_loading_goes_on():
    cluster = Cluster()
    cluster.join("client-0", "ps-0")
    cluster.create("placed", store_record("store-1", servers=1))
    cluster.create("placing", store_record("store-2", servers=2))

    first = learned(a=report_of(cluster)).first_map()

    assert {name: store.phase for name, store in first.stores.items()} == {
        "placed": "loading",
        "placing": "placing",
    }


def test_without_reports_the_first_map_is_empty():
    assert learned().first_map().version == 0


# --- primaries -----------------------------------------------------------------------------------


def test_the_primary_goes_on_whatever_the_others_report():
    cluster = cluster_of()
    found = learned(
        a=report_of(cluster, Standing(generation=1, last=5)),
        b=report_of(cluster, Standing(generation=1, last=9)),
        c=report_of(cluster),
    )

    assert first_bundle(found).in_sync == (A, B, C)


@pytest.mark.parametrize("further", ["b", "c"])
def test_without_the_primary_the_highest_generation_and_position_lead(further):
    cluster = cluster_of()
    cluster.set(KEY, replace(cluster.map.bundles[KEY], generation=2, in_sync=(B, A, C)))
    cluster.set(KEY, replace(cluster.map.bundles[KEY], generation=3, in_sync=(A, C, B)))
    standings = {"b": Standing(generation=2, last=9), "c": Standing(generation=2, last=9)}
    standings[further] = Standing(generation=3, last=7)
    other = {"b": C, "c": B}[further]

    found = learned(**{letter: report_of(cluster, at) for letter, at in standings.items()})

    bundle = first_bundle(found)
    assert bundle.primary == {"b": B, "c": C}[further]
    assert bundle.in_sync[1:] == (other,)
    assert bundle.lost == ("ps-0",)


def test_a_member_that_lacks_entries_which_the_new_primary_has_dropped_joins_again():
    cluster = cluster_of()
    found = learned(
        b=report_of(cluster, Standing(generation=1, last=9, start=5, committed=8)),
        c=report_of(cluster, Standing(generation=1, last=4, start=2, committed=4)),
    )

    assert first_bundle(found).in_sync == (B,)


def test_all_orders_of_reports_give_one_map():
    cluster = cluster_of()
    reports = {
        "a": report_of(cluster, Standing(generation=1, last=5)),
        "b": report_of(cluster, Standing(generation=1, last=7)),
    }
    cluster.join("client-9")
    reports["c"] = report_of(cluster, Standing(generation=1, last=6))
    maps = [
        learned(**{letter: reports[letter] for letter in order}).first_map()
        for order in itertools.permutations("abc")
    ]

    assert all(first == maps[0] for first in maps)


def test_a_server_that_does_not_report_is_lost_and_a_store_without_copies_fails_and_names_it():
    cluster = cluster_of(copies=1, servers=3)
    first = learned(a=report_of(cluster), b=report_of(cluster)).first_map()

    assert not first.nodes["ps-2"].live
    assert first.stores["a"].phase == "failed"
    assert first.stores["a"].reason.startswith("ps-2 died")


# --- the wait ------------------------------------------------------------------------------------


def test_the_wait_of_a_new_cluster_is_short_and_that_of_a_restart_lasts_until_all_have_reported():
    cluster = cluster_of()
    found = LearnedMap(100.0, LONGEST_S, most_version(NOW_S))
    assert found.ends_at == 100.0 + LISTEN_S
    found.is_restart = True  # a client has come, so a server may come
    assert found.ends_at == 100.0 + LONGEST_S
    found.report(A, report_of(cluster))
    assert (found.missing(), found.ends_at) == ([B, C], 100.0 + LONGEST_S)
    found.report(C, report_of(cluster))
    found.report(B, report_of(cluster))
    assert found.ends_at == 100.0 + LISTEN_S


def test_the_wait_is_longer_again_if_a_newer_map_names_another_server():
    cluster = cluster_of(copies=1, servers=1)
    found = learned(a=report_of(cluster))
    assert found.ends_at == LISTEN_S
    cluster.open("b", store_record("store-2", servers=3))
    assert found.report(B, report_of(cluster)) == ""
    assert (found.missing(), found.ends_at) == ([C], LONGEST_S)


def test_the_next_incarnation_of_a_server_does_not_report_for_the_last_one():
    cluster = cluster_of()
    found = learned(a=report_of(cluster), b=report_of(cluster))
    assert found.report(("ps-2", 2), report_of(cluster)) == ""

    assert found.missing() == [C]
    assert first_bundle(found).in_sync == (A, B)


# --- false reports -------------------------------------------------------------------------------


def false_maps():
    good = stores_of(cluster_of(clients=2).map)
    store, bundle, server = good.stores["a"], good.bundles[KEY], good.nodes["ps-0"]
    client = good.nodes["client-0"]

    def of_store(**fields):
        return replace(good, stores={"a": replace(store, **fields)})

    def of_bundle(**fields):
        return replace(good, bundles={KEY: replace(bundle, **fields)})

    def of_nodes(**nodes):
        return replace(
            good, nodes={**good.nodes, **{name.replace("_", "-"): it for name, it in nodes.items()}}
        )

    placed = replace(client, store=store.id, replica=0, placed=1)
    return {
        "version 0": replace(good, version=0),
        "version 2**63": replace(good, version=1 << 63),
        "version in the far future": replace(good, version=most_version(NOW_S) + 1),
        "negative version": replace(good, version=-1),
        "placements": replace(good, placements=good.version + 1),
        "store generation": of_store(generation=good.placements + 1),
        "store changed": of_store(changed=1 << 62),
        "store phase": of_store(phase="deleted"),
        "store shards": of_store(shards=store.shards + 1),
        "store buckets": of_store(buckets=store.buckets[:5]),
        "store bytes": of_store(bucket_bytes=(1 << 60,) * 64),
        "store program": of_store(program="run-1"),
        "store rules": of_store(rules=()),
        "store pieces": of_store(pieces=64),
        "store nowhere": of_store(buckets=("ps-9",) * 64),
        "store epoch": of_store(epoch=7),
        "store name": replace(good, stores={"a\n": store}),
        "a store twice": replace(good, stores={"a": store, "b": store}),
        "arrays": replace(good, arrays={}),
        "bundle generation": of_bundle(generation=good.version + 1),
        "bundle changed": of_bundle(changed=good.version + 1),
        "bundle of none": of_bundle(in_sync=()),
        "bundle of many": of_bundle(joining=tuple((f"ps-{n}", 1) for n in range(5))),
        "bundle twice": of_bundle(in_sync=(A, A)),
        "bundle of a client": of_bundle(in_sync=(("client-0", 1),)),
        "bundle of nobody": of_bundle(in_sync=(("ps-9", 1),)),
        "bundle of another store": of_bundle(store="store-9"),
        "bundle missing": replace(good, bundles={}),
        "bundle added": replace(good, bundles={**good.bundles, "bundles/a/ps-7": bundle}),
        "node address": of_nodes(ps_0=replace(server, address="nowhere")),
        "node role": of_nodes(ps_0=replace(server, role="king")),
        "node worker": of_nodes(worker_0=replace(server, role="worker")),
        "node changed": of_nodes(ps_0=replace(server, changed=1 << 60)),
        "node placed": of_nodes(client_0=replace(placed, placed=1 << 60)),
        "node place": of_nodes(client_0=replace(placed, replica=1 << 40)),
        "node info": of_nodes(ps_0=replace(server, info={"x": "y" * (1 << 16)})),
        "one place twice": of_nodes(client_0=placed, client_1=placed),
    }


@pytest.mark.parametrize("name", false_maps())
def test_a_report_that_no_correct_server_sends_is_refused_and_changes_nothing(name):
    found = learned(a=report_of(cluster_of()))
    before = found.first_map()

    assert found.report(B, StoresReport(map=false_maps()[name])) != ""

    assert found.first_map() == before
    assert found.missing() == [B, C]


@pytest.mark.parametrize(
    "standings", [{"bundles/a/ps-7": Standing()}, {KEY: Standing(generation=(1 << 53) - 1)}]
)
def test_a_log_of_no_bundle_or_of_a_later_generation_is_refused(standings):
    report = StoresReport(map=stores_of(cluster_of().map), standings=standings)
    assert learned().report(A, report) != ""


def test_a_position_beyond_its_bound_is_refused_at_the_message():
    text = msgspec.json.encode({"map": {}, "standings": {KEY: [1 << 63, 0, 0, 0]}})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=StoresReport)


def test_the_highest_false_version_leaves_room_for_all_later_controllers():
    cluster = cluster_of()
    report = report_of(cluster)
    lie = replace(report, map=replace(report.map, version=most_version(NOW_S)))
    version = learned(a=report, b=lie).first_map().version

    for second in range(1, 100):  # a restart each second, and each with the highest lie
        report = replace(report, map=replace(report.map, version=version + 1000))
        found = LearnedMap(0.0, LONGEST_S, most_version(NOW_S + 2 * second))
        assert found.report(A, report) == ""
        version = found.first_map().version
    assert version < 1 << 52


def test_a_report_of_many_servers_is_bounded():
    found, report = learned(), report_of(cluster_of())
    faults = [found.report((f"ps-{number}", 1), report) for number in range(3, 1030)]
    assert any("servers have reported" in fault for fault in faults)


def test_the_logs_of_all_reports_are_bounded(monkeypatch):
    monkeypatch.setattr(learned_map, "MOST_LOGS", 2)
    report = StoresReport(map=stores_of(cluster_of().map), standings={KEY: Standing()})
    found = learned(a=report, b=report)
    assert "logs" in found.report(C, report)
    assert found.report(A, report) == ""  # in place of its first report
    assert found.missing() == [C]


def test_servers_that_report_one_map_cost_one_check_of_it(monkeypatch):
    checked = []
    check = learned_map._fault_of_stores
    monkeypatch.setattr(learned_map, "_fault_of_stores", lambda cluster: checked.append(1) or check(cluster))
    report = report_of(cluster_of())
    found = learned(a=report, b=report, c=report)
    assert len(checked) == 1
    assert found.report(C, StoresReport(map=report.map, standings={"bundles/a/ps-7": Standing()})) != ""
    assert found.missing() == []


def test_arrays_of_one_store_do_not_pass_for_those_of_another():
    cluster = cluster_of()
    wide = store_record(listed=(ArrayRecord("w", (64, 32)),))
    good = stores_of(cluster.map)
    report = StoresReport(map=replace(good, stores={"a": replace(good.stores["a"], nbytes=wide.nbytes)}))
    assert learned().report(A, report) != ""
