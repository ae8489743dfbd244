"""The end of a cluster's processes."""

import asyncio

import pytest

from adam_async.cluster.local_launcher import LocalLauncher
from adam_async.cluster.supervision import Supervisor
from adam_async.run.config import Config, Waits


class Process:
    """A process that ends when it is asked to, or only when it is killed."""

    def __init__(self, node: str, *, ends: bool) -> None:
        self.node, self.ended, self._ends, self.is_killed = node, asyncio.Event(), ends, False

    def end(self) -> None:
        if self._ends:
            self.ended.set()

    def kill(self) -> None:
        self.is_killed = not self.ended.is_set()


@pytest.mark.parametrize(
    ("stuck", "named"),
    [
        ({"ps-0", "worker-1"}, "ps-0, worker-1"),
        ({"worker-1"}, "worker-1"),
        ({"controller"}, "controller"),
        (set(), None),
    ],
)
async def test_the_roles_that_do_not_end_are_named_and_killed(stuck: set[str], named: str | None) -> None:
    lines: list[str] = []
    config = Config(waits=Waits(drain_s=0.01))
    supervisor = Supervisor(config, LocalLauncher({}), environment={}, on_line=lines.append)
    nodes = ("controller", "ps-0", "ps-1", "worker-0", "worker-1")
    supervisor.processes = {node: Process(node, ends=node not in stuck) for node in nodes}
    await supervisor.stop()
    assert lines == ([] if named is None else [f"not ended within drain_s=0.01 s, and killed: {named}"])
    assert stuck <= {node for node, process in supervisor.processes.items() if process.is_killed}
