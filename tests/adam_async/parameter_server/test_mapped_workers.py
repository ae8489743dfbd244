"""Workers of other processes: what the server believes of their notes, and what waits for their end."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adam_async.errors import DeadlineExceeded
from adam_async.messages import MapShards
from adam_async.model.rules import Sgd
from adam_async.parameter_server.mapped_workers import MappedWorkers
from adam_async.parameter_server.storage import NotedStep, ShardStorage
from adam_async.run.config import Waits
from tests.adam_async.runs import NETWORKS, servers_of
from transport import LinkClosed

ASKED = MapShards(
    store="run", generation=1, session=1, incarnation=1, replica=0, notes=1, threads=1, jobs=1, groups=1
)


async def test_steps_of_a_lost_worker_count_once_also_of_an_epoch_that_the_server_does_not_know_yet() -> None:
    async with servers_of(NETWORKS["local"](), weights="aliased") as servers:
        served = servers.servers[0].store("run")
        assert served is not None
        steps = [NotedStep(1, 0, 16, 0.5, 0), NotedStep(served._epoch + 1, 1, 16, None, 0)]
        assert [served._count_mapped(ASKED, steps) for _ in range(2)] == [1, 0]
        for shard in servers.shards().values():
            assert (shard.version, shard.last_number) == (2, {(1, 1): 2})


@pytest.mark.parametrize(
    "step",
    [
        NotedStep(1, -1, 16, 0.5, 0),
        NotedStep(1, 1 << 40, 16, 0.5, 0),
        NotedStep(1 << 40, 1, 16, 0.5, 0),
        NotedStep(1, 1, 0, 0.5, 0),
        NotedStep(1, 1, 1 << 62, 0.5, 0),
        NotedStep(1, 1, 16, 0.5, -7),
    ],
    ids=str,
)
async def test_notes_of_impossible_steps_count_nothing(step: NotedStep, caplog: Any) -> None:
    async with servers_of(NETWORKS["local"](), weights="aliased") as servers:
        served = servers.servers[0].store("run")
        assert served is not None
        assert served._count_mapped(ASKED, [step]) == 0
        assert "ps-0: notes of a worker of replica 0: " in caplog.text
        assert all((shard.version, shard.last_number) == (0, {}) for shard in servers.shards().values())


class _ClosedLink:
    peer, closed = SimpleNamespace(node="worker-1"), True

    def hand_over(self, memory: object) -> int:
        return 1

    async def call(self, message: object, *, timeout_s: float) -> None:
        raise LinkClosed("it has ended")

    def abort(self) -> None:
        """It has ended."""


class _Lost:
    """A server whose worker has lost its link, and the order of what happens."""

    def __init__(self, kill: Callable[[], Awaitable[None]]) -> None:
        self.order: list[str] = []
        self._kill = kill
        self.storage = ShardStorage((), Sgd(), in_place=True, region=np.zeros(1 << 13, np.uint8))
        host: Any = SimpleNamespace(node="ps-0", waits=Waits())
        self.workers = MappedWorkers(self.storage, host, self._count)
        events = {name: asyncio.Event() for name in ("has_to_end", "is_away", "is_over")}
        fields = {"link": _ClosedLink(), "body": ASKED, "leaves": None, "notes": [], "process": self}
        fields["is_followed"] = ExitStack()
        self.mapped: Any = SimpleNamespace(**events, **fields)
        self.workers._mapped[self.mapped.link] = self.mapped
        self.workers._waiting.append(lambda: self.order.append("dealt"))

    def _count(self, body: object, steps: object) -> int:
        self.order.append("counted")
        return 0

    async def kill(self, what: str, *, within_s: float) -> None:
        self.what, self.within_s = what, within_s
        await self._kill()
        self.order.append("ended")

    def close(self) -> None:
        """See `PeerProcess`."""

    async def attend(self) -> None:
        self.workers.links_closed()
        request: Any = SimpleNamespace(reply=lambda message: None)
        await self.workers._attend(self.mapped, request)

    async def read(self) -> None:
        async with self.storage.still():
            self.order.append("read")


async def test_readers_and_dealers_wait_until_the_process_has_ended_and_its_steps_are_counted() -> None:
    async def kill() -> None:
        readers.append(asyncio.create_task(lost.read()))
        for _ in range(20):
            await asyncio.sleep(0)

    readers: list[asyncio.Task[None]] = []
    lost = _Lost(kill)
    await lost.attend()
    await asyncio.gather(*readers)
    assert lost.order == ["ended", "counted", "dealt", "read"]


async def test_nothing_goes_on_beside_a_killed_process_that_does_not_end() -> None:
    async def kill() -> None:
        raise DeadlineExceeded(lost.what, lost.within_s)

    lost = _Lost(kill)
    with pytest.raises(DeadlineExceeded, match="for the killed process of worker-1, which could write"):
        await lost.attend()
    assert lost.order == []
    with pytest.raises(TimeoutError):  # a reader waits, too, such as the disk at the end of the server
        async with asyncio.timeout(0):
            await lost.read()
    lost.workers.end(lets_go=True)
    await lost.read()
    assert lost.order == ["dealt", "read"]
