"""torchrun on two nodes: agents run the roles, outlive a worker and a node, and leave no process behind."""

import os
import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, command_line, run, watched
from tests.processes.ssh_hosts import free_port
from tests.processes.torchrun_nodes import TOKEN, TorchrunNode, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

COPIES = ("--controllers", "3", "--copies", "2", "--min-in-sync", "1")
MNIST = os.environ.get("ADAM_DATA_DIR", "")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "adam.toml"
    file.write_text(ADAM_TOML)
    return file


def roles_of(node: TorchrunNode) -> dict[str, int]:
    """Return the process ids of the roles on a node, by node id."""
    found = {pid: re.search(r"adam_async \w+ --id (\S+)", command_line(pid)) for pid in node.processes()}
    return {match[1]: pid for pid, match in found.items() if match}


def outlive_a_worker_and_a_node(*words: str, seconds: float) -> str:
    """Kill a worker after the first epoch, then the node of rank 1; returns the output of rank 0."""
    port = free_port("127.0.0.1")
    with TorchrunNode(0, port, *words, *COPIES) as first, TorchrunNode(1, port, *words, *COPIES) as second:
        first.wait_for("epoch 1/")
        roles = {**roles_of(first), **roles_of(second)}
        nodes = [f"controller-{number}" for number in (1, 2, 3)]
        assert sorted(roles) == [*nodes, "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
        assert len(roles_of(second)) == 3
        os.kill(roles_of(first).get("worker-0") or roles_of(first)["worker-1"], signal.SIGKILL)
        first.wait_for("died: killed by signal 9; starting it again")
        second.kill()
        first.wait_for("died: its node rank-1 is lost")
        first.wait_for("came back as a new incarnation")
        with watched(first.processes()[1:]) as all_end:
            all_end(seconds)
        # torchrun itself waits for the lost node, for minutes.
        first.signal(signal.SIGKILL)
        first.finish()
    assert "Traceback" not in first.output
    return first.output


@pytest.mark.timeout(240)
def test_a_run_outlives_a_worker_and_a_node_and_leaves_no_process(file: Path) -> None:
    output = outlive_a_worker_and_a_node(str(file), "--epochs", "60", seconds=150)

    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", output), output


@pytest.mark.convergence
@pytest.mark.timeout(600)
@pytest.mark.skipif(not MNIST, reason="ADAM_DATA_DIR names no folder with MNIST")
def test_mnist_outlives_a_worker_and_a_node(file: Path) -> None:
    output = outlive_a_worker_and_a_node(str(file), "--data", "mnist", "--epochs", "6", seconds=500)

    accuracy = re.search(r"test accuracy (\d+\.\d+)% after 6 epochs", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 98.5


def test_restarted_ranks_continue_from_the_checkpoint(file: Path, tmp_path: Path) -> None:
    words = (str(file), "--epochs", "40", "--checkpoint", str(tmp_path / "kept"))
    with TorchrunNode(0, free_port("127.0.0.1"), *words, nodes=1, ranks=2, restarts=1) as node:
        node.wait_for("epoch 2/40")
        # The rank that is no driver: torchrun then ends the driver too, and starts both again.
        agents = [pid for pid in node.processes() if "launch torchrun" in command_line(pid)][1:]
        rank = next(pid for pid in agents if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(rank, signal.SIGKILL)
        node.wait_for("restart 1: the run continues from checkpoint-")
        with watched(node.processes()) as all_end:
            code = node.finish(seconds=90)
            all_end(PATIENCE_S)

    assert code == 0, node.output
    assert "after 40 epochs" in node.output


def test_keys_are_neither_in_arguments_nor_in_variables_and_sigterm_ends_all(file: Path) -> None:
    with TorchrunNode(0, free_port("127.0.0.1"), str(file), "--epochs", "100000", nodes=1, ranks=2) as node:
        node.wait_for("epoch 1/")
        roles = roles_of(node)
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
    [
        ("", "set ADAM_TOKEN to the same token, or give --token-file"),
        ("short", "adam-async token new makes one"),
    ],
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
    assert "choose another with --port on all nodes" in node.output


def test_a_missing_rank_is_named_with_the_remedy(file: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(free_port("127.0.0.1") - 1), "ADAM_TOKEN": TOKEN}
    code, output = run("launch", "torchrun", str(file), "--wait", "3s", environment=variables)

    assert code == 5, output
    assert "waited 3 s for the agents of rank-1; rank-0 arrived; start torchrun with the same" in output


def test_without_torchrun_the_command_to_start_it_is_named(file: Path) -> None:
    code, output = run("launch", "torchrun", str(file))

    assert code == 2, output
    assert "torchrun sets RANK and MASTER_ADDR, and one is missing: start with torchrun" in output
    assert output.count("\n") == 1, output
