"""The containers of `launch k8s` run as written: they train, answer probes, and another driver continues."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.commands import RUN_S, Command, run, until
from tests.processes.pods import Cluster, Manifest, Pod, skip_without_namespaces

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

OPTIONS = """
data = "digits"
controllers = 3
servers = 2
copies = 2
min_in_sync = 1
replicas = 2
epochs = 40
consistency = "bsp"
kernels = "numpy"
"""


def written(folder: Path) -> list[Manifest]:
    """Write the manifests by the command; return their objects."""
    (folder / "adam.toml").write_text(OPTIONS)
    out = folder / "manifests"
    code, output = run(
        "launch", "k8s", str(folder / "adam.toml"), "--out", str(out), "--image", "adam-async:0.1.0"
    )
    assert code == 0, output
    files = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    return [item for file in files for item in file.get("items", [file])]


def test_containers_train_as_written_and_a_drained_driver_is_replaced(tmp_path: Path) -> None:
    skip_without_namespaces()
    items = written(tmp_path)
    cluster = Cluster(items, tmp_path)
    owners = (
        ("StatefulSet", "adam-controller"),
        ("StatefulSet", "adam-ps"),
        ("StatefulSet", "adam-data"),
        ("Deployment", "adam-worker"),
    )
    roles = [pod for kind, name in owners for pod in cluster.pods(kind, name)]
    (driver,) = cluster.pods("Job", "adam-driver")
    assert len(roles) == 8
    with ExitStack() as stack:

        def start(pod: Pod) -> Command:
            return stack.enter_context(pod.start())

        running = [start(pod) for pod in roles]
        for pod, role in zip(roles, running, strict=True):
            role.wait_for(f" listens on tcp://{pod_name(pod)}")
        for pod in roles:
            until(lambda pod=pod: pod.probe("readinessProbe") == 200, f"{pod.name} to be ready")
        first = start(driver)
        first.wait_for("epoch 3/40")
        assert [pod.probe("livenessProbe") for pod in (*roles, driver)] == [200] * 9
        first.signal(signal.SIGTERM)
        assert first.finish() == 143, first.output
        assert "waits for the next train --attach" in first.output

        second = start(driver)
        assert second.finish(seconds=RUN_S) == 0, second.output
        assert "took over run " in second.output
        assert "after 40 epochs" in second.output

        for role in running:
            role.signal(signal.SIGTERM)
        assert [role.finish() for role in running] == [143] * 8
    results = cluster.volume("", "results", {"persistentVolumeClaim": {}})
    assert (results / "model" / "model.safetensors").stat().st_size > 0
    assert any((results / "checkpoints").iterdir())


def pod_name(pod: Pod) -> str:
    """The address that a role prints: controllers have a name, the others the address of their pod."""
    return f"{pod.name}.adam-controller:7070" if "controller" in pod.name else f"{pod.address}:7070"
