"""A cluster of child processes trains, survives a worker, and says what it cannot survive."""

import os
import re
import signal

import pytest

from tests.processes.commands import Command, children_of, run, watched

pytestmark = pytest.mark.processes

TRAIN = ("train", "--data", "digits", "--processes", "--replicas", "2", "--servers", "2")


def test_child_processes_train_the_digits() -> None:
    code, output = run(*TRAIN, "--epochs", "4")

    assert code == 0, output
    assert re.search(r"test accuracy (9\d|8[5-9])\.\d+% after 4 epochs", output), output
    assert "|" not in output, "no child had anything to complain about"
    assert "event" not in output


def test_a_killed_worker_is_named_and_replaced_and_no_image_is_lost() -> None:
    with Command(*TRAIN, "--epochs", "40") as command:
        command.wait_for("epoch 1/40")
        os.kill(command.child("worker-1"), signal.SIGKILL)
        command.wait_for("worker-1 died: killed by signal 9; starting it again")
        code = command.finish()

    assert code == 0, command.output
    epochs = re.findall(r"epoch \d+/40: .* (\S+ \d+) images in", command.output)
    assert epochs == ["1 437"] * 40, command.output
    assert re.search(r"event  at \d+\.\d s: worker-1 died: killed by signal 9", command.output)
    assert "Traceback" not in command.output


@pytest.mark.parametrize("node", ["ps-1", "data-0", "controller"])
def test_a_dead_role_that_holds_the_only_copy_ends_the_run_with_its_name(node: str) -> None:
    with Command(*TRAIN, "--epochs", "1000") as command:
        command.wait_for("epoch 1/1000")
        with watched(list(children_of(command.pid))) as all_end:
            os.kill(command.child(node), signal.SIGKILL)
            command.wait_for(f"{node} died: killed by signal 9")
            code = command.finish()
            all_end(1)

    assert code == 4, command.output
    assert command.output.rstrip().endswith(f"adam-async: {node} died: killed by signal 9")
    assert "Traceback" not in command.output


def test_children_end_when_their_parent_is_killed() -> None:
    with Command(*TRAIN, "--epochs", "1000") as command:
        command.wait_for("epoch 1/1000")
        pids = list(children_of(command.pid))
        assert len(pids) == 6
        with watched(pids) as all_end:
            command.signal(signal.SIGKILL)
            all_end(5)


def test_a_role_that_cannot_start_ends_the_command_with_its_own_code() -> None:
    code, output = run("train", "--processes", "--data", "/no/such/folder")

    assert code == 3, output
    assert "adam-async: data-0 died: /no/such/folder does not exist" in output
    assert "Traceback" not in output


def test_what_only_training_finds_wrong_leaves_no_children() -> None:
    code, output = run(*TRAIN, "--model", "mnist-adam")

    assert code == 2, output
    assert "adam-async: model 'mnist-adam' takes images of (1, 28, 28)" in output
