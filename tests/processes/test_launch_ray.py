"""Roles as actors of Ray on two nodes: they train, outlive a worker and a node, and leave nothing behind."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.commands import PATIENCE_S, Command, watched
from tests.processes.ray_nodes import RayNodes, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

TRAIN = """
servers = 2
replicas = 2
threads = 1
"""

MNIST = os.environ.get("ADAM_DATA_DIR", "")

NOTHING = {"actors": [], "groups": []}


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with RayNodes(5, 5) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "adam.toml"
    written.write_text(TRAIN)
    return written


def launch(nodes: RayNodes, file: Path, *words: str) -> Command:
    return Command("launch", "ray", str(file), "--address", nodes.address, *words)


def outlives_a_worker_and_a_node(nodes: RayNodes, command: Command) -> None:
    """Kill a worker and the second node during a run, and check that the run ends well, and cleanly."""
    command.wait_for("epoch 1/")
    roles, lost = nodes.roles(), nodes.roles(1)
    names = [f"controller-{number}" for number in (1, 2, 3)]
    assert sorted(roles) == [*names, "data-0", "data-1", "ps-0", "ps-1", "worker-0", "worker-1"]
    assert len({node for node in lost if node.startswith("ps-")}) == 1
    assert len({node for node in lost if node.startswith("worker-")}) == 1
    with watched(list(roles.values())) as all_end:
        os.kill(roles["worker-0"], signal.SIGKILL)
        command.wait_for("worker-0 died: killed by signal 9; starting it again")
        nodes.kill(1)
        command.wait_for("died: its actor on ")
        code = command.finish(seconds=180)
        all_end(PATIENCE_S)
    assert nodes.roles() == {}
    assert nodes.left() == NOTHING

    assert code == 0, command.output
    assert "Traceback" not in command.output


def test_a_run_outlives_a_worker_and_a_node_and_leaves_nothing(nodes: RayNodes, file: Path) -> None:
    copies = ("--controllers", "3", "--copies", "2", "--min-in-sync", "1", "--data-servers", "2")
    with launch(nodes, file, "--data", "digits", "--epochs", "60", *copies) as command:
        outlives_a_worker_and_a_node(nodes, command)

    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", command.output), command.output
