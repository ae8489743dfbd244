"""Bundles: changes by members, lost members, placement of copies, new members, and all of these at random."""

import time

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from msgspec.structs import replace

from adam_async.controller.bundle_rules import (
    bundle_lines,
    may_change,
    next_member,
    other_numerics,
    unready_copy,
)
from adam_async.controller.state import Conflict, Invalid
from adam_async.errors import lost_copies_text
from adam_async.run.cluster_map import NUMERICS
from adam_async.run.store_record import NUM_BUCKETS, BundleRecord, bundle_key
from tests.adam_async.cluster_maps import Cluster, RecordedCluster, node, store_record
from tests.simulation.checkers.maps import Maps

FIRST, SECOND, THIRD, FOURTH, FIFTH = ((f"ps-{number}", 1) for number in range(5))
KEY = "bundles/a/ps-0"


def anyone(server):
    return True


def without(*servers):
    return lambda server: server not in servers


def with_bundle(*, servers=5, copies=3, **fields):
    """A cluster with an open store of one bundle, and that bundle with these fields."""
    cluster = Cluster()
    cluster.join("client-0", *(f"ps-{number}" for number in range(servers)))
    cluster.open("a", store_record(servers=1, copies=copies))
    if fields:
        change(cluster, **fields)
    return cluster


def bundle_of(cluster):
    return cluster.map.bundles[KEY]


def change(cluster, **fields):
    return cluster.set(KEY, replace(bundle_of(cluster), **fields))


IN_SYNC = {"in_sync": (FIRST, SECOND, THIRD), "joining": ()}

# --- placement -----------------------------------------------------------------------------------


def test_a_new_bundle_has_its_home_in_sync_and_the_other_copies_join():
    bundle = bundle_of(with_bundle())
    assert (bundle.generation, bundle.in_sync, bundle.joining) == (1, (FIRST,), (SECOND, THIRD))


@pytest.mark.parametrize(("servers", "copies"), [(3, 3), (5, 2), (8, 8), (4, 1)])
def test_each_server_is_a_secondary_of_as_many_bundles_as_the_others(servers, copies):
    cluster = Cluster()
    names = [f"ps-{number}" for number in range(servers)]
    cluster.join("client-0", *names)
    cluster.create("a", store_record(copies=copies))
    bundles = cluster.map.bundles
    assert set(bundles) == {bundle_key("a", name) for name in names}
    for key, bundle in bundles.items():
        assert bundle.in_sync[0][0] == key.rpartition("/")[2]
        assert len({name for name, _ in bundle.members}) == copies
    joining = [name for bundle in bundles.values() for name, _ in bundle.joining]
    assert {joining.count(name) for name in names} == {copies - 1}


def test_a_store_waits_until_as_many_servers_are_live_as_it_wants_copies():
    cluster = with_bundle(servers=2, copies=1)
    cluster.create("b", store_record("store-2", copies=3))
    assert cluster.map.stores["b"].phase == "placing"
    cluster.join("ps-2")
    assert cluster.map.stores["b"].phase == "loading"


def test_the_memory_of_secondaries_is_counted():
    cluster = Cluster()
    cluster.join("client-0", "ps-0")
    cluster.set("nodes/ps-1", node("ps", info={"memory_bytes": 4095}))
    (event,) = cluster.create("a", store_record(servers=1, copies=2))
    assert isinstance(event, Invalid)
    assert "need 8192 bytes in 2 copies with the state of their rules" in event.reason
    assert "4096 of them on ps-1, which has 4095" in event.reason
    cluster.set("nodes/ps-1", node("ps", info={"memory_bytes": 8191}))
    cluster.create("a", store_record(servers=1, copies=2))
    (event,) = cluster.create("b", store_record("store-2", servers=1, copies=2))
    assert "4096 of them on ps-1, which has 4095 bytes free" in event.reason


def test_a_store_opens_before_its_joining_members_have_its_values():
    assert with_bundle().map.stores["a"].phase == "open"


def test_a_store_that_replaces_a_failed_one_has_new_bundles_only():
    cluster = with_bundle(servers=2, copies=1)
    cluster.lose("ps-0")
    assert cluster.map.stores["a"].phase == "failed"
    cluster.create("a", store_record("store-2", servers=2, copies=1))
    assert (cluster.map.stores["a"].phase, cluster.map.bundles) == ("placing", {})
    cluster.join("ps-2")
    assert {bundle.store for bundle in cluster.map.bundles.values()} == {"store-2"}


