"""A status has a line for each thing that an operator asks first, and durations in words."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from adam_async.cli.operation import VERDICT_CODES, print_status
from adam_async.cli.options import StatusOptions
from adam_async.cli.terminal import Terminal, age_text
from adam_async.errors import ConfigError
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import status_of
from adam_async.run.condition import Condition, LostRole, Wait
from tests.adam_async.cluster_maps import run_record


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (61, "1m 01s"), (3725, "1h 02m"), (86400, "1d 00h"), (1e6, "11d 13h")],
)
def test_an_age_has_two_units_at_most(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_a_status_names_verdict_losses_waits_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    wait = Wait(who="run run-1", what="a driver", deadline_s=None, cure="train --attach")
    condition = Condition(
        verdict="degraded",
        reasons=("ps-1 is lost", "1 of 2 replicas are live"),
        survives=0,
        weakest="the controllers",
        limited_by="clock",
        live=1,
        lost=(LostRole(node="ps-1", role="ps", since=1.0), LostRole(node="ps-2", role="ps", since=None)),
        waits=(wait,),
    )
    cluster = ClusterMap(run=run_record("run-1", phase="training", epoch=2))
    status = status_of(cluster, {}, leading="")
    run = structs.replace(
        status.run,
        epochs=9,
        groups=90,
        finished=30,
        images_per_s=1234.5,
        loss=0.25,
        left_s=61.0,
        in_place=True,
    )
    print_status(structs.replace(status, run=run, condition=condition), Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "run run-1: training, epoch 2 of 9, in place, 30 of 90 groups, 1,234 images/s, loss 0.2500, "
        "1m 01s left"
    )
    assert lines[2] == "degraded: ps-1 is lost; 1 of 2 replicas are live"
    assert lines[3] == "survives 0 losses (the controllers); limited by clock; 1 live, 0 taking part"
    assert re.fullmatch(r"ps-1 is lost since \d\d:\d\d:\d\d, for \d+d \d\dh", lines[4])
    assert lines[5:7] == ["ps-2 is lost", f"{wait}"]


def test_a_failed_run_has_its_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    failed = structs.replace(run_record("run-1", phase="failed"), reason="ps-0 was lost")
    print_status(status_of(ClusterMap(run=failed), {}, leading=""), Terminal())
    assert capsys.readouterr().out.count("ps-0 was lost") == 1


def test_a_cluster_of_stores_alone_shows_the_losses_that_they_survive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    condition = Condition(verdict="well", survives=1, weakest="the servers of ps-0 of store 'net'")
    status = structs.replace(status_of(ClusterMap(), {}, leading=""), stores=1, condition=condition)
    print_status(status, Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "survives 1 loss (the servers of ps-0 of store 'net')"


def test_each_verdict_has_a_code_and_no_other_command_has_it() -> None:
    assert VERDICT_CODES == {"well": 0, "degraded": 10, "ending": 11}
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "exit-codes.md").read_text()
    assert {code for code in VERDICT_CODES.values() if f"\n| {code} | " in page} == {0, 10, 11}
    with pytest.raises(ConfigError, match="--check ends with a code"):
        StatusOptions(controller="tcp://127.0.0.1:1", check=True, watch=True)
