"""The audit of a training run counts each acknowledged push once, and finds lost and doubled ones."""

from collections.abc import Callable
from typing import Any

import pytest

from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Apply
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Config
from adam_async.run.counts import Counts, PushCounts, ServerCounts
from adam_async.run.training_program import ProgramRecord
from tests.adam_async.role_counts import counts_of
from tests.adam_async.runs import cluster_of
from tests.drill.judging import Observations, exit_code, judge
from tests.drill.training_audit import WorkerSlots, audit_run, compare

REPLICAS = {"worker-0": "0", "worker-1": "1"}


def pushes(numbers: dict[str, int], unanswered: int, acknowledged: int) -> Any:
    counts = {"numbers": numbers, "unanswered": unanswered, "acknowledged": acknowledged}
    return counts_of("worker", parameters=counts)


def workers(*numbers: dict[str, int], unanswered: int = 0) -> dict[str, PushCounts]:
    return {
        f"worker-{place}": pushes(each, unanswered, sum(each.values()) - unanswered * len(each)).parameters
        for place, each in enumerate(numbers)
    }


def server(versions: dict[str, int], *rows: int, refused: int = 0) -> dict[str, ServerCounts]:
    clients = {str(replica): {"staleness": {"0": row}} for replica, row in enumerate(rows)}
    return {"ps-0": counts_of("ps", versions=versions, clients=clients, refused=refused)}


BOTH = ({"0": 5, "1": 5}, {"0": 4, "1": 4})


@pytest.mark.parametrize(
    ("versions", "rows", "refused", "lost", "twice"),
    [
        ({"0": 9, "1": 9}, (10, 8), 0, 0, 0),
        ({"0": 9, "1": 8}, (9, 8), 0, 1, 0),
        ({"0": 9, "1": 10}, (11, 8), 0, 0, 1),
        ({"0": 8, "1": 10}, (10, 8), 0, 1, 1),
        ({"0": 9, "1": 9}, (9, 9), 0, 1, 1),
        ({"0": 9, "1": 8}, (9, 8), 1, 0, 0),
        ({"0": 9, "1": 9}, (10, 8), 1, 0, 1),
        ({"0": 9, "1": 7}, (8, 8), 1, 1, 0),
    ],
)
def test_applied_pushes_are_compared_by_shard_and_by_replica(
    versions: dict[str, int], rows: tuple[int, ...], refused: int, lost: int, twice: int
) -> None:
    audit, differences = compare(workers(*BOTH), server(versions, *rows, refused=refused), REPLICAS)

    assert (audit.acknowledged, audit.lost, audit.twice) == (18, lost, twice)
    assert bool(differences) == bool(lost or twice)


def test_an_unanswered_push_may_be_applied_or_not() -> None:
    open_pushes = workers({"0": 5, "1": 5}, {"0": 4, "1": 4}, unanswered=1)

    for versions, rows in (({"0": 9, "1": 9}, (10, 8)), ({"0": 7, "1": 7}, (8, 6))):
        audit, _ = compare(open_pushes, server(versions, *rows), REPLICAS)
        assert (audit.unanswered, audit.lost, audit.twice) == (2, 0, 0)
    audit, differences = compare(open_pushes, server({"0": 6, "1": 7}, 7, 6), REPLICAS)
    assert (audit.lost, differences[0]) == (1, "shard 0: 9 acknowledged, 6 applied")


# --- runs ----------------------------------------------------------------------------------------


async def audited() -> Observations:
    """Train a run on real roles, and audit it."""
    seen, slots = Observations(), WorkerSlots()
    config = Config(epochs=2, replicas=2, servers=2, threads=1, shard_bytes=4096, weights="copy")
    async with cluster_of(config) as cluster:

        def observe(_: object) -> None:
            slots.observe(cluster.driver.map)

        result = await cluster.train(observe)
    audit_run(result.statistics, slots, "seed 0", seen)
    return seen


def wraps_one_commit(
    monkeypatch: pytest.MonkeyPatch, instead: Callable[[Any, Bundle, Apply], list[Any]]
) -> None:
    """Replace the commit of the third batch of pushes of the process."""
    commit, batches = Bundle.commit, 0

    def commit_other(self: Bundle, entry: Any) -> list[Any]:
        nonlocal batches
        batches += isinstance(entry, Apply)
        if isinstance(entry, Apply) and batches == 3:
            return instead(commit, self, entry)
        return commit(self, entry)

    monkeypatch.setattr(Bundle, "commit", commit_other)


