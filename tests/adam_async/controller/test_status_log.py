"""Log lines of controllers on their group: one line for each change, and none without a change."""

import asyncio
import logging
from itertools import pairwise

import pytest
from msgspec.structs import replace

from adam_async.controller import status_log as status_log_module
from adam_async.controller.bootstrap import name_of
from adam_async.controller.status_log import GROUPLESS_S, LEADERLESS_S, LOST_S, StatusLog, map_lines
from adam_async.errors import LOST_STORE, lost_copies_text
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.store_record import cut_arrays
from tests.adam_async.cluster_maps import ARRAYS, Cluster, node, store_record, training
from tests.adam_async.controller.consensus.small_group import SmallGroup
from tests.adam_async.controller.simulated_group import simulated
from tests.worlds import inside

A, B, C = "controller-1/a", "controller-2/b", "controller-3/c"
THREE = (A, B, C)
WORKER = NodeRecord(role="worker", address="tcp://a:1", incarnation=1)
DRIVER = NodeRecord(role="driver", address="", incarnation=2)
NAMES = [name_of(each) for each in THREE]

seeds = pytest.mark.parametrize("seed", range(4))


@pytest.fixture
def said(caplog):
    """Return a function that takes the new lines of the status log; warnings begin with a "!"."""
    caplog.set_level(logging.INFO, logger=status_log_module.logger.name)

    def take():
        lines = [
            ("!" if record.levelno == logging.WARNING else "") + record.getMessage()
            for record in caplog.records
            if record.name == status_log_module.logger.name
        ]
        caplog.clear()
        return lines

    return take


class Hall:
    """Three cores whose words are delivered by hand, and a status log that looks at one of them."""

    def __init__(self, me=A, *, linked=(), kept=True, **options):
        self.group, self.me = SmallGroup(THREE), me
        self.status_log = StatusLog(
            name_of(me),
            names=NAMES,
            linked=lambda: {name_of(each) for each in linked},
            kept=kept,
            now=self.group.now,
            **options,
        )

    def look(self):
        self.status_log.update(self.group[self.me], now=self.group.now)

    def beat(self, leader, among, seconds):
        """Let the leader speak and be answered for a while, and look each time."""
        until = self.group.now + seconds
        while self.group.now < until:
            self.group.beat(leader, among)
            self.look()

    def silence(self, seconds):
        """Let a node without a leader go on alone."""
        until = self.group.now + seconds
        while self.group.now < until:
            self.group.tick(self.me, 0.5)
            self.group.wire.clear()
            self.look()


# --- who belongs, who leads ----------------------------------------------------------------------


def test_a_new_group_has_one_line_with_all_and_then_its_leader(said):
    hall = Hall(kept=False)
    hall.look()
    assert said() == []
    hall.group.elect(A)
    hall.look()
    assert said() == [
        "controller-1: the group is founded, with 3 of 3 controllers",
        "controller-1 leads now (term 2)",
    ]
    hall.beat(A, THREE, 10.0)
    assert said() == []


@pytest.mark.parametrize(("linked", "heard", "count"), [([A], [], 2), ([A], [C], 3), ([A, C], [], 3)])
def test_a_group_after_a_restart_has_a_line_with_the_linked_and_heard_ones(said, linked, heard, count):
    hall = Hall(B, linked=linked)
    for each in heard:
        hall.status_log.heard(name_of(each))
    hall.group.elect(A)
    hall.look()
    assert said() == [
        f"controller-2: the group is there again, with {count} of 3 controllers",
        "controller-2: controller-1 leads now (term 2)",
    ]


def test_a_request_for_votes_has_no_line_and_each_new_leader_one(said):
    hall = Hall(B, linked=THREE)
    hall.group.elect(A)
    hall.look()
    said()
    hall.group.now += 10.0
    hall.group.tick(B)  # asks whether the others would vote for it
    hall.look()
    assert said() == []
    hall.group.elect(B)
    hall.look()
    hall.look()
    assert said() == ["controller-2 leads now (term 3)"]


