"""Copies of all shards, between a driver and the servers: read for a checkpoint, loaded to take one up.

All servers are asked at once, each for a few shards at a time, so that neither a message nor the wait of a
heartbeat grows with the model. Whoever reads for a checkpoint has seen that every group that was leased is
finished, so every push is acknowledged. With ssp and bsp that is not enough: ticks may still be on their
way, and in bsp the last sum waits for them. So shards are read bound to the clock at which all replicas
meet: those that are behind are waited for and read again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

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
from adam_async.runtime.traffic import Traffic
from transport import Identity, Link, Message, Network, RemoteError, RemoteProtocolError, RetrySchedule

MESSAGE_BYTES = 8 << 20
"""Tensors of one message at most, or one shard."""

META_BYTES = 12 << 10
"""Maximum size of the descriptions of one message's tensors, in bytes; a frame's meta holds a little more."""

TENSOR_META_BYTES = 16
"""Maximum size of the description of one flat tensor in a frame's meta, in bytes."""

PAUSES = RetrySchedule(first_s=0.005, longest_s=0.2)
"""Between two questions to a server that has not taken up the run."""


NOT_YET = frozenset({"not-ready", "wrong-run"})
"""Codes with which a server refuses shards before it has taken up their run."""


NOT_SETTLED = "not-settled"
"""With which it refuses to show shards while it holds contributions to their sums for too long."""


class ShardCopies:
    """Reads and loads shards.

    Args:
        network: How to reach the servers.
        identity: Who we are; role ``driver``.
        waits: Deadlines.
        traffic: Where the links are counted.
    """

    def __init__(self, *, network: Network, identity: Identity, waits: Waits, traffic: Traffic) -> None:
        self._network = network
        self._identity = identity
        self._waits = waits
        self._traffic = traffic

    async def read(
        self, cluster: ClusterMap, table: ShardTable, tensors: RunTensors, *, clocks: Mapping[int, int]
    ) -> tuple[ShardState, ...]:
        """Copy all shards into `tensors`. Returns what travels with them, in the order of their numbers.

        Args:
            cluster: Where they are.
            table: All shards.
            tensors: Filled.
            clocks: Shard to the clock that all its replicas must have reached; others are read as they are.

        Raises:
            DeadlineExceeded: The clocks were not reached, or sums not complete, within `clock_s` after the
                first attempt; names who is behind.
            TransportError: A server did not answer.
        """
        found: dict[int, ShardState] = {}

        async def read_server(link: Link, shards: Sequence[ShardSpec]) -> None:
            left, ends_at = shards, 0.0
            while left:
                behind: list[ShardSpec] = []
                held = "replicas are behind"
                for some in self._chunks(tensors, left):
                    try:
                        states = await self._read(link, cluster, some, tensors)
                    except RemoteError as error:
                        if error.code != NOT_SETTLED:
                            raise
                        states, held = (), error.text
                    found.update((state.shard, state) for state in states)
                    behind += [s for s in some if _behind(found.get(s.id), clocks.get(s.id, 0))]
                left = behind
                now = asyncio.get_running_loop().time()
                ends_at = ends_at or now + self._waits.clock_s  # the time of a first copy does not count
                if left and now > ends_at:
                    raise DeadlineExceeded(
                        f"{link.peer.node} to show its shards: {held}", self._waits.clock_s
                    )
                for some in self._chunks(tensors, left):
                    clock = max(clocks.get(s.id, 0) for s in some)
                    await self._wait_clock(link, cluster, some, clock, ends_at)

        await self._with_servers(cluster, table, read_server)
        return tuple(found[shard.id] for shard in table.shards)

    async def _read(
        self, link: Link, cluster: ClusterMap, shards: Sequence[ShardSpec], tensors: RunTensors
    ) -> tuple[ShardState, ...]:
        """Read the shards of one message. Raises RemoteError `NOT_SETTLED` if their sums are not complete."""
        assert cluster.run is not None
        numbers = tuple(int(shard.id) for shard in shards)
        ask = ReadShards(run=cluster.run.id, generation=cluster.generation, shards=numbers)
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
        """Wait until all pushes up to a clock are in these shards, or the loop's clock is at `ends_at`."""
        assert cluster.run is not None
        ask = Pull(
            run=cluster.run.id,
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
                who = ", ".join(f"replica {replica}" for replica in answer.behind)
                raise DeadlineExceeded(f"{who} to reach clock {clock}", self._waits.clock_s)

    async def load(
        self, cluster: ClusterMap, table: ShardTable, tensors: RunTensors, states: Sequence[ShardState]
    ) -> None:
        """Set all shards of a run whose servers wait for them.

        Args:
            cluster: Where they are.
            table: All shards.
            tensors: What they hold.
            states: What travels with each, in the order of their numbers.

        Raises:
            TransportError: A server refused them, or did not answer.
        """
        assert cluster.run is not None
        run = cluster.run.id

        async def load_server(link: Link, shards: Sequence[ShardSpec]) -> None:
            for some in self._chunks(tensors, shards):
                body = LoadShards(run=run, generation=cluster.generation, arrays=tensors.arrays)
                tables = state_tables([states[shard.id] for shard in some])
                arrays = [array for shard in some for array in tensors.cut(shard.id)]
                await self._load(link, pack(body, [*tables, *arrays]))

        await self._with_servers(cluster, table, load_server)

    async def _load(self, link: Link, message: Message) -> None:
        """Say it until the server has taken up the run; whoever waits for all servers has a deadline."""
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
        table: ShardTable,
        work: Callable[[Link, Sequence[ShardSpec]], Awaitable[None]],
    ) -> None:
        """Do something with each server that holds shards, all at once, over links of their own."""

        async def work_with(server: str) -> None:
            shards = [shard for shard in table.shards if cluster.buckets[shard.bucket] == server]
            address = cluster.nodes[server].address
            async with self._network.connect(address, self._identity, timeout_s=self._waits.dial_s) as link:
                self._traffic.watch(link)
                try:
                    await work(link, shards)
                finally:
                    self._traffic.gone(link)

        try:
            async with asyncio.TaskGroup() as group:
                for server in holders(table, cluster.buckets):
                    group.create_task(work_with(server), name=f"{self._identity.node}/copies-{server}")
        except ExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__

    @staticmethod
    def _chunks(tensors: RunTensors, shards: Sequence[ShardSpec]) -> Iterator[list[ShardSpec]]:
        """Cut shards into those of one message."""
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
