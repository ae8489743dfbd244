"""One client's calls of a store, in order: each sends its messages and takes their answers.

In bsp a push names its step. In ssp the tick at the end of a step names it, so that a step may have any
number of pushes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient
from adam_async.controller.client import Membership
from adam_async.errors import DeadlineExceeded, StoreError
from adam_async.messages import REFUSED, OfEach, Pushed, each_of, fits, joined
from adam_async.messages import Values as ValuesMessage
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.ids import ShardId
from adam_async.run.store_record import ArrayRecord, StoreRecord, VectorRecord
from adam_async.runtime.machine import available_bytes
from adam_async.store.arguments import OpenArguments
from adam_async.store.arrays import out_memory
from adam_async.store.layout import FactorMessage, ShardMessage, StoreLayout, StorePlan
from adam_async.store.values import (
    Outgoing,
    PushBuffers,
    PushMessages,
    PushOutcome,
    ReadVersions,
    RefusedShard,
    Values,
)
from transport import BufferPool, RemoteProtocolError
from transport.regions import as_one

LARGE_BYTES = 1 << 28
"""Total size in bytes of a store's arrays up to which a pull does not check the available memory."""


def check_loop(name: str, loop: asyncio.AbstractEventLoop) -> None:
    """Check that the running loop is the one in which a store was opened. Raises StoreError: it is not."""
    if asyncio.get_running_loop() is not loop:
        raise StoreError(
            f"store {name!r} was opened in another event loop: call it there, for example with "
            "asyncio.run_coroutine_threadsafe, or open it with adam_async.sync"
        )


def _joined(versions: NDArray[np.int64]) -> OfEach:
    """Return the versions of a message's shards in the form in which they travel."""
    first = int(versions[0])
    # One shard is the usual case in small stores; NumPy would take several times as long.
    return first if len(versions) == 1 or (versions == first).all() else tuple(versions.tolist())


class MoreFields(TypedDict, total=False):
    """Fields of `Push` that few pushes have."""

    vector: int
    groups: tuple[int, ...]


