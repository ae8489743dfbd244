"""The containers of the chart run as written: they train, answer probes, and another driver continues."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helm import Manifest, rendered
from tests.processes.commands import RUN_S, Command, until
from tests.processes.pods import Cluster, Pod, skip_without_namespaces

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

USER = 10001
"""User of the processes, and of the image."""

CONFIG = """
data = "digits"
epochs = 40
consistency = "bsp"
kernels = "numpy"
"""
COPIES: Manifest = {
    "controllers": 3,
    "servers": 2,
    "copies": 2,
    "replicas": 2,
    "config": f"{CONFIG}min_in_sync = 1\n",
}


def test_containers_train_as_written_outlive_a_server_and_a_drained_driver(tmp_path: Path) -> None:
    skip_without_namespaces()
    cluster = Cluster(rendered(COPIES), tmp_path)
    controllers = cluster.pods("StatefulSet", "adam-controller")
    servers = cluster.pods("StatefulSet", "adam-ps")
    others = cluster.pods("StatefulSet", "adam-data") + cluster.pods("Deployment", "adam-worker")
    (driver,) = cluster.pods("Job", "adam-driver")
    pods = [*servers, *others, *controllers]
    assert len(pods) == 8
    with ExitStack() as stack:

        def start(pod: Pod) -> Command:
            return stack.enter_context(pod.start())

        running = {pod.name: start(pod) for pod in (*servers, *others)}
        until(lambda: servers[0].probe("livenessProbe") == 200, "a server to answer probes")
        assert servers[0].probe("readinessProbe") == 503  # there is no controller yet
        running |= {pod.name: start(pod) for pod in controllers}
        for pod in pods:
            running[pod.name].wait_for(f" listens on tcp://{announced(pod)}")
            wait_until_ready(pod)
        check_rights(running["adam-ps-0"])
        first = start(driver)
        first.wait_for("epoch 2/40")
        running["adam-ps-1"].signal(signal.SIGKILL)
        assert running["adam-ps-1"].finish() == -signal.SIGKILL
        running["adam-ps-1"] = start(servers[1])  # as Kubernetes does
        first.wait_for("the shards of ps-1 have 2 copies in sync again")
        wait_until_ready(servers[1])
        assert [pod.probe("livenessProbe") for pod in (*pods, driver)] == [200] * 9
        first.signal(signal.SIGTERM)
        assert first.finish() == 143, first.output
        assert "waits for the next train --attach" in first.output

        second = start(driver)
        assert second.finish(seconds=RUN_S) == 0, second.output
        assert "took over run " in second.output
        assert "after 40 epochs" in second.output

        for role in running.values():
            role.signal(signal.SIGTERM)
        assert [role.finish() for role in running.values()] == [143] * 8
    results = cluster.volume("", "results", {"persistentVolumeClaim": {}})
    assert (results / "model" / "model.safetensors").stat().st_size > 0
    assert any((results / "checkpoints").iterdir())


def test_without_copies_the_next_driver_resumes_and_a_controller_returns_with_its_volume(
    tmp_path: Path,
) -> None:
    skip_without_namespaces()
    cluster = Cluster(rendered({"config": CONFIG}), tmp_path)
    kinds = {"controller": "StatefulSet", "ps": "StatefulSet", "data": "StatefulSet", "worker": "Deployment"}
    pods = {role: cluster.pods(kind, f"adam-{role}")[0] for role, kind in kinds.items()}
    (driver,) = cluster.pods("Job", "adam-driver")
    final = cluster.object("Job", "adam-driver")["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
    with ExitStack() as stack:

        def start(pod: Pod) -> Command:
            return stack.enter_context(pod.start())

        def restart(role: str) -> None:
            running[role].signal(signal.SIGKILL)
            assert running[role].finish() == -signal.SIGKILL
            running[role] = start(pods[role])

        running = {role: start(pod) for role, pod in pods.items()}
        for pod in pods.values():
            wait_until_ready(pod)
        first = start(driver)
        first.wait_for("epoch 2/40")
        restart("controller")
        wait_until_ready(pods["controller"])
        first.wait_for("epoch 4/40")
        restart("ps")
        assert first.finish(seconds=60) == 4, first.output
        assert 4 not in final["values"]  # so the Job starts another driver

        second = start(driver)
        assert second.finish(seconds=RUN_S) == 0, second.output
    assert "resumed from " in second.output
    assert "after 40 epochs" in second.output


def wait_until_ready(pod: Pod) -> None:
    until(lambda: pod.probe("readinessProbe") == 200, f"{pod.name} to be ready")


def check_rights(role: Command) -> None:
    """Check user and capabilities of a process, and that its root file system is read-only."""
    lines = Path(f"/proc/{role.pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert int(status["CapEff"][0], 16) == int(status["CapBnd"][0], 16) == 0
    assert status["NoNewPrivs"] == ["1"]
    assert set(status["Uid"]) == ({str(USER)} if os.geteuid() == 0 else {str(os.geteuid())})
    mounts = [line.split() for line in Path(f"/proc/{role.pid}/mounts").read_text().splitlines()]
    writable = {folder for _, folder, _, options, *_ in mounts if "ro" not in options.split(",")}
    assert writable & {"/", "/srv", "/srv/adam/config", "/srv/adam/tmp"} == {"/srv/adam/tmp"}


def announced(pod: Pod) -> str:
    """The address that a role prints: controllers have a name, the others the address of their pod."""
    return f"{pod.name}.adam-controller:7070" if "controller" in pod.name else f"{pod.address}:7070"
