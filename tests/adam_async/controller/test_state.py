"""The controller's map as a log of commands: the same commands give the same map."""

import time
from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from msgspec.structs import replace

from adam_async.controller import store_rules
from adam_async.controller.state import INCARNATIONS_KEPT, CompareAndSet, Conflict, Invalid
from adam_async.controller.store_rules import CLIENT_STORES, CREATOR_STORES, UNFINISHED_PIECES
from adam_async.errors import LOST_STORE
from adam_async.model.rules import Adam, Sgd
from adam_async.run.shard_table import assign_buckets, shard_table
from adam_async.run.store_checks import MAX_SHARDS
from adam_async.run.store_record import (
    MOST_VALUES,
    NUM_BUCKETS,
    STORE_PIECES,
    ArrayRecord,
    ArraysPiece,
    cut_arrays,
)
from tests.adam_async.cluster_maps import (
    ARRAYS,
    Cluster,
    RecordedCluster,
    node,
    run_record,
    store_record,
    training,
)


def test_of_a_node_that_left_little_stays_however_often_it_comes_back():
    cluster = Cluster()
    for incarnation in range(1, 100):
        cluster.join("data-0", incarnation=incarnation)
        cluster.lose("data-0")
    record = cluster.map.nodes["data-0"]
    assert record.before == tuple(range(99 - INCARNATIONS_KEPT, 99))


def test_a_compare_and_set_that_comes_too_late_changes_nothing():
    cluster = Cluster()
    cluster.join("worker-0")
    version = cluster.map.nodes["worker-0"].changed
    assert cluster.set("nodes/worker-0", node(), expected=0) == [Conflict("nodes/worker-0", version)]
    assert cluster.set("run", run_record(), expected=9) == [Conflict("run", 0)]
    assert cluster.map.run is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "colour",
            {},
            "no key 'colour'; there are nodes/<id>, stores/<name>, stores/<name>/<n>, bundles/<store>/<home>",
        ),
        ("nodes/", {}, "no key"),
        ("nodes/worker-0", {"role": "worker"}, "nodes/worker-0: Object missing required field `address`"),
        ("nodes/x", {"role": "spy", "address": "", "incarnation": 1}, "there is no role 'spy'"),
        (
            "nodes/x",
            {"role": "ps", "address": "file:///etc/passwd", "incarnation": 1},
            "not of the form tcp://",
        ),
        ("nodes/x", {"role": "ps", "address": "x" * 1025, "incarnation": 1}, "address has 1025 char"),
        (
            "nodes/x",
            {"role": "ps", "address": "local://x", "incarnation": 1, "info": {"x": "x" * 33_000}},
            "33008 bytes",
        ),
    ],
)
def test_a_value_that_the_rules_cannot_work_with_is_refused_with_a_reason(key, value, said):
    cluster = Cluster()
    (event,) = cluster.apply(CompareAndSet(key=key, expected=0, value=value))
    assert isinstance(event, Invalid)
    assert said in event.reason
    assert cluster.map.version == 0


def test_an_incarnation_that_another_one_followed_never_joins_again():
    cluster = Cluster()
    cluster.join("worker-0")
    first = cluster.map.nodes["worker-0"]
    second = msgspec.structs.replace(first, incarnation=77)
    cluster.set("nodes/worker-0", second)
    (event,) = cluster.set("nodes/worker-0", msgspec.structs.replace(first, before=()))
    assert isinstance(event, Invalid)
    assert "a later incarnation of worker-0 has joined" in event.reason
    assert cluster.map.nodes["worker-0"].incarnation == 77


# --- names of nodes ----------------------------------------------------------------------------


def takes(cluster, name, role, incarnation=9):
    """Whether a node of a role gets a name."""
    events = cluster.set(f"nodes/{name}", node(role, incarnation))
    return not isinstance(events[0], Invalid)


ROLES_OF_CLUSTERS = ("driver", "worker", "ps", "data")


@pytest.mark.parametrize("squatter", ["reader", "client"])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_program_that_uses_stores_keeps_no_name_from_the_roles_of_a_cluster(squatter, leaves):
    for role in ROLES_OF_CLUSTERS:
        for name in (role, f"{role}-1", "gpu7"):
            cluster = Cluster()
            for incarnation in (7, 8, 9):  # also under the incarnation of the role that comes next
                assert takes(cluster, name, squatter, incarnation)
            if leaves:
                cluster.lose(name)
            assert takes(cluster, name, role)
            assert cluster.map.nodes[name].role == role
            assert not takes(cluster, name, squatter, 10)


