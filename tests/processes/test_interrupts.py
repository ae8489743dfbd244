"""Ctrl-C and SIGTERM at any moment: the right code, no stack trace, no orphan."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint.trained_model import load_model
from adam_async.data_server.sources.datasets import DIGITS_FILE
from adam_async.report.report import Report
from tests.processes.commands import PATIENCE_S, Command, answers_signals, children_of, until, watched

pytestmark = pytest.mark.processes

LOCAL = ("train", "--data", "digits", "--epochs", "1000")
DIGITS = np.load(DIGITS_FILE)
PROCESSES = (*LOCAL, "--processes", "--servers", "2")


def begun(command: Command) -> None:
    until(lambda: answers_signals(command.pid), "the command's own signal handlers")


def one_child(command: Command) -> None:
    until(lambda: children_of(command.pid), "a first child")


def all_children(command: Command) -> None:
    until(lambda: len(children_of(command.pid)) == 5, "all children")


def model_known(command: Command) -> None:
    command.wait_for("model ")


def training(command: Command) -> None:
    command.wait_for("epoch 2/1000")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", [begun, model_known, training])
def test_a_run_in_one_process_ends_by_a_signal(moment: Callable[[Command], None], number: int) -> None:
    with Command(*LOCAL) as command:
        moment(command)
        command.signal(number)
        command.ends(128 + number)

    assert "Traceback" not in command.output
    assert "adam-async:" not in command.output


@pytest.mark.parametrize("moment", [begun, model_known])
def test_sigterm_ends_a_run_with_checkpoints_without_an_error_before_training(
    moment: Callable[[Command], None], tmp_path: Path
) -> None:
    with Command(*LOCAL, "--checkpoint", str(tmp_path / "checkpoints")) as command:
        moment(command)
        command.signal(signal.SIGTERM)
        command.ends(143)

    assert "adam-async:" not in command.output


@pytest.mark.parametrize("moment", [one_child, all_children, model_known, training])
def test_a_run_of_processes_ends_by_ctrl_c_without_orphans(moment: Callable[[Command], None]) -> None:
    with Command(*PROCESSES) as command:
        moment(command)
        with watched(list(children_of(command.pid))) as all_end:
            command.signal(signal.SIGINT)
            command.ends(130)
            all_end(2)

    assert "Traceback" not in command.output
    assert "died" not in command.output


@pytest.mark.parametrize("options", [(), ("--processes",)])
def test_an_interrupted_run_prints_its_results_and_keeps_its_weights(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    out, checkpoints = tmp_path / "out", tmp_path / "checkpoints"
    with Command(*LOCAL, "--out", str(out), "--checkpoint", str(checkpoints), *options) as command:
        command.wait_for("epoch 3/1000")
        command.signal(signal.SIGINT)
        command.ends(130)
    saved = load_model((out / "model.safetensors").read_bytes())
    named = saved.network.predict(saved.weights, DIGITS["x_test"].reshape(-1, 1, 8, 8))

    done = r"in epoch \d+, after [\d,]+ of 1,437 images; epoch \d+ ended with|after epoch \d+, with"
    assert re.search(rf"interrupted ({done}) test accuracy", command.output)
    assert f"kept: the latest weights in {out}/model.safetensors, checkpoint-" in command.output
    assert f"(go on with --resume {checkpoints})" in command.output
    assert np.mean(named == DIGITS["y_test"]) > 0.5


@pytest.mark.parametrize(
    "options", [(), ("--processes", "--replicas", "2"), ("--replicas", "2", "--consistency", "bsp")]
)
def test_sigterm_takes_a_checkpoint_of_that_moment(tmp_path: Path, options: tuple[str, ...]) -> None:
    checkpoints = tmp_path / "checkpoints"
    newest = checkpoints / "latest"
    with Command(*LOCAL, "--checkpoint", str(checkpoints), *options) as command:
        command.wait_for("epoch 2/1000")
        until(newest.exists, "the first checkpoint")
        before = newest.read_text()
        command.signal(signal.SIGTERM)
        command.ends(143)
    assert "SIGTERM: the run stops after the groups in flight, with a checkpoint" in command.output
    assert "no checkpoint was taken" not in command.output
    assert newest.read_text() > before

    with Command("train", "--quiet", "--resume", str(checkpoints)) as command:
        command.wait_for(f"resumed from {newest.read_text().strip()}")
        command.signal(signal.SIGINT)
        assert command.finish() == 130, command.output


@pytest.mark.slow  # the kernels alone are measured first
def test_an_interrupted_run_leaves_a_report_of_its_results(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with Command(*LOCAL, "--report", str(path)) as command:
        training(command)
        command.signal(signal.SIGINT)
        command.ends(130)
    report = msgspec.json.decode(path.read_bytes(), type=Report)

    assert report.ended == "interrupted"
    assert len(report.epochs) >= 2
    assert report.series[-1].images >= report.totals.images > 0
    assert report.staleness.pushes > 0


@pytest.mark.slow
def test_a_failed_run_leaves_a_report_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with Command(*PROCESSES, "--report", str(path)) as command:
        training(command)
        os.kill(command.child("ps-0"), signal.SIGKILL)
        command.ends(4)
    report = msgspec.json.decode(path.read_bytes(), type=Report)

    assert "ps-0" in report.ended
    assert len(report.epochs) >= 2
    assert {server.node for server in report.servers} == {"ps-0", "ps-1"}


def test_a_second_ctrl_c_ends_it_at_once_and_its_children_with_it(tmp_path: Path) -> None:
    patient = tmp_path / "adam.toml"
    patient.write_text("[waits]\ndrain_s = 600.0\n")  # the first one alone would take that long
    with Command(*PROCESSES, "--config", str(patient)) as command:
        command.wait_for("epoch 1/1000")
        stopped = command.child("ps-0")
        # A stopped child does not go when it is let go, so the first signal waits for it.
        os.kill(stopped, signal.SIGSTOP)
        with watched([command.child("worker-0")]) as worker_ends, watched([stopped]) as stopped_ends:
            command.signal(signal.SIGINT)
            worker_ends(PATIENCE_S)
            command.signal(signal.SIGINT)
            command.ends(130)
            stopped_ends(PATIENCE_S)

    assert "Traceback" not in command.output
    assert "killed" not in command.output


def test_a_role_ends_by_a_signal() -> None:
    with Command("controller", "--bind", "tcp://127.0.0.1:0") as command:
        command.wait_for("listens on")
        command.signal(signal.SIGTERM)

        assert command.finish() == 143
        assert "Traceback" not in command.output