# --- changes by members --------------------------------------------------------------------------


def test_a_primary_adds_joined_members_strikes_out_and_invites():
    cluster = with_bundle(**IN_SYNC)
    change(cluster, in_sync=(FIRST, THIRD), joining=(FOURTH,))
    change(cluster, in_sync=(FIRST, THIRD, FOURTH), joining=())
    bundle = bundle_of(cluster)
    assert (bundle.generation, bundle.in_sync) == (1, (FIRST, THIRD, FOURTH))
    assert bundle.changed == cluster.map.version


def test_a_new_primary_was_in_sync_and_begins_a_generation():
    cluster = with_bundle(**IN_SYNC)
    change(cluster, in_sync=(SECOND, FIRST, THIRD), generation=2)
    assert cluster.map.primary("store-1", "ps-0") is cluster.map.nodes["ps-1"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"store": "other"}, "store is 'other', and the bundle belongs to store store-1"),
        ({"in_sync": ()}, "in_sync is empty: only the controllers"),
        ({"joining": (THIRD,)}, "server 'ps-2' is named twice"),
        ({"joining": (("ps-2", 7),)}, "server 'ps-2' is named twice"),
        ({"joining": (FOURTH, FIFTH)}, "name 5 members; 4 are the most with copies=3"),
        (
            {"in_sync": (FIRST, SECOND, FOURTH)},
            "in_sync names ps-3 (incarnation 1), which was neither in sync nor joining",
        ),
        ({"generation": 2}, "generation is 2; it must be 1, because the primary stays"),
        ({"generation": 0}, "generation is 0; it must be 1"),
        (
            {"in_sync": (SECOND, THIRD)},
            "generation is 1; it must be 2, because the primary is another one than ps-0",
        ),
        ({"in_sync": (SECOND, THIRD), "generation": 3}, "generation is 3; it must be 2"),
    ],
)
def test_a_change_that_breaks_a_rule_is_refused_with_value_and_rule(fields, said):
    cluster = with_bundle(**IN_SYNC)
    before = cluster.map
    (event,) = change(cluster, **fields)
    assert isinstance(event, Invalid)
    assert event.reason.startswith(f"{KEY}: ")
    assert said in event.reason
    assert cluster.map is before


def test_a_joining_member_does_not_become_the_primary():
    cluster = with_bundle()
    (event,) = change(cluster, in_sync=(SECOND, FIRST), joining=(THIRD,), generation=2)
    assert "the first of in_sync is ps-1 (incarnation 1), which was not in sync before" in event.reason


@pytest.mark.parametrize("member", [("ps-3", 2), ("ps-9", 1), ("client-0", 1)])
def test_a_new_member_that_is_no_live_server_is_a_conflict(member):
    cluster = with_bundle(**IN_SYNC)
    assert change(cluster, joining=(member,)) == [Conflict(KEY, bundle_of(cluster).changed)]


def test_a_change_of_a_failed_or_deleted_store_is_a_conflict():
    cluster = Cluster()
    cluster.join("client-0", "ps-0", "ps-1", "ps-2")
    cluster.open("a", store_record(servers=2))
    cluster.lose("ps-1")
    there = bundle_of(cluster)
    assert cluster.set(KEY, there) == [Conflict(KEY, there.changed)]
    cluster.set("stores/a", replace(cluster.map.stores["a"], phase="deleted"))
    assert cluster.set(KEY, there, expected=there.changed) == [Conflict(KEY, 0)]
    (event,) = cluster.set(KEY, there)
    assert "there is no such bundle: the controllers create bundles with their store" in event.reason


@pytest.mark.parametrize("key", ["bundles", "bundles/", "bundles/a", "bundles/a/", "bundles//ps-0"])
def test_a_key_of_no_bundle_is_refused(key):
    cluster = with_bundle()
    (event,) = cluster.set(key, bundle_of(cluster), expected=0)
    assert "no key" in event.reason


def test_members_do_not_set_the_lost_servers():
    cluster = with_bundle(**IN_SYNC)
    cluster.lose("ps-2")
    change(cluster, lost=("ps-7",))
    assert bundle_of(cluster).lost == ("ps-2",)