class Call(msgspec.Struct, kw_only=True, eq=False):
    """One call, from its place in the queue to its last answer: a push, a pull, or a push that pulls.

    Attributes:
        calls: The calls of the client.
        done: Future that ends with the call, unless its caller was cancelled.
        messages: Messages of a push; None for a pull.
        versions: For each message of a push, the versions of its shards that the gradients were computed
            from.
        own: Number of this client's pushes that the values had in addition to these versions, by array.
        weight: Weight of the gradients in the mean of a step.
        assign: Whether a push's values replace those of the store.
        more: Further fields of a push's messages.
        vector: Number of the vector that a pull reads; 0 for the values.
        plan: Messages for the shards of the pulled arrays; None for a push.
        targets: Flat memory to fill, by name. The call allocates the memory of other arrays.
    """

    calls: "Calls"
    done: "asyncio.Future[None]"
    messages: Sequence[Outgoing] | None = None
    versions: Sequence[OfEach] = ()
    own: Mapping[str, int] = {}
    weight: int = 1
    assign: bool = False
    more: MoreFields = {}
    vector: int = 0
    plan: StorePlan | None = None
    targets: dict[str, NDArray[Any]] = {}
    error: Exception | None = None
    """Error with which the call was not sent."""
    clocks: list[int] = []
    """Clock of each answer with values."""
    _left: int = 0
    """Number of messages without an answer."""
    _bound: int = 0
    _timer: asyncio.TimerHandle | None = None
    _late: tuple[int, ...] = ()
    _flats: dict[int, NDArray[Any]] = {}
    """Values that were not received in `targets`, by the number of the message."""
    _arrays: dict[str, NDArray[Any]] = {}
    _read: NDArray[np.int64] | None = None
    _versions: dict[str, int] = {}
    _refused: list[RefusedShard] = []

    def __post_init__(self) -> None:
        plan = self.plan
        if plan is None:
            self._left = len(self.messages or ())
            return
        self._left = len(plan.messages)
        self._read = self.calls.layout.unread.copy()
        # In shared memory the parts of an array usually lie in one piece, which needs no memory here.
        if plan.apart and not all(self.calls.connections[each.server].shares for each in plan.messages):
            for record, _ in plan.apart:
                if record.name not in self.targets:
                    self.targets[record.name] = self._memory_of(record)

    def _memory_of(self, record: ArrayRecord) -> NDArray[Any]:
        return self.calls.memory.lend(record.nbytes, np.dtype(record.dtype), (record.size,))[0]

    # --- sending -------------------------------------------------------------------------------

    def send(self) -> None:
        """Send the call's messages; for a pull, only if its caller was not cancelled."""
        if self.messages is not None:
            self._send_push(self.messages)
        elif self.done.done():
            self.calls.ended(self)
            return
        elif self.plan is not None:
            self._send_pull(self.plan)

    def _send_push(self, messages: Sequence[Outgoing]) -> None:
        """Send a push. In bsp the push ends the step on its shards, in ssp it belongs to the current step."""
        calls, own = self.calls, self.own
        if calls.is_summed:
            calls.note_pushed([message.shards.shards for message in messages], assign=self.assign)
        clock = epoch = 0
        if calls.slack is not None and not self.assign:
            clock, epoch = calls.clock + calls.is_summed, 1
        for number, message in enumerate(messages):
            of = message.shards
            calls.connections[of.server].push(
                message.tensors,
                self,
                number,
                self._into(of),
                parts=of.parts,
                shards=of.shards,
                versions=self.versions[number],
                own_applied=joined([own.get(name, 0) for name in of.names]) if own else 0,
                clock=clock,
                weight=self.weight,
                rate=message.rate,
                epoch=epoch,
                assign=self.assign,
                pull=self.plan is not None,
                **self.more,
            )
        if not messages:
            self.freed()

    def _send_pull(self, plan: StorePlan) -> None:
        calls = self.calls
        self._bound = calls.bound
        if self._bound:
            self._timer = calls.loop.call_later(calls.clock_s, self._expire)
        for number, message in enumerate(plan.messages):
            connection = calls.connections[message.server]
            connection.pull(message.shards, self, number, self._bound, self._into(message), self.vector)
        if not plan.messages:
            self.freed()

    def _into(self, message: ShardMessage | FactorMessage) -> NDArray[Any] | None:
        """Return the part of `targets` for the answer to a message of one range; None for pooled memory."""
        if not self.targets or isinstance(message, FactorMessage) or len(message.ranges) != 1:
            return None
        only = message.ranges[0]
        target = self.targets.get(only.name)
        return None if target is None else target[only.start : only.stop]

    def prepare(self) -> None:
        """Make the arrays whose memory is known, while the answers are on their way."""
        records = self.calls.layout.arrays
        for name, flat in self.targets.items():
            array = self._arrays[name] = flat.reshape(records[name].shape)
            array.flags.writeable = False

    # --- answers -------------------------------------------------------------------------------

    def pushed(self, number: int, answer: Pushed, values: NDArray[Any] | None) -> None:
        """Take the answer to a push; with values the call reports no refused parts.

        Raises:
            RemoteProtocolError: The answer has another number of versions, or names a problem with another
                shard; or see `take`.
        """
        if values is not None:
            self.take(number, answer.versions, answer.clock, values)
            return
        assert self.messages is not None
        of, versions = self.messages[number].shards, self._versions
        count, problems = len(of.shards), answer.problems
        if not fits(count, answer.versions) or (problems and any(each.index >= count for each in problems)):
            raise RemoteProtocolError(
                "versions",
                f"{len(each_of(answer.versions, count))} versions, and problems of shards "
                f"{[problem.index for problem in problems[:8]]}, do not fit {count} shards",
            )
        self.calls.note_versions(of.index, answer.versions)
        if isinstance(of, ShardMessage) and of.whole:
            versions.update(zip(of.names, each_of(answer.versions, count), strict=True))
        else:
            for name, version in zip(of.names, each_of(answer.versions, count), strict=True):
                versions[name] = min(versions.get(name, version), version)
        for problem in problems:
            if problem.status == REFUSED:
                self.refuse_shard(of.shards[problem.index])

    def refuse_shard(self, shard: ShardId) -> None:
        """Note that a shard has refused the call."""
        spec = self.calls.layout.table.shards[shard]
        self._refused.append(RefusedShard(name=spec.tensor, start=spec.start, stop=spec.stop))

    def pulled(self, number: int, answer: ValuesMessage, values: NDArray[Any]) -> None:
        """Take the answer to a pull. For errors see `take`."""
        if answer.deleted and self.vector:
            self.fail(StoreError("another client has deleted the vector"))
            return
        self.take(number, answer.versions, answer.clock, values)

    def take(self, number: int, versions: OfEach, clock: int, flat: NDArray[Any]) -> None:
        """Take the values of a message.

        Raises:
            RemoteProtocolError: The answer has another number of versions or values, or another type.
        """
        assert self.plan is not None
        message = self.plan.messages[number]
        shards = len(message.shards)
        has_versions = isinstance(versions, int) or len(versions) == shards
        if not has_versions or flat.shape != (message.size,) or flat.dtype != message.dtype:
            raise RemoteProtocolError(
                "values",
                f"{len(each_of(versions, shards))} versions and values {flat.dtype}{flat.shape} do not fit "
                f"{shards} shards of {message.size} values {message.dtype}",
            )
        assert self._read is not None
        self._read[message.index] = self.calls.note_versions(message.index, versions)
        self.clocks.append(clock)
        if len(message.ranges) > 1 or message.ranges[0].name not in self.targets:
            flat.flags.writeable = False
            self._flats[number] = flat
            for each in message.ranges if self.targets else ():
                target = self.targets.get(each.name)
                if target is not None:
                    target[each.start : each.stop] = flat[each.at : each.at + each.stop - each.start]

    def behind(self, number: int, answer: ValuesMessage) -> bool:
        """Take an answer without values; the pull goes on while its caller waits."""
        self._late = tuple(answer.behind)
        return not self.done.done()

    def _expire(self) -> None:
        late = self.calls.named(self._late)
        self.fail(DeadlineExceeded(f"{late} to end step {self._bound}", self.calls.clock_s))

    # --- the end -------------------------------------------------------------------------------

    def freed(self) -> None:
        """Record that a message is answered, and that no send reads its tensors."""
        self._left -= 1
        if self._left <= 0:
            if self._timer is not None:
                self._timer.cancel()
            self.calls.ended(self)
            if not self.done.done():
                self.done.set_result(None)

    def refuse(self, error: Exception) -> None:
        """End an unsent call with an error."""
        self.error = error
        self.calls.ended(self)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the wait of the caller with an error."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # a call without a waiting caller is no defect

    def outcome(self) -> PushOutcome:
        """Return a push's outcome; call it when `done` has ended."""
        return PushOutcome(versions=self._versions, refused=tuple(self._refused))

    def values(self) -> Values:
        """Return a pull's values; call it when `done` has ended."""
        assert self.plan is not None
        assert self._read is not None
        read = ReadVersions(self.calls.store.id, self._read)
        for record, places in self.plan.apart:
            if record.name not in self._arrays:
                parts = [self._flats[number][part] for number, part in places]
                whole = as_one(parts) if parts else None
                if whole is None:  # a part is not where the server has its newest values
                    whole = self._memory_of(record)
                    if parts:
                        np.concatenate(parts, out=whole)
                    whole.flags.writeable = False
                self._arrays[record.name] = whole.reshape(record.shape)
        return Values(self.plan, self._flats, self._arrays, read, min(self.clocks, default=0))


