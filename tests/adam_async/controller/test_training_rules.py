"""Training runs on the controllers' map: placing, worker slots, epochs, dealers, failures."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from msgspec.structs import replace

from adam_async.controller.state import DEPARTED_KEPT, CompareAndSet, Conflict, Invalid, NodeLost
from adam_async.controller.training_rules import assign_workers, program_lines
from adam_async.driver.readiness import check_failed
from adam_async.errors import LOST_SHARDS, RoleFailed
from adam_async.run.cluster_map import ClusterMap, EpochRecord, failed_word
from adam_async.run.counts import EpochCounts, Evaluation
from adam_async.run.training_program import ResumeRecord
from tests.adam_async.cluster_maps import Cluster, RecordedCluster, node, run_record, training


def test_a_run_is_placed_when_as_many_servers_are_live_as_it_wants():
    cluster = Cluster()
    cluster.join("driver", "ps-1")
    cluster.submit(run_record(servers=2))
    assert cluster.map.buckets == ()
    cluster.join("ps-0", "ps-2")
    assert set(cluster.map.buckets) == {"ps-0", "ps-1"}
    assert cluster.map.generation == 1


def test_nodes_that_left_long_ago_leave_the_map_and_those_of_the_run_do_not():
    cluster = training(servers=2)
    cluster.lose("ps-1")
    cluster.lose("driver")
    for number in range(200):
        cluster.join(f"worker-{number}-of-many", f"ps-{number}-of-many")
        cluster.lose(f"worker-{number}-of-many")
        cluster.lose(f"ps-{number}-of-many")
        assert len(cluster.map.nodes) <= 6 + 2 * DEPARTED_KEPT
    assert {"driver", "ps-0", "ps-1", "worker-0"} < set(cluster.map.nodes)
    assert "worker-199-of-many" in cluster.map.nodes
    assert "worker-100-of-many" not in cluster.map.nodes
    cluster.join("worker-100-of-many", incarnation=2)
    assert cluster.map.nodes["worker-100-of-many"].live


def test_every_bucket_keeps_its_primary_while_others_come_and_go():
    cluster = training(servers=2)
    placed = cluster.map.buckets
    cluster.join("ps-7")
    cluster.lose("ps-7")
    assert cluster.map.buckets == placed
    assert cluster.map.run.phase == "training"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shards_are_weighed_in_the_type_of_the_run(dtype):
    cluster = training(servers=3, shard_bytes=64, dtype=dtype)
    held = [cluster.map.buckets.count(server) for server in ("ps-0", "ps-1", "ps-2")]
    assert sum(held) == len(cluster.map.buckets)
    # In either type there are more shards than servers, so none of them may be left empty.
    assert min(held) >= 1


def test_every_live_worker_gets_the_lowest_free_replica():
    cluster = Cluster()
    cluster.join("driver", "worker-c", "worker-a", "worker-b")
    cluster.submit(run_record(replicas=2))
    replicas = {name: record.replica for name, record in cluster.map.nodes.items() if record.role == "worker"}
    assert replicas == {"worker-a": 0, "worker-b": 1, "worker-c": 2}


def test_a_worker_that_joins_takes_part_as_soon_as_it_is_ready():
    cluster = training(replicas=2)
    cluster.join("worker-9")
    assert cluster.map.nodes["worker-9"].replica == 2
    assert cluster.map.live_replicas() == (0, 1)
    cluster.ready("worker-9")
    assert cluster.map.live_replicas() == (0, 1, 2)
    cluster.lose("worker-0")
    cluster.join("worker-8")
    assert cluster.map.nodes["worker-8"].replica == 0
    cluster.end_epoch()
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert cluster.map.epoch.shares == {"1": (0, 5), "2": (5, 10)}
    assert cluster.map.run.phase == "training"


def test_a_run_begins_with_as_many_replicas_as_it_wants_and_more_if_they_are_ready():
    cluster = Cluster()
    cluster.join("driver", "data-0", "ps-0", "worker-0", "worker-1", "worker-2")
    cluster.submit(run_record(replicas=2))
    cluster.ready("data-0", "worker-0", "worker-1")
    cluster.join("worker-3")
    cluster.ready("worker-3", "ps-0")
    assert cluster.map.run.phase == "training"
    assert cluster.map.epoch.shares == {"0": (0, 3), "1": (3, 6), "3": (6, 10)}


def test_a_departed_node_is_not_live_and_its_loss_changes_nothing():
    cluster = training(replicas=2)
    record = cluster.map.nodes["worker-1"]
    cluster.set("nodes/worker-1", replace(record, live=False, left=True))
    assert cluster.map.live_replicas() == (0,)
    assert cluster.map.nodes["worker-1"].left
    version = cluster.map.version
    assert cluster.apply(NodeLost("worker-1", 1)) == []
    assert cluster.map.version == version


@pytest.mark.parametrize("missing", ["data-0", "ps-0", "worker-0"])
def test_an_epoch_begins_only_when_everybody_is_ready(missing):
    cluster = Cluster()
    everybody = ("data-0", "ps-0", "worker-0")
    cluster.join("driver", *everybody)
    cluster.submit(run_record())
    cluster.ready(*(name for name in everybody if name != missing))
    assert cluster.map.run.phase == "preparing"
    cluster.ready(missing)
    assert (cluster.map.run.phase, cluster.map.run.epoch) == ("training", 1)
    assert cluster.map.epoch.shares == {"0": (0, 10)}


def test_shares_cover_the_groups_and_differ_by_one_at_most():
    cluster = training(replicas=3)
    assert cluster.map.epoch.groups == 10
    assert sorted(cluster.map.epoch.shares.values()) == [(0, 3), (3, 6), (6, 10)]


@pytest.mark.parametrize("consistency", ["ssp:3", "bsp"])
def test_where_clocks_count_replicas_take_turns_of_a_step_from_where_all_have_met(consistency):
    cluster = training(replicas=2, consistency=consistency, push_every=3)
    epoch = cluster.map.epoch
    assert (epoch.round_groups, epoch.first_clock) == (3, 0)
    assert epoch.shares == {"0": (0, 2), "1": (1, 2)}
    cluster.end_epoch(clock=2)
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert cluster.map.epoch.first_clock == 2


def test_asynchronous_epochs_know_no_clock():
    cluster = training(push_every=3)
    cluster.end_epoch(clock=7)
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert (cluster.map.epoch.round_groups, cluster.map.epoch.first_clock) == (0, 0)


def test_in_a_warm_start_the_lowest_replica_has_more():
    cluster = training(replicas=2, warm_start=4)
    assert cluster.map.epoch.shares == {"0": (0, 7), "1": (7, 10)}


RESUMED = ResumeRecord(epoch=2, clock=9, results=(EpochCounts(images=100, clock=5),))


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_resumed_run_begins_with_the_epoch_that_it_takes_up(consistency):
    cluster = training(replicas=2, consistency=consistency, resumed=RESUMED)
    run, epoch = cluster.map.run, cluster.map.epoch
    assert (run.epoch, epoch.number, cluster.map.ended) == (2, 2, 1)
    synchronous = consistency == "bsp"
    assert epoch.shares == ({"0": (0, 2), "1": (1, 2)} if synchronous else {"0": (0, 5), "1": (5, 10)})
    assert epoch.first_clock == (9 if synchronous else 0)
    cluster.end_epoch(images=100, clock=12)
    assert (cluster.map.run.phase, cluster.map.ended, cluster.map.result(2).images) == ("between", 2, 100)


def test_the_skipped_groups_of_an_epoch_and_their_replicas_go_into_the_next():
    cluster = training(replicas=2)
    assert (cluster.map.epoch.carried, cluster.map.epoch.behind) == (0, ())
    cluster.end_epoch(images=69, skipped=31, behind=(1,), skipped_groups=((6, 10),))
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    epoch = cluster.map.epoch
    assert (epoch.carried, epoch.behind) == (4, (1,))
    assert epoch.shares == {"0": (0, 7), "1": (7, 10)}
    assert cluster.map.results[0].skipped_groups == ((6, 10),)


def test_after_an_epoch_the_run_waits_for_its_driver_and_keeps_the_result():
    cluster = training()
    cluster.end_epoch(images=100, loss=0.5, train_s=1.0)
    assert (cluster.map.run.phase, cluster.map.run.epoch) == ("between", 1)
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert (cluster.map.epoch.number, cluster.map.epoch.ended) == (2, False)
    assert cluster.map.results == (EpochCounts(images=100, loss=0.5, train_s=1.0),)


def test_with_concurrent_evaluation_the_next_epoch_begins_at_once_and_results_stay():
    cluster = training(evaluation="concurrent")
    cluster.end_epoch(images=1)
    assert (cluster.map.run.phase, cluster.map.epoch.number) == ("training", 2)
    cluster.end_epoch(images=2)
    assert (cluster.map.run.phase, cluster.map.epoch.number) == ("between", 2)
    assert cluster.map.results == (EpochCounts(images=1), EpochCounts(images=2))


def test_the_next_epoch_is_shared_among_those_who_are_left():
    cluster = training(replicas=2)
    cluster.lose("worker-0")
    cluster.end_epoch()
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert cluster.map.epoch.shares == {"1": (0, 10)}


def test_a_run_fails_when_it_loses_what_it_cannot_do_without():
    cluster = training()
    cluster.lose("ps-0")
    assert cluster.map.run.lost == "ps-0"
    assert (cluster.map.run.phase, cluster.map.run.reason) == ("failed", f"ps-0 died: {LOST_SHARDS}")


def test_a_run_that_trains_outlives_its_driver_and_waits_after_the_epoch():
    cluster = training()
    cluster.lose("driver")
    assert cluster.map.run.phase == "training"
    cluster.end_epoch(images=1)
    assert (cluster.map.run.phase, cluster.map.driven, cluster.map.results) == (
        "between",
        False,
        (EpochCounts(images=1),),
    )
    cluster.join("driver")
    assert cluster.map.driven, "the same incarnation drives on"
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert cluster.map.epoch.number == 2


def test_with_concurrent_evaluation_a_run_without_a_driver_trains_all_epochs():
    cluster = training(evaluation="concurrent", epochs=3)
    cluster.lose("driver")
    for _ in range(3):
        cluster.end_epoch()
    assert (cluster.map.run.phase, cluster.map.ended) == ("between", 3)


def test_a_run_that_prepares_fails_when_its_driver_is_lost():
    cluster = Cluster()
    cluster.join("driver", "ps-0")
    cluster.submit(run_record())
    cluster.lose("driver")
    assert (cluster.map.run.phase, cluster.map.run.reason) == (
        "failed",
        "its driver driver was lost before training",
    )


def taken(cluster, driver="driver", incarnation=2, **fields):
    """The record of the run with another driver."""
    return replace(cluster.map.run, driver=driver, incarnation=incarnation, **fields)


def refusal(events):
    """The reason for which a command changed nothing."""
    (event,) = events
    assert isinstance(event, Invalid)
    return event.reason


@pytest.mark.parametrize("successor", ["driver", "driver-of-another-name"])
def test_another_driver_takes_a_run_over_that_has_lost_its_driver(successor):
    cluster = training()
    cluster.end_epoch(images=1)
    before = cluster.map
    cluster.lose("driver")
    cluster.join(successor, incarnation=2)
    cluster.set("run", taken(cluster, successor))
    after = cluster.map
    assert (after.driven, after.run.driven_by) == (True, (successor, 2))
    assert taken(cluster, "driver", 1, changed=before.run.changed) == before.run
    assert (after.epoch, after.results, after.run_store) == (before.epoch, before.results, before.run_store)
    cluster.set("run", replace(after.run, phase="training", epoch=2))
    assert cluster.map.epoch.number == 2


def test_a_driver_that_joins_again_under_its_name_takes_its_own_run_over():
    cluster = training()
    cluster.join("driver", incarnation=2)
    assert not cluster.map.driven
    cluster.set("run", taken(cluster))
    assert cluster.map.driven
    cluster.lose("driver")
    assert (cluster.map.driven, cluster.map.run.phase) == (False, "training")


def test_a_run_with_a_live_driver_is_neither_taken_over_nor_replaced():
    cluster = training()
    cluster.join("driver-2")
    error = "run: run run-1 is in progress, and its driver driver is live"
    assert refusal(cluster.set("run", taken(cluster, "driver-2", 1))) == error
    assert refusal(cluster.set("run", taken(cluster, "driver", 2))) == error
    assert refusal(cluster.set("run", run_record("run-2", driver="driver-2"))) == error
    assert cluster.map.run.driven_by == ("driver", 1)


def test_a_replaced_driver_changes_nothing_any_more():
    cluster = training()
    cluster.end_epoch()
    late = replace(cluster.map.run, phase="training", epoch=2)
    cluster.join("driver", incarnation=2)
    cluster.set("run", taken(cluster))
    assert cluster.set("run", late, expected=late.changed) == [Conflict("run", cluster.map.run.changed)]
    error = "run: run run-1 is in progress, and its driver driver is live"
    assert refusal(cluster.set("run", late)) == error
    cluster.lose("driver")  # the successor; the first incarnation cannot join again
    assert refusal(cluster.set("run", late)) == "run: its driver driver has not joined in this incarnation"


def test_a_takeover_changes_the_driver_only():
    cluster = training()
    cluster.join("driver", incarnation=2)
    error = "run: a driver that takes run run-1 over sets driver and incarnation only"
    for more in ({"phase": "finished"}, {"epoch": 2}, {"evaluated": (Evaluation(1, 0.5),)}):
        assert refusal(cluster.set("run", taken(cluster, **more))) == error
    assert refusal(cluster.set("run", taken(cluster, incarnation=3))) == (
        "run: its driver driver has not joined in this incarnation"
    )


def test_a_run_that_is_over_is_not_taken_over():
    cluster = training()
    cluster.set("run", replace(cluster.map.run, phase="finished"))
    cluster.join("driver", incarnation=2)
    error = "run: run run-1 is over (finished): it takes no other driver"
    assert refusal(cluster.set("run", taken(cluster))) == error


def test_a_stop_outlives_its_driver():
    cluster = training()
    cluster.set("epoch", replace(cluster.map.epoch, drain=True))
    cluster.lose("driver")
    assert cluster.map.epoch.drain


def test_the_loss_of_a_driver_its_return_and_its_successor_are_lines():
    cluster = training()

    def lines(change):
        before = cluster.map
        change()
        return list(program_lines(before, cluster.map))

    waits = (
        "run run-1 waits for a driver, because driver is lost: "
        "adam-async train --controller ... --attach run-1 takes it over"
    )
    assert lines(lambda: cluster.lose("driver")) == [waits]
    assert lines(lambda: cluster.join("driver")) == ["run run-1 goes on with driver driver"]
    assert lines(lambda: cluster.join("driver", incarnation=2)) == [waits]
    assert lines(cluster.end_epoch) == []
    assert lines(lambda: cluster.set("run", taken(cluster))) == ["run run-1 goes on with driver driver"]


def test_a_run_does_not_fail_because_a_worker_reports_a_failure():
    cluster = Cluster()
    cluster.join("driver", "ps-0", "worker-0")
    cluster.submit(run_record())
    cluster.set("nodes/worker-0", replace(cluster.map.nodes["worker-0"], failed="me"))
    assert cluster.map.run.phase == "preparing"


def test_a_data_server_that_refuses_a_run_is_reported_as_refusing_and_not_as_dead():
    cluster = Cluster()
    cluster.join("driver", "data-0", "ps-0", "worker-0")
    cluster.submit(run_record())
    refusal = "step 1 (a:b): there is no module 'a'"
    report = failed_word(cluster.map.run.id, refusal)
    cluster.set("nodes/data-0", replace(cluster.map.nodes["data-0"], failed=report))
    assert (cluster.map.run.phase, cluster.map.run.lost) == ("failed", "the data server")
    assert cluster.map.run.reason == f"the data server cannot serve the run: data-0: {refusal}"
    with pytest.raises(RoleFailed, match=r"^the data server cannot serve the run: data-0: step 1"):
        check_failed(cluster.map, cluster.map.run.id)


def test_a_late_refusal_of_an_earlier_run_ends_no_later_run():
    cluster = Cluster()
    cluster.join("driver", "data-0", "ps-0", "worker-0")
    cluster.submit(run_record())
    for report in (failed_word("run-0", "no"), "no"):
        cluster.set("nodes/data-0", replace(cluster.map.nodes["data-0"], failed=report))
        assert cluster.map.run.phase == "preparing"


def test_a_refusal_before_training_ends_a_run_only_if_no_other_data_server_may_serve_it():
    cluster = Cluster()
    cluster.join("driver", "data-0", "data-1", "ps-0", "worker-0")
    cluster.submit(run_record())
    report = failed_word(cluster.map.run.id, "no")
    cluster.set("nodes/data-0", replace(cluster.map.nodes["data-0"], failed=report))
    assert cluster.map.run.phase == "preparing"
    cluster.set("nodes/data-1", replace(cluster.map.nodes["data-1"], failed=report))
    assert cluster.map.run.reason == "the data server cannot serve the run: data-0: no"


def test_a_ready_data_server_that_refuses_its_run_ends_it_although_others_serve_it():
    cluster = Cluster()
    cluster.join("driver", "data-0", "data-1", "data-2", "ps-0", "worker-0")
    cluster.submit(run_record())
    run = cluster.map.run.id
    for name in ("data-0", "data-1", "data-2"):
        cluster.set(f"nodes/{name}", replace(cluster.map.nodes[name], ready=run))
    ended = replace(cluster.map.nodes["data-0"], ready="", failed=failed_word(run, "a damaged image"))
    cluster.set("nodes/data-0", ended)
    assert cluster.map.run.phase == "preparing"
    refused = replace(cluster.map.nodes["data-1"], failed=failed_word(run, "step 1 failed"))
    cluster.set("nodes/data-1", refused)
    assert cluster.map.run.reason == "the data server cannot serve the run: data-1: step 1 failed"


def test_a_run_goes_on_without_a_worker():
    cluster = training()
    cluster.lose("worker-0")
    assert cluster.map.run.phase == "training"
    assert cluster.map.live_replicas() == ()


def test_a_primary_that_restarts_before_it_is_missed_has_lost_its_shards_all_the_same():
    cluster = training()
    cluster.join("ps-0", incarnation=2)
    assert cluster.map.nodes["ps-0"].live
    assert cluster.map.run.phase == "failed"
    assert cluster.map.run.reason.startswith("ps-0 died")


def test_a_worker_that_restarts_gets_a_replica_again_in_its_new_life():
    cluster = training(replicas=2)
    cluster.join("worker-1", incarnation=5)
    record = cluster.map.nodes["worker-1"]
    assert (record.incarnation, record.replica, record.ready) == (5, 1, "")
    assert cluster.map.run.phase == "training"


def test_a_node_that_sets_the_same_record_again_keeps_its_replica():
    cluster = training()
    cluster.set("nodes/worker-0", node(ready="run-1"))
    assert cluster.map.nodes["worker-0"].replica == 0


def test_a_failed_run_stays_failed_and_a_new_one_starts_afresh():
    cluster = training()
    cluster.lose("ps-0")
    cluster.join("ps-0", incarnation=2)
    assert cluster.map.run.phase == "failed"
    cluster.submit(run_record("run-2"))
    assert (cluster.map.run.id, cluster.map.run.phase) == ("run-2", "preparing")
    assert set(cluster.map.buckets) == {"ps-0"}
    assert cluster.map.generation == 2
    assert cluster.map.epoch is None
    assert {record.ready for record in cluster.map.nodes.values()} == {""}
    assert cluster.map.nodes["worker-0"].replica == 0


def test_a_finished_run_fails_no_more():
    cluster = training()
    cluster.set("run", replace(cluster.map.run, phase="finished"))
    for name in ("ps-0", "data-0", "driver"):
        cluster.lose(name)
    assert cluster.map.run.phase == "finished"


def test_the_death_of_an_earlier_incarnation_changes_nothing():
    cluster = training()
    version = cluster.map.version
    assert cluster.apply(NodeLost("worker-0", 99)) == []
    assert cluster.apply(NodeLost("nobody", 1)) == []
    assert cluster.map.version == version


# --- replicas of several workers ---------------------------------------------------------------


def places(cluster):
    """Where the live workers are."""
    nodes = cluster.map.nodes
    return {name: (nodes[name].replica, nodes[name].partition) for name in cluster.map.live("worker")}


def test_workers_fill_one_replica_after_the_other_and_who_is_left_over_waits():
    cluster = Cluster()
    cluster.join("driver", *(f"worker-{number}" for number in range(5)))
    cluster.submit(run_record(replicas=2, partitions=2))
    assert list(places(cluster).values()) == [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0)]
    cluster.join("worker-5")
    assert places(cluster) | {"worker-4": (2, 0), "worker-5": (2, 1)} == places(cluster)


def test_a_run_begins_when_all_workers_of_its_replicas_are_ready():
    cluster = Cluster()
    everybody = ("data-0", "ps-0", "worker-0", "worker-1", "worker-2")
    cluster.join("driver", *everybody)
    cluster.submit(run_record(partitions=3))
    cluster.ready(*everybody[:-1])
    assert (cluster.map.run.phase, cluster.map.live_replicas()) == ("preparing", ())
    cluster.ready("worker-2")
    assert (cluster.map.run.phase, cluster.map.live_replicas()) == ("training", (0,))


def test_a_replica_that_lost_a_worker_is_out_until_the_spare_one_and_all_others_are_ready_anew():
    cluster = training(replicas=2, partitions=2)
    lives = cluster.map.replica_generations()
    cluster.join("worker-9")
    assert cluster.map.replica_generations() == lives
    cluster.lose("worker-1")
    assert places(cluster)["worker-9"] == (0, 1)
    assert cluster.map.replica_generations() == {1: lives[1]}
    cluster.ready("worker-9")
    assert cluster.map.live_replicas() == (1,)
    cluster.ready("worker-0")
    again = cluster.map.replica_generations()
    assert (again[1], set(again)) == (lives[1], {0, 1})
    assert again[0] != lives[0]


def test_a_worker_that_was_gone_and_is_back_gives_its_replica_another_life():
    cluster = training()
    before = cluster.map.replica_generation(0)
    cluster.lose("worker-0")
    assert cluster.map.replica_generation(0) == 0
    cluster.join("worker-0")
    assert cluster.map.replica_generation(0) not in (0, before)


def test_of_two_replicas_that_lack_workers_the_higher_one_gives_its_own_to_the_lower():
    cluster = training(replicas=3, partitions=2)
    cluster.lose("worker-1")
    assert places(cluster)["worker-0"] == (0, 0)
    cluster.lose("worker-4")
    assert places(cluster) == {"worker-0": (0, 0), "worker-2": (1, 0), "worker-3": (1, 1), "worker-5": (0, 1)}


class Members(RecordedCluster):
    """Nodes join, restart, get ready and die while a driver advances the run; the map stays sound."""

    PARTITIONS = 1

    names = st.sampled_from(
        ["driver", "data-0", "ps-0", "ps-1", *(f"worker-{number}" for number in range(5))]
    )

    def __init__(self):
        super().__init__()
        self.runs = 0

    @rule(name=names, incarnation=st.integers(1, 3))
    def joins(self, name, incarnation):
        self.cluster.join(name, incarnation=incarnation)

    @rule(name=names)
    def gets_ready(self, name):
        run = self.cluster.map.run
        if run is not None and name in self.cluster.map.nodes:
            self.cluster.ready(name, run=run.id)

    @rule(name=names)
    def dies(self, name):
        if name in self.cluster.map.nodes:
            self.cluster.lose(name)

    @rule(concurrent=st.booleans())
    def a_run_is_submitted(self, concurrent):
        self.runs += 1
        evaluation = "concurrent" if concurrent else "wait"
        driver = self.cluster.map.nodes.get("driver")
        record = run_record(
            f"run-{self.runs}",
            servers=2,
            replicas=2,
            partitions=self.PARTITIONS,
            evaluation=evaluation,
            incarnation=driver.incarnation if driver is not None else 1,
        )
        self.cluster.submit(record)

    @rule()
    def the_epoch_ends(self):
        epoch = self.cluster.map.epoch
        if epoch is not None and not epoch.ended:
            self.cluster.end_epoch(images=1)

    @rule()
    def the_driver_takes_the_run_over(self):
        run, driver = self.cluster.map.run, self.cluster.map.nodes.get("driver")
        if run is not None and driver is not None:
            before = self.cluster.map
            self.cluster.set("run", taken(self.cluster, incarnation=driver.incarnation))
            may = driver.live and not run.over and not before.driven
            assert (self.cluster.map.run.driven_by != run.driven_by) == may

    @rule()
    def the_driver_goes_on(self):
        run = self.cluster.map.run
        if run is not None and run.phase == "between":
            self.cluster.set("run", replace(run, phase="training", epoch=run.epoch + 1))

    @invariant()
    def the_map_is_sound(self):
        self.cluster.state.check_invariants()
        cluster = self.cluster.map
        if cluster.epoch is not None and cluster.run.phase in ("training", "between"):
            assert len(cluster.results) == cluster.epoch.number - (not cluster.epoch.ended)


class MembersInTwos(Members):
    PARTITIONS = 2


class MembersInThrees(Members):
    PARTITIONS = 3


for machine in (Members, MembersInTwos, MembersInThrees):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


TestMembers = Members.TestCase


TestMembersInTwos = MembersInTwos.TestCase


TestMembersInThrees = MembersInThrees.TestCase


def test_an_epoch_without_a_run_is_only_a_record():
    cluster = Cluster()
    cluster.set("epoch", EpochRecord(run="x", number=1, groups=1, shares={}))
    assert cluster.map.run is None


# --- the dealer ---------------------------------------------------------------------------------


def dealer_of(cluster):
    return cluster.map.dealing, cluster.map.dealer.term


def generations_of(cluster):
    return {replica: cluster.map.replica_generation(replica) for replica in range(2)}


def with_two_data_servers():
    cluster = training(replicas=2)
    cluster.join("data-1")
    cluster.ready("data-1")
    assert dealer_of(cluster) == ("data-0", 1)
    return cluster


def test_the_first_ready_data_server_is_the_dealer():
    cluster = Cluster()
    cluster.join("driver", "data-0", "data-1")
    cluster.submit(run_record())
    assert cluster.map.dealer is None
    cluster.ready("data-1")
    cluster.ready("data-0")
    assert dealer_of(cluster) == ("data-1", 1)


def test_another_ready_data_server_replaces_a_lost_dealer_and_the_replicas_go_on():
    cluster = with_two_data_servers()
    before, epoch = generations_of(cluster), cluster.map.epoch
    cluster.lose("data-0")
    assert dealer_of(cluster) == ("data-1", 2)
    assert cluster.map.dealer.changed == cluster.map.version
    assert (cluster.map.live_replicas(), generations_of(cluster)) == ((0, 1), before)
    assert cluster.map.run.phase == "training"
    assert cluster.map.epoch == replace(epoch, changed=cluster.map.version)


def test_a_run_without_a_data_server_waits_for_one_and_its_workers_go_on():
    cluster = training(replicas=2)
    before = generations_of(cluster)
    cluster.lose("data-0")
    assert (cluster.map.run.phase, cluster.map.dealing, cluster.map.dealer_address) == ("training", "", "")
    assert generations_of(cluster) == before
    cluster.join("data-0", incarnation=2)
    assert cluster.map.dealing == ""
    cluster.ready("data-0")
    assert dealer_of(cluster) == ("data-0", 2)
    assert generations_of(cluster) == before


def test_an_epoch_that_is_due_without_a_data_server_begins_with_the_next_one():
    cluster = training()
    cluster.end_epoch(images=1)
    cluster.lose("data-0")
    cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
    assert (cluster.map.run.epoch, cluster.map.epoch.number) == (2, 1)
    cluster.join("data-0", incarnation=2)
    cluster.ready("data-0")
    assert (cluster.map.epoch.number, cluster.map.epoch.ended) == (2, False)


def test_a_dealer_that_begins_anew_is_another_one():
    cluster = training(replicas=2)
    cluster.join("data-0", incarnation=2)
    assert cluster.map.dealing == ""
    cluster.ready("data-0")
    assert dealer_of(cluster) == ("data-0", 2)


def test_a_late_end_of_an_epoch_by_a_replaced_dealer_is_void():
    cluster = with_two_data_servers()
    ended = replace(cluster.map.epoch, ended=True, result={"images": 100})
    cluster.lose("data-0")
    (event,) = cluster.set("epoch", ended, expected=ended.changed)
    assert isinstance(event, Conflict)
    assert not cluster.map.epoch.ended


def test_the_facts_of_the_first_data_stay_and_a_new_run_has_no_dealer():
    cluster = training()
    facts = cluster.map.dealer.data
    assert facts["train_images"] == cluster.map.nodes["data-0"].info["train_images"]
    cluster.lose("data-0")
    cluster.join("data-1")
    cluster.ready("data-1")
    assert cluster.map.dealer.data == facts
    cluster.submit(run_record("run-2"))
    assert cluster.map.dealer is None


def test_the_loss_of_a_dealer_and_its_successor_are_reported():
    cluster = training(replicas=2)
    before = cluster.map
    cluster.lose("data-0")
    waits = "run run-1 waits for a data server, because data-0 is lost"
    assert [*program_lines(before, cluster.map)] == [waits]
    before = cluster.map
    cluster.join("data-1")
    cluster.ready("data-1")
    assert [*program_lines(before, cluster.map)] == [
        "run run-1 goes on with data server data-1, after the loss of data-0"
    ]


def test_replicas_are_spread_over_the_ready_data_servers_and_a_new_run_has_none():
    cluster = training()
    cluster.join("data-1", "data-2")
    cluster.ready("data-1", "data-2")
    servers = [cluster.map.data_servers_for(replica) for replica in range(4)]
    assert {len(each) for each in servers} == {3}
    assert cluster.map.dealer_address == "local://1"
    cluster.submit(run_record("run-2"))
    assert (cluster.map.dealer_address, cluster.map.data_servers_for(0)) == ("", ())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("run/24", {"run": "r", "data": ""}, "no key"),
        ("run", {"id": "r", "driver": "d", "incarnation": 1, "pieces": 25}, "`int` <= 24 - at `$.pieces`"),
        ("nodes/data-0", {"role": "data", "address": "local://1", "incarnation": 1}, "train_images"),
        ("epoch", {"run": "r", "number": "one", "groups": 1, "shares": {}}, "epoch: Expected `int`"),
        (
            "run",
            {"id": "r", "driver": "d", "incarnation": 1, "terms": {"replicas": 0}},
            "Expected `int` >= 1 - at `$.replicas`",
        ),
        (
            "run",
            {"id": "r", "driver": "d", "incarnation": 1, "terms": {"partitions": 65}},
            "`int` <= 64 - at `$.partitions`",
        ),
        (
            "run",
            {"id": "r", "driver": "d", "incarnation": 1, "phase": "asleep"},
            "run: unknown phase 'asleep' of a run; known: p",
        ),
        (
            "run",
            {"id": "", "driver": "d", "incarnation": 1},
            "run: id must be 1 to 160 bytes of printable characters, not ''",
        ),
    ],
)
def test_a_value_that_the_rules_cannot_work_with_is_refused_with_a_reason(key, value, said):
    cluster = Cluster()
    (event,) = cluster.apply(CompareAndSet(key=key, expected=0, value=value))
    assert isinstance(event, Invalid)
    assert said in event.reason
    assert cluster.map.version == 0


@pytest.mark.parametrize("blob", [b"", b"\xff\x00 no msgpack", bytes(20_000)])
def test_a_blob_of_garbage_does_not_change_what_the_rules_do(blob):
    maps = []
    for garbage in (None, blob):
        cluster = Cluster()
        cluster.join("driver", "data-0", "ps-0", "worker-0")
        record = run_record()
        cluster.submit(record, blob=garbage)
        cluster.ready("data-0", "ps-0", "worker-0")
        cluster.end_epoch(images=100)
        cluster.set("run", replace(cluster.map.run, phase="training", epoch=2))
        cluster.lose("data-0")
        assert cluster.map.run.blob == (record.blob if garbage is None else garbage)
        maps.append(replace(cluster.map, run=replace(cluster.map.run, blob=b"")))
    assert maps[0] == maps[1]
    assert (maps[0].run.phase, maps[0].dealing) == ("training", "")


def test_a_run_that_begins_ends_or_fails_is_a_line_and_its_epochs_are_none():
    phases = ("preparing", 0), ("training", 1), ("between", 1), ("training", 2), ("failed", 2)
    run, maps = run_record("r"), [ClusterMap()]
    maps += [ClusterMap(run=replace(run, phase=phase, epoch=epoch, reason="why")) for phase, epoch in phases]
    lines = [line for before, after in pairwise(maps) for line in program_lines(before, after)]
    assert lines == ["run r is preparing", "run r is training", "run r failed: why"]


@pytest.mark.parametrize(
    ("evaluated", "said"),
    [
        ((), "run r has finished"),
        ((Evaluation(2, 0.985),), "run r has finished with 98.50% of the test images correct"),
    ],
)
def test_the_line_of_a_finished_run_has_its_accuracy(evaluated, said):
    run = run_record("r")
    before, after = (
        ClusterMap(run=replace(run, phase="training")),
        ClusterMap(run=replace(run, phase="finished", evaluated=evaluated)),
    )
    assert list(program_lines(before, after)) == [said]


@pytest.mark.parametrize(
    ("role", "info", "said"),
    [
        ("worker", {"threads": "many"}, "threads"),
        ("worker", {"threads": 0}, "threads"),
        ("worker", {"in_flight": -1}, "in_flight"),
        ("data", {"train_images": 1 << 40}, "train_images"),
        ("data", {"train_images": 0}, "train_images"),
        ("data", {"shape": [1, 8]}, "shape"),
        ("data", {"classes": None}, "classes"),
        ("data", {"name": 7}, "name"),
    ],
)
def test_fields_that_other_roles_calculate_with_have_their_types(role, info, said):
    (event,) = Cluster().set("nodes/x", node(role, info=info))
    assert said in event.reason


NONE = (-1, 0)


def test_gaps_are_filled_before_a_replica_begins_and_who_is_left_over_has_no_place():
    known = {"a": (0, 1), "b": (1, 0), "c": (1, 1), "d": NONE, "e": NONE}
    assert assign_workers(known, 2) == {**known, "d": (0, 0)}
    assert assign_workers({**known, "f": NONE}, 2) == {**known, "d": (0, 0), "e": (2, 0), "f": (2, 1)}


def test_a_number_that_no_replica_has_is_given_again_the_lowest_first():
    assert assign_workers({"a": (1, 0), "b": NONE, "c": NONE}, 1) == {"a": (1, 0), "b": (0, 0), "c": (2, 0)}


@st.composite
def some_places(draw):
    partitions = draw(st.integers(1, 4))
    spots = st.tuples(st.integers(0, 4), st.integers(0, partitions - 1))
    taken = draw(st.lists(spots, unique=True, max_size=8))
    free = [NONE] * draw(st.integers(0, 6))
    return {
        f"w{number}": place for number, place in enumerate(draw(st.permutations(taken + free)))
    }, partitions


@given(some_places())
def test_as_many_replicas_are_complete_as_there_are_workers_for_and_those_that_were_keep_theirs(given_places):
    before, partitions = given_places
    after = assign_workers(before, partitions)
    assert after.keys() == before.keys()
    taken = Counter(place for place in after.values() if place != NONE)
    assert set(taken.values()) <= {1}
    sizes = Counter(replica for replica, _ in taken)
    complete = sum(size == partitions for size in sizes.values())
    assert complete == len(before) // partitions
    was = Counter(replica for replica, _ in before.values() if replica >= 0)
    for name, place in before.items():
        if was[place[0]] == partitions:
            assert after[name] == place
    assert assign_workers(after, partitions) == after