# --- lost members --------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("server", "generation", "in_sync", "joining"),
    [("ps-0", 2, (SECOND,), (THIRD,)), ("ps-1", 1, (FIRST,), (THIRD,)), ("ps-2", 1, (FIRST, SECOND), ())],
)
def test_a_lost_incarnation_is_struck_out_at_once(server, generation, in_sync, joining, restarts):
    cluster = with_bundle(in_sync=(FIRST, SECOND), joining=(THIRD,))
    if restarts:
        cluster.join(server, incarnation=2)
    else:
        cluster.lose(server)
    bundle = bundle_of(cluster)
    assert (bundle.generation, bundle.in_sync, bundle.joining) == (generation, in_sync, joining)
    assert bundle.changed == cluster.map.version
    assert cluster.map.stores["a"].phase == "open"


def test_a_server_that_returns_with_its_old_incarnation_is_no_member():
    cluster = with_bundle(**IN_SYNC)
    cluster.lose("ps-2")
    cluster.join("ps-2")
    assert bundle_of(cluster).in_sync == (FIRST, SECOND)


LOSS = lost_copies_text(["ps-0"], "a", is_of_run=False)


@pytest.mark.parametrize("joining", [(), (SECOND, THIRD)])
def test_a_store_fails_with_its_only_copy_in_sync(joining):
    cluster = with_bundle(joining=joining)
    cluster.lose("ps-0")
    store, bundle = cluster.map.stores["a"], bundle_of(cluster)
    assert (bundle.generation, bundle.members) == (1, ())
    assert (store.phase, store.lost, store.reason) == ("failed", "ps-0", f"ps-0 died: {LOSS}")


def test_a_store_that_loses_all_copies_names_all_lost_servers():
    cluster = with_bundle(**IN_SYNC)
    for server in ("ps-1", "ps-0"):
        cluster.lose(server)
    assert cluster.map.stores["a"].phase == "open"
    cluster.lose("ps-2")
    store = cluster.map.stores["a"]
    assert (store.phase, store.lost) == ("failed", "ps-1, ps-0, ps-2")
    assert store.reason == f"ps-1, ps-0, ps-2 died: {LOSS}"


def test_servers_that_were_replaced_long_ago_are_not_named():
    cluster = with_bundle(**IN_SYNC)
    cluster.lose("ps-2")
    change(cluster, joining=(FOURTH,))
    change(cluster, in_sync=(FIRST, SECOND, FOURTH), joining=())
    assert bundle_of(cluster).lost == ()
    for server in ("ps-0", "ps-1", "ps-3"):
        cluster.lose(server)
    assert cluster.map.stores["a"].lost == "ps-0, ps-1, ps-3"


# --- new members ---------------------------------------------------------------------------------


def after_a_loss(**infos):
    """A cluster whose bundle lost a member, and a store of one copy on ps-3; by server, further infos."""
    cluster = with_bundle(**IN_SYNC)
    cluster.lose("ps-2")
    for name, info in infos.items():
        cluster.set(f"nodes/{name.replace('_', '-')}", node("ps", info=info))
    return cluster


def test_the_least_used_server_that_is_no_member_comes_next():
    cluster = after_a_loss()
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == FOURTH
    cluster.create("b", store_record("store-2", servers=1))
    assert set(cluster.map.stores["b"].buckets) == {"ps-3"}
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == FIFTH


def test_a_server_with_the_numerics_of_the_primary_comes_before_others():
    cluster = after_a_loss(ps_0={NUMERICS: "x"}, ps_3={NUMERICS: "y"}, ps_4={NUMERICS: "x"})
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == FIFTH
    cluster.lose("ps-4")
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == FOURTH


def test_a_server_is_unready_while_it_joins_a_bundle_or_is_the_next_to_do_so():
    cluster = with_bundle(**IN_SYNC)
    assert {unready_copy(cluster.map, server) for server in (FIRST, SECOND, THIRD, FOURTH)} == {""}
    cluster.lose("ps-2")
    assert [unready_copy(cluster.map, server) for server in (FIRST, FOURTH, FIFTH)] == ["", "ps-0", ""]
    change(cluster, in_sync=(FIRST, SECOND), joining=(FOURTH,))
    assert [unready_copy(cluster.map, server) for server in (SECOND, FOURTH, FIFTH)] == ["", "ps-0", ""]
    change(cluster, in_sync=(FIRST, SECOND, FOURTH), joining=())
    assert unready_copy(cluster.map, FOURTH) == ""