@pytest.mark.parametrize(
    ("first", "then"), [(a, b) for a in ROLES_OF_CLUSTERS for b in ROLES_OF_CLUSTERS if a != b]
)
def test_a_name_that_begins_with_a_role_is_that_roles(first, then):
    cluster = Cluster()
    assert takes(cluster, f"{then}-1", first, 5)
    assert takes(cluster, f"{then}-1", then)  # also from a live node
    assert not takes(cluster, f"{then}-1", first)
    cluster.lose(f"{then}-1")
    assert not takes(cluster, f"{then}-1", first)
    assert takes(cluster, f"{then}-1", then)  # the departed incarnation returns


def test_any_other_name_is_free_after_its_node_has_departed():
    cluster = Cluster()
    assert takes(cluster, "gpu7", "worker", 5)
    assert not takes(cluster, "gpu7", "ps")
    assert "gpu7 is the name of a worker: choose another one, such as ps-1 (--id)" in refused(
        cluster.set("nodes/gpu7", node("ps", 9))
    )
    cluster.lose("gpu7")
    assert not takes(cluster, "gpu7", "reader", 5)  # other records name the departed node so
    for incarnation in (6, 7):
        assert takes(cluster, "gpu7", "reader", incarnation)
    assert takes(cluster, "gpu7", "worker", 5)  # the reader has used up no incarnation of it


def test_the_home_of_a_store_keeps_its_name_after_its_departure():
    cluster = with_servers("gpu7")
    cluster.create("a", store_record())
    cluster.lose("gpu7")
    assert not takes(cluster, "gpu7", "worker")
    cluster.set("stores/a", replace(cluster.map.stores["a"], phase="deleted"))
    assert takes(cluster, "gpu7", "worker")


def test_a_server_whose_name_its_own_role_takes_is_lost():
    cluster = with_servers("ps-0")
    cluster.set("nodes/worker-1", node("ps"))
    cluster.create("a", store_record(servers=2))
    assert servers_of(cluster, "a") == ["ps-0", "worker-1"]
    assert takes(cluster, "worker-1", "worker")
    assert cluster.map.stores["a"].phase == "failed"


@pytest.mark.parametrize("name", ["driver", "me"])
def test_no_other_role_drives_a_run_under_the_name_and_incarnation_of_its_lost_driver(name):
    cluster = Cluster()
    cluster.set(f"nodes/{name}", node("driver", 5))
    cluster.submit(run_record(driver=name, incarnation=5))
    assert cluster.map.driven
    cluster.lose(name)
    for role in ("reader", "client", "worker", "ps", "data"):
        assert not takes(cluster, name, role, 5)
        assert not takes(cluster, name, role, 6)
    assert not cluster.map.driven
    assert takes(cluster, name, "driver", 6)


# --- stores ------------------------------------------------------------------------------------


def with_servers(*names, **memory):
    """A cluster with live servers, some with a number of bytes of memory."""
    cluster = Cluster()
    cluster.join("client-0")
    for name in names:
        info = {"memory_bytes": memory[name.replace("-", "")]} if name.replace("-", "") in memory else {}
        cluster.set(f"nodes/{name}", node("ps", info=info))
    return cluster


def servers_of(cluster, name):
    return sorted(set(cluster.map.stores[name].buckets))


def refused(events):
    (event,) = events
    assert isinstance(event, Invalid), event
    return event.reason


@pytest.mark.parametrize(("servers", "wanted"), [(2, ["ps-0", "ps-1"]), (0, ["ps-0"])])
def test_a_store_is_placed_when_as_many_servers_are_live_as_it_wants(servers, wanted):
    cluster = Cluster()
    cluster.join("client-0")
    cluster.create("a", store_record(servers=servers))
    assert (cluster.map.stores["a"].phase, servers_of(cluster, "a")) == ("placing", [])
    cluster.join("ps-0")
    cluster.join("ps-1")
    assert (cluster.map.stores["a"].phase, servers_of(cluster, "a")) == ("loading", wanted)


