"""Workers that cannot train a run fail it if too few others are left; one alone ends no run."""

import pytest

from adam_async.controller.training_rules import fail_if_lost
from adam_async.driver.readiness import check_failed
from adam_async.errors import RoleFailed
from adam_async.run.cluster_map import ClusterMap, NodeRecord, failed_word, failure_of
from adam_async.run.training_program import ProgramRecord

RUN = "driver-1"


def map_of(phase: str, failed: dict[str, str], *, replicas: int = 1) -> ClusterMap:
    """A cluster with workers, of which some have reported a failure."""
    nodes = {role: NodeRecord(role=role, address="", incarnation=1) for role in ("driver", "data", "ps")}
    for name, text in failed.items():
        nodes[name] = NodeRecord(role="worker", address="", incarnation=1, failed=text)
    terms = {"replicas": replicas}
    return ClusterMap(
        nodes=nodes, run=ProgramRecord(id=RUN, driver="driver", incarnation=1, terms=terms, phase=phase)
    )


NO = failed_word(RUN, "step a:b failed in step: no")


@pytest.mark.parametrize(
    ("phase", "failed", "replicas"),
    [
        ("preparing", {"worker-0": NO}, 1),
        ("preparing", {"worker-0": NO, "worker-1": ""}, 2),
        ("training", {"worker-0": NO}, 1),
        ("between", {"worker-0": NO, "worker-1": NO}, 1),
    ],
)
def test_a_run_with_too_few_workers_left_fails_with_the_reason_of_one(
    phase: str, failed: dict[str, str], replicas: int
) -> None:
    after = fail_if_lost(map_of(phase, failed, replicas=replicas))
    with pytest.raises(RoleFailed, match=r"^worker-0 cannot train the run: step a:b failed in step: no"):
        check_failed(after, RUN)


@pytest.mark.parametrize(
    ("phase", "failed", "replicas"),
    [
        ("preparing", {"worker-0": NO, "worker-1": ""}, 1),
        ("training", {"worker-0": NO, "worker-1": ""}, 2),
        ("preparing", {"worker-0": failed_word("driver-0", "no")}, 1),
        ("preparing", {"worker-0": "no"}, 1),
    ],
    ids=["a spare worker", "one of two", "an earlier run", "another text"],
)
def test_one_worker_alone_and_old_reports_end_no_run(
    phase: str, failed: dict[str, str], replicas: int
) -> None:
    cluster = map_of(phase, failed, replicas=replicas)
    assert fail_if_lost(cluster) == cluster


def test_a_report_keeps_its_run_apart_from_its_reason() -> None:
    node = NodeRecord(role="worker", address="", incarnation=1, failed=failed_word(RUN, "a: b" * 2000))
    assert failure_of(node, RUN).startswith("a: ba: b")
    assert failure_of(node, "driver") == ""
    assert len(node.failed) == 2048
