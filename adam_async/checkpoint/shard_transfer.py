"""Copies of all shards between a driver and the servers: read for a checkpoint, and loaded to resume one.

All servers are read at once, each a few shards at a time, so neither a message nor the wait of a heartbeat
grows with the model. A checkpoint is read after every leased group is finished, so every push is
acknowledged. With ssp and bsp that is not enough: ticks may still be in transit, and in bsp the last sum
waits for them. A read therefore names the sync clock of all replicas; shards below it are read again after
they have reached it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from adam_async.checkpoint.tensors import RunTensors
from adam_async.errors import DeadlineExceeded, first_cause
from adam_async.messages import (
    Loaded,
    LoadShards,
    Pull,
    ReadShards,
    ShardState,
    ShardStates,
    Values,
    pack,
    read_state_tables,
    state_tables,
    unpack,
)
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.shard_table import ShardSpec, ShardTable, holders
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.traffic import Traffic
from transport import Identity, Link, Message, Network, RemoteError, RemoteProtocolError, RetrySchedule

MESSAGE_BYTES = 8 << 20
"""Maximum size of the tensors of one message in bytes, unless a single shard is larger."""

META_BYTES = 12 << 10
"""Maximum size of the descriptions of one message's tensors, in bytes; a frame's meta has room for a little
more."""

TENSOR_META_BYTES = 16
"""Maximum size of the description of one flat tensor in a frame's meta, in bytes."""

PAUSES = RetrySchedule(first_s=0.005, longest_s=0.2)
"""Pauses between two requests to a server that has not taken up the run."""

NOT_YET = frozenset({"not-ready", "wrong-run"})
"""Codes with which a server refuses shards before it has begun their run."""

NOT_SETTLED = "not-settled"
"""Code with which a server refuses shards whose sums have waited for contributions too long."""


class ShardValues(Protocol):
    """Values of shards, with the arrays of their rule."""

    arrays: tuple[str, ...]
    """Names of the rule's arrays; none for values alone."""

    def bytes_of(self, shard: ShardSpec) -> int:
        """Return the size of a shard with its rule state, in bytes."""
        ...

    def cut(self, shard: ShardSpec) -> list[NDArray[Any]]:
        """Return a shard in the form of a message: values, then the rule's arrays in order; flat."""
        ...