async def test_the_audit_of_a_run_counts_each_push_of_each_worker_and_holds() -> None:
    seen = await audited()

    assert seen.audit is not None
    assert (seen.audit.lost, seen.audit.twice, seen.audit.unanswered) == (0, 0, 0)
    assert seen.audit.acknowledged > 100
    assert seen.audit_gaps == seen.differences == []
    (claim,) = [each for each in judge(seen, margin=0.1) if each.name == "each push applied once"]
    assert claim.holds
    assert claim.text == f"{seen.audit.acknowledged:,} acknowledged, 0 unanswered; 0 lost, 0 twice"


async def test_a_server_that_acknowledges_a_batch_and_drops_it_fails_the_drill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wraps_one_commit(monkeypatch, lambda commit, bundle, entry: [entry])

    seen = await audited()

    assert seen.audit is not None
    assert seen.audit.lost >= 1
    assert seen.audit.twice == 0
    assert "acknowledged," in seen.differences[0]
    assert exit_code(judge(seen, margin=0.1), (), require=False) == 1


async def test_a_server_that_applies_a_batch_twice_fails_the_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(commit: Any, bundle: Bundle, entry: Apply) -> list[Any]:
        bundle._count(entry)
        return commit(bundle, entry)  # type: ignore[no-any-return]

    wraps_one_commit(monkeypatch, twice)

    seen = await audited()

    assert seen.audit is not None
    assert (seen.audit.lost, seen.audit.twice > 0) == (0, True)
    assert exit_code(judge(seen, margin=0.1), (), require=False) == 1


# --- gaps ----------------------------------------------------------------------------------------


def trained_map(*workers: NodeRecord, run: str = "a", phase: str = "training") -> ClusterMap:
    record = ProgramRecord(id=run, driver="driver", incarnation=1, phase=phase)
    return ClusterMap(run=record, nodes={f"worker-{place}": node for place, node in enumerate(workers)})


def worker(incarnation: int, placed: int, replica: int = 0) -> NodeRecord:
    return NodeRecord(role="worker", address="", incarnation=incarnation, placed=placed, replica=replica)


def gaps_of(slots: WorkerSlots, statistics: dict[str, Counts]) -> list[str]:
    seen = Observations()
    audit_run(statistics, slots, "run", seen)
    (claim,) = [each for each in judge(seen, margin=0.1) if each.name == "each push applied once"]
    assert claim.holds is None
    assert seen.audit is None
    return seen.audit_gaps


PUSHES = pushes({"7": 3}, 0, 3)
SERVER = server({"7": 3}, 3)["ps-0"]


@pytest.mark.parametrize(
    ("statistics", "gap"),
    [
        ({"ps-0": SERVER}, "run: worker-0 did not report its pushes"),
        ({"worker-0": PUSHES}, "run: no server reported shard 7"),
        ({"worker-0": PUSHES, "ps-0": SERVER, "ps-1": SERVER}, "run: several servers reported shard 7"),
    ],
)
def test_counts_that_are_missing_leave_the_claim_unchecked(statistics: dict[str, Counts], gap: str) -> None:
    slots = WorkerSlots()
    slots.observe(trained_map(worker(1, 5)))

    assert gap in gaps_of(slots, statistics)


def test_a_worker_with_a_second_session_leaves_the_claim_unchecked() -> None:
    for second in (worker(2, 5), worker(1, 9)):
        slots = WorkerSlots()
        slots.observe(trained_map(worker(1, 5)))
        slots.observe(trained_map(second))

        assert gaps_of(slots, {"worker-0": PUSHES, "ps-0": SERVER}) == ["run: worker-0 had several sessions"]


def test_slots_before_training_and_of_an_earlier_run_do_not_count() -> None:
    slots = WorkerSlots()
    slots.observe(trained_map(worker(1, 2), phase="preparing"))
    slots.observe(trained_map(worker(1, 3), worker(1, 3, replica=1)))
    slots.observe(trained_map(worker(1, 5), run="b"))

    assert slots.replicas == {"worker-0": 0}
    assert slots.replaced == []


def test_a_drill_that_saw_no_worker_leaves_the_claim_unchecked() -> None:
    assert gaps_of(WorkerSlots(), {"ps-0": SERVER}) == ["run: no worker was seen in training"]