def test_a_server_without_enough_memory_does_not_come_next():
    cluster = after_a_loss(ps_3={"memory_bytes": 4095}, ps_4={"memory_bytes": 4096})
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == FIFTH


def test_a_full_bundle_gets_its_home_back_and_no_other_member():
    cluster = with_bundle(**IN_SYNC)
    assert next_member(cluster.map, "store-1", "ps-0", anyone) is None
    cluster.lose("ps-0")
    cluster.join("ps-0", incarnation=2)
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == ("ps-0", 2)
    change(cluster, in_sync=(SECOND, THIRD), joining=(FOURTH,))
    assert next_member(cluster.map, "store-1", "ps-0", anyone) == ("ps-0", 2)
    change(cluster, joining=(FOURTH, ("ps-0", 2)))
    assert next_member(cluster.map, "store-1", "ps-0", anyone) is None


def test_a_server_with_a_pause_is_not_the_next_member_and_its_next_incarnation_is():
    cluster = with_bundle(in_sync=(FIRST, SECOND), joining=())
    cluster.join("ps-0", incarnation=2)
    again = ("ps-0", 2)
    assert next_member(cluster.map, "store-1", "ps-0", without(FIRST)) == again
    assert next_member(cluster.map, "store-1", "ps-0", without(again)) == THIRD
    assert next_member(cluster.map, "store-1", "ps-0", without(again, THIRD, ("ps-9", 1))) == FOURTH


def test_a_joining_member_leaves_and_makes_no_other_change():
    old = bundle_of(with_bundle(in_sync=(FIRST,), joining=(SECOND, THIRD)))
    assert may_change(SECOND, old, replace(old, joining=(THIRD,)))
    for forbidden in (
        {"joining": (SECOND,)},
        {"joining": ()},
        {"in_sync": (FIRST, SECOND), "joining": (THIRD,)},
        {"in_sync": (SECOND,), "joining": (THIRD,), "generation": 2},
        {"joining": (THIRD,), "generation": 2},
        {"joining": (THIRD, FOURTH)},
    ):
        assert not may_change(SECOND, old, replace(old, **forbidden)), forbidden


def test_a_member_with_other_numerics_than_the_primary_is_named_with_the_differences():
    cluster = Cluster()
    for name, facts in (
        ("ps-0", {"numpy": "2.1", "blas core": "Zen"}),
        ("ps-1", {"numpy": "2.1", "blas core": "Haswell", "libc": "glibc 2.36"}),
        ("ps-2", {"numpy": "2.1", "blas core": "Zen"}),
        ("ps-3", "not a mapping"),
    ):
        cluster.join(name, info={NUMERICS: facts})
    cluster.join("client-0")
    cluster.open("a", store_record(servers=1, copies=4))
    differences = "blas core is Haswell, not Zen, libc is glibc 2.36, not unknown"
    assert other_numerics(cluster.map, bundle_of(cluster)) == {"ps-1": differences}
    prefix = "shards of ps-0 in store 'a':"
    line = f"{prefix} ps-1 may round otherwise than ps-0: {differences}"
    assert line in list(bundle_lines(Cluster().map, cluster.map))
    before = cluster.map
    change(cluster, in_sync=(FIRST, SECOND), joining=(THIRD,))
    assert line not in list(bundle_lines(before, cluster.map))


def test_a_bundle_without_a_primary_or_a_store_has_no_next_member():
    cluster = with_bundle()
    assert next_member(cluster.map, "store-2", "ps-0", anyone) is None
    assert next_member(cluster.map, "store-1", "ps-1", anyone) is None
    cluster.lose("ps-0")
    assert next_member(cluster.map, "store-1", "ps-0", anyone) is None


def test_a_command_beside_many_bundles_takes_a_moment():
    cluster = Cluster()
    cluster.join("client-0", *(f"ps-{number}" for number in range(16)))
    for number in range(32):
        cluster.create(f"s{number}", store_record(f"id-{number}", copies=3))
    assert len(cluster.map.bundles) == 32 * 16
    begin = time.process_time()
    cluster.lose("ps-7")
    assert time.process_time() - begin < 0.3
    assert {store.lost for store in cluster.map.stores.values()} == {"ps-7"}


