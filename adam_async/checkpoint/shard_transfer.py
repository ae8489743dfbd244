"""Transfer of all shards between servers and a driver or client: read for a checkpoint, loaded at the start.

All bundles are read at once, each one piece at a time. So neither a message nor the reader's memory grows
with the model. If a bundle's primary moves, the reading continues with the next piece: a piece's tables have
the groups in it, and in bsp all copies have the same values at a clock. The loading of the bundle begins
again with its first shard, because a primary lost before training leaves none.

A read may name a clock. With ssp the servers answer such a read once the values contain all pushes up to this
clock. With bsp they answer with the values of exactly this clock, although training goes on
(`parameter_server/kept_shards.py`).
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from adam_async.checkpoint.checkpoint import StoredPieces, take_states
from adam_async.checkpoint.tensors import ShardSource
from adam_async.client.connection import NOT_SERVING
from adam_async.errors import DeadlineExceeded, ShardUnavailable, first_cause
from adam_async.messages import (
    KeepStill,
    Loaded,
    LoadShards,
    ReadShards,
    ShardState,
    ShardStates,
    pack,
    state_tables,
    unpack,
)
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import chunks_of
from adam_async.parameter_server.question_checks import MOST_STEPS
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import state_of
from adam_async.persistence.records import StateName
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.epoch_shares import most_clock
from adam_async.run.ids import ShardId
from adam_async.run.run_copies import Primary, lacks_copies, primary_of
from adam_async.run.shard_table import ShardSpec, ShardTable, holders
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.channel import Channel, Endpoint
from transport import (
    CallTimeout,
    DialFailed,
    Link,
    LinkBroken,
    LinkClosed,
    Message,
    RemoteError,
    RemoteProtocolError,
    RetrySchedule,
)

PAUSES = RetrySchedule(first_s=0.005, longest_s=0.2)
"""Pauses between two requests to a server that has not taken up the run."""

NOT_YET = frozenset({"not-ready", "wrong-run"})
"""Codes with which a server refuses shards before it has begun their run."""

PASSING = (CallTimeout, DialFailed, LinkBroken, LinkClosed, RemoteError)
"""Errors of a primary that is lost, or that does not serve the bundle; see `NOT_SERVING`."""

NOT_SETTLED = "not-settled"
"""Code with which a server refuses shards whose clock was not reached in time."""


class ClockPassed(Exception):
    """A shard has passed the clock at which all shards should be read.

    Attributes:
        clock: Clock of the shard; the shard may pass this clock, too.
    """

    def __init__(self, clock: int) -> None:
        super().__init__(f"a shard is at clock {clock} already")
        self.clock = clock


@dataclass(frozen=True, slots=True)
class _Deadline:
    """The end of a wait by the loop's clock, and the wait's length in seconds."""

    ends_at: float
    within_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Bundle:
    """One bundle that is read or loaded."""

    store: str
    home: str
    shards: Sequence[ShardSpec]
    channel: Channel
    """Channel to the primary."""
    primary: Primary | None = None
    """The primary in the newest map."""
    stands: bool = True
    """Whether the store is in the newest map, and has not failed there."""
    lacks_copies: bool = False
    """Whether the store is open in the newest map and waits there for another copy of this bundle."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that a change of the primary sets and the next attempt clears."""
    attempt: asyncio.Timeout | None = None
    """Timeout of the current attempt, which ends when the primary changes; None between attempts."""

    def map_changed(self, cluster: ClusterMap) -> None:
        """Follow the primary of the bundle; a change of the primary ends the attempt in progress."""
        store, primary = cluster.store(self.store), primary_of(cluster, self.store, self.home)
        self.stands = store is not None and store.phase != "failed"
        # During the loading of a store, its bundles always lack copies.
        is_open = store is not None and store.phase == "open"
        self.lacks_copies = is_open and lacks_copies(cluster, self.store, self.home)
        if primary != self.primary:
            self.primary = primary
            if primary is not None:
                self.channel.peer, self.channel.address = primary.node, primary.address
            self.moved.set()
            if self.attempt is not None and not self.attempt.expired():
                self.attempt.reschedule(asyncio.get_running_loop().time())

    def __str__(self) -> str:
        if self.primary is None:
            return f"a primary of bundle {self.home}"
        return f"{self.channel}, the primary of bundle {self.home}"


