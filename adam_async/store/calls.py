"""The calls of a client of a store: each sends its messages, and takes their answers."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.controller.client import Membership
from adam_async.errors import DeadlineExceeded, StoreError
from adam_async.messages import REFUSED, Pushed
from adam_async.messages import Values as ValuesMessage
from adam_async.parameter_server.client import ParameterClient, StepPush
from adam_async.run.ids import ShardId
from adam_async.run.store_record import StoreRecord
from adam_async.store.layout import FactorMessage, ShardMessage, StoreLayout, StorePlan
from adam_async.store.pushing import Outgoing
from adam_async.store.values import PushOutcome, ReadVersions, RefusedShard, Values
from adam_async.store.wish import StoreWish
from transport import RemoteProtocolError


class Gathered(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A push, checked and gathered, before its sending.

    Attributes:
        versions: For each message, the versions of its shards that the gradients were computed from.
        own: Number of this client's pushes that the values had in addition to these versions, by array.
        assign: Whether the values replace the values of the store.
    """

    messages: Sequence[Outgoing]
    versions: Sequence[tuple[int, ...]]
    own: Mapping[str, int]
    weight: int
    assign: bool


class Call(msgspec.Struct, kw_only=True, eq=False):
    """One call, from its place in the queue to its last answer: a push, a pull, or a push that pulls.

    Attributes:
        calls: The calls of the client.
        done: Future that ends with the call, unless its caller was cancelled.
        push: The push; None for a pull.
        plan: Messages for the shards of the pulled arrays; None for a push.
        targets: Flat memory to fill, by name. The call allocates the memory of other arrays.
    """

    calls: "Calls"
    done: "asyncio.Future[None]"
    push: Gathered | None = None
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
    """Values of messages of several arrays, by the number of the message."""
    _arrays: dict[str, NDArray[Any]] = {}
    _read: NDArray[np.int64] | None = None
    _versions: dict[str, int] = {}
    _refused: list[RefusedShard] = []

    def __post_init__(self) -> None:
        plan, push = self.plan, self.push
        if plan is not None:
            self._left = len(plan.messages)
            self._read = self.calls.layout.unread.copy()
            for record in plan.apart:
                if record.name not in self.targets:
                    self.targets[record.name] = np.empty(record.shape, record.dtype).reshape(-1)
        elif push is not None:
            self._left = len(push.messages)

    # --- sending -------------------------------------------------------------------------------

    def send(self) -> None:
        """Send the messages of the call; a pull only if its caller was not cancelled."""
        if self.push is not None:
            self._send_push(self.push)
        elif self.done.done():
            self.calls.ended(self)
            return
        elif self.plan is not None:
            self._send_pull(self.plan)

    def _send_push(self, push: Gathered) -> None:
        """Send a push. In bsp it ends the step on its shards, in ssp it belongs to the step in progress."""
        calls, own = self.calls, push.own
        if calls.is_summed:
            calls.note_pushed(push)
        clock = epoch = 0
        if calls.slack is not None and not push.assign:
            clock, epoch = calls.clock + calls.is_summed, 1
        for number, message in enumerate(push.messages):
            of = message.shards
            step = StepPush(
                parts=of.parts,
                shards=of.shards,
                tensors=message.tensors,
                versions=push.versions[number],
                own_applied=tuple([own.get(name, 0) for name in of.names]) if own else of.zeros,
                clock=clock,
                weight=push.weight,
                rate=message.rate,
                epoch=epoch,
                assign=push.assign,
                pull=self.plan is not None,
            )
            calls.connections[of.server].push(step, self, number, self._into(of))
        if not push.messages:
            self.freed()

    def _send_pull(self, plan: StorePlan) -> None:
        calls = self.calls
        self._bound = calls.bound
        if self._bound:
            self._timer = calls.loop.call_later(calls.clock_s, self._expire)
        for number, message in enumerate(plan.messages):
            connection = calls.connections[message.server]
            connection.pull(message.shards, self, number, self._bound, self._into(message))
        if not plan.messages:
            self.freed()

    def _into(self, message: ShardMessage | FactorMessage) -> NDArray[Any] | None:
        """Return memory for the answer to a message of one range; None for pooled memory."""
        if self.plan is None or isinstance(message, FactorMessage) or len(message.ranges) != 1:
            return None
        only = message.ranges[0]
        return self.targets[only.name][only.start : only.stop]

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
            RemoteProtocolError: The answer has another number of versions, or a problem of another shard; or
                see `take`.
        """
        if values is not None:
            self.take(number, answer.versions, answer.clock, values)
            return
        assert self.push is not None
        of, versions = self.push.messages[number].shards, self._versions
        if len(answer.versions) != len(of.shards) or any(
            problem.index >= len(of.shards) for problem in answer.problems
        ):
            raise RemoteProtocolError(
                "versions",
                f"{len(answer.versions)} versions, and problems of shards "
                f"{[problem.index for problem in answer.problems[:8]]}, do not fit {len(of.shards)} shards",
            )
        self.calls.note_versions(of.index, answer.versions)
        if isinstance(of, ShardMessage) and of.whole:
            versions.update(zip(of.names, answer.versions, strict=True))
        else:
            for name, version in zip(of.names, answer.versions, strict=True):
                versions[name] = min(versions.get(name, version), version)
        for problem in answer.problems:
            if problem.status == REFUSED:
                spec = self.calls.layout.table.shards[of.shards[problem.index]]
                self._refused.append(RefusedShard(name=spec.tensor, start=spec.start, stop=spec.stop))

    def pulled(self, number: int, answer: ValuesMessage, values: NDArray[Any]) -> None:
        """Take the answer to a pull. For errors see `take`."""
        self.take(number, answer.versions, answer.clock, values)

    def take(self, number: int, versions: Sequence[int], clock: int, flat: NDArray[Any]) -> None:
        """Take the values of a message.

        Raises:
            RemoteProtocolError: The answer has another number of versions or values, or another type.
        """
        assert self.plan is not None
        message = self.plan.messages[number]
        if (
            len(versions) != len(message.shards)
            or flat.shape != (message.size,)
            or flat.dtype != message.dtype
        ):
            raise RemoteProtocolError(
                "values",
                f"{len(versions)} versions and values {flat.dtype}{flat.shape} do not fit "
                f"{len(message.shards)} shards of {message.size} values {message.dtype}",
            )
        assert self._read is not None
        read = np.array(versions, np.int64)
        self._read[message.index] = read
        self.calls.note_versions(message.index, read)
        self.clocks.append(clock)
        if len(message.ranges) > 1:
            flat.flags.writeable = False
            self._flats[number] = flat
            for each in message.ranges if self.targets else ():
                target = self.targets.get(each.name)
                if target is not None:
                    target[each.start : each.stop] = flat[each.at : each.at + each.stop - each.start]

    def behind(self, answer: ValuesMessage) -> bool:
        """Take an answer without values; the pull goes on while its caller waits."""
        self._late = tuple(answer.behind)
        return not self.done.done()

    def _expire(self) -> None:
        late = self.calls.named(self._late)
        self.fail(DeadlineExceeded(f"{late} to end step {self._bound}", self.calls.clock_s))

    # --- the end -------------------------------------------------------------------------------

    def freed(self) -> None:
        """Note that a message is answered, and that no send reads its tensors."""
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
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # a call without a waiting caller is no defect

    def outcome(self) -> PushOutcome:
        """Return the outcome of a push; call it when `done` has ended."""
        return PushOutcome(versions=self._versions, refused=tuple(self._refused))

    def values(self) -> Values:
        """Return the values of a pull; call it when `done` has ended."""
        assert self.plan is not None
        assert self._read is not None
        read = ReadVersions(self.calls.store.id, self._read)
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
    """The calls of one client of a store, in order: a push waits while a server owes too many answers.

    The calls after a queued push wait behind it. A queued call is independent of its caller, so that a
    cancelled push keeps its place.

    Args:
        wish: Arguments of the caller.
        store: The store.
        layout: Its shards.
        servers: Client of the servers.
        membership: Membership of the client.
    """

    def __init__(
        self,
        wish: StoreWish,
        store: StoreRecord,
        layout: StoreLayout,
        servers: ParameterClient,
        membership: Membership,
    ) -> None:
        self.store = store
        self.layout = layout
        self.loop = asyncio.get_running_loop()
        self.connections = servers.connections
        self.clock_s = wish.waits.clock_s
        self.clock = 0
        """Number of steps that this client has ended."""
        self._is_reader = wish.reader
        self.is_summed = store.summed_weight > 0
        self.slack = store.slack
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
        """Timeouts of the waits for the first step; a failure of this client ends them."""
        self._error: BaseException | None = None

    def put(self, call: Call) -> None:
        """Send a call after the earlier ones: at once if none waits, otherwise later."""
        self._open[call] = None
        if self._queued or (call.push is not None and not self.servers.may_push):
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
                if self._queued[0].push is not None:
                    await self.servers.admit()
                self._send(self._queued.popleft())
            self._has_queued.clear()
            await self._has_queued.wait()

    def ended(self, call: Call) -> None:
        """Take note of the end of a call."""
        self._open.pop(call, None)
        if self._settling and not self._is_pushing():
            for waiter in self._settling:
                if not waiter.done():
                    waiter.set_result(None)
            self._settling.clear()

    def _is_pushing(self) -> bool:
        return any(call.push is not None for call in self._open)

    def fail(self, error: BaseException) -> None:
        """End all waits with an error; only the first error counts."""
        if self._error is None:
            self._error = error
            for call in self._open:
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

    def note_pushed(self, push: Gathered) -> None:
        """Refuse a second push of an array in a step of bsp, and an assignment after a push."""
        shards = {shard for message in push.messages for shard in message.shards.shards}
        if again := shards & self._pushed:
            name = self.layout.table.shards[min(again)].tensor
            raise StoreError(
                f"array {name[:80]!r} was pushed before in this step: with bsp call tick() after each step"
            )
        if not push.assign:
            self._pushed |= shards

    def note_versions(
        self, index: slice | NDArray[np.intp], versions: Sequence[int] | NDArray[np.int64]
    ) -> None:
        """Take note of the versions of an answer."""
        seen = self._seen
        if isinstance(index, slice) and index.stop - index.start == 1:
            # One shard is the usual case of small stores; numpy would take several times as long.
            seen[index.start] = max(versions[0], seen[index.start])
        else:
            seen[index] = np.maximum(seen[index], versions)

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
        """Clock that the values of a pull must reach; 0 without clocks, and for a reader."""
        return 0 if self.slack is None or self._is_reader else max(self.clock - self.slack, 0)

    def named(self, late: Sequence[int]) -> str:
        """Return the places of some clients with their nodes, as ``store show`` has them."""
        pushers = self._membership.map.pushers(self.store)
        names = []
        for place in late:
            _, members = pushers.get(place, (0, frozenset()))
            nodes = ", ".join(sorted(node for node, _ in members))
            names.append(f"client {place} ({nodes})" if nodes else f"client {place}")
        return ", ".join(names) or "a client"