def test_a_group_of_one_has_nothing_to_say(said):
    group = SmallGroup([A])
    status_log = StatusLog(name_of(A), names=NAMES[:1], linked=set, kept=False, now=0.0)
    group.elect(A)
    status_log.update(group[A], now=group.now)
    assert said() == []


# --- who is there --------------------------------------------------------------------------------


def test_a_voter_that_is_not_heard_is_lost_once_and_back_once(said):
    hall = Hall(linked=THREE)
    hall.group.elect(A)
    hall.look()
    said()
    hall.beat(A, THREE, LOST_S + 1)
    hall.beat(A, (A, B), LOST_S - 0.5)
    assert said() == []
    hall.beat(A, (A, B), 10.0)
    assert said() == ["controller-3 is lost: nothing was heard of it for 2 s; 2 of 3 are there"]
    hall.beat(A, THREE, 10.0)
    assert said() == ["controller-3 is back; 3 of 3 are there"]


def test_a_new_term_of_the_same_leader_brings_nobody_back_who_is_not_heard(said):
    hall = Hall(linked=THREE)
    hall.group.elect(A)
    hall.look()
    hall.beat(A, (A, B), 2 * LOST_S)
    said()
    hall.group.tick(A)  # it has heard nobody for long, and gives up
    hall.look()
    assert hall.group[A].leader is None
    hall.group.elect(A, among=(A, B))
    hall.look()
    hall.beat(A, (A, B), 3 * LOST_S)
    assert said() == ["controller-1 leads now (term 3)"]


def test_one_that_was_missing_from_the_beginning_is_not_lost_again_but_is_back(said):
    hall = Hall(linked=[B])
    hall.group.elect(A, among=(A, B))
    hall.look()
    assert "with 2 of 3 controllers" in said()[0]
    hall.beat(A, (A, B), 3 * LOST_S)
    assert said() == []
    hall.beat(A, THREE, 1.0)
    assert said() == ["controller-3 is back; 3 of 3 are there"]


def test_a_return_under_another_leader_has_no_line_of_a_later_one(said):
    hall = Hall(B, linked=[A])
    hall.group.elect(A)
    hall.look()
    assert "with 2 of 3 controllers" in said()[0]
    hall.group.elect(B)
    hall.look()
    hall.beat(B, THREE, 3 * LOST_S)
    assert said() == ["controller-2 leads now (term 3)"]


# --- nobody leads --------------------------------------------------------------------------------


def test_a_lost_majority_has_one_warning_with_names_until_there_is_a_leader_again(said):
    hall = Hall(linked=THREE)
    hall.group.elect(A)
    hall.look()
    said()
    hall.silence(LEADERLESS_S / 2)
    assert said() == []
    hall.silence(20.0)
    (line,) = said()
    assert line.startswith(
        "!controller-1 has no majority: nothing was heard of controller-2, controller-3 for "
    )
    assert line.endswith(" s; questions wait until 2 of 3 are there")
    hall.group.elect(A, among=(A, B))
    hall.look()
    hall.beat(A, (A, B), 2 * LOST_S)
    assert said() == [
        f"controller-1 leads now (term {hall.group[A].term})",
        "controller-2 is back; 2 of 3 are there",
    ]


def test_a_follower_logs_the_same_leader_again_only_after_a_warning(said):
    hall = Hall(B, linked=THREE)
    hall.group.elect(A)
    hall.look()
    said()
    for looks, lines in ((10, 0), (40, 2)):
        for _ in range(looks):
            hall.group.beat(A, (A, C))
            hall.group.tick(B, 0.0)
            hall.group.wire.clear()
            hall.look()
        assert hall.group[B].leader is None
        hall.group.beat(A)
        hall.look()
        heard = said()
        assert len(heard) == lines, heard
    assert heard[1] == "controller-2: controller-1 leads again (term 2)"


def test_a_majority_without_an_election_is_not_reported_as_missing(said):
    hall = Hall(linked=THREE)
    hall.look()
    hall.status_log.heard("controller-2")
    hall.silence(LEADERLESS_S + 1)
    assert said() == ["!controller-1 knows of no leader: questions wait until there is one"]


