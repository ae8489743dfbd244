"""The status of a cluster, from its map and the reports of its roles."""

from typing import Any

import pytest
from msgspec.structs import replace

from adam_async.run.cluster_map import NOTICE, ClusterMap, DealerRecord, EpochRecord, ready_word
from adam_async.run.cluster_status import status_of
from adam_async.run.counts import Counts
from tests.adam_async.cluster_maps import node, run_record
from tests.adam_async.role_counts import counts_of

PROCESS: dict[str, Any] = {"host": "machine", "pid": 7, "peak_rss_mb": 12.5, "age_s": 3725.0}


def cluster() -> ClusterMap:
    return ClusterMap(
        nodes={
            "worker-1": node("worker", replica=1),
            "worker-0": node("worker", replica=0),
            "worker-2": node("worker"),
            "worker-3": node("worker", live=False, left=True),
            "ps-0": node("ps", info={NOTICE: "cannot join"}),
            "data-0": node("data"),
            "driver": node("driver"),
        },
        run=run_record("run-1", phase="training", epoch=2),
        epoch=EpochRecord(run="run-1", number=2, groups=90, shares={}),
        dealer=DealerRecord(run="run-1", term=1, node="data-0", incarnation=1),
    )


def reports() -> dict[str, Counts]:
    return {
        "controller": counts_of("controller", **PROCESS),
        "ps-0": counts_of(
            "ps",
            versions={"0": 90, "1": 88},
            clocks={"0": {"0": 45, "1": 40}, "1": {"0": 44, "1": 44}},
            **PROCESS,
        ),
        "data-0": counts_of("data", finished=30, groups=90, **PROCESS),
        "worker-0": counts_of("worker", data={"groups": 12}, **PROCESS),
    }


def test_a_status_shows_progress_lags_and_versions() -> None:
    status = status_of(cluster(), reports(), leading="controller", with_ended=False)

    assert status.run is not None
    assert (status.run.epoch, status.run.epochs, status.run.finished, status.run.groups) == (2, 2, 30, 90)
    assert status.run.driven
    assert [role.node for role in status.roles] == [
        "controller",
        "data-0",
        "ps-0",
        "worker-0",
        "worker-1",
        "worker-2",
        "driver",
    ]
    by_node = {role.node: role for role in status.roles}
    assert by_node["controller"].state == "leads"
    assert by_node["ps-0"].version == (88, 90)
    assert by_node["ps-0"].notice == "cannot join"
    assert (by_node["worker-0"].lag, by_node["worker-1"].lag, by_node["worker-2"].lag) == (0, 5, None)
    assert (by_node["worker-0"].groups, by_node["worker-0"].pid, by_node["worker-0"].age_s) == (12, 7, 3725.0)
    assert by_node["controller"].age_s == 3725.0
    assert (by_node["worker-1"].state, by_node["worker-2"].state) == ("replica 1", "spare")


def test_a_role_shows_the_number_of_peers_with_which_it_shares_memory() -> None:
    rows = [
        {"to": peer, "type": kind, "shared": peer != "far"}
        for peer in ("near", "other", "far")
        for kind in ("Push", "Tick")
    ]
    facts = {"ps-0": counts_of("ps", traffic=rows, **PROCESS)}
    status = status_of(cluster(), facts, leading="controller", with_ended=False)
    assert {role.node: role.shared for role in status.roles if role.shared} == {"ps-0": 2}


def test_roles_that_left_are_shown_on_request() -> None:
    status = status_of(cluster(), {}, leading="", with_ended=True)

    assert [role.node for role in status.roles if role.state == "left"] == ["worker-3"]


def test_a_cluster_without_a_run_has_a_status() -> None:
    status = status_of(ClusterMap(), {}, leading="", with_ended=False)

    assert (status.run, status.copies, status.roles) == (None, None, ())


def test_a_run_without_a_live_replica_has_no_rate_and_no_time_left() -> None:
    facts = {"data-0": counts_of("data", "data-0", finished=30, groups=90, images=240, train_s=60.0, term=1)}
    ready = node("worker", replica=0, ready=ready_word("run-1", cluster().replica_generation(0)))
    trains = {**cluster().nodes, "worker-0": ready}
    trained, idle = (
        status_of(each, facts, leading="").run for each in (replace(cluster(), nodes=trains), cluster())
    )
    assert trained is not None
    assert idle is not None
    assert (trained.images_per_s, trained.left_s) == (4.0, 120.0)
    assert (idle.images_per_s, idle.left_s) == (0.0, None)


@pytest.mark.parametrize(("known", "loss"), [(0, None), (8, 0.5)])
def test_a_loss_of_no_image_is_unknown_and_not_zero(known: int, loss: float | None) -> None:
    counts = counts_of("data", "data-0", images=8, loss=loss or 0.0, loss_images=known)
    run = status_of(cluster(), {"data-0": counts}, leading="").run
    assert run is not None
    assert run.loss == loss
