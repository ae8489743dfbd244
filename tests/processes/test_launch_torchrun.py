"""torchrun on two nodes: the ranks run the roles, end with the driver, and leave no process behind."""

import os
import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, command_line, roles_among, run, watched
from tests.processes.ssh_hosts import free_port
from tests.processes.torchrun_nodes import TOKEN, TorchrunNode, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "adam.toml"
    file.write_text(ADAM_TOML)
    return file


def rank_of(node: TorchrunNode, number: int) -> int:
    """Return the process id of a rank on a node."""
    ranks = [pid for pid in node.processes() if "launch torchrun" in command_line(pid)][1:]
    mark = f"\0RANK={number}\0".encode()
    return next(pid for pid in ranks if mark in Path(f"/proc/{pid}/environ").read_bytes())


def test_two_nodes_train_restart_a_lost_worker_and_leave_no_process(file: Path) -> None:
    port = free_port("127.0.0.1")
    words = (str(file), "--epochs", "60")
    with TorchrunNode(0, port, *words) as first, TorchrunNode(1, port, *words) as second:
        first.wait_for("epoch 1/")
        roles = {**roles_among(first.processes()), **roles_among(second.processes())}
        assert sorted(roles) == ["controller", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
        assert len(roles_among(second.processes())) == 3
        with watched([*first.processes(), *second.processes()]) as all_end:
            os.kill(roles["worker-1"], signal.SIGKILL)
            second.wait_for("worker-1 died: killed by signal 9; starting it again")
            assert first.finish(seconds=100) == 0, first.output
            assert second.finish(seconds=60) == 0, second.output
            all_end(PATIENCE_S)
    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", first.output), first.output
    assert "Traceback" not in first.output + second.output


def test_a_killed_rank_ends_the_run_and_all_processes(file: Path) -> None:
    words = (str(file), "--epochs", "100000")
    with TorchrunNode(0, free_port("127.0.0.1"), *words, nodes=1, ranks=2) as node:
        node.wait_for("epoch 1/")
        with watched(node.processes()) as all_end:
            os.kill(rank_of(node, 1), signal.SIGKILL)
            assert node.finish(seconds=60) != 0
            all_end(PATIENCE_S)
    assert re.search(r"^interrupted (in|after) epoch ", node.output, re.MULTILINE), node.output


def test_restarted_ranks_continue_from_the_checkpoint(file: Path, tmp_path: Path) -> None:
    words = (str(file), "--epochs", "40", "--checkpoint", str(tmp_path / "kept"))
    with TorchrunNode(0, free_port("127.0.0.1"), *words, nodes=1, ranks=2, restarts=1) as node:
        node.wait_for("epoch 2/40")
        os.kill(rank_of(node, 1), signal.SIGKILL)  # torchrun then ends the driver too, and starts both again
        node.wait_for("restart 1: the run continues from checkpoint-")
        with watched(node.processes()) as all_end:
            node.ends(0, seconds=90)
            all_end(PATIENCE_S)

    assert "after 40 epochs" in node.output


def test_keys_are_neither_in_arguments_nor_in_variables_and_sigterm_ends_all(file: Path) -> None:
    with TorchrunNode(0, free_port("127.0.0.1"), str(file), "--epochs", "100000", nodes=1, ranks=2) as node:
        node.wait_for("epoch 1/")
        roles = roles_among(node.processes())
        assert sorted(roles) == ["controller", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
        for pid in roles.values():
            shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            assert TOKEN.encode() not in shown
            assert b"adam-async-keys" not in shown
        with watched(node.processes()) as all_end:
            node.signal(signal.SIGTERM)
            node.finish(seconds=60)
            all_end(PATIENCE_S)
        assert re.search(r"^interrupted (in|after) epoch ", node.output, re.MULTILINE), node.output


def test_roles_end_when_torchrun_is_killed(file: Path) -> None:
    with TorchrunNode(0, free_port("127.0.0.1"), str(file), "--epochs", "100000", nodes=1, ranks=2) as node:
        node.wait_for("epoch 1/")
        with watched(node.processes()) as all_end:
            node.signal(signal.SIGKILL)
            all_end(PATIENCE_S)


@pytest.mark.parametrize(
    ("token", "claim"),
    [("", "set ADAM_TOKEN to the same token on all nodes"), ("short", "adam-async token new makes one")],
)
def test_ranks_without_a_token_name_the_remedy(file: Path, token: str, claim: str) -> None:
    with TorchrunNode(0, free_port("127.0.0.1"), str(file), nodes=1, token=token) as node:
        assert node.finish(seconds=60) != 0
    assert claim in node.output


def test_a_port_in_use_is_named_and_the_other_rank_ends(file: Path) -> None:
    with socket.socket() as taken, ExitStack() as stack:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = (str(file), "--port", port, "--wait", "10s")
        node = stack.enter_context(TorchrunNode(0, free_port("127.0.0.1"), *words, nodes=1, ranks=2))
        with watched(node.processes()) as all_end:
            assert node.finish(seconds=60) != 0
            all_end(PATIENCE_S)
    assert f"cannot listen on tcp://127.0.0.1:{port}: " in node.output


def test_a_driver_that_does_not_come_is_named(file: Path) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(free_port("127.0.0.1") - 1), "ADAM_TOKEN": TOKEN}
    output = run("launch", "torchrun", str(file), "--wait", "1s", environment=variables, code=4)
    assert "cannot reach the controller at tcp://127.0.0.1:" in output


def test_without_torchrun_the_command_to_start_it_is_named(file: Path) -> None:
    output = run("launch", "torchrun", str(file), code=2)
    assert "torchrun sets RANK and MASTER_ADDR, and one is missing: start with torchrun" in output
    assert output.count("\n") == 1, output
