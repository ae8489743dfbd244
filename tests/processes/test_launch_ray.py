"""Roles as actors of Ray on two nodes: they train, outlive a worker and a node, and leave nothing behind."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.commands import ADAM_TOML, PATIENCE_S, ROOT, RUN_S, Command, descendants, until, watched
from tests.processes.ray_nodes import NOTHING, RayNodes, missing
from tests.processes.ssh_hosts import free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

COPIES = ("--controllers", "3", "--copies", "2", "--min-in-sync", "1", "--data-servers", "2")

FOR_EVER = ("--epochs", "100000")

HEAD = "node:__internal_head__"

RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray that outlive a killed Ray for a minute or two, and then end by themselves."""

MNIST = os.environ.get("ADAM_DATA_DIR", "")

OF_RAY_DATA = """
import asyncio, sys
import numpy as np, ray
from adam_async import Config, RayCluster, Disk, from_ray, load_dataset

async def main():
    ray.init(address=sys.argv[1], log_to_driver=False)
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    pairs = zip(digits.train_images, digits.train_labels)
    rows = [{"picture": image, "digit": int(label)} for image, label in pairs]
    dataset = await from_ray(ray.data.from_items(rows), image="picture", label="digit", test=0.2)
    async with RayCluster(Config(epochs=15, servers=2, replicas=2, threads=1), dataset=dataset) as cluster:
        result = await cluster.train()
    print("accuracy", result.test_accuracy, "epochs", len(result.epochs))
    print("still joined", ray.is_initialized())

asyncio.run(main())
"""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with RayNodes(5, 5) as found:
        yield found


@pytest.fixture(scope="module")
def kept_nodes() -> Iterator[RayNodes]:
    """Two nodes for several tests, none of which kills one."""
    with RayNodes(3, 3) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "adam.toml"
    written.write_text(ADAM_TOML)
    return written


def launch(nodes: RayNodes, file: Path, *words: str) -> Command:
    return Command("launch", "ray", str(file), "--address", nodes.address, *words)


def outlives_a_worker_and_a_node(nodes: RayNodes, command: Command) -> None:
    """Kill a worker and the second node during a run, and check that the run ends well, and cleanly."""
    command.wait_for("epoch 1/")
    roles, lost = nodes.roles(), nodes.roles(1)
    controllers = [f"controller-{number}" for number in (1, 2, 3)]
    assert sorted(roles) == [*controllers, "data-0", "data-1", "ps-0", "ps-1", "worker-0", "worker-1"]
    for role in ("ps-", "data-", "worker-"):
        assert len([node for node in lost if node.startswith(role)]) == 1
    with watched(list(roles.values())) as all_end:
        os.kill(roles["worker-0"], signal.SIGKILL)
        command.wait_for("worker-0 died: killed by signal 9; starting it again")
        nodes.kill(1)
        command.wait_for("died: its actor on ")
        command.ends(0, seconds=240)
        all_end(PATIENCE_S)
    assert "Traceback" not in command.output
    assert "(raylet)" not in command.output
    assert nodes.roles() == {}
    assert nodes.left() == NOTHING


def test_a_run_outlives_a_worker_and_a_node_and_leaves_nothing(nodes: RayNodes, file: Path) -> None:
    with launch(nodes, file, "--epochs", "60", *COPIES) as command:
        outlives_a_worker_and_a_node(nodes, command)

    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", command.output), command.output


@pytest.mark.convergence
@pytest.mark.skipif(not MNIST, reason="ADAM_DATA_DIR names no folder with MNIST")
def test_mnist_is_learnt_to_98_5_percent_without_a_worker_and_a_node(nodes: RayNodes, file: Path) -> None:
    variable = ("--env", f"ADAM_DATA_DIR={MNIST}")
    with launch(nodes, file, "--data", "mnist", "--epochs", "8", *COPIES, *variable) as command:
        outlives_a_worker_and_a_node(nodes, command)

    found = re.search(r"test accuracy (\d+\.\d+)% after 8 epochs", command.output)
    assert found is not None, command.output
    assert float(found[1]) >= 98.5, command.output


def test_a_worker_whose_node_left_starts_again_on_a_node_that_comes(file: Path) -> None:
    with RayNodes(3, 2) as nodes:
        # Only the head node has this resource of Ray; the data and the only copy of the shards stay there.
        asks = ("worker:CPU=2", f"ps:{HEAD}=0.1", "ps:CPU=0.5", f"data:{HEAD}=0.1", "data:CPU=0.5")
        words = [word for ask in asks for word in ("--ask", ask)]
        with launch(nodes, file, *FOR_EVER, "--servers", "1", *words) as command:
            command.wait_for("epoch 1/")
            lost = next(node for node in nodes.roles(1) if node.startswith("worker-"))
            nodes.kill(1)
            command.wait_for(f"{lost} waits for room on Ray: CPU 2")
            nodes.add(2)
            command.wait_for(f"{lost} came back as a new incarnation")
            command.signal(signal.SIGINT)
            assert command.finish() == 130, command.output


