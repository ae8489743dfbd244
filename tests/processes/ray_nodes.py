"""Nodes of a real Ray cluster on this machine, for tests: `with RayNodes(folder, 4, 4) as nodes`.

Ray starts in a process of its own, because it leaves threads and files open in a process that uses it. The
process gets commands on stdin, one a line, and answers each with a line. Its end ends the nodes.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.processes.commands import ROOT, descendants, kill_all, roles_among

NOTHING: dict[str, list[str]] = {"actors": [], "groups": []}
"""Answer of `RayNodes.left` on nodes without a launch."""

STORE_BYTES = 80 << 20
"""Memory of each node for objects; the roles use none of it."""


def missing() -> str:
    """Return the reason that these tests cannot run; empty if they can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install 'adam-async[ray]'"
    return "" if sys.platform == "linux" else "the tests read /proc"


class RayNodes:
    """A head node and further nodes, each with so many CPUs; `kill` is the loss of a node.

    Args:
        cpus: CPUs that each node declares.
        variables: Variables of the nodes, in addition to those of this process.
        second: Variables of all nodes but the first.
    """

    def __init__(
        self, *cpus: float, variables: dict[str, str] | None = None, second: dict[str, str] | None = None
    ) -> None:
        self._cpus, self._second = cpus, second or {}
        self._variables = {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A node that is lost in a test counts as lost sooner.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
            **(variables or {}),
        }
        # The paths of sockets have at most 107 bytes, which a folder of pytest would exceed.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        # Ray writes the address of the newest cluster here, also with another folder for the rest.
        Path("/tmp/ray").mkdir(exist_ok=True)

    def __enter__(self) -> "RayNodes":
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ADAM_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.ray_nodes", self._folder],
            cwd=ROOT,
            env={**inherited, **self._variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._raylets: list[int] = []
        for number, cpus in enumerate(self._cpus):
            self.add(cpus, variables=self._second if number else {})
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        left = descendants(self._process.pid)
        self._process.wait()
        self._process.stdout.close()
        kill_all(left)
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, cpus: float, *, variables: dict[str, str] | None = None) -> None:
        """Start a further node."""
        answer = self._ask({"cpus": cpus, "variables": variables or {}})
        self.address = answer["address"]
        self._raylets.append(answer["raylet"])

    def kill(self, number: int) -> None:
        """Kill a node with all its processes, as the loss of its machine would."""
        kill_all(descendants(self._raylets[number]))

    def roles(self, number: int | None = None) -> dict[str, int]:
        """Return the process ids of the roles on all nodes or on one, by node id of the role."""
        raylets = self._raylets if number is None else [self._raylets[number]]
        return roles_among(pid for raylet in raylets for pid in descendants(raylet))

    def left(self) -> dict[str, Any]:
        """Return the live actors and the placement groups of the cluster."""
        return self._ask({"left": True})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the process of the nodes has ended")


def main(folder: str) -> None:
    """Start and describe nodes until stdin ends."""
    import ray
    from ray.cluster_utils import Cluster

    def add(cluster: Any, question: dict[str, Any]) -> dict[str, Any]:
        more: dict[str, Any] = (
            {"temp_dir": folder, "include_dashboard": False} if not cluster.head_node else {}
        )
        node = cluster.add_node(
            num_cpus=question["cpus"],
            object_store_memory=STORE_BYTES,
            env_vars=question["variables"] or None,
            **more,
        )
        return {"address": cluster.address, "raylet": node.all_processes["raylet"][0].process.pid}

    def left(cluster: Any) -> dict[str, Any]:
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            groups = ray.util.placement_group_table().values()
            actors = ray._private.state.actors().values()
            return {
                "actors": [one["ActorClassName"] for one in actors if one["State"] != "DEAD"],
                "groups": [one["name"] for one in groups if one["state"] != "REMOVED"],
            }
        finally:
            ray.shutdown()

    cluster = Cluster()
    for line in sys.stdin:
        question = json.loads(line)
        answer = left(cluster) if "left" in question else add(cluster, question)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