def test_the_buckets_of_a_store_are_those_of_its_table():
    cluster = with_servers("ps-0", "ps-1", "ps-2")
    arrays = (
        ArrayRecord("a", (70, 9)),
        ArrayRecord("b", (3, 500), "float64"),
        ArrayRecord("c", ()),
        ArrayRecord("d", (0, 4)),
        ArrayRecord("e", (40, 5), cuts=(7, 20)),
        ArrayRecord("f", (90, 90), split=False),
    )
    cluster.create("a", store_record(listed=arrays), arrays)
    table = shard_table(arrays, shard_bytes=256)
    assert list(cluster.map.stores["a"].buckets) == assign_buckets(table, ["ps-0", "ps-1", "ps-2"])


def test_a_store_opens_when_all_its_servers_hold_its_values():
    cluster = with_servers("ps-0", "ps-1")
    cluster.create("a", store_record())
    cluster.serve("ps-0", "store-1")
    assert cluster.map.stores["a"].phase == "loading"
    cluster.serve("ps-1", "store-1")
    assert cluster.map.stores["a"].phase == "open"


def test_a_second_store_goes_to_the_servers_with_the_least_use():
    cluster = with_servers("ps-0", "ps-1", "ps-2")
    for number, wanted in enumerate(["ps-0", "ps-1", "ps-2", "ps-0"]):
        cluster.create(f"s{number}", store_record(f"id-{number}", servers=1))
        assert servers_of(cluster, f"s{number}") == [wanted]
    assert [cluster.map.stores[f"s{number}"].generation for number in range(4)] == [1, 2, 3, 4]


def test_a_store_that_does_not_fit_on_the_least_used_server_goes_to_the_one_with_most_room():
    cluster = with_servers("ps-0", "ps-1", ps0=4095, ps1=1 << 20)
    cluster.create("a", store_record(servers=1))
    assert servers_of(cluster, "a") == ["ps-1"]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            {"ps0": 10_000, "ps1": 10239},
            "need 20480 bytes with the state of their rules, 10240 of them on ps-",
        ),
        ({"ps0": 100_000, "ps1": 10239}, "10240 of them on ps-1, which has 10239 bytes free: add servers"),
    ],
)
def test_a_store_that_exceeds_the_memory_of_a_server_is_refused_in_bytes(memory, said):
    cluster = with_servers("ps-0", "ps-1", **memory)
    adam = {"rules": (Adam(),), "state_arrays": 2}
    reason = refused(cluster.create("a", store_record(**adam)))
    assert "its 4096 bytes of values " in reason
    assert said in reason
    assert cluster.map.stores == {}


def test_the_memory_of_other_stores_is_not_free():
    cluster = with_servers("ps-0", ps0=24575)
    cluster.create("a", store_record("id-a"))
    assert "12288 of them on ps-0, which has 12287 bytes free" in refused(
        cluster.create("b", store_record("id-b"))
    )
    cluster.set("stores/a", replace(cluster.map.stores["a"], phase="deleted"))
    cluster.create("b", store_record("id-b"))
    assert cluster.map.stores["b"].phase == "loading"


def test_a_store_that_does_not_fit_on_the_servers_that_come_later_fails_with_the_reason():
    cluster = with_servers()
    cluster.create("a", store_record())
    cluster.set("nodes/ps-0", node("ps", info={"memory_bytes": 100}))
    store = cluster.map.stores["a"]
    assert (store.phase, store.buckets) == ("failed", ())
    assert "on ps-0, which has 100 bytes free" in store.reason


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lost_server_fails_its_stores_and_no_others(restarts):
    cluster = with_servers("ps-0", "ps-1")
    cluster.open("a", store_record("id-a", servers=1))
    cluster.open("b", store_record("id-b", servers=1))
    if restarts:
        cluster.join("ps-0", incarnation=2)
    else:
        cluster.lose("ps-0")
    failed = cluster.map.stores["a"]
    assert (failed.phase, failed.lost, failed.reason) == ("failed", "ps-0", f"ps-0 died: {LOST_STORE}")
    assert cluster.map.stores["b"].phase == "open"