def test_a_probe_beside_many_bundles_takes_a_moment():
    cluster = Cluster()
    cluster.join("client-0", *(f"ps-{number}" for number in range(64)))
    for number in range(16):
        cluster.open(f"s{number}", store_record(f"id-{number}", copies=2))
    begin = time.process_time()
    assert unready_copy(cluster.map, FIRST) == ""
    assert time.process_time() - begin < 0.1


# --- random commands -----------------------------------------------------------------------------


class Bundles(RecordedCluster):
    """Servers come and go while members change bundles, by right and by mistake; the map stays sound."""

    servers = st.sampled_from([f"ps-{number}" for number in range(5)])
    members = st.tuples(servers, st.integers(1, 3))

    def __init__(self):
        super().__init__()
        self.maps = Maps()
        self.made = 0
        apply = self.cluster.state.apply

        def followed(command):
            events = apply(command)
            self.maps.follow(self.cluster.map)
            return events

        self.cluster.state.apply = followed

    @rule(name=servers, incarnation=st.integers(1, 3))
    def a_server_joins(self, name, incarnation):
        self.cluster.set(f"nodes/{name}", node("ps", incarnation))

    @rule(name=servers)
    def a_server_is_lost(self, name):
        if name in self.cluster.map.nodes:
            self.cluster.lose(name)

    @rule(servers=st.integers(0, 2), copies=st.integers(1, 3))
    def a_store_is_created_and_loaded(self, servers, copies):
        self.made += 1
        self.cluster.create("a", store_record(f"id-{self.made}", servers=servers, copies=copies))
        store = self.cluster.map.stores.get("a")
        for home in sorted(set(store.buckets)) if store is not None else ():
            if self.cluster.map.nodes[home].live:
                self.cluster.serve(home, store.id)

    @rule()
    def a_store_is_deleted(self):
        if "a" in self.cluster.map.stores:
            self.cluster.set("stores/a", replace(self.cluster.map.stores["a"], phase="deleted"))

    @rule(
        home=servers,
        in_sync=st.lists(members, max_size=3),
        joining=st.lists(members, max_size=2),
        more=st.integers(-1, 2),
        caller=members,
        checked=st.booleans(),
    )
    def any_change_is_tried(self, home, in_sync, joining, more, caller, checked):
        old = self.cluster.map.bundles.get(f"bundles/a/{home}")
        if old is None:
            return
        generation = max(old.generation + more, 0)
        new = replace(old, generation=generation, in_sync=tuple(in_sync), joining=tuple(joining))
        # The rules of the log keep the map sound also without the check of the caller.
        if not checked or may_change(caller, old, new):
            self.cluster.set(f"bundles/a/{home}", new)

    @rule(home=servers)
    def the_joining_members_come_into_sync(self, home):
        old = self.cluster.map.bundles.get(f"bundles/a/{home}")
        if old is not None and old.joining:
            self.make(home, old, replace(old, in_sync=old.members, joining=()))

    @rule(home=servers)
    def a_new_member_is_invited(self, home):
        store, old = self.cluster.map.stores.get("a"), self.cluster.map.bundles.get(f"bundles/a/{home}")
        member = next_member(self.cluster.map, store.id, home, anyone) if store is not None else None
        if old is not None and member is not None:
            self.make(home, old, replace(old, joining=(*old.joining, member)))

    @rule(home=servers)
    def the_second_takes_over(self, home):
        old = self.cluster.map.bundles.get(f"bundles/a/{home}")
        if old is not None and len(old.in_sync) > 1:
            new = replace(old, generation=old.generation + 1, in_sync=old.in_sync[1:])
            assert may_change(old.in_sync[1], old, new)
            self.make(home, old, new)

    def make(self, home, old, new):
        """Make a change that must be accepted unless the store has failed."""
        assert may_change(old.primary, old, new) or new.generation > old.generation
        before = self.cluster.map.version
        self.cluster.set(f"bundles/a/{home}", new)
        failed = self.cluster.map.stores["a"].phase == "failed"
        assert (self.cluster.map.version > before) != failed

    @invariant()
    def the_map_is_sound(self):
        self.cluster.state.check_invariants()
        cluster = self.cluster.map
        assert len(cluster.stores.get("a", store_record()).buckets) in (0, NUM_BUCKETS)
        assert msgspec.json.decode(msgspec.json.encode(cluster.bundles), type=dict[str, BundleRecord]) == (
            cluster.bundles
        )


Bundles.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBundles = Bundles.TestCase