def test_a_controller_reported_as_cut_off_has_no_second_warning(said):
    hall = Hall(is_cut_off=True)
    hall.silence(20.0)
    assert said() == []


@pytest.mark.parametrize(
    ("linked", "whom"), [([], "for controller-1, controller-3"), ([A, C], "to be taken in")]
)
def test_a_controller_without_a_group_names_the_missing_ones_once(said, linked, whom):
    group = SmallGroup([A], joiners=[B])
    status_log = StatusLog(
        name_of(B), names=NAMES, linked=lambda: {name_of(each) for each in linked}, kept=False, now=0.0
    )
    for now in (0.0, GROUPLESS_S - 0.1, GROUPLESS_S, 3 * GROUPLESS_S):
        status_log.update(group[B], now=now)
    assert said() == [f"!controller-2 belongs to no group yet, and waits {whom}"]


def test_another_group_has_one_warning_for_each_of_its_controllers(said):
    hall = Hall()
    for _ in range(5):
        hall.status_log.of_another_group("controller-2", theirs="bb", ours="aa")
    (line,) = said()
    assert line == (
        "!controller-1 belongs to group aa, controller-2 to group bb: "
        "one of them has to begin anew, with an empty folder"
    )


# --- three of them -------------------------------------------------------------------------------


@seeds
@inside(simulated)
async def test_the_story_of_three_controllers_is_a_line_for_each_change(trio, seed, said):
    leader = await trio.settled()
    await asyncio.sleep(10.0)
    lines = said()
    founded = [f"{name}: the group is founded, with 3 of 3 controllers" for name in trio.peers]
    leads = [f"{name}: {leader} leads now" for name in trio.others(leader)] + [f"{leader} leads now"]
    assert sorted(line.partition(" (term")[0] for line in lines) == sorted(founded + leads)

    trio.crash(leader)
    successor = await trio.led()
    (third,) = set(trio.others(leader)) - {successor}
    await asyncio.sleep(10.0)
    lines = [line.partition(" (term")[0] for line in said()]
    lost = f"{leader} is lost: nothing was heard of it for 2 s; 2 of 3 are there"
    assert sorted(lines) == sorted([f"{successor} leads now", f"{third}: {successor} leads now", lost])

    await trio.restart(leader)
    await asyncio.sleep(10.0)
    assert sorted(line.partition(" (term")[0] for line in said()) == sorted(
        [
            f"{leader}: the group is there again, with 3 of 3 controllers",
            f"{leader}: {successor} leads now",
            f"{leader} is back; 3 of 3 are there",
        ]
    )

    trio.crash(leader, successor)
    await asyncio.sleep(30.0)
    (line,) = said()
    both = ", ".join(sorted((leader, successor)))
    assert line.startswith(f"!{third} has no majority: nothing was heard of {both} for ")


@inside(simulated)
async def test_one_that_lost_its_disk_is_taken_in_and_back(trio, said):
    leader = await trio.settled()
    stranger = trio.others(leader)[0]
    trio.crash(stranger)
    await asyncio.sleep(5.0)
    said()
    await trio.restart(stranger, empty_disk=True)
    await trio.settled()
    await asyncio.sleep(3.0)
    assert sorted(line.partition(" (term")[0] for line in said()) == sorted(
        [
            f"{stranger} is back; 3 of 3 are there",
            f"{stranger}: it is taken into the group, with 3 of 3 controllers",
            f"{stranger}: {leader} leads now",
        ]
    )


# --- the cluster map -----------------------------------------------------------------------------


def test_a_node_that_joins_leaves_or_is_lost_makes_a_line():
    here = ClusterMap(nodes={"worker-0": WORKER})
    assert list(map_lines(ClusterMap(), here)) == ["worker-0 joined"]
    for fields, line in ({"live": False}, "is lost"), ({"live": False, "left": True}, "left"):
        gone = ClusterMap(nodes={"worker-0": replace(WORKER, **fields)})
        assert list(map_lines(here, gone)) == [f"worker-0 {line}"]