def test_a_failed_store_is_replaced_by_one_of_another_id():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record("id-1", slack=1))
    cluster.lose("ps-0")
    cluster.join("ps-0")
    assert "exists" in refused(cluster.create("a", store_record("id-1")))
    cluster.create("a", store_record("id-2"))
    store = cluster.map.stores["a"]
    assert (store.id, store.phase, store.generation) == ("id-2", "loading", 2)
    assert (store.lost, store.reason, store.epoch) == ("", "", 0)
    assert {piece.store for piece in cluster.map.arrays.values()} == {"id-2"}


def test_a_present_store_is_not_replaced_and_its_arrays_do_not_change():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record("id-1"))
    before = cluster.map
    assert "exists" in refused(cluster.create("a", store_record("id-2")))
    for id in ("id-1", "id-2"):
        piece = ArraysPiece(store=id, text=b"[]")
        for number in (0, 1):
            assert "exists" in refused(cluster.set(f"stores/a/{number}", piece))
    assert cluster.map is before


def test_a_deletion_removes_a_store_with_its_arrays_and_only_the_named_one():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record("id-a"))
    cluster.open("b", store_record("id-b"))
    store = cluster.map.stores["a"]
    assert "there is no store other" in refused(
        cluster.set("stores/a", replace(store, id="other", phase="deleted"))
    )
    cluster.set("stores/a", replace(store, phase="deleted"))
    assert list(cluster.map.stores) == ["b"]
    assert list(cluster.map.arrays) == ["stores/b/0"]
    assert "there is no store id-a" in refused(cluster.set("stores/a", replace(store, phase="deleted")))


def test_a_creator_sets_no_field_of_the_controllers():
    cluster = with_servers("ps-0")
    claimed = {"phase": "open", "buckets": ("ps-9",) * NUM_BUCKETS, "generation": 7, "epoch": 3}
    cluster.create("a", store_record(reason="no", lost="ps-9", bucket_bytes=(1,), changed=99, **claimed))
    store = cluster.map.stores["a"]
    assert (store.phase, store.generation, store.epoch, store.reason, store.lost) == ("loading", 1, 0, "", "")
    assert servers_of(cluster, "a") == ["ps-0"]
    assert sum(store.bucket_bytes) == 4096


def test_two_creators_of_one_name_replace_the_lists_of_each_other_and_one_comes_through():
    cluster = with_servers("ps-0")
    mine, theirs = (cut_arrays(id, ARRAYS)[0] for id in ("mine", "theirs"))
    cluster.set("stores/a/0", mine)
    cluster.set("stores/a/0", theirs)
    assert "store mine lacks 1 pieces: create it again" in refused(
        cluster.set("stores/a", store_record("mine"))
    )
    cluster.set("stores/a", store_record("theirs"))
    assert cluster.map.stores["a"].id == "theirs"


def test_two_stores_have_no_common_id():
    cluster = with_servers("ps-0")
    cluster.create("a", store_record("id"))
    assert "another store has the id id" in refused(cluster.create("b", store_record("id")))


def test_stores_live_beside_a_run_and_outlive_it():
    cluster = training()
    cluster.join("client-0")
    cluster.open("a", store_record())
    cluster.submit(run_record("run-2"))
    assert set(cluster.map.stores) == {"a", "run-2"}
    assert cluster.map.run_store.id == "run-2"
    assert cluster.map.stores["a"].phase == "open"


# --- clients and clocks -------------------------------------------------------------------------


def push_to(cluster, name, store="store-1", incarnation=1):
    cluster.set(f"nodes/{name}", node("client", incarnation, store=store))


def places(cluster):
    return {name: cluster.map.nodes[name].replica for name in cluster.map.live("client")}


def test_clients_get_the_lowest_free_place_in_the_clocks_of_their_store():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record(slack=1))
    cluster.open("b", store_record("store-2", slack=1))
    for name in ("client-0", "client-1", "client-2"):
        push_to(cluster, name)
    push_to(cluster, "client-3", "store-2")
    cluster.set("nodes/reader-0", node("reader"))
    assert places(cluster) == {"client-0": 0, "client-1": 1, "client-2": 2, "client-3": 0}
    cluster.lose("client-1")
    push_to(cluster, "client-4")
    assert places(cluster)["client-4"] == 1
    assert cluster.map.nodes["reader-0"].replica == -1
    assert set(cluster.map.pushers(cluster.map.stores["a"])) == {0, 1, 2}