class ShardCopies:
    """Reads and loads shards."""

    def __init__(self, *, network: Network, identity: Identity, waits: Waits, traffic: Traffic) -> None:
        self._network = network
        self._identity = identity
        self._waits = waits
        self._traffic = traffic

    async def read(
        self, cluster: ClusterMap, table: ShardTable, tensors: RunTensors, *, clocks: Mapping[int, int]
    ) -> tuple[ShardState, ...]:
        """Copy all shards into `tensors`; returns their states, in the order of their numbers.

        Args:
            clocks: Clock by shard that all its replicas must reach; other shards have no bound.

        Raises:
            DeadlineExceeded: The clocks were not reached, or sums not complete, within `clock_s` after the
                first attempt; the error names the slower replicas.
            TransportError: A server did not answer.
        """
        found: dict[int, ShardState] = {}

        async def read_server(link: Link, shards: Sequence[ShardSpec]) -> None:
            left, ends_at = shards, 0.0
            while left:
                behind: list[ShardSpec] = []
                reason = "replicas are behind"
                for some in self._chunks(tensors, left):
                    try:
                        states = await self._read(link, cluster, some, tensors)
                    except RemoteError as error:
                        if error.code != NOT_SETTLED:
                            raise
                        states, reason = (), error.text
                    found.update((state.shard, state) for state in states)
                    behind += [s for s in some if _behind(found.get(s.id), clocks.get(s.id, 0))]
                left = behind
                now = asyncio.get_running_loop().time()
                ends_at = ends_at or now + self._waits.clock_s  # the time of a first copy does not count
                if left and now > ends_at:
                    raise DeadlineExceeded(
                        f"{link.peer.node} to send its shards: {reason}", self._waits.clock_s
                    )
                for some in self._chunks(tensors, left):
                    clock = max(clocks.get(s.id, 0) for s in some)
                    await self._wait_clock(link, cluster, some, clock, ends_at)

        store = cluster.run_store
        assert store is not None, "a run has a store"
        await self._with_servers(cluster, store, table, read_server)
        return tuple(found[shard.id] for shard in table.shards)

    async def _read(
        self, link: Link, cluster: ClusterMap, shards: Sequence[ShardSpec], tensors: RunTensors
    ) -> tuple[ShardState, ...]:
        """Read the shards of one message. Raises RemoteError `NOT_SETTLED` if their sums are not complete."""
        assert cluster.run is not None
        numbers = tuple(int(shard.id) for shard in shards)
        ask = ReadShards(store=cluster.run.id, generation=cluster.generation, shards=numbers)
        reply = await link.call(pack(ask), timeout_s=self._waits.call_s)
        answer = unpack(reply, ShardStates)
        states, arrays = read_state_tables(reply.tensors)
        if tuple(state.shard for state in states) != numbers:
            raise RemoteProtocolError("shards", f"asked for shards {numbers}, got others")
        tensors.put(numbers, answer.arrays, arrays)
        return states

    async def _wait_clock(
        self, link: Link, cluster: ClusterMap, shards: Sequence[ShardSpec], clock: int, ends_at: float
    ) -> None:
        """Wait until these shards contain all pushes up to a clock; `ends_at` is a time of the loop."""
        assert cluster.run is not None
        ask = Pull(
            store=cluster.run.id,
            generation=cluster.generation,
            shards=tuple(int(shard.id) for shard in shards),
            clock=clock,
            wait_s=self._waits.answer_s / 2,
        )
        loop = asyncio.get_running_loop()
        while True:
            answer = unpack(await link.call(pack(ask), timeout_s=self._waits.call_s), Values)
            if answer.versions:
                return
            if loop.time() > ends_at:
                behind = ", ".join(f"replica {replica}" for replica in answer.behind)
                raise DeadlineExceeded(f"{behind} to reach clock {clock}", self._waits.clock_s)

    async def load(
        self,
        cluster: ClusterMap,
        store: StoreRecord,
        table: ShardTable,
        tensors: ShardValues,
        states: Sequence[ShardState],
    ) -> None:
        """Load all shards of a store into the servers, which wait for them.

        Args:
            cluster: The map with the servers.
            store: The store.
            states: States of all shards, in the order of their numbers.

        Raises:
            TransportError: A server refused the shards, or did not answer.
        """

        async def load_server(link: Link, shards: Sequence[ShardSpec]) -> None:
            for some in self._chunks(tensors, shards):
                body = LoadShards(store=store.id, generation=store.generation, arrays=tensors.arrays)
                tables = state_tables([states[shard.id] for shard in some])
                arrays = [array for shard in some for array in tensors.cut(shard)]
                await self._load(link, pack(body, [*tables, *arrays]))

        await self._with_servers(cluster, store, table, load_server)

    async def _load(self, link: Link, message: Message) -> None:
        """Send until the server has begun the run; the caller's wait for all servers has a deadline."""
        for pause_s in PAUSES.waits():
            try:
                unpack(await link.call(message, timeout_s=self._waits.call_s), Loaded)
            except RemoteError as error:
                if error.code not in NOT_YET:
                    raise
                await asyncio.sleep(pause_s)
            else:
                return

    async def _with_servers(
        self,
        cluster: ClusterMap,
        store: StoreRecord,
        table: ShardTable,
        work: Callable[[Link, Sequence[ShardSpec]], Awaitable[None]],
    ) -> None:
        """Call a function for each server with shards, all at once, each with its own link."""

        async def work_with(server: str) -> None:
            shards = [shard for shard in table.shards if store.buckets[shard.bucket] == server]
            address = cluster.nodes[server].address
            async with self._network.connect(address, self._identity, timeout_s=self._waits.dial_s) as link:
                self._traffic.watch(link)
                try:
                    await work(link, shards)
                finally:
                    self._traffic.gone(link)

        try:
            async with asyncio.TaskGroup() as group:
                for server in holders(table, store.buckets):
                    group.create_task(work_with(server), name=f"{self._identity.node}/copies-{server}")
        except ExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__

    @staticmethod
    def _chunks(tensors: ShardValues, shards: Sequence[ShardSpec]) -> Iterator[list[ShardSpec]]:
        """Split shards into groups of one message each."""
        most = META_BYTES // (TENSOR_META_BYTES * (1 + len(tensors.arrays)))
        some: list[ShardSpec] = []
        room = MESSAGE_BYTES
        for shard in shards:
            if some and (tensors.bytes_of(shard) > room or len(some) >= most):
                yield some
                some, room = [], MESSAGE_BYTES
            some.append(shard)
            room -= tensors.bytes_of(shard)
        if some:
            yield some


def _behind(state: ShardState | None, clock: int) -> bool:
    return state is None or min(state.clocks.values(), default=clock) < clock
