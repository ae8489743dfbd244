"""The workers of other processes that train in place on the memory of a store.

A worker in another process has a separate link to the server (`MapShards`), over which the server hands the
memory over. The link is the right to write: the server kills a worker whose link or replica generation ends
before its `UnmapShards`. So a worker that was frozen, cut off or slow cannot write later. Then the server
counts the unreported steps and the cut-off steps in the worker's notes. Dealers get the group sets only after
that, so no other worker trains a group that this worker has begun.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from adam_async.messages import KeepStill, MapShards, Settled, ShardsMapped, StepReport, UnmapShards, pack
from adam_async.parameter_server.replica_clocks import EndedGenerations
from adam_async.parameter_server.shard import ShardTables
from adam_async.parameter_server.storage import NotedStep, ShardStorage, StepNotes
from adam_async.parameter_server.store_host import StoreHost
from adam_async.run.group_ranges import has_groups
from adam_async.run.ids import Replica
from adam_async.runtime.channel import wait_set
from adam_async.runtime.child_process import PeerProcess
from transport import Link, LinkBroken, Request, TransportError

logger = logging.getLogger(__name__)


class _Mapped:
    """One worker, from its request until the server has counted its last step."""

    def __init__(self, link: Link, body: MapShards) -> None:
        self.body, self.link = body, link
        notes = link.region(body.notes, is_common=False)
        self.notes = StepNotes.of_worker(notes, body.threads, body.jobs, body.groups)
        self.process = PeerProcess(link.peer_process())
        self.leaves: Request | None = None
        """The `UnmapShards` of the worker."""
        self.has_to_end, self.is_away, self.is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Set when the worker must end (its link or generation has ended, or it leaves); when it is away (it
        leaves, or its link has ended); and when all its steps are counted."""
        self.is_followed = ExitStack()
        """Until then, readers wait for this worker."""