def test_a_client_that_changes_its_store_leaves_its_place():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record(slack=1))
    cluster.open("b", store_record("store-2", slack=1))
    push_to(cluster, "client-0")
    push_to(cluster, "client-1", "store-2")
    push_to(cluster, "client-0", "store-2")
    assert places(cluster) == {"client-0": 1, "client-1": 0}
    assert cluster.map.pushers(cluster.map.stores["a"]) == {}


def test_a_client_that_restarts_gets_a_place_of_another_generation():
    cluster = with_servers("ps-0")
    store = cluster.open("a", store_record(slack=1))
    push_to(cluster, "client-0")
    before = cluster.map.pushers(store)
    push_to(cluster, "client-0", incarnation=2)
    assert cluster.map.pushers(store)[0] != before[0]


def test_the_clocks_of_a_store_begin_with_its_wanted_number_of_clients():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record(slack=0, summed_weight=1, replicas=2))
    cluster.open("b", store_record("store-2"))
    push_to(cluster, "client-0")
    assert cluster.map.stores["a"].epoch == 0
    push_to(cluster, "client-1")
    assert cluster.map.stores["a"].epoch == 1
    cluster.lose("client-1")
    assert cluster.map.stores["a"].epoch == 1
    assert cluster.map.stores["b"].epoch == 0


# --- invalid stores -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id": ""}, "id must be 1 to 160 bytes of printable characters, not ''"),
        ({"id": "é" * 81}, "id must be 1 to 160 bytes of printable characters, not 'éé"),
        ({"id": "a\x01"}, "id must be 1 to 160 bytes of printable characters, not 'a\\x01'"),
        ({"creator": "x" * 161}, "creator must be 0 to 160 bytes of printable characters, not 'xx"),
        ({"creator": "a\n"}, "creator must be 0 to 160 bytes of printable characters, not 'a\\n'"),
        ({"rules": ()}, "rules must have 1 to 256 entries, not 0"),
        ({"rules": (Sgd(),) * 257}, "rules must have 1 to 256 entries, not 257"),
        ({"rules": (Sgd(momentum=0.5),)}, "state_arrays is 0, and its rules keep 1"),
        ({"rules": (Adam(),), "state_arrays": 1}, "state_arrays is 1, and its rules keep 2"),
        ({"arrays": 2}, "the record names 2 arrays of 4096 bytes, the list others"),
        ({"nbytes": 4095}, "the record names 1 arrays of 4095 bytes, the list others"),
        ({"nbytes": -1}, "nbytes must be within 0 and 9007199254740992, not -1"),
        ({"state_arrays": 9}, "state_arrays must be within 0 and 8, not 9"),
        ({"shard_bytes": 4}, "shard_bytes must be within 8 and 1099511627776, not 4"),
        ({"servers": 65}, "servers must be within 0 and 64, not 65"),
        ({"servers": -1}, "servers must be within 0 and 64, not -1"),
        ({"copies": 9}, "copies must be within 1 and 8, not 9"),
        ({"copies": 2, "program": "r", "in_place": True}, "in_place allows one copy, and copies is 2"),
        ({"replicas": 0}, "replicas must be within 1 and 1048576, not 0"),
        ({"most_weight": 1 << 40}, "most_weight must be within 1 and 4294967295, not 1099511627776"),
        ({"slack": -1}, "slack must be within 0 and 1048576, not -1"),
        ({"slack": None, "summed_weight": 1}, "summed_weight is 1 without clocks"),
        ({"kernels": "quantum"}, "kernels must be one of auto, numpy, numba, not 'quantum'"),
        ({"in_place": True}, "in_place is for the store of a program"),
        (
            {"durable": True, "program": "r", "summed_weight": 1, "slack": 0},
            "durable keeps each push, and disks keep a run in bsp at one clock",
        ),
        ({"first_clock": -1}, "first_clock must be within 0 and 281474976710656, not -1"),
    ],
    ids=str,
)
def test_a_bad_record_of_a_store_is_refused_with_field_and_value(fields, said):
    cluster = with_servers("ps-0")
    assert said in refused(cluster.create("a", store_record(**fields)))
    assert cluster.map.stores == {}


