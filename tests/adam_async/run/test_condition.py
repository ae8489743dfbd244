"""The condition of a cluster: verdict, losses survived, limit of the rate, participants, waits."""

import pytest
from msgspec import structs

from adam_async.run.cluster_map import ClusterMap, ready_word
from adam_async.run.cluster_status import status_of
from adam_async.run.condition import MOST_WAITED_FOR, Condition, LostRole, limit_of
from adam_async.run.counts import Counts
from adam_async.run.training_program import ProgramRecord
from tests.adam_async.cluster_maps import bundle_map, node, run_record
from tests.adam_async.role_counts import counts_of

CONTROLLERS = {f"controller-{n}": counts_of("controller", f"controller-{n}") for n in range(3)}


def run_of(replicas: int = 2, **fields: object) -> ProgramRecord:
    record = run_record("run-1", phase="training")
    terms = {**record.terms, "replicas": replicas, "partitions": 1, "epochs": 10}
    return structs.replace(record, terms=terms, **fields)


def training(*, live: int = 2, **fields: object) -> ClusterMap:
    """A run of two replicas with two copies of its shards, of whose workers some are ready."""
    cluster = bundle_map({"ps-0": ("ps-0", "ps-1"), "ps-1": ("ps-1", "ps-0")})
    driver = node("driver", incarnation=1)
    workers = {f"worker-{n}": node("worker", replica=n, placed=1) for n in range(live)}
    nodes = {**cluster.nodes, **workers, "driver": driver}
    cluster = structs.replace(cluster, nodes=nodes, run=run_of(driver="driver", incarnation=1, **fields))
    ready = {
        name: structs.replace(worker, ready=ready_word("run-1", cluster.replica_generation(worker.replica)))
        for name, worker in workers.items()
    }
    return structs.replace(cluster, nodes={**cluster.nodes, **ready})


def condition(
    cluster: ClusterMap,
    counts: dict[str, Counts] | None = None,
    earlier: dict[str, Counts] | None = None,
    *,
    of=3,
) -> Condition:
    return status_of(
        cluster, counts or {}, leading="", controllers=of if counts else 0, earlier=earlier or {}
    ).condition


def test_a_whole_cluster_is_well_and_survives_a_loss() -> None:
    found = condition(training(), CONTROLLERS)
    assert (found.verdict, found.reasons) == ("well", ())
    assert (found.survives, found.live) == (1, 2)


def test_controllers_without_a_further_majority_survive_no_loss() -> None:
    two = dict(list(CONTROLLERS.items())[:2])
    found = condition(training(), two)
    assert (found.survives, found.weakest) == (0, "the controllers")
    assert (found.verdict, found.reasons) == ("degraded", ("2 of 3 controllers answer",))
    assert condition(training(), {"controller": CONTROLLERS["controller-0"]}, of=1).survives == 0


def test_a_bundle_with_one_copy_survives_no_loss_and_is_degraded() -> None:
    cluster = training()
    bundle = bundle_map({"ps-0": ("ps-0", "ps-1"), "ps-1": ("ps-1",)}).bundles
    found = condition(structs.replace(cluster, bundles=bundle))
    assert (found.survives, found.weakest) == (0, "the servers of ps-1 of the run")
    assert found.reasons == ("bundle ps-1 of the run has 1 of 2 copies in sync",)
    (wait,) = [each for each in found.waits if each.who.startswith("pushes")]
    assert (wait.what, wait.deadline_s) == ("1 more copies in sync", 3600.0)


def test_a_lost_bundle_or_run_is_ending() -> None:
    lost = structs.replace(training(), bundles=bundle_map({"ps-0": (), "ps-1": ("ps-1", "ps-0")}).bundles)
    found = condition(lost)
    assert (found.verdict, found.reasons[0]) == ("ending", "all copies of ps-0 of the run are lost")
    failed = condition(training(phase="failed", reason="ps-0 died"))
    assert (failed.verdict, failed.reasons[0]) == ("ending", "run run-1 has failed: ps-0 died")


def test_a_failed_store_of_clients_is_ending_and_one_that_lacks_copies_degraded() -> None:
    def with_store(in_sync: tuple[str, ...], phase: str = "open") -> Condition:
        cluster = bundle_map({"ps-0": in_sync}, phase=phase)
        store = structs.replace(cluster.stores["run-1"], program="")
        return condition(structs.replace(cluster, run=None, stores={"run-1": store}))

    assert with_store(("ps-0", "ps-1")).verdict == "well"
    assert with_store(("ps-0",)).reasons == ("bundle ps-0 of store 'run-1' has 1 of 2 copies in sync",)
    assert with_store((), phase="failed").verdict == "ending"


def test_a_finished_run_needs_no_replicas_and_no_driver() -> None:
    cluster = training(live=0, phase="finished")
    nodes = {name: each for name, each in cluster.nodes.items() if name != "driver"}
    found = condition(structs.replace(cluster, nodes=nodes))
    assert (found.verdict, found.waits, found.limited_by) == ("well", (), "")