class MappedWorkers:
    """The workers of other processes on the memory of one store.

    Args:
        storage: Memory of the store; `region` is None if all workers are in this process.
        count: Counts a worker's uncounted steps, and returns how many steps were cut off.

    Attributes:
        steps_cut: Number of steps that may have been applied in part.
    """

    def __init__(
        self, storage: ShardStorage, host: StoreHost, count: Callable[[MapShards, Iterable[NotedStep]], int]
    ) -> None:
        self.storage = storage
        self._host = host
        self._count = count
        self._mapped: dict[Link, _Mapped] = {}
        self._waiting: list[Callable[[], object]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.steps_cut = 0

    def take(self, request: Request, body: MapShards | UnmapShards | KeepStill) -> None:
        """Take a request of a worker, or of the driver."""
        link, mapped = request.link, self._mapped.get(request.link)
        if isinstance(body, KeepStill):
            self._spawn(f"still-for-{link.peer.node}", self._keep_for(request))
        elif isinstance(body, UnmapShards):
            if mapped is None or mapped.leaves is not None:
                request.fail("malformed", "UnmapShards: this link does not have the memory")
                return
            mapped.leaves = request
            mapped.is_away.set()
            mapped.has_to_end.set()
        elif mapped is not None or self.storage.region is None or not link.shares:
            request.fail("malformed", "MapShards: once on a link with shared memory, to a server of its own")
        else:
            try:
                mapped = self._mapped[link] = _Mapped(link, body)
            except (ValueError, OSError, TransportError) as error:
                request.fail("no-room", f"{self._host.node} cannot follow the worker: {error}")
                return
            self._spawn(f"follows-{link.peer.node}", self._attend(mapped, request))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._host.spawn(name, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, mapped: _Mapped, request: Request) -> None:
        """Follow a worker until its last write, then release the waiters for the end of its writes.

        Raises:
            DeadlineExceeded: The process of the worker does not end.
        """
        try:
            await self._follow(mapped, request)
        finally:
            mapped.process.close()
        self._over(mapped)  # not after an error: the process may still write

    async def _follow(self, mapped: _Mapped, request: Request) -> None:
        """Hand the memory to a worker, and follow the worker until all its steps are counted."""
        link, region, patience_s = mapped.link, self.storage.region, self._host.waits.patience_s
        assert region is not None, "links with shared memory come from other processes"
        async with self.storage.gate.turn:  # no worker begins while the values are still
            try:
                number = link.hand_over(region)
            except LinkBroken as error:
                request.fail("no-room", str(error))
                return
            request.reply(pack(ShardsMapped(region=number)))
            mapped.is_followed.enter_context(self.storage.counted_by(partial(self._kept_still, mapped)))
        await mapped.has_to_end.wait()
        # A worker that ends in order leaves the map before it ends the jobs of its threads.
        await wait_set(mapped.is_away, patience_s)
        if mapped.leaves is None:
            link.abort()
            logger.warning("%s lost %s, and ends its process", self._host.node, link.peer.node)
            what = f"the killed process of {link.peer.node}, which could write into the values, to end"
            await mapped.process.kill(what, within_s=patience_s)
        self.steps_cut += self._count_notes(mapped)
        if mapped.leaves is not None:
            mapped.leaves.reply(pack(Settled()))

    def _over(self, mapped: _Mapped) -> None:
        """Forget a worker, and let its waiting readers and dealers go on."""
        del self._mapped[mapped.link]
        mapped.is_followed.close()
        mapped.is_over.set()
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    @asynccontextmanager
    async def _kept_still(self, mapped: _Mapped) -> AsyncIterator[None]:
        """Keep a worker still for a block, or wait for the end of one that does not answer."""
        link, store, patience_s = mapped.link, mapped.body.store, self._host.waits.patience_s
        try:
            try:
                await link.call(pack(KeepStill(store=store)), timeout_s=patience_s)
                self._count_notes(mapped)  # a worker that leaves meanwhile reports no more
            except TransportError as error:
                if mapped.leaves is None:
                    logger.warning("%s does not keep its values still: %s", link.peer.node, error)
                    link.abort()
                await mapped.is_over.wait()
            yield
        finally:
            if not link.closed:
                goes_on = pack(KeepStill(store=store, is_still=False))
                link.ask(goes_on, lambda _: None, timeout_s=patience_s)

    async def _keep_for(self, request: Request) -> None:
        """Keep the values still for a peer until its link ends."""
        async with self.storage.still():
            request.reply(pack(Settled()))
            await request.link.wait_closed()

    def _count_notes(self, mapped: _Mapped) -> int:
        return self._count(mapped.body, (step for notes in mapped.notes for step in notes.steps()))

    def links_closed(self) -> None:
        """Look for workers whose links have ended."""
        for link, mapped in self._mapped.items():
            if link.closed:
                mapped.is_away.set()
                mapped.has_to_end.set()

    def waits_for(self, ended: EndedGenerations, resume: Callable[[], object]) -> bool:
        """Return whether a worker of an ended generation is not counted yet; then call `resume` later."""
        for mapped in self._mapped.values():
            if (Replica(mapped.body.replica), mapped.body.incarnation) in ended:
                mapped.has_to_end.set()
        waits = any(mapped.has_to_end.is_set() for mapped in self._mapped.values())
        if waits:
            self._waiting.append(resume)
        return waits

    def end(self, *, lets_go: bool) -> None:
        """Follow no worker any more: the store or the server ends.

        Args:
            lets_go: Whether the readers and dealers that wait for workers go on.
        """
        for task in tuple(self._tasks):
            task.cancel()
        for mapped in tuple(self._mapped.values()) if lets_go else ():
            self._over(mapped)


def unreported_steps(
    body: MapShards, noted: Iterable[NotedStep], tables: ShardTables
) -> tuple[StepReport, ...]:
    """Return the reports of the steps that a worker has noted and the tables of some shards do not have.

    Raises:
        msgspec.ValidationError: No message may have such steps.
    """
    named = [(step, (step.epoch, step.group, step.group + 1)) for step in noted]
    missing = [(step, groups) for step, groups in named if not has_groups(tables.groups, groups)]
    clock = tables.clocks.get(Replica(body.replica), 0)
    reports = [
        StepReport(
            clock + place,
            step.images,
            step.staleness,
            groups=groups,
            loss_sum=None if step.loss is None else step.loss * step.images,
        )
        for place, (step, groups) in enumerate(missing, 1)
    ]
    # Its worker could write anything into the notes, so they pass the checks of a message.
    return msgspec.convert(msgspec.to_builtins(reports), tuple[StepReport, ...])