@pytest.mark.parametrize("pieces", [0, -1, 65, 1 << 40])
def test_a_record_with_another_number_of_pieces_is_refused(pieces):
    cluster = with_servers("ps-0")
    cluster.create("a", store_record("other"))
    record = store_record("x", pieces=pieces)
    assert f"pieces must be within 1 and 64, not {pieces}" in refused(cluster.set("stores/b", record))


@pytest.mark.parametrize(
    "key",
    [
        "stores/",
        "stores//0",
        "stores/a/",
        "stores/a/64",
        "stores/a/-1",
        "stores/a/01",
        "stores/a/0/0",
        "stores/a\n",
        "stores/" + "x" * 10_000,
        "stores/" + "é" * 65 + "/0",
    ],
)
def test_a_key_of_no_store_and_no_piece_is_refused(key):
    cluster = with_servers()
    before = cluster.map
    for value in (store_record(), ArraysPiece(store="s", text=b"")):
        reason = refused(cluster.apply(CompareAndSet(key=key, expected=0, value=msgspec.to_builtins(value))))
        assert "no key" in reason
        assert len(reason) < 500
    assert cluster.map is before


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"garbage",
        b"[[]]",
        b"{}",
        b'[["w",[1' + b",1" * 20_000 + b"]]]",
        b'[["w",[' + b"9" * 40_000 + b"]]]",
        b'[["w",[1e999]]]',
        b'[["w",[4],"float32",0,true,[],' + b"[" * 40_000 + b"]" * 40_000 + b"]]",
        b'[["\xff",[4]]]',
        b'[["\\ud800",[4]]]',
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_a_list_that_is_no_list_of_arrays_is_refused_and_costs_little(text):
    cluster = with_servers("ps-0")
    pieces = [ArraysPiece(store="s", text=text)] * 3
    for number, piece in enumerate(pieces):
        cluster.set(f"stores/a/{number}", piece)
    begin = time.process_time()
    refused(cluster.set("stores/a", store_record("s", pieces=1)))
    refused(cluster.set("stores/a", store_record("s", pieces=3)))
    assert time.process_time() - begin < 0.5
    assert cluster.map.stores == {}