class ShardCopies:
    """Reads and loads shards.

    Args:
        changes: Yields the cluster map now, and after every change.
    """

    def __init__(
        self, endpoint: Endpoint, *, changes: Callable[[], AsyncIterator[ClusterMap]], waits: Waits
    ) -> None:
        self._endpoint = endpoint
        self._changes = changes
        self._waits = waits

    @asynccontextmanager
    async def still(self, cluster: ClusterMap) -> AsyncIterator[None]:
        """Keep the memory of an in-place run's server still for a block; its link ends with the block.

        Raises:
            TransportError, DeadlineExceeded: The server does not answer, or its memory has moved.
        """
        store, waits = cluster.run_store, self._waits
        assert store is not None
        primary = primary_of(cluster, store.id, store.buckets[0])
        if primary is None:
            raise LinkClosed(f"the run has no primary of {store.buckets[0]}")
        async with self._endpoint.connected(primary.address, timeout_s=waits.dial_s) as link:
            # The server waits this long for a worker, and then ends the worker.
            await link.call(pack(KeepStill(store=store.id)), timeout_s=2 * waits.patience_s)
            yield
            if link.closed:  # what the block has read belongs to no set of groups
                raise LinkClosed(f"the link on which {primary.address} kept the values still has ended")

    async def read(
        self,
        cluster: ClusterMap,
        pieces: StoredPieces,
        put: Callable[[StateName, Bundle], Awaitable[None]],
        *,
        clock: int = 0,
        within_s: float,
    ) -> None:
        """Read all shards, and put each arrived piece, as a bundle with its shards.

        Args:
            pieces: The pieces of the store.
            put: Takes a piece; the next piece from the same primary is read once the call has returned.
            clock: Clock that all trained shards must reach in ssp, and at which they are read in bsp; 0: read
                the shards as they are.
            within_s: Time within which the shards must reach the clock, in seconds.

        Raises:
            ClockPassed: In bsp, a shard has passed the clock.
            DeadlineExceeded: The clock was not reached in time; the error names the replicas behind.
            RemoteProtocolError: A primary sent other shards, or a clock that no replica can have reached.
            TransportError, ShardUnavailable: A primary did not answer for `patience_s` after its first
                failure, or for `copies_s` while its bundle lacks copies.
        """
        deadline = _Deadline(asyncio.get_running_loop().time() + within_s, within_s)
        store = pieces.catalogue.record
        left: dict[str, deque[StateName]] = {}
        # From the first trained shard on the server keeps the clock of the others.
        by_use = sorted(pieces.specs, key=lambda name: all(spec.frozen for spec in pieces.specs[name]))
        for name in by_use:
            left.setdefault(name.home, deque()).append(name)

        async def read_bundle(link: Link, shards: Sequence[ShardSpec]) -> None:
            """Read the remaining pieces of one bundle; after a broken link continue with the same piece."""
            names = left[pieces.home_of(shards[0])]
            while names:
                specs = pieces.specs[names[0]]
                bundle = pieces.bundle(specs)
                for is_frozen in (False, True):
                    some = [spec for spec in specs if spec.frozen == is_frozen]
                    for numbers in chunks_of(some, pieces.arrays):
                        at = 0 if is_frozen else clock
                        await self._read(link, cluster, store, numbers, bundle, at, deadline)
                await put(names[0], bundle)
                names.popleft()

        await self.with_primaries(store, pieces.table, read_bundle)

    async def _read(
        self,
        link: Link,
        cluster: ClusterMap,
        store: StoreRecord,
        numbers: tuple[int, ...],
        bundle: Bundle,
        clock: int,
        deadline: _Deadline,
    ) -> None:
        """Read one message's shards into a bundle, as soon as they reach the clock; errors as in `read`."""
        ask = ReadShards(store=store.id, generation=store.generation, shards=numbers, clock=clock)
        while True:
            try:
                reply = await link.call(pack(ask), timeout_s=self._waits.call_s)
            except RemoteError as error:
                if error.code != NOT_SETTLED:
                    raise
                if asyncio.get_running_loop().time() > deadline.ends_at:
                    what = f"{link.peer.node} to send its shards: {error.text}"
                    raise DeadlineExceeded(what, deadline.within_s) from None
            else:
                break
        answer = unpack(reply, ShardStates)
        most = _most_clock(cluster) if store.program else MOST_STEPS
        if answer.passed:
            if not clock < answer.passed <= most:  # the caller reads at a later clock than this one
                text = f"sent clock {answer.passed} for shards past clock {clock}, and {most} is the most"
                raise RemoteProtocolError("clock", f"{link.peer.node} {text}")
            raise ClockPassed(answer.passed)
        take_states(bundle, numbers, answer, reply.tensors)
        shards = [bundle.shards[ShardId(number)] for number in numbers]
        newest = max([found for shard in shards for found in shard.clocks.values()], default=0)
        if newest > most:  # a run that continues the checkpoint would begin at this clock
            text = f"sent clock {newest} of a replica, and {most} is the most"
            raise RemoteProtocolError("clock", f"{link.peer.node} {text}")

    async def load(
        self, store: StoreRecord, source: ShardSource, *, loaded: Callable[[], None] = lambda: None
    ) -> None:
        """Load all shards of a store into the primaries, which wait for them.

        A run's store gets the shards' versions, clocks and groups; any other store begins without them.

        Args:
            loaded: Called when a primary has taken some shards.

        Raises:
            CheckpointError: A shard is missing or damaged.
            TransportError, ShardUnavailable: A primary refused the shards, or did not answer for `patience_s`
                after its first failure.
        """

        async def load_bundle(link: Link, specs: Sequence[ShardSpec]) -> None:
            async with aclosing(source.shards_of(specs)) as parts:
                async for shards in parts:
                    for message in _load_messages(store, shards):
                        await self._load(link, message)
                        loaded()

        await self.with_primaries(store, source.table, load_bundle)

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

    async def with_primaries(
        self,
        store: StoreRecord,
        table: ShardTable,
        work: Callable[[Link, Sequence[ShardSpec]], Awaitable[None]],
    ) -> None:
        """Call a function for each bundle, all at once, each with a separate link to the primary."""
        bundles = [
            _Bundle(
                store=store.id,
                home=home,
                shards=[shard for shard in table.shards if store.buckets[shard.bucket] == home],
                channel=Channel(self._endpoint, peer=home, address=""),
            )
            for home in holders(table, store.buckets)
        ]
        node = self._endpoint.identity.node
        task = asyncio.current_task()
        assert task is not None
        # Before Python 3.13 a group whose task fails during its exit leaves a request to cancel the caller.
        # Requests of earlier groups are older than this call, and do not end it.
        requested = task.cancelling()
        try:
            async with asyncio.TaskGroup() as group:
                changes = self._changes()
                _map_changed(bundles, await anext(changes))
                following = group.create_task(_follow(bundles, changes), name=f"{node}/copies")
                works = [
                    group.create_task(self._repeat(bundle, work), name=f"{node}/copies-{bundle.home}")
                    for bundle in bundles
                ]
                await asyncio.gather(*works)  # in the body, so that a failure leaves no such request
                following.cancel()
        except ExceptionGroup as errors:
            if task.cancelling() > requested:  # a group with an error raises it, and no cancellation
                raise asyncio.CancelledError from None
            cause = first_cause(errors)
            raise cause from cause.__cause__

    async def _repeat(
        self, bundle: _Bundle, work: Callable[[Link, Sequence[ShardSpec]], Awaitable[None]]
    ) -> None:
        """Call a function with a link to the primary; repeat the call after a failure that a new primary may
        repair."""
        loop, since, lacked_copies = asyncio.get_running_loop(), math.inf, False
        while True:
            bundle.moved.clear()
            failure = await self._attempt(bundle, work)
            if failure is None:
                return
            now, lacks_copies = loop.time(), bundle.lacks_copies
            since = min(since, now) if lacks_copies == lacked_copies else now
            lacked_copies = lacks_copies
            longest_s = self._waits.copies_s if lacks_copies else self._waits.patience_s
            if not bundle.stands or now - since >= longest_s:
                raise failure
            await bundle.channel.pause(bundle.moved)

    async def _attempt(
        self, bundle: _Bundle, work: Callable[[Link, Sequence[ShardSpec]], Awaitable[None]]
    ) -> Exception | None:
        """Call a function once; returns the failure that a new primary may repair, else None."""
        channel, primary = bundle.channel, bundle.primary
        unavailable = ShardUnavailable(str(bundle), self._waits.patience_s)
        if primary is None:
            return unavailable
        try:
            async with asyncio.timeout(None) as bundle.attempt:
                link = await channel.dial(self._waits.dial_s)
                peer = link.peer
                if (peer.role, peer.node, peer.incarnation) != ("ps", primary.node, primary.incarnation):
                    return unavailable
                await work(link, bundle.shards)
            bundle.attempt = None  # a timeout that has ended cannot be rescheduled
            await channel.aclose()
            return None
        except PASSING as error:
            if isinstance(error, RemoteError) and error.code not in NOT_SERVING:
                raise
            return error
        except TimeoutError:
            if bundle.primary == primary:
                raise
            return unavailable
        finally:
            bundle.attempt = None
            channel.drop()