class Tick(Call, kw_only=True, eq=False):
    """The end of a step, unless the push `after` was refused."""

    after: Call | None = None

    def send(self) -> None:
        """See `Call`. The call ends at once: no caller waits for the answers of ticks."""
        if self.after is not None and self.after.error is not None:
            raise self.after.error
        self.calls.send_ticks()
        self.freed()


class Calls:
    """One client's calls of a store, in order: a push waits while a server owes too many answers.

    The calls after a queued push wait behind it. A queued call is independent of its caller, so that a
    cancelled push keeps its place.

    Args:
        name: Name of the store.
        arguments: Arguments of the caller.
        store: The store.
        layout: Its shards.
        rates: Default rate of each rule.
        servers: Client of the servers.
        membership: Membership of the client.
    """

    def __init__(
        self,
        name: str,
        arguments: OpenArguments,
        store: StoreRecord,
        layout: StoreLayout,
        rates: tuple[float, ...],
        servers: ParameterClient,
        membership: Membership,
    ) -> None:
        self.name = name
        self.store = store
        self.layout = layout
        self.loop = asyncio.get_running_loop()
        self.connections = servers.connections
        self.clock_s = arguments.waits.clock_s
        self.clock = 0
        """Number of steps that this client has ended."""
        self.groups_epoch = 0
        """Highest epoch of the groups that the servers had at this client's steps on vectors."""
        self.memory = BufferPool()
        """Memory of pulled arrays that come in several messages."""
        self._shares = arguments.link != "tcp"
        self.is_reader = arguments.reader
        self.is_summed = store.summed_weight > 0
        self.slack = store.slack
        self.has_begun = store.slack is None
        """Whether the clocks of the store have begun."""
        self._has_clock = store.slack is None or arguments.reader
        """Whether the clock of this client has begun at the clock of the others."""
        self.gradients = PushMessages(layout, rates, is_summed=self.is_summed)
        self._prepare_s = arguments.waits.prepare_s
        self.servers = servers
        self._membership = membership
        self._seen: NDArray[np.int64] = np.zeros(len(layout.table.shards), np.int64)
        """Newest version of each shard that this client has seen."""
        self._pushed: set[ShardId] = set()
        """Shards pushed in the step in progress, in bsp."""
        self._queued: deque[Call] = deque()
        self._has_queued = asyncio.Event()
        self._open: dict[Call, None] = {}
        """Calls that have not ended."""
        self._settling: list[asyncio.Future[None]] = []
        """Futures of callers that wait for the end of all pushes."""
        self._beginning: set[asyncio.Timeout] = set()
        """Timeouts of the waits for the first step; if this client fails, they end."""
        self._error: BaseException | None = None

    def check(self) -> None:
        """Check that the client is open, and in this loop.

        Raises:
            StoreError: It is not.
            Exception: The error with which the client has failed.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        # A future of another loop would never wake its caller.
        if asyncio.get_running_loop() is not self.loop:
            check_loop(self.name, self.loop)

    async def begin_push(self) -> None:
        """Refuse the push of a reader, and wait for the first step."""
        if self.is_reader:
            raise StoreError("this client is a reader: open the store without reader=True to push")
        if not self.has_begun:
            await self.begin()
            self.check()

    async def begin(self) -> None:
        """Wait until the clocks of the store have begun: they wait for `replicas` clients."""
        name, id, wanted = self.name, self.store.id, self.store.replicas

        def has_begun(cluster: ClusterMap) -> bool:
            store = cluster.stores.get(name)
            return store is None or store.id != id or store.epoch > 0

        what = f"{wanted} clients of store {name!r}, with which its first step begins"
        limit = asyncio.timeout(None)
        self._beginning.add(limit)
        try:
            async with limit:
                await self._membership.wait_for(has_begun, what, self._prepare_s)
        except TimeoutError:
            if limit.expired():
                self.check()
            raise
        finally:
            self._beginning.discard(limit)
        self.has_begun = True

    def new_push(
        self,
        messages: Sequence[Outgoing],
        read: Values | ReadVersions | None,
        *,
        weight: int = 1,
        assign: bool = False,
        plan: StorePlan | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
        more: MoreFields | None = None,
    ) -> Call:
        """Return a push with the versions that its gradients were computed from.

        Unread shards count with the newest version seen. With a plan the answers bring the values.
        """
        targets = {} if plan is None or out is None else out_memory(self.layout.arrays, plan.names, out)
        seen = self._seen
        own: Mapping[str, int] = {}
        if read is not None:
            versions = read.read if isinstance(read, Values) else read
            if not isinstance(versions, ReadVersions):
                raise StoreError(
                    f"read takes the values of a pull, or their versions, not {type(read).__name__}"
                )
            if versions.store != self.store.id:
                raise StoreError("read holds versions of another store: pull from this one")
            seen, own = np.where(versions.of_shards < 0, seen, versions.of_shards), versions.own
        # Copied, because versions in later answers must not count as read before this call.
        known = [_joined(seen[message.shards.index]) for message in messages]
        return Call(
            calls=self,
            done=self.loop.create_future(),
            messages=messages,
            versions=known,
            own=own,
            weight=weight,
            assign=assign,
            more=more or {},
            plan=plan,
            targets=targets,
        )

    @property
    def newest(self) -> StoreRecord:
        """The store's record in the newest map, or the last one before its end."""
        store = self._membership.map.stores.get(self.name)
        return store if store is not None and store.id == self.store.id else self.store

    async def change_vectors(
        self, change: Callable[[tuple[VectorRecord, ...]], tuple[VectorRecord, ...]]
    ) -> None:
        """Change the store's vectors; for errors see `Membership.change_vectors`."""
        self.check()
        if self.is_reader:
            raise StoreError("this client is a reader: open the store without reader=True to change vectors")
        await self._membership.change_vectors(self.name, self.store.id, change)

    def new_tick(self, after: Call | None = None) -> Call:
        """Return the end of a step, unless the push `after` is refused."""
        return Tick(calls=self, done=self.loop.create_future(), after=after)

    async def start(self) -> None:
        """Begin at the other clients' clock: end the steps on all shards up to it.

        On each shard a late client begins at the slowest clock of the other clients there. The client's own
        clock is the highest of these clocks. Without these ticks the client's first pull would wait for its
        own steps.
        """
        if not self._has_clock:
            await self.pull(None, None)
            if self.clock:
                self._tick_all()

    async def pull(
        self, names: Iterable[str] | None, out: Mapping[str, NDArray[Any]] | None, vector: int = 0
    ) -> Values:
        """See `ParameterStore.pull`; `vector` is the number of a vector, or 0 for the values."""
        self.check()
        if names is None:
            self.check_room()
        call = self.new_pull(self.layout.arrays if names is None else names, out, vector)
        self.put(call)
        return await self.pulled(call)

    def check_room(self, times: int = 1) -> None:
        """Refuse to read all arrays if they do not fit into memory: another client may have chosen them.

        Args:
            times: Number of arrays for each of the store's arrays.

        Raises:
            StoreError: The arrays take more than the available memory.
        """
        nbytes = self.store.nbytes * times
        if nbytes > LARGE_BYTES and nbytes > (available := available_bytes()):
            raise StoreError(
                f"store {self.name!r} has arrays of {nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of "
                "memory are available here: pull arrays by their names, or use a larger machine"
            )

    def buffers(self, names: Sequence[str] | None) -> PushBuffers:
        """See `ParameterStore.buffers`."""
        self.check()
        if names is None:
            self.check_room()
        return PushBuffers(self._plan_of(self.layout.arrays if names is None else names), shares=self._shares)

    def _plan_of(self, names: Iterable[str]) -> StorePlan:
        if isinstance(names, str):
            raise StoreError(f"names is a sequence of names: [{names!r}]")
        return self.layout.plan(tuple(dict.fromkeys(names)))

    def new_pull(self, names: Iterable[str], out: Mapping[str, NDArray[Any]] | None, vector: int = 0) -> Call:
        """Check a pull, and return it."""
        plan = self._plan_of(names)
        targets = {} if out is None else out_memory(self.layout.arrays, plan.names, out)
        return Call(calls=self, done=self.loop.create_future(), plan=plan, targets=targets, vector=vector)

    async def pulled(self, pull: Call) -> Values:
        pull.prepare()
        await pull.done
        if not self._has_clock:
            self.clock, self._has_clock = max(pull.clocks, default=0), True
        return pull.values()

    def put(self, call: Call) -> None:
        """Send a call after the earlier ones: at once if none waits, otherwise later."""
        self._open[call] = None
        if self._queued or (call.messages is not None and not self.servers.may_push):
            self._queued.append(call)
            self._has_queued.set()
        else:
            self._send(call)

    def _send(self, call: Call) -> None:
        try:
            call.send()
        except Exception as error:
            # Any error but `StoreError` is a defect, and the caller must not wait for ever.
            call.refuse(error)

    async def run(self) -> None:
        """Send the queued calls."""
        while True:
            while self._queued:
                if self._queued[0].messages is not None:
                    await self.servers.admit()
                self._send(self._queued.popleft())
            self._has_queued.clear()
            await self._has_queued.wait()

    def ended(self, call: Call) -> None:
        """Record that a call has ended."""
        self._open.pop(call, None)
        if self._settling and not self._is_pushing():
            for waiter in self._settling:
                if not waiter.done():
                    waiter.set_result(None)
            self._settling.clear()

    def _is_pushing(self) -> bool:
        return any(call.messages is not None for call in self._open)

    def fail(self, error: BaseException) -> None:
        """End all waits with an error; only the first error counts."""
        if self._error is None:
            self._error = error
            for call in tuple(self._open):  # a garbage collection may free the last tensor of a push here
                call.fail(error)
            for waiter in self._settling:
                if not waiter.done():
                    waiter.set_exception(error)
            for limit in self._beginning:
                limit.reschedule(self.loop.time())

    async def until_settled(self) -> None:
        """Wait until no push is open."""
        if self._error is None and self._is_pushing():
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._settling.append(waiter)
            await waiter

    def note_pushed(self, several: Iterable[Sequence[ShardId]], *, assign: bool) -> None:
        """Refuse a second push of an array in a step of bsp, and an assignment after a push."""
        shards = {shard for each in several for shard in each}
        if again := shards & self._pushed:
            name = self.layout.table.shards[min(again)].tensor
            raise StoreError(
                f"array {name[:80]!r} was pushed before in this step: with bsp call tick() after each step"
            )
        if not assign:
            self._pushed |= shards

    def note_versions(self, index: slice | NDArray[np.intp], versions: OfEach) -> int | NDArray[np.int64]:
        """Record an answer's versions, and return them."""
        seen, found = self._seen, versions if isinstance(versions, int) else np.array(versions, np.int64)
        if isinstance(found, int) and isinstance(index, slice) and index.stop - index.start == 1:
            # One shard is the usual case in small stores; numpy would take several times as long.
            seen[index.start] = max(found, seen[index.start])
        else:
            part = seen[index]
            seen[index] = np.maximum(part, found, out=part)
        return found

    def send_ticks(self) -> None:
        """End the step on all shards that no push of the step has ended."""
        self.clock += 1
        self._tick_all()
        self._pushed.clear()

    def _tick_all(self) -> None:
        for message in self.layout.everything:
            shards = tuple([shard for shard in message.shards if shard not in self._pushed])
            if shards:
                self.connections[message.server].tick(shards, self.clock, 1)

    @property
    def bound(self) -> int:
        """Clock that a pull's values must reach; 0 without clocks, and for a reader."""
        return 0 if self.slack is None or self.is_reader else max(self.clock - self.slack, 0)

    def named(self, late: Sequence[int]) -> str:
        """Return the places of some clients with their nodes, as ``store show`` has them."""
        pushers = self._membership.map.pushers(self.store)
        names = []
        for place in late:
            _, members = pushers.get(place, (0, frozenset()))
            nodes = ", ".join(sorted(node for node, _ in members))
            names.append(f"client {place} ({nodes})" if nodes else f"client {place}")
        return ", ".join(names) or "a client"