@pytest.mark.parametrize(
    "arrays",
    [
        [ArrayRecord("w", (MOST_VALUES,))],
        [ArrayRecord("w", (1 << 20, 1 << 20), cuts=(5, 1 << 19))],
        [ArrayRecord("w", (MOST_VALUES // 7, 7), "float64")],
        [ArrayRecord("w", (3, MOST_VALUES // 7))],
        [ArrayRecord(str(n), (16_384,)) for n in range(10_000)],
    ],
    ids=["vector", "cuts", "rows", "long rows", "many arrays"],
)
def test_a_store_of_too_many_shards_is_refused_before_they_are_counted_one_by_one(arrays):
    cluster = with_servers("ps-0")
    begin = time.process_time()
    reason = refused(cluster.create("a", store_record("s", arrays, shard_bytes=8), arrays))
    assert time.process_time() - begin < 2.0
    assert "shard_bytes=8 cuts its" in reason
    assert f"raise it, so that there are at most {MAX_SHARDS}" in reason


def test_a_shard_that_no_message_holds_is_refused_with_its_array():
    arrays = [ArrayRecord("small", (4,)), ArrayRecord("large", (1 << 25,))]
    reason = refused(with_servers("ps-0").create("a", store_record("s", arrays, shard_bytes=1 << 30), arrays))
    assert "array 'large' has a shard of 134217728 bytes, and a message holds 67043328" in reason


def test_the_memory_of_many_small_shards_is_counted():
    arrays = [ArrayRecord(str(n), (2_000,)) for n in range(50)]
    store = store_record("s", arrays, shard_bytes=8)
    few = with_servers("ps-0", ps0=50_000_000)
    reason = refused(few.create("a", store, arrays))
    assert "its 400000 bytes of values need" in reason
    assert "with the state of their rules and 100302848 for 50000 shards, " in reason
    enough = with_servers("ps-0", ps0=110_000_000)
    enough.create("a", store, arrays)
    assert enough.map.stores["a"].shards == 50_000


def test_the_memory_of_all_copies_is_counted_and_named():
    arrays = [ArrayRecord("w", (1_000,))]
    few = with_servers("ps-0", "ps-1", "ps-2", ps0=10_000, ps1=10_000, ps2=1_000)
    reason = refused(few.create("a", store_record("s", arrays, servers=1, copies=3), arrays))
    assert "need 12000 bytes in 3 copies with the state of their rules, 4000 of them on ps-2" in reason
    few.create("a", store_record("s", arrays, servers=1, copies=2), arrays)
    assert few.map.stores["a"].phase == "loading"


def test_ten_thousand_arrays_are_placed_in_a_moment():
    cluster = with_servers("ps-0", "ps-1")
    arrays = [ArrayRecord(f"layer-{number}/weights", (16, 16)) for number in range(10_000)]
    record = store_record("s", arrays)
    for number, piece in enumerate(cut_arrays("s", arrays)):
        cluster.set(f"stores/a/{number}", piece)
    begin = time.process_time()
    cluster.set("stores/a", record)
    assert time.process_time() - begin < 0.5
    assert servers_of(cluster, "a") == ["ps-0", "ps-1"]


def test_stores_that_wait_for_servers_are_not_read_again_with_each_command(monkeypatch):
    cluster = with_servers()
    arrays = [ArrayRecord(f"{number}", (8,)) for number in range(10_000)]
    for number in range(6):
        cluster.create(f"s{number}", store_record(f"id-{number}", arrays, servers=2), arrays)
    monkeypatch.setattr(store_rules, "joined_arrays", None)
    cluster.join("ps-0")
    cluster.join("ps-1")
    assert {store.phase for store in cluster.map.stores.values()} == {"loading"}


def test_a_command_beside_many_stores_takes_a_moment():
    cluster = with_servers("ps-0")
    for number in range(CLIENT_STORES):
        cluster.create(f"s{number}", store_record(f"id-{number}", servers=1 + number % 2))
    begin = time.process_time()
    cluster.join("worker-0")
    assert time.process_time() - begin < 0.3
    begin = time.process_time()
    cluster.join("ps-1")
    assert time.process_time() - begin < 1.0
    assert {store.phase for store in cluster.map.stores.values()} == {"loading"}


def test_clients_have_a_share_of_the_stores_and_runs_have_room():
    cluster = with_servers("ps-0")
    created = Counter()
    for creator in ("client-0", "client-1", "client-2"):
        cluster.join(creator)
        for number in range(CREATOR_STORES):
            name = f"{creator}-{number}"
            events = cluster.create(name, store_record(name, creator=creator))
            if isinstance(events[0], Invalid):
                break
            created[creator] += 1
    rest = CLIENT_STORES - CREATOR_STORES
    assert created == {"client-0": CREATOR_STORES, "client-1": rest}
    assert "clients have 120 of 128 stores, all that are not for runs: delete one" in events[0].reason
    one_more = store_record("x", creator="client-0")
    said = "client-0 has created 64 stores, and no client may have more: delete one"
    assert said in refused(cluster.create("x", one_more))
    cluster.join("driver")
    cluster.submit(run_record())
    assert cluster.map.run_store.phase == "loading"


def unfinished(cluster, creator, count):
    """Let a client set pieces of stores whose records it never sets."""
    cluster.set(f"nodes/{creator}", node("client"))
    for number in range(count):
        piece = ArraysPiece(store=f"{creator}-{number}", creator=creator, text=b"x")
        cluster.set(f"stores/{creator}-{number}/{number % STORE_PIECES}", piece)


def pieces_of(cluster):
    return Counter(piece.creator for piece in cluster.map.arrays.values())


def test_the_lists_of_unfinished_stores_leave_when_their_creator_has_too_many():
    cluster = with_servers()
    unfinished(cluster, "me", 1)
    cluster.create("a", store_record(creator="me"))
    unfinished(cluster, "me", 2 * STORE_PIECES)
    assert pieces_of(cluster) == {"me": STORE_PIECES + 1}
    assert "stores/a/0" in cluster.map.arrays
    assert f"stores/me-{2 * STORE_PIECES - 1}/{STORE_PIECES - 1}" in cluster.map.arrays


def test_unfinished_lists_of_one_creator_do_not_drive_out_those_of_another():
    cluster = with_servers()
    unfinished(cluster, "modest", 2)
    for name in ("greedy", "grabbing", "grasping"):
        unfinished(cluster, name, STORE_PIECES)
    found = pieces_of(cluster)
    assert found["modest"] == 2
    assert sum(found.values()) == UNFINISHED_PIECES


def test_the_lists_of_unfinished_stores_leave_with_their_creator():
    cluster = with_servers()
    unfinished(cluster, "me", STORE_PIECES)
    unfinished(cluster, "you", 3)
    cluster.create("a", store_record(creator="me"))
    cluster.lose("me")
    assert pieces_of(cluster) == {"you": 3, "me": 1}
    piece = ArraysPiece(store="s", creator="not-joined", text=b"x")
    cluster.set("stores/s/0", piece)
    assert pieces_of(cluster) == {"you": 3, "me": 1}


def test_a_store_does_not_take_the_pieces_of_another_creator():
    cluster = with_servers("ps-0")
    cluster.set("nodes/you", node("client"))
    (piece,) = cut_arrays("s", ARRAYS, creator="you")
    cluster.set("stores/a/0", piece)
    (event,) = cluster.set("stores/a", store_record("s", creator="me", pieces=1))
    assert event.reason == "stores/a: store s lacks 1 pieces: create it again"


def test_the_store_of_a_run_goes_when_the_run_is_over_and_not_before():
    cluster = training()
    deleted = replace(cluster.map.run_store, phase="deleted")
    (event,) = cluster.set("stores/run-1", deleted)
    assert "belongs to run-1, which is in progress" in event.reason
    cluster.set("run", replace(cluster.map.run, phase="finished").without_fixed())
    cluster.set("stores/run-1", deleted)
    assert not cluster.map.stores


def test_a_store_that_is_created_again_under_its_id_is_not_open_before_it_has_values():
    cluster = with_servers("ps-0")
    cluster.open("a", store_record("s"))
    cluster.set("stores/a", replace(cluster.map.stores["a"], phase="deleted"))
    cluster.create("a", store_record("s"))
    assert cluster.map.stores["a"].phase == "loading"
    cluster.serve("ps-0", "s")
    assert cluster.map.stores["a"].phase == "open"


class Stores(RecordedCluster):
    """Servers and clients come and go while stores are created and deleted; the map stays sound."""

    servers = st.sampled_from(["ps-0", "ps-1", "ps-2"])
    clients = st.sampled_from([f"client-{number}" for number in range(4)])
    names = st.sampled_from(["a", "b"])

    def __init__(self):
        super().__init__()
        self.made = 0

    @rule(name=servers, incarnation=st.integers(1, 3), memory=st.sampled_from([100, 5000, 1 << 30]))
    def a_server_joins(self, name, incarnation, memory):
        self.cluster.set(f"nodes/{name}", node("ps", incarnation, info={"memory_bytes": memory}))

    @rule(name=clients, incarnation=st.integers(1, 3), of=names)
    def a_client_pushes(self, name, incarnation, of):
        store = self.cluster.map.stores.get(of)
        push_to(self.cluster, name, store.id if store is not None else "gone", incarnation)

    @rule(name=servers | clients)
    def a_node_is_lost(self, name):
        if name in self.cluster.map.nodes:
            self.cluster.lose(name)

    @rule(name=names, servers=st.integers(0, 2), slack=st.sampled_from([None, 0, 3]))
    def a_store_is_created(self, name, servers, slack):
        self.made += 1
        record = store_record(f"id-{self.made}", servers=servers, slack=slack, replicas=2)
        self.cluster.create(name, record)

    @rule(name=names)
    def a_store_is_deleted(self, name):
        if name in self.cluster.map.stores:
            self.cluster.set(f"stores/{name}", replace(self.cluster.map.stores[name], phase="deleted"))

    @rule(name=names)
    def values_are_loaded(self, name):
        if name in self.cluster.map.stores:
            store = self.cluster.map.stores[name]
            for server in sorted(set(store.buckets)):
                self.cluster.serve(server, store.id)

    @invariant()
    def the_map_is_sound(self):
        self.cluster.state.check_invariants()
        cluster = self.cluster.map
        for name, store in cluster.stores.items():
            live = all(cluster.nodes[server].live for server in store.buckets)
            assert live or store.phase == "failed"
            assert f"stores/{name}/0" in cluster.arrays
        generations = [store.generation for store in cluster.stores.values() if store.generation]
        assert len(generations) == len(set(generations))


Stores.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStores = Stores.TestCase