def _load_messages(store: StoreRecord, shards: Sequence[Shard]) -> Iterator[Message]:
    by_number = {int(shard.spec.id): shard for shard in shards}
    for numbers in chunks_of([shard.spec for shard in shards], store.arrays_per_value):
        some = [by_number[number] for number in numbers]
        names = tuple(dict.fromkeys([name for each in some for name in each.rule_state]))
        states = [state_of(each) if store.program else ShardState(int(each.spec.id), 0, {}) for each in some]
        arrays = [
            array
            for each in some
            for array in (each.values, *(each.rule_state.get(name, each.values[:0]) for name in names))
        ]
        body = LoadShards(store=store.id, generation=store.generation, arrays=names)
        yield pack(body, [*state_tables(states), *arrays])


def _most_clock(cluster: ClusterMap) -> int:
    """Return a clock, in steps, that no replica of the run can exceed; the servers have the same bound."""
    store, epoch = cluster.run_store, cluster.epoch
    stands_at = store.first_clock if store is not None else 0
    if epoch is None:
        return most_clock(stands_at=stands_at, epochs=1, groups=0)
    stands_at = max(stands_at, epoch.first_clock)
    return most_clock(stands_at=stands_at, epochs=epoch.number + 1, groups=epoch.groups)


def _map_changed(bundles: Sequence[_Bundle], cluster: ClusterMap) -> None:
    for bundle in bundles:
        bundle.map_changed(cluster)


async def _follow(bundles: Sequence[_Bundle], changes: AsyncIterator[ClusterMap]) -> None:
    async for cluster in changes:
        _map_changed(bundles, cluster)
