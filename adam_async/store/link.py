"""One client of a store: its joining, pushes, pulls and end. `ParameterStore` is its interface.

The client is a member of the cluster, with the role `client` or `reader`; a reader has no place in the clocks
and may not push. In bsp a push names its step; in ssp the tick at the end of a step names it, so that a step
may have any number of pushes.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from adam_async.controller.client import Membership
from adam_async.errors import DeadlineExceeded, StoreError
from adam_async.messages import Values as ValuesMessage
from adam_async.parameter_server.client import ParameterClient, SessionIdentity, StepPush
from adam_async.run.cluster_map import ClusterMap, NodeRecord, replica_generation
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import holders, shard_table
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.machine import available_bytes
from adam_async.runtime.traffic import Traffic
from adam_async.store.arrays import Gradient
from adam_async.store.call_queue import CallQueue
from adam_async.store.joining import Joining
from adam_async.store.layout import ShardMessage, StoreLayout, StorePlan
from adam_async.store.local_servers import ServerAccess
from adam_async.store.pulling import PullCollector, pull_targets
from adam_async.store.pushing import Collector, Outgoing, PushCollector, PushMessages, Rate
from adam_async.store.rules import Rule, rule_of
from adam_async.store.values import PushOutcome, ReadVersions, Values
from adam_async.store.wish import StoreWish, consistency_of
from transport import Identity

_T = TypeVar("_T")

LARGE_BYTES = 1 << 28
"""Size of all arrays of a store up to which a pull does not check the available memory, in bytes."""

LEAVE_S = 2.0
"""Maximum time for open pushes at the end of a client, in seconds."""


def check_loop(name: str, loop: asyncio.AbstractEventLoop) -> None:
    """Check that the running loop is the one in which a store was opened. Raises StoreError: it is not."""
    if asyncio.get_running_loop() is not loop:
        raise StoreError(
            f"store {name!r} was opened in another event loop: call it there, for example with "
            "asyncio.run_coroutine_threadsafe, or open it with adam_async.sync"
        )


class StoreLink:
    """One client of a store, from its join to its end.

    Args:
        wish: Arguments of the caller.
        access: Access to the servers.
        group: Runs the background tasks.
    """

    def __init__(self, wish: StoreWish, access: ServerAccess, group: asyncio.TaskGroup) -> None:
        self._wish = wish
        self._network = access.network
        self._entropy = access.entropy
        self._waits = wish.waits
        self._group = group
        self.tasks: list[asyncio.Task[None]] = []
        """Background tasks, which the owner of this object cancels at the end."""
        role = "reader" if wish.reader else "client"
        incarnation = int.from_bytes(access.entropy(7), "little")
        self._identity = Identity(role=role, node=f"{role}-{incarnation:014x}", incarnation=incarnation)
        traffic = Traffic(self._identity.node, timeline=None)
        self._endpoint = Endpoint(access.network, self._identity, traffic)
        self._membership = Membership(
            network=access.network,
            controller=access.controllers,
            identity=self._identity,
            record=NodeRecord(role=role, address="", incarnation=incarnation),
            waits=wish.waits,
            traffic=traffic,
        )
        self.name = wish.name
        self.closed = False
        self.clock = 0
        self.slack = wish.slack
        self._is_summed = wish.is_summed
        self.rules: Mapping[str, Rule]
        """Rule of each array, with the rate of this client."""
        self.layout: StoreLayout
        self.store: StoreRecord
        self.session: SessionIdentity
        """Identity of this client among the clients of the store."""
        self._client: ParameterClient
        self._seen: NDArray[np.int64]
        """Newest version of each shard that this client has seen."""
        self._messages: PushMessages
        self._pushed: set[ShardId] = set()
        """Shards pushed in the step in progress, in bsp."""
        self._queue: CallQueue
        self._open: set[Collector] = set()
        """Pushes that are not answered."""
        self._settling: list[asyncio.Future[None]] = []
        """Futures of callers that wait for the end of all pushes."""
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        """Futures of waiting callers, which end with the failure of this client."""
        self._beginning: set[asyncio.Timeout] = set()
        """Timeouts of the waits for the first step; a failure of this client ends them."""
        self._deleting = False

    @property
    def consistency(self) -> str:
        """See `ParameterStore.consistency`."""
        return consistency_of(self.slack, is_summed=self._is_summed)

    @property
    def clients(self) -> int:
        """See `ParameterStore.clients`."""
        return max(len(self._membership.map.pushers(self.store)), 1)

    # --- failures ------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End all waits with an error; only the first error counts."""
        if self._error is None:
            self._error = error
            for future in self._waiting:
                if not future.done():
                    future.set_exception(error)
            now = asyncio.get_running_loop().time()
            for limit in self._beginning:
                limit.reschedule(now)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)
        # A future of another loop would never wake its caller.
        check_loop(self.name, self._loop)

    async def _unless_failed(self, future: "asyncio.Future[_T]") -> _T:
        """Wait for a future, or raise the error with which this client fails. Call `_check` before."""
        self._waiting[future] = None
        try:
            return await future
        finally:
            del self._waiting[future]

    # --- opening -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the cluster and the store, and begin to serve calls; for errors see `Joining.join`."""
        wish, membership = self._wish, self._membership
        self._spawn("membership", membership.run())
        joining = Joining(wish, self._endpoint, membership, self._entropy)
        store, arrays = await joining.join()
        self.slack = store.slack
        self._is_summed = store.summed_weight > 0
        table = shard_table(arrays, shard_bytes=store.shard_bytes)
        self.store = store
        self.layout = StoreLayout(arrays, table, store.buckets)
        rates = [rule.rate for rule in store.rules]
        mine = {record.name: wish.rules[record.rule].rate for record in wish.records}
        for array in arrays if mine else ():  # the rates of this client, for the rules of its arrays
            rates[array.rule] = mine[array.name]
        self._messages = PushMessages(self.layout, tuple(rates), is_summed=self._is_summed)
        rules = [rule_of(record, rate) for record, rate in zip(store.rules, rates, strict=True)]
        self.rules = {array.name: rules[array.rule] for array in arrays}
        self._seen = np.zeros(len(table.shards), np.int64)
        session = self.session = await joining.take_place(store)
        self._client = ParameterClient(
            self._endpoint,
            session=session,
            homes=holders(table, store.buckets),
            cluster=membership.map,
            waits=self._waits,
        )
        self._spawn("servers", self._client.run())
        self._queue = CallQueue(self._client)
        self._spawn("queue", self._queue.run())
        self._spawn("follow", self._follow(session))
        if self.slack is not None and not wish.reader:
            await self.pull(None, None)  # a late client begins at the clock of the others
            self._level()

    def _spawn(self, name: str, work: Any) -> None:
        self.tasks.append(self._group.create_task(work, name=f"{self._identity.node}/{name}"))

    async def _follow(self, session: SessionIdentity) -> None:
        """Follow the primaries of the store; fail if the store or this client's place ends."""
        name, node = self._wish.name, self._identity.node
        async for cluster in self._membership.changes():
            store = cluster.stores.get(name)
            if store is None or store.id != session.store:
                if self._deleting:  # `delete` closes this client next
                    return
                raise StoreError(f"store {name!r} was deleted")
            if store.phase == "failed":
                raise StoreError(f"store {name!r} failed: {store.reason}")
            self._client.map_changed(cluster)
            mine = cluster.nodes.get(node)
            if mine is None or self._wish.reader:
                continue
            if (
                mine.placed
                and replica_generation([(mine.incarnation, mine.placed)], 1) != session.incarnation
            ):
                raise StoreError(
                    f"the controllers did not hear of this client of store {name!r} for too long, and gave "
                    "up its place: open the store again"
                )

    # --- pushes --------------------------------------------------------------------------------

    async def push(
        self,
        gradients: Mapping[str, Gradient],
        *,
        read: Values | ReadVersions | None = None,
        rate: Rate = None,
        weight: int = 1,
        assign: bool = False,
    ) -> PushOutcome:
        """See `ParameterStore.push`."""
        self._check()
        if self.slack is not None:
            await self._begun()
        messages = self._checked_messages(gradients, rate, weight, assign)
        push = PushCollector(self.layout, self.note_versions, len(messages), self._ended)
        self._begin_push(messages, read, weight, push, assign=assign)
        await self._unless_failed(push.done)
        return push.outcome()

    async def push_pull(
        self,
        gradients: Mapping[str, Gradient],
        names: Sequence[str] | None,
        *,
        out: Mapping[str, NDArray[Any]] | None,
        read: Values | ReadVersions | None,
        rate: Rate,
        weight: int,
    ) -> Values:
        """See `ParameterStore.push_pull`."""
        self._check()
        if self.slack is not None:
            await self._begun()
        messages = self._checked_messages(gradients, rate, weight, assign=False)
        is_dense = all(type(each.shards) is ShardMessage for each in messages)
        if self.slack is None and is_dense and names is None:
            # One message each way: the answer to a push may bring the values.
            targets = pull_targets(self.layout.arrays, tuple(gradients), out)
            pull = self._pull_collector(self._messages.plan(gradients, rate), targets)
            self._begin_push(messages, read, weight, pull)
            pull.prepare()
            await self._unless_failed(pull.done)
            return pull.values()
        pulling = self._new_pull(tuple(gradients) if names is None else names, out)
        push = PushCollector(self.layout, self.note_versions, len(messages), self._ended)
        # No wait between push, tick and pull: a push of the next call must not come before this tick.
        self._begin_push(messages, read, weight, push)
        ticked = None if self.slack is None else self._begin_tick(push)
        self._begin_pull(*pulling)
        if ticked is not None:
            try:
                await self._ended_tick(ticked)
            except BaseException:
                pulling[0].is_wanted = False
                raise
        values = await self._ended_pull(*pulling)
        await self._unless_failed(push.done)
        return values

    async def _begun(self) -> None:
        """Wait until the clocks of the store have begun: they wait for `replicas` clients."""
        if self._has_begun:
            return
        name, id, wanted = self.name, self.store.id, self.store.replicas

        def has_begun(cluster: ClusterMap) -> bool:
            store = cluster.stores.get(name)
            return store is None or store.id != id or store.epoch > 0

        what = f"{wanted} clients of store {name!r}, with which its first step begins"
        limit = asyncio.timeout(None)
        self._beginning.add(limit)
        try:
            async with limit:
                await self._membership.wait_for(has_begun, what, self._waits.prepare_s)
        except TimeoutError:
            if limit.expired():
                self._check()
            raise
        finally:
            self._beginning.discard(limit)
        self._has_begun = True

    def _checked_messages(
        self, gradients: Mapping[str, Gradient], rate: Rate, weight: int, assign: bool
    ) -> list[Outgoing]:
        """Return the messages of a push; for errors see `ParameterStore.push`."""
        if self._error is not None:
            self._check()
        if self._wish.reader:
            raise StoreError("this client is a reader: open the store without reader=True to push")
        return self._messages.messages(gradients, rate, weight, assign)

    def _begin_push(
        self,
        messages: list[Outgoing],
        read: Values | ReadVersions | None,
        weight: int,
        collector: PushCollector | PullCollector,
        *,
        assign: bool = False,
    ) -> None:
        """Send a push now or, while servers owe too many answers, put it into the queue.

        The answers to a push with a `PullCollector` bring the values, too.
        """
        all_versions, own = self._versions(read)
        # Copied, because versions in later answers must not count as read before this call.
        versions = [tuple(all_versions[message.shards.index].tolist()) for message in messages]
        self._open.add(collector)
        send = partial(self._send, messages, versions, own, weight, assign, collector)
        self._queue.put(send, collector.fail, is_push=True)

    def _ended(self, call: Collector) -> None:
        """Take note of the end of a push or a pull."""
        self._open.discard(call)
        if self._settling and not self._open:
            for waiter in self._settling:
                if not waiter.done():
                    waiter.set_result(None)
            self._settling.clear()

    def _versions(self, read: Values | ReadVersions | None) -> tuple[NDArray[np.int64], Mapping[str, int]]:
        """Return the read versions of a push, and `ReadVersions.own`.

        Unread shards count with the newest version seen.
        """
        if read is None:
            return self._seen, {}
        versions = read.read if isinstance(read, Values) else read
        if not isinstance(versions, ReadVersions):
            raise StoreError(f"read takes the values of a pull, or their versions, not {type(read).__name__}")
        if versions.store != self.store.id:
            raise StoreError("read holds versions of another store: pull from this one")
        return np.where(versions.of_shards < 0, self._seen, versions.of_shards), versions.own

    def _note_pushed(self, messages: Sequence[Outgoing], *, assign: bool) -> None:
        """Refuse a second push of an array in a step of bsp, and an assignment after a push."""
        shards = {shard for message in messages for shard in message.shards.shards}
        if again := shards & self._pushed:
            name = self.layout.table.shards[min(again)].tensor
            raise StoreError(
                f"array {name[:80]!r} was pushed before in this step: with bsp call tick() after each step"
            )
        if not assign:
            self._pushed |= shards

    def _send(
        self,
        messages: Sequence[Outgoing],
        versions: Sequence[tuple[int, ...]],
        own: Mapping[str, int],
        weight: int,
        assign: bool,
        collector: PushCollector | PullCollector,
    ) -> None:
        """Send the messages of a push.

        Args:
            versions: For each message, the versions of its shards that the gradients were computed from.
            own: Number of this client's pushes that the values had in addition to these versions, by array.
            weight: Weight of the gradients in the mean of a step.
            assign: Whether the values replace the values of the store.
            collector: Collects the answers, and the values that they bring.
        """
        if self._is_summed:
            self._note_pushed(messages, assign=assign)
        clock = 0
        if self.slack is not None and not assign:
            clock = self.clock + 1 if self._is_summed else self.clock
        for number, message in enumerate(messages):
            of = message.shards
            step = StepPush(
                parts=of.parts,
                shards=of.shards,
                tensors=message.tensors,
                versions=versions[number],
                own_applied=tuple([own.get(name, 0) for name in of.names]) if own else (0,) * len(of.shards),
                clock=clock,
                weight=weight,
                rate=message.rate,
                epoch=1 if self.slack is not None and not assign else 0,
                assign=assign,
                pull=isinstance(collector, PullCollector),
            )
            if isinstance(collector, PullCollector):
                # The values bring the versions; `push_pull` reports no refused parts.
                self._client.push(
                    of.server,
                    step,
                    on_free=collector.freed,
                    on_values=partial(collector.answered, number),
                    into=collector.into(number),
                )
            else:
                answered = partial(collector.answered, message)
                self._client.push(of.server, step, on_free=collector.freed, on_outcome=answered)
        if not messages:
            collector.freed()

    def note_versions(self, index: slice | NDArray[np.intp], versions: Sequence[int]) -> None:
        """Take note of the versions of an answer."""
        seen = self._seen
        if len(versions) == 1 and isinstance(index, slice):
            # One shard is the usual case of small stores; numpy would take half of the call's time.
            seen[index.start] = max(versions[0], seen[index.start])
        else:
            seen[index] = np.maximum(seen[index], versions)

    # --- clocks --------------------------------------------------------------------------------

    async def tick(self) -> None:
        """See `ParameterStore.tick`."""
        self._check()
        if self.slack is None:
            return
        if self._wish.reader:
            raise StoreError("this client is a reader: it has no place in the clocks")
        await self._begun()
        await asyncio.sleep(0)  # a loop of ticks lets other tasks run
        await self._ended_tick(self._begin_tick())

    def _begin_tick(self, after: Collector | None = None) -> "asyncio.Future[None]":
        """End the step after the earlier calls, unless the push `after` fails: the future has its error."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(partial(self._send_ticks, sent, after), sent.set_exception)
        return sent

    async def _ended_tick(self, sent: "asyncio.Future[None]") -> None:
        if sent.done():
            sent.result()
        else:
            await self._unless_failed(asyncio.shield(sent))

    def _level(self) -> None:
        """End the steps on all shards up to the clock of this client.

        On each shard a late client begins at the slowest clock of the other clients there. Its own clock is
        the highest of these clocks. Without these ticks its first pull would wait for its own steps.
        """
        if self.clock:
            for message in self.layout.everything:
                self._client.tick(message.server, message.shards, self.clock, epoch=1)

    def _send_ticks(self, sent: "asyncio.Future[None]", after: Collector | None) -> None:
        if after is not None and after.done.done():
            after.done.result()  # a push that was refused in the queue ends no step
        self.clock += 1
        for message in self.layout.everything:
            shards = [shard for shard in message.shards if shard not in self._pushed]
            if shards:
                self._client.tick(message.server, shards, self.clock, epoch=1)
        self._pushed.clear()
        sent.set_result(None)

    async def settled(self) -> None:
        """See `ParameterStore.settled`."""
        self._check()
        if self._open:
            await self._unless_failed(self._until_settled())

    def _until_settled(self) -> "asyncio.Future[None]":
        """Return a future that ends when no push is open."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settling.append(waiter)
        return waiter

    # --- pulls ---------------------------------------------------------------------------------

    async def pull(self, names: Sequence[str] | None, out: Mapping[str, NDArray[Any]] | None) -> Values:
        """See `ParameterStore.pull`."""
        self._check()
        if names is None:
            self._check_room()
        pulling = self._new_pull(tuple(self.layout.arrays) if names is None else names, out)
        self._begin_pull(*pulling)
        return await self._ended_pull(*pulling)

    def _check_room(self) -> None:
        """Refuse a pull of all arrays if they do not fit into memory: another client may have chosen them.

        Raises:
            StoreError: The arrays take more than the available memory.
        """
        nbytes = self.store.nbytes
        if nbytes > LARGE_BYTES and nbytes > (available := available_bytes()):
            raise StoreError(
                f"store {self.name!r} has arrays of {nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of "
                "memory are available here: pull arrays by their names, or use a larger machine"
            )

    def _new_pull(
        self, names: Sequence[str], out: Mapping[str, NDArray[Any]] | None
    ) -> tuple[PullCollector, "asyncio.Future[int]"]:
        """Check a pull; returns its collector, and the future of the clock that its values must reach."""
        if isinstance(names, str):
            raise StoreError(f"names is a sequence of names: [{names!r}]")
        wanted = tuple(dict.fromkeys(names))
        pull = self._pull_collector(self.layout.plan(wanted), pull_targets(self.layout.arrays, wanted, out))
        return pull, asyncio.get_running_loop().create_future()

    def _begin_pull(self, pull: PullCollector, sent: "asyncio.Future[int]") -> None:
        """Pull after the pushes of earlier calls."""
        self._queue.put(partial(self._send_pull, pull, sent), sent.set_exception)

    async def _ended_pull(self, pull: PullCollector, sent: "asyncio.Future[int]") -> Values:
        bound = sent.result() if sent.done() else await self._unless_failed(sent)
        try:
            async with asyncio.timeout(self._waits.clock_s if bound else None):
                await self._unless_failed(pull.done)
        except asyncio.CancelledError:
            pull.is_wanted = False
            raise
        except TimeoutError:
            pull.is_wanted = False
            raise DeadlineExceeded(
                f"{self._named(pull.late)} to end step {bound}", self._waits.clock_s
            ) from None
        if self.slack is not None and not self._wish.reader and not self._started:
            self.clock, self._started = max(pull.clocks, default=0), True
        return pull.values()

    def _pull_collector(self, plan: StorePlan, targets: dict[str, NDArray[Any]]) -> PullCollector:
        return PullCollector(self.store.id, self.layout, plan, self.note_versions, targets, self._ended)

    def _named(self, late: Sequence[int]) -> str:
        """Return the places of some clients with their nodes, as ``store show`` has them."""
        pushers = self._membership.map.pushers(self.store)
        names = []
        for place in late:
            _, members = pushers.get(place, (0, frozenset()))
            nodes = ", ".join(sorted(node for node, _ in members))
            names.append(f"client {place} ({nodes})" if nodes else f"client {place}")
        return ", ".join(names) or "a client"

    def _send_pull(self, pull: PullCollector, sent: "asyncio.Future[int]") -> None:
        """Send the pull, unless its caller was cancelled; set `sent` to the clock that the values must
        reach."""
        if sent.done():
            return
        bound = 0
        if self.slack is not None and not self._wish.reader:
            bound = max(self.clock - self.slack, 0)
        for number, message in enumerate(pull.plan.messages):
            self._client.pull(
                message.server,
                message.shards,
                partial(_pulled, pull, number),
                clock=bound,
                into=pull.into(number),
                on_behind=pull.behind,
                is_wanted=lambda: pull.is_wanted,
            )
        if not pull.plan.messages:
            pull.freed()
        sent.set_result(bound)

    _has_begun = False
    """Whether the clocks of the store have begun."""

    _started = False
    """Whether the clock of this client has begun at the clock of the others."""

    # --- the end -------------------------------------------------------------------------------

    async def delete(self) -> None:
        """See `ParameterStore.delete`."""
        self._check()
        if self._wish.reader:
            raise StoreError("this client is a reader: open the store without reader=True to delete it")
        self._deleting = True
        try:
            await self._membership.delete_store(self._wish.name, self.store.id)
        except BaseException:
            self._deleting = False
            raise

    async def leave(self) -> None:
        """Wait up to `LEAVE_S` for open pushes, and leave the cluster; then no client waits for this one."""
        try:
            async with asyncio.timeout(LEAVE_S):
                if self._open and self._error is None:
                    await self._until_settled()
        except TimeoutError:
            pass
        await self._membership.leave()


def _pulled(pull: PullCollector, number: int, answer: ValuesMessage, flat: NDArray[Any]) -> None:
    pull.answered(number, answer.versions, flat, answer.clock)
    pull.freed()