def test_an_interrupted_launch_leaves_nothing(kept_nodes: RayNodes, file: Path) -> None:
    with launch(kept_nodes, file, *FOR_EVER) as command:
        command.wait_for("epoch 1/")
        roles = kept_nodes.roles()
        assert sorted(roles) == ["controller", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
        for pid in roles.values():
            assert b"adam-async-keys" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"adam-async-keys" not in Path(f"/proc/{pid}/environ").read_bytes()
        with watched(list(roles.values())) as all_end:
            command.signal(signal.SIGINT)
            assert command.finish() == 130, command.output
            all_end(PATIENCE_S)
    assert kept_nodes.left() == NOTHING


def test_roles_end_when_the_launching_process_is_killed(kept_nodes: RayNodes, file: Path) -> None:
    with launch(kept_nodes, file, *FOR_EVER) as command:
        command.wait_for("epoch 1/")
        with watched(list(kept_nodes.roles().values())) as all_end:
            command.signal(signal.SIGKILL)
            all_end(PATIENCE_S)
    until(lambda: kept_nodes.left() == NOTHING, "Ray to remove the actors and groups")


def test_the_lines_of_a_role_that_cannot_start_have_its_name(kept_nodes: RayNodes, file: Path) -> None:
    with launch(kept_nodes, file, "--data", "/no/such/folder") as command:
        command.ends(3, seconds=RUN_S)

    assert "data-0 | adam-async: /no/such/folder does not exist" in command.output
    assert "data-0 died: ended with exit code 3" in command.output
    assert kept_nodes.left() == NOTHING


def test_missing_room_is_named_with_the_resources_to_ask_for(kept_nodes: RayNodes, file: Path) -> None:
    with launch(kept_nodes, file, "--ask", "worker:CPU=4", "--room-wait", "3s", *FOR_EVER) as command:
        command.ends(5, seconds=RUN_S)

    assert (
        "waited 3 s for room on Ray for 2 x worker, each with CPU 4; the 2 nodes have CPU" in command.output
    )
    assert "ask for less with --ask worker:CPU=N" in command.output
    assert command.output.count("\n") == 1, command.output
    assert kept_nodes.left() == NOTHING


def test_a_resource_that_no_node_has_is_named(kept_nodes: RayNodes, file: Path) -> None:
    with launch(kept_nodes, file, "--ask", "ps:ssd=1", "--room-wait", "3s", *FOR_EVER) as command:
        command.ends(5, seconds=RUN_S)

    assert "for 2 x ps, each with CPU 1, ssd 1; the 2 nodes have CPU 6, ssd 0 free" in command.output
    assert kept_nodes.left() == NOTHING


def test_another_version_of_the_package_on_a_node_is_named_with_the_cure(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "adam_async-9.9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: adam-async\nVersion: 9.9.9\n")
    with RayNodes(3, 3, second={"PYTHONPATH": f"{tmp_path}:{ROOT}"}) as nodes:
        with launch(nodes, file, *FOR_EVER) as command:
            command.ends(2, seconds=RUN_S)

        assert "of Ray has adam-async '9.9.9', and this process '" in command.output
        assert "install the same version on all nodes" in command.output
        assert nodes.left() == NOTHING


def test_an_address_that_does_not_answer_is_named_with_its_deadline(file: Path) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with Command("launch", "ray", str(file), "--address", address) as command:
        command.ends(4, seconds=RUN_S)

    assert f"cannot reach Ray at {address}: no answer within 20 s" in command.output
    assert command.output.count("\n") == 1, command.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_ray_of_the_launch_ends_with_it(file: Path, number: int) -> None:
    with Command("launch", "ray", str(file), "--address", "local", *FOR_EVER) as command:
        command.wait_for("epoch 1/")
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(command.pid)}
        assert any("/raylet" in line for line in lines.values())
        ends = [
            pid for pid, line in lines.items() if number == signal.SIGINT or not line.startswith(RAYS_AGENTS)
        ]
        with watched(ends) as all_end:
            command.signal(number)
            command.finish(seconds=RUN_S)
            all_end(PATIENCE_S)


def test_a_program_trains_a_dataset_of_ray_and_stays_joined(kept_nodes: RayNodes) -> None:
    if importlib.util.find_spec("pandas") is None or importlib.util.find_spec("pyarrow") is None:
        pytest.skip("ray.data is not installed: pip install 'ray[data]'")
    done = subprocess.run(
        [sys.executable, "-c", OF_RAY_DATA, kept_nodes.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )

    found = re.search(r"accuracy (\S+) epochs 15\nstill joined True", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) > 0.9
    left = kept_nodes.left()
    assert left["groups"] == []
    # ray.data itself leaves actors of its own.
    assert "RoleActor" not in left["actors"]
