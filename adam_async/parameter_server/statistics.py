"""The shard counts of a store or run on one server, and their reports to peers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from numpy.typing import NDArray

from adam_async.controller.role import STATISTICS_BYTES, reply_when_room
from adam_async.messages import Statistics, pack, text_tensor
from adam_async.parameter_server.shard import OTHERS, Shard
from adam_async.parameter_server.state import ServerState
from adam_async.run.counts import ClientCounts, Histogram, ServerCounts, StoreCounts
from transport import Message, Request

PIECE_SHARDS = 1 << 11
"""Number of shards whose counts one round of the loop adds up."""

_Total = TypeVar("_Total", bound=StoreCounts)


def count_store(states: Sequence[ServerState], total: _Total) -> Generator[None, None, _Total]:
    """Add up the counts of a store's bundles on one server, `PIECE_SHARDS` shards per step.

    Shards may change between two pieces.

    Args:
        total: Counts that the generator fills in and returns. Keys are text, as in JSON.
    """
    shards = _shards_of(states)
    total.shards = len(shards)
    staleness: dict[str, Counter[int]] = {}
    for number, piece in enumerate(_pieces(shards)):
        if number:
            yield
        for shard in piece:
            total.bytes += shard.values.nbytes
            total.state_bytes += sum([array.nbytes for array in shard.rule_state.values()])
            total.versions[str(shard.spec.id)] = int(shard.version)
            total.refused += shard.tables.refused
            total.duplicates += shard.tables.duplicates
            for replica, clock in shard.clocks.items():
                counts = total.clients.setdefault(str(replica), ClientCounts())
                counts.clock = clock if counts.clock is None else min(counts.clock, clock)
            for pusher, found in shard.tables.staleness_of.items():
                if found:  # otherwise the map names the replica, and it has not pushed
                    name = str(pusher) if pusher != OTHERS else "others"
                    staleness.setdefault(name, Counter()).update(found)
    for name, found in staleness.items():
        total.clients.setdefault(name, ClientCounts()).staleness = _as_text(found)
    total.waiting = sum([len(state.waiting) for state in states])
    total.waiting_for = sorted({int(each) for state in states for each in state.waiting.waiting_for()})
    bundles = [state.bundle for state in states]
    total.batches = sum([each.batches for each in bundles])
    total.batched_pushes = sum([each.batched_pushes for each in bundles])
    total.cut_pushes = sum([each.cut_pushes for each in bundles])
    return total


def count_server(states: Sequence[ServerState]) -> ServerCounts:
    """Add up the counts of a run's bundles on one server."""
    total = ServerCounts()
    for _ in count_store(states, total):
        pass
    shards = _shards_of(states)
    by_tensor: dict[str, Counter[int]] = {}
    for shard in shards:
        for counts in shard.tables.staleness_of.values():
            if counts:
                by_tensor.setdefault(shard.spec.tensor, Counter()).update(counts)
    total.staleness = _as_text(sum(by_tensor.values(), Counter()))
    total.staleness_by_tensor = {name: _as_text(counts) for name, counts in by_tensor.items()}
    total.clocks = {str(each.spec.id): {str(r): c for r, c in each.clocks.items()} for each in shards}
    total.clock = min((shard.applied_clock() for shard in shards), default=0)
    pending = [shard.pending for shard in shards if shard.pending is not None]
    total.pending_contributions = sum(len(sums) for each in pending for sums in each.waiting.values())
    return total


def most_updates(states: Sequence[ServerState]) -> int:
    """Return the update count of the run's most updated shard; refused updates count."""
    tables = [shard.tables for shard in _shards_of(states)]
    return max([each.version - each.loaded + each.refused for each in tables], default=0)


def _shards_of(states: Sequence[ServerState]) -> list[Shard]:
    return [shard for state in states for shard in state.shards.values()]


def _pieces(shards: Collection[Shard]) -> Iterator[list[Shard]]:
    rest = iter(shards)
    while piece := list(islice(rest, PIECE_SHARDS)):
        yield piece


def _as_text(counts: Mapping[int, int]) -> Histogram:
    return {str(staleness): counts[staleness] for staleness in sorted(counts)}


KEPT_S = 1.0
"""Time in seconds for which a report that took several rounds of the loop answers further requests."""

Counting = Generator[None, None, StoreCounts]


class StoreReports:
    """Counts a store when a peer asks; the loop runs between the pieces of the count.

    Args:
        sender: The server.
        now: Returns the time of the loop's clock, in seconds.
        spawn: Starts a task of the server, by name.
    """

    def __init__(
        self,
        sender: Statistics,
        now: Callable[[], float],
        spawn: Callable[[str, Coroutine[Any, Any, None]], Any],
    ) -> None:
        self._sender = sender
        self._now = now
        self._spawn = spawn
        self._kept: NDArray[Any] | None = None
        self._kept_until = 0.0
        self._requests: list[Request] = []
        """Requests that wait for the report in progress."""

    def answer(self, request: Request, counting: Callable[[], Counting]) -> None:
        """Answer a request with the current counts; for a large store, with a report from the last second.

        Args:
            counting: Returns a generator that counts in pieces.
        """
        if self._kept is not None and self._now() < self._kept_until:
            self._reply(request, self._kept)
            return
        if self._requests:
            self._requests.append(request)
            return
        pieces = counting()
        try:
            next(pieces)
        except StopIteration as end:
            self._reply(request, text_tensor(end.value))
            return
        self._requests.append(request)
        self._spawn(f"counts for {request.link.peer.node}", self._go_on(pieces))

    async def _go_on(self, pieces: Counting) -> None:
        while True:
            await asyncio.sleep(0)
            try:
                next(pieces)
            except StopIteration as end:
                self._kept = text_tensor(end.value)
                break
        self._kept_until = self._now() + KEPT_S
        requests, self._requests = self._requests, []
        for request in requests:
            self._reply(request, self._kept)

    def _reply(self, request: Request, text: NDArray[Any]) -> None:
        def make() -> Message:
            return pack(self._sender, [text])

        reply_when_room(request, max(text.nbytes, STATISTICS_BYTES), make)