def test_readers_and_commands_of_operators_make_no_lines():
    reader = replace(DRIVER, role="reader", incarnation=7)
    operator = replace(DRIVER, incarnation=0xAB)
    nodes = {"reader-1": reader, "driver-000000000000ab": operator}
    here = ClusterMap(nodes=nodes)
    gone = ClusterMap(nodes={name: replace(node, live=False, left=True) for name, node in nodes.items()})
    assert [*map_lines(ClusterMap(), here), *map_lines(here, gone)] == []
    assert list(map_lines(ClusterMap(), ClusterMap(nodes={"driver": DRIVER}))) == ["driver joined"]


def test_a_notice_of_a_driver_is_a_line_once():
    before = ClusterMap(nodes={"driver": DRIVER})
    after = ClusterMap(nodes={"driver": replace(DRIVER, info={"notice": "a checkpoint failed"})})
    assert list(map_lines(before, after)) == ["driver reports: a checkpoint failed"]
    assert list(map_lines(after, after)) == []


def test_a_store_of_clients_makes_a_line_for_each_phase():
    cluster = Cluster()
    maps = [cluster.map]
    store = store_record()
    for key, record in (
        ("stores/a/0", cut_arrays(store.id, ARRAYS)[0]),
        ("stores/a", store),
        ("nodes/ps-0", node("ps")),
        ("nodes/ps-0", node("ps", serves=(f"{store.id}/1",))),
        ("nodes/ps-0", node("ps", live=False)),
        ("stores/a", replace(store, phase="deleted")),
    ):
        cluster.set(key, record)
        maps.append(cluster.map)
    lines = [line for before, after in pairwise(maps) for line in map_lines(before, after)]
    assert [line for line in lines if line.startswith("store")] == [
        "store 'a' waits for servers",
        "store 'a' waits for its values",
        "store 'a' is open",
        f"store 'a' failed: ps-0 died: {LOST_STORE}",
        "store 'a' was deleted",
    ]


def test_a_bundle_makes_a_line_for_each_change_of_its_members():
    cluster = Cluster()
    cluster.join("ps-0", "ps-1", "ps-2", "client-0")
    cluster.open("a", store_record(servers=1, copies=2))
    key = "bundles/a/ps-0"
    first, second, third = (("ps-0", 1), ("ps-1", 1), ("ps-2", 1))
    bundle, maps = cluster.map.bundles[key], [cluster.map]
    for change in (
        {"in_sync": (first, second), "joining": ()},
        {"in_sync": (first, second), "joining": (third,)},
        {"in_sync": (second, third), "joining": (), "generation": 2},
    ):
        cluster.set(key, replace(bundle, **change))
        maps.append(cluster.map)
    for server in ("ps-1", "ps-2"):
        cluster.lose(server)
        maps.append(cluster.map)
    prefix = "shards of ps-0 in store 'a':"
    assert [line for before, after in pairwise(maps) for line in map_lines(before, after)] == [
        f"{prefix} ps-1 is in sync (2 of 2 copies are)",
        f"{prefix} ps-2 begins a copy",
        f"{prefix} ps-0 was removed from the copies",
        f"{prefix} ps-2 is in sync (2 of 2 copies are)",
        f"{prefix} ps-1 is the primary now, not ps-0 (generation 2)",
        "ps-1 is lost",
        f"{prefix} ps-1 was removed from the copies",
        f"{prefix} pushes wait: 1 in sync, 2 needed (min_in_sync): start a server",
        f"{prefix} ps-2 is the primary now, not ps-1 (generation 3)",
        "ps-2 is lost",
        f"store 'a' failed: ps-1, ps-2 died: {lost_copies_text(['ps-0'], 'a', is_of_run=False)}",
    ]


def test_the_store_of_a_run_makes_no_line():
    cluster = training()
    assert not [line for line in map_lines(ClusterMap(), cluster.map) if line.startswith("store")]