def test_the_loss_of_the_only_replica_is_degraded() -> None:
    cluster = training(live=0)
    assert cluster.run is not None
    record = run_record("run-1", phase="training", replicas=1, epochs=1)
    assert "replicas" not in record.terms, "terms leave out defaults"
    run = structs.replace(record, driver="driver", incarnation=1)
    lost = node("worker", replica=0, live=False, lost_at=12.0)
    found = status_of(
        structs.replace(cluster, run=run, nodes={**cluster.nodes, "worker-0": lost}),
        {},
        leading="",
        controllers=0,
        earlier={},
    )
    assert found.condition.verdict == "degraded"
    assert found.condition.reasons == ("worker-0 is lost", "0 of 1 replicas are live")
    assert found.run is not None
    assert (found.run.replicas, found.run.epochs) == (1, 1)


def test_lacking_replicas_and_drivers_are_named_with_their_cures() -> None:
    cluster = training(live=0)
    nodes = {name: each for name, each in cluster.nodes.items() if name != "driver"}
    found = condition(structs.replace(cluster, nodes=nodes))
    assert found.verdict == "degraded"
    assert "0 of 2 replicas are live" in found.reasons
    assert {each.what for each in found.waits} == {"a live replica", "a data server", "a driver"}
    assert all(each.cure for each in found.waits)
    assert [each.deadline_s for each in found.waits] == [60.0, 60.0, None]


def test_lost_roles_have_the_time_of_their_loss_until_they_are_replaced() -> None:
    gone = node("worker", live=False, lost_at=12.5)
    left, server = node("ps", live=False, left=True), node("ps", live=False)
    lacking = training(live=1)
    more = {"worker-7": gone, "ps-8": left, "ps-9": server}
    found = condition(structs.replace(lacking, nodes={**lacking.nodes, **more})).lost
    assert found == (
        LostRole(node="ps-9", role="ps", since=None),
        LostRole(node="worker-7", role="worker", since=12.5),
    )
    whole = training()
    assert condition(structs.replace(whole, nodes={**whole.nodes, "worker-7": gone})).lost == ()


def worker(age_s: float, *, busy_s=0.0, server=0.0, image=0.0, clock=0.0, late=0.0, groups=0) -> Counts:
    counts = counts_of(
        "worker",
        "worker-0",
        age_s=age_s,
        parameters={"admission_wait_s": server},
        data={"blocked_s": image, "groups": groups},
        clock_wait_s=clock,
        lag_s={"p50": late, "p99": late, "max": late},
    )
    pool = counts_of("worker", pool=POOL | {"busy_s": busy_s}).pool
    return structs.replace(counts, pool=pool)


POOL = {
    "threads": 2,
    "accepted": 0,
    "finished": 0,
    "outstanding": 0,
    "wakes": 0,
    "elapsed_s": 1.0,
    "busy_share": 0.0,
    "paced_s": 0.0,
    "queue_wait_s": 0.0,
}


@pytest.mark.parametrize(
    ("then", "now", "server_cpu_s", "limit"),
    [
        ({}, {"busy_s": 1.8, "server": 0.1}, 0.0, "compute"),
        ({"busy_s": 100.0}, {"busy_s": 100.1, "image": 0.8}, 0.0, "input"),
        ({"clock": 50.0}, {"busy_s": 0.2, "clock": 50.7}, 0.0, "clock"),
        ({}, {"busy_s": 0.2, "server": 0.7}, 0.1, "wire"),
        ({}, {"busy_s": 0.2, "server": 0.7}, 0.9, "server"),
        ({}, {"busy_s": 0.2, "server": 0.7, "late": 0.3}, 0.1, "loop"),
        ({}, {}, 0.0, ""),
    ],
)
def test_the_limit_is_the_largest_share_of_the_last_seconds(then, now, server_cpu_s, limit) -> None:
    counts = {
        "worker-0": worker(11.0, **now),
        "ps-0": counts_of("ps", "ps-0", age_s=11.0, cpu_s=5.0 + server_cpu_s),
    }
    earlier = {"worker-0": worker(10.0, **then), "ps-0": counts_of("ps", "ps-0", age_s=10.0, cpu_s=5.0)}
    assert limit_of(counts, earlier) == limit


def test_replicas_that_trained_a_group_since_the_last_poll_take_part() -> None:
    found = condition(training(), {"worker-0": worker(2.0, groups=7)}, {"worker-0": worker(1.0, groups=6)})
    assert (found.live, found.taking_part) == (2, 1)
    idle = condition(training(), {"worker-0": worker(2.0, groups=6)}, {"worker-0": worker(1.0, groups=6)})
    assert idle.taking_part == 0
    assert idle.line.endswith("2 live, 0 taking part")


def test_the_text_of_a_wait_is_short_however_long_a_worker_makes_it() -> None:
    counts = counts_of("worker", "worker-0", waiting_for="replica 1 " * 100_000)
    wait = condition(training(), {**CONTROLLERS, "worker-0": counts}).waits[0]
    assert wait.what == ("replica 1 " * 100)[:MOST_WAITED_FOR]
