"""One client of a store: it joins, creates, loads, pushes, pulls and leaves. `ParameterStore` is its face.

The client is a member of the cluster, with the role `client`, or `reader`, which has no place in the clocks
and may not push. With clocks a push in bsp names the step that it belongs to; in ssp the end of the step, a
tick, names it, so that a step may have any number of pushes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.controller.client import Membership
from adam_async.errors import DeadlineExceeded, RunFailed, StoreError
from adam_async.messages import REFUSED, Part, Pushed, ShardState
from adam_async.messages import Values as ValuesMessage
from adam_async.model.rules import rule_of
from adam_async.parameter_server.client import ParameterClient, SessionIdentity, StepPush
from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.cluster_map import ClusterMap, NodeRecord, replica_generation
from adam_async.run.config import Waits
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, holders, shard_table
from adam_async.run.store_record import ArrayRecord, RuleRecord, StoreRecord, joined_arrays
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.store.arrays import (
    Gradient,
    InitialArrays,
    flat_factors,
    flat_values,
)
from adam_async.store.layout import PulledPlace, ShardMessage, StoreLayout, StorePlan
from adam_async.store.local_servers import ServerAccess
from adam_async.store.values import PushOutcome, ReadVersions, RefusedShard, Values
from transport import Identity, LocalNetwork

_T = TypeVar("_T")

GOODBYE_S = 2.0
"""Maximum time for open pushes at the end of a client, in seconds."""

CREATE_TRIES = 3
"""Number of attempts to create a store that another client creates at the same time."""

CREATE_PAUSE_S = 0.2
"""Wait for the store of another client between two attempts, in seconds."""

MOST_RATE = 1e12
"""Largest learning rate."""

MOST_WEIGHT = (1 << 32) - 1
"""Largest weight of a push."""


class StoreWish(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The checked arguments of `ParameterStore.open`."""

    name: str
    create: str
    values: InitialArrays | None
    records: tuple[ArrayRecord, ...]
    rules: tuple[RuleRecord, ...]
    slack: int | None
    is_summed: bool
    """Whether servers apply the mean of the gradients of a step (bsp); in ``ssp:0`` they apply each push."""
    replicas: int
    servers: int
    shard_bytes: int
    reader: bool
    waits: Waits


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
        """Background tasks, which its owner cancels at the end."""
        role = "reader" if wish.reader else "client"
        incarnation = int.from_bytes(access.entropy(7), "little")
        self._identity = Identity(role=role, node=f"{role}-{incarnation:014x}", incarnation=incarnation)
        self._traffic = Traffic(self._identity.node, timeline=None)
        self._membership = Membership(
            network=access.network,
            controller=access.controllers,
            identity=self._identity,
            record=NodeRecord(role=role, address="", incarnation=incarnation),
            waits=wish.waits,
            traffic=self._traffic,
        )
        self.name = wish.name
        self.closed = False
        self.clock = 0
        self.slack = wish.slack
        self._is_summed = wish.is_summed
        self.layout: StoreLayout
        self.store: StoreRecord
        self.session: SessionIdentity
        """Its place among the clients of the store."""
        self._client: ParameterClient
        self._seen: NDArray[np.int64]
        """Newest version of each shard that this client has seen."""
        self._rates: tuple[float, ...] = ()
        self._pushed: set[ShardId] = set()
        """Shards pushed in the step in progress, in bsp."""
        self._turns: deque[_Turn] = deque()
        """Calls that wait for the servers to answer earlier pushes, in order."""
        self._has_turns = asyncio.Event()
        self._open: set[asyncio.Future[PushOutcome]] = set()
        self._error: BaseException | None = None
        self._waiting: set[asyncio.Timeout] = set()
        """Limits of the waits in progress, which end with the failure of this client."""
        self._deleting = False

    # --- failures ------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End all waits with an error; the first one counts."""
        if self._error is None:
            self._error = error
            now = asyncio.get_running_loop().time()
            for limit in self._waiting:
                limit.reschedule(now)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def _unless_failed(self, wait: Awaitable[_T]) -> _T:
        """Wait, or raise the failure that comes meanwhile. Call `_check` before."""
        limit = asyncio.timeout(None)
        self._waiting.add(limit)
        try:
            async with limit:
                return await wait
        except TimeoutError:
            if limit.expired():
                self._check()
            raise
        finally:
            self._waiting.discard(limit)

    # --- opening -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the cluster, create or find the store, and begin to serve calls.

        Raises:
            StoreError: The store is there and differs, or is not there, or has failed.
            DeadlineExceeded: It was not open within `prepare_s`; names the phase.
        """
        wish, membership = self._wish, self._membership
        self._spawn("membership", membership.run())
        what = "the controllers to accept this client"
        await membership.wait_for(lambda _: membership.joined, what, self._waits.start_s + self._waits.call_s)
        store = membership.map.stores.get(wish.name)
        if store is None or store.phase == "failed":
            store = await self._create(store)
        elif wish.create == "new":
            raise StoreError(
                f"store {wish.name!r} is there: choose another name, delete it, or leave create out"
            )
        arrays = arrays_of(membership.map, wish.name, store)
        if wish.values is not None:
            _compare(wish, store, arrays)
        self.slack = store.slack
        self._is_summed = store.summed_weight > 0
        table = shard_table(arrays, shard_bytes=store.shard_bytes)
        store = await self._wait_open(store, arrays)
        self.store = store
        self.layout = StoreLayout(arrays, table, store.buckets)
        self._rates = tuple(rule.rate for rule in store.rules)
        own = wish.rules
        if own:  # this client's rates, for the rules of its arrays
            mine = {record.name: own[record.rule].rate for record in wish.records}
            rates = dict(enumerate(self._rates))
            rates.update({array.rule: mine[array.name] for array in arrays})
            self._rates = tuple(rates[number] for number in range(len(rates)))
        self._seen = np.zeros(len(table.shards), np.int64)
        session = self.session = await self._take_place(store)
        cluster = membership.map
        self._client = ParameterClient(
            Endpoint(self._network, self._identity, self._traffic),
            session=session,
            addresses={name: cluster.nodes[name].address for name in holders(table, store.buckets)},
            waits=self._waits,
        )
        self._spawn("servers", self._client.run())
        self._spawn("turns", self._take_turns())
        self._spawn("follow", self._follow(session))
        if self.slack is not None and not wish.reader:
            await self.pull(None, None)  # a late client begins at the clock of the others

    def _spawn(self, name: str, work: Any) -> None:
        self.tasks.append(self._group.create_task(work, name=f"{self._identity.node}/{name}"))

    async def _create(self, failed: StoreRecord | None) -> StoreRecord:
        wish, membership = self._wish, self._membership
        if wish.create == "never" or wish.values is None or wish.reader:
            there = ", ".join(map(repr, sorted(membership.map.stores)[:8])) or "none"
            why = f"failed: {failed.reason}" if failed is not None else "is not there"
            raise StoreError(f"store {wish.name!r} {why}; stores of this cluster: {there}")
        state = [len(rule_of(rule).state_names) for rule in wish.rules]
        record = StoreRecord(
            id=f"{self._identity.node}-{wish.name}",
            creator=self._identity.node,
            rules=wish.rules,
            arrays=len(wish.records),
            nbytes=sum(record.nbytes for record in wish.records),
            state_arrays=max(state),
            pieces=0,
            shard_bytes=wish.shard_bytes,
            servers=wish.servers,
            slack=wish.slack,
            summed_weight=1 if wish.is_summed else 0,
            replicas=wish.replicas,
        )
        store = await self._create_once(record)
        if wish.create == "new" and store.id != record.id:
            raise StoreError(f"store {wish.name!r} was just created by another client")
        return store

    async def _create_once(self, record: StoreRecord) -> StoreRecord:
        """Create the store, or return that of another client that creates it at the same time."""
        name, membership = self._wish.name, self._membership

        def is_there(cluster: ClusterMap) -> bool:
            return name in cluster.stores and cluster.stores[name].phase != "failed"

        for tries_left in reversed(range(CREATE_TRIES)):
            try:
                await membership.create_store(name, record, self._wish.records)
                return membership.map.stores[name]
            except RunFailed as refusal:
                # Two creators may have replaced each other's lists of arrays: one of them comes through.
                try:
                    cluster = await membership.wait_for(is_there, f"store {name!r}", CREATE_PAUSE_S)
                except DeadlineExceeded:
                    if not tries_left:
                        raise refusal from refusal.__cause__
                    continue
                return cluster.stores[name]
        raise AssertionError("the last try returns or raises")

    async def _wait_open(self, store: StoreRecord, arrays: Sequence[ArrayRecord]) -> StoreRecord:
        """Wait until the store is open; its creator, or an heir of one that is gone, loads its values."""
        wish, membership = self._wish, self._membership
        key = (wish.name, store.id)
        loaded = False
        ends_at = asyncio.get_running_loop().time() + self._waits.prepare_s
        while True:
            now = _present(membership.map, key)
            if now.phase == "open":
                return now
            creator = membership.map.nodes.get(now.creator)
            mine = now.creator == self._identity.node or creator is None or not creator.live
            if now.phase == "loading" and mine and not loaded:
                if wish.values is None:
                    raise StoreError(
                        f"the creator of store {wish.name!r} left before it had loaded the values: open it "
                        "with arrays, which loads them"
                    )
                await self._load(now, arrays)
                loaded = True
                continue
            changed = partial(
                _has_changed,
                key=key,
                version=now.changed,
                creator_was_live=creator is not None and creator.live,
            )
            left_s = ends_at - asyncio.get_running_loop().time()
            await membership.wait_for(
                changed,
                f"store {wish.name!r} to open: {_state_of(now, membership.map)}",
                max(left_s, 0.001),
            )

    async def _load(self, store: StoreRecord, arrays: Sequence[ArrayRecord]) -> None:
        assert self._wish.values is not None
        start = _StartValues(self._wish.values, arrays)
        table = shard_table(arrays, shard_bytes=store.shard_bytes)
        states = [ShardState(shard=int(shard.id), version=0, clocks={}) for shard in table.shards]
        copies = ShardCopies(
            network=self._network, identity=self._identity, waits=self._waits, traffic=self._traffic
        )
        try:
            async with asyncio.timeout(self._waits.prepare_s):
                await copies.load(self._membership.map, store, table, start, states)
        except TimeoutError:
            raise DeadlineExceeded(
                f"servers to load store {self._wish.name!r}", self._waits.prepare_s
            ) from None

    async def _take_place(self, store: StoreRecord) -> SessionIdentity:
        """Get a place among the clients of the store; a reader needs none."""
        incarnation, replica = self._identity.incarnation, -1
        membership, node = self._membership, self._identity.node
        if not self._wish.reader:
            await membership.set_node(store=store.id)
            cluster = await membership.wait_for(
                lambda cluster: node in cluster.nodes and bool(cluster.nodes[node].placed),
                f"a place among the clients of store {self._wish.name!r}",
                self._waits.call_s,
            )
            placed = cluster.nodes[node]
            replica = placed.replica
            incarnation = replica_generation([(placed.incarnation, placed.placed)], 1)
        return SessionIdentity(
            store=store.id,
            session=int.from_bytes(self._entropy(7), "little"),
            incarnation=incarnation,
            replica=replica,
            generation=store.generation,
        )

    async def _follow(self, session: SessionIdentity) -> None:
        """Fail the client if the store goes, or if the controllers gave its place away."""
        name, node = self._wish.name, self._identity.node
        async for cluster in self._membership.changes():
            store = cluster.stores.get(name)
            if store is None or store.id != session.store:
                if self._deleting:  # `delete` closes this client next
                    return
                raise StoreError(f"store {name!r} was deleted")
            if store.phase == "failed":
                raise StoreError(f"store {name!r} failed: {store.reason}")
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
        rate: float | None = None,
        weight: int = 1,
        assign: bool = False,
    ) -> PushOutcome:
        """See `ParameterStore.push`."""
        done = self._begin_push(gradients, read=read, rate=rate, weight=weight, assign=assign)
        return await self._unless_failed(asyncio.shield(done))

    async def push_pull(
        self,
        gradients: Mapping[str, Gradient],
        *,
        read: Values | ReadVersions | None,
        rate: float | None,
        weight: int,
    ) -> Values:
        """See `ParameterStore.push_pull`."""
        done = self._begin_push(gradients, read=read, rate=rate, weight=weight)
        if self.slack is not None:
            await self.tick()
        values = await self.pull(tuple(gradients), None)
        await self._unless_failed(asyncio.shield(done))
        return values

    def _begin_push(
        self,
        gradients: Mapping[str, Gradient],
        *,
        read: Values | ReadVersions | None = None,
        rate: float | None = None,
        weight: int = 1,
        assign: bool = False,
    ) -> "asyncio.Future[PushOutcome]":
        """Send a push now or, if servers owe answers, in its turn; returns the future of its outcome."""
        self._check()
        if self._wish.reader:
            raise StoreError("this client is a reader: open the store without reader=True to push")
        messages = self._messages_of(gradients, rate, weight, assign)
        versions = self._versions(read)
        done: asyncio.Future[PushOutcome] = asyncio.get_running_loop().create_future()
        self._open.add(done)
        done.add_done_callback(self._open.discard)
        send = partial(self._send, messages, versions, weight, assign, done)
        self._in_turn(_Turn(send=send, outcome=done, is_push=True))
        return done

    def _in_turn(self, turn: "_Turn") -> None:
        """Make a call behind those before it; a push waits until all servers may be sent one.

        No caller waits for the turn of a push, so that a cancelled one keeps its place.
        """
        if self._turns or (turn.is_push and not self._client.may_push):
            self._turns.append(turn)
            self._has_turns.set()
        else:
            turn.take()

    async def _take_turns(self) -> None:
        while True:
            while self._turns:
                if self._turns[0].is_push:
                    await self._client.admit()
                self._turns.popleft().take()
            self._has_turns.clear()
            await self._has_turns.wait()

    def _messages_of(
        self, gradients: Mapping[str, Gradient], rate: float | None, weight: int, assign: bool
    ) -> "list[_Outgoing]":
        if not isinstance(gradients, Mapping):
            raise StoreError(f"a push takes a mapping of names to arrays, not {type(gradients).__name__}")
        rate = _checked_rate(rate)
        if not isinstance(weight, int) or not 1 <= weight <= MOST_WEIGHT:
            raise StoreError(f"weight is a whole number from 1 to {MOST_WEIGHT}, not {weight!r}")
        layout = self.layout
        plan = layout.plan(tuple(gradients))
        what = "value" if assign else "gradient"
        scaled = weight != 1 and self._is_summed
        gathered = plan.gather(gradients)
        if gathered is not None:
            return [
                self._outgoing(message, values * message.dtype.type(weight) if scaled else values, rate)
                for message, values in zip(plan.messages, gathered, strict=True)
            ]
        flat: dict[str, NDArray[Any]] = {}
        found: list[_Outgoing] = []
        for name, gradient in gradients.items():
            record = layout.arrays[name]
            if isinstance(gradient, Factors) and not assign:
                activations, errors = flat_factors(record, gradient)
                if scaled:
                    errors = errors * record_type(record)(weight)
                outgoing = self._factors_of(name, activations, errors, rate)
                if outgoing is not None:
                    found += outgoing
                else:  # a row is cut over shards, and no server could form the product
                    flat[name] = (errors @ activations.T).reshape(-1)
                continue
            flat[name] = flat_values(record, gradient, what)
            if scaled:
                flat[name] = flat[name] * record_type(record)(weight)
        if len(flat) < len(gradients):
            plan = layout.plan(tuple(flat))
        found += [self._outgoing(message, message.gather(flat), rate) for message in plan.messages]
        return found

    def _outgoing(self, message: ShardMessage, values: NDArray[Any], rate: float | None) -> "_Outgoing":
        return _Outgoing(
            server=message.server,
            parts=message.parts,
            shards=message.shards,
            index=message.index,
            names=message.names if message.whole else (),
            tensors=(values,),
            rate=self._rates[message.rule] if rate is None else rate,
        )

    def _factors_of(
        self, name: str, activations: NDArray[Any], errors: NDArray[Any], rate: float | None
    ) -> "list[_Outgoing] | None":
        messages = self.layout.factor_messages(name)
        if messages is None:
            return None
        found = []
        for message in messages:
            rows = (
                errors[message.rows[0]]
                if len(message.rows) == 1
                else np.concatenate([errors[part] for part in message.rows])
            )
            found.append(
                _Outgoing(
                    server=message.server,
                    parts=message.parts,
                    shards=message.shards,
                    index=message.index,
                    tensors=(activations, rows),
                    rate=self._rates[message.rule] if rate is None else rate,
                )
            )
        return found

    def _versions(self, read: Values | ReadVersions | None) -> NDArray[np.int64]:
        """Return the versions that a push counts as read at; those not read count as the newest seen."""
        if read is None:
            return self._seen
        versions = read.read if isinstance(read, Values) else read
        if not isinstance(versions, ReadVersions):
            raise StoreError(f"read takes the values of a pull, or their versions, not {type(read).__name__}")
        if versions.store != self.store.id:
            raise StoreError("read holds versions of another store: pull from this one")
        return np.where(versions.of_shards < 0, self._seen, versions.of_shards)

    def _note_pushed(self, messages: "Sequence[_Outgoing]") -> None:
        shards = {shard for message in messages for shard in message.shards}
        if again := shards & self._pushed:
            name = self.layout.table.shards[min(again)].tensor
            raise StoreError(
                f"array {name[:80]!r} was pushed before in this step: with bsp call tick() after each step"
            )
        self._pushed |= shards

    def _send(
        self,
        messages: "Sequence[_Outgoing]",
        versions: NDArray[np.int64],
        weight: int,
        assign: bool,
        done: "asyncio.Future[PushOutcome]",
    ) -> None:
        if self._is_summed and not assign:
            self._note_pushed(messages)
        collector = _Collector(self, done, len(messages))
        clock = 0
        if self.slack is not None and not assign:
            clock = self.clock + 1 if self._is_summed else self.clock
        # In bsp a server answers a push before it applies the sum. By reference it would read the caller's
        # memory after the push has returned, and the push would wait for the sum.
        kept = self._is_summed and not assign and isinstance(self._network, LocalNetwork)
        for message in messages:
            shards = message.shards
            self._client.push(
                message.server,
                StepPush(
                    parts=message.parts,
                    shards=shards,
                    tensors=tuple([tensor.copy() for tensor in message.tensors]) if kept else message.tensors,
                    versions=tuple(versions[message.index].tolist()),
                    own_applied=(0,) * len(shards),
                    clock=clock,
                    weight=weight,
                    rate=message.rate,
                    epoch=1 if self.slack is not None and not assign else 0,
                    assign=assign,
                ),
                on_free=_keep if kept else collector.freed,
                on_outcome=partial(collector.answered, message, done=kept),
            )
        if not messages:
            collector.finish()

    def note_versions(self, index: slice | NDArray[np.intp], versions: Sequence[int]) -> NDArray[np.int64]:
        """Take note of the versions of an answer, and return them."""
        found = np.array(versions, np.int64)
        self._seen[index] = np.maximum(self._seen[index], found)
        return found

    # --- clocks --------------------------------------------------------------------------------

    async def tick(self) -> None:
        """See `ParameterStore.tick`."""
        self._check()
        if self.slack is None:
            return
        if self._wish.reader:
            raise StoreError("this client is a reader: it has no place in the clocks")
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_turn(_Turn(send=partial(self._send_ticks, sent), outcome=sent))
        if not sent.done():
            await self._unless_failed(asyncio.shield(sent))

    def _send_ticks(self, sent: "asyncio.Future[None]") -> None:
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
        while self._open:
            await self._unless_failed(asyncio.wait(set(self._open)))

    # --- pulls ---------------------------------------------------------------------------------

    async def pull(self, names: Sequence[str] | None, out: Mapping[str, NDArray[Any]] | None) -> Values:
        """See `ParameterStore.pull`."""
        self._check()
        layout = self.layout
        if isinstance(names, str):
            raise StoreError(f"names is a sequence of names: [{names!r}]")
        wanted = tuple(layout.arrays) if names is None else tuple(dict.fromkeys(names))
        plan = layout.plan(wanted)
        targets = _targets(layout.arrays, wanted, out)
        pull = _PullInProgress(self, wanted, plan, targets)
        sent: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Behind the pushes that were called before.
        self._in_turn(_Turn(send=partial(self._send_pull, pull, sent), outcome=sent))
        bound = sent.result() if sent.done() else await self._unless_failed(sent)
        try:
            async with asyncio.timeout(self._waits.clock_s if bound else None):
                await self._unless_failed(pull.done)
        except TimeoutError:
            behind = ", ".join(f"client {number}" for number in pull.late) or "a client"
            raise DeadlineExceeded(f"{behind} to end step {bound}", self._waits.clock_s) from None
        if self.slack is not None and not self._wish.reader and not self._started:
            self.clock, self._started = max(pull.clocks, default=0), True
        return pull.values()

    def _send_pull(self, pull: "_PullInProgress", sent: "asyncio.Future[int]") -> None:
        """Ask for the values of a pull, unless its caller has given up; `sent` gets the clock it waits for."""
        if sent.done():
            return
        bound = 0
        if self.slack is not None and not self._wish.reader:
            bound = max(self.clock - self.slack, 0)
        for number, message in enumerate(pull.plan.messages):
            self._client.pull(
                message.server,
                message.shards,
                partial(pull.answered, number),
                clock=bound,
                into=pull.into(message),
                on_behind=pull.behind,
            )
        if not pull.missing:
            pull.done.set_result(None)
        sent.set_result(bound)

    _started = False
    """Whether the clock of this client has begun where the others are."""

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
        """Wait a moment for open pushes, and leave the cluster, so that no client waits for this one."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                while self._open and self._error is None:
                    await asyncio.wait(set(self._open))
        except TimeoutError:
            pass
        await self._membership.leave()


class _Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A push, a tick or a pull that is sent in the order of the calls."""

    send: Callable[[], None]
    outcome: "asyncio.Future[Any]"
    """Gets the error of `send`."""
    is_push: bool = False

    def take(self) -> None:
        try:
            self.send()
        except StoreError as error:
            self.outcome.set_exception(error)


class _Outgoing(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One message of a push."""

    server: str
    parts: tuple[Part, ...]
    shards: tuple[ShardId, ...]
    index: slice | NDArray[np.intp]
    names: tuple[str, ...] = ()
    """Array of each shard, if each is of one shard."""
    tensors: Sequence[NDArray[Any]]
    rate: float


def _keep() -> None:
    """Leave tensors that the caller does not own to the server."""


class _Collector:
    """Collects the answers of one push."""

    def __init__(self, link: StoreLink, done: "asyncio.Future[PushOutcome]", messages: int) -> None:
        self._link = link
        self._done = done
        self._left = messages
        self._versions: dict[str, int] = {}
        self._refused: list[RefusedShard] = []

    def answered(self, message: "_Outgoing", answer: Pushed, *, done: bool) -> None:
        """Take an answer; `done`: the message needs no more, because its tensors are not the caller's."""
        link, shards = self._link, message.shards
        link.note_versions(message.index, answer.versions)
        table, versions = link.layout.table.shards, self._versions
        if message.names:
            versions.update(zip(message.names, answer.versions, strict=True))
        else:
            for shard, version in zip(shards, answer.versions, strict=True):
                name = table[shard].tensor
                versions[name] = min(versions.get(name, version), version)
        for problem in answer.problems:
            if problem.status == REFUSED:
                spec = table[shards[problem.index]]
                self._refused.append(RefusedShard(name=spec.tensor, start=spec.start, stop=spec.stop))
        if done:
            self.freed()

    def freed(self) -> None:
        self._left -= 1
        if not self._left:
            self.finish()

    def finish(self) -> None:
        if not self._done.done():
            self._done.set_result(PushOutcome(versions=self._versions, refused=tuple(self._refused)))


class _PullInProgress:
    """Collects the answers of one pull."""

    def __init__(
        self,
        link: StoreLink,
        names: tuple[str, ...],
        plan: StorePlan,
        targets: Mapping[str, NDArray[Any]],
    ) -> None:
        self._link = link
        self._names = names
        self.plan = plan
        self._flats: dict[int, NDArray[Any]] = {}
        """Values of messages of whole arrays, by number."""
        self._targets = dict(targets)
        self._given = frozenset(targets)
        self._found: dict[str, NDArray[Any]] = {}
        self._read = np.full(len(link.layout.table.shards), -1, np.int64)
        self.missing = len(plan.messages)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.clocks: list[int] = []
        """Clock of each answer."""
        self.late: tuple[int, ...] = ()

    def into(self, message: ShardMessage) -> NDArray[Any] | None:
        """Return memory for the answer if it is one range of an array; None for pooled memory."""
        if len(message.runs) != 1:
            return None
        (run,) = message.runs
        return self._target(run.name)[run.start : run.stop]

    def _target(self, name: str) -> NDArray[Any]:
        flat = self._targets.get(name)
        if flat is None:
            record = self._link.layout.arrays[name]
            flat = self._targets[name] = np.empty(record.size, record.dtype)
        return flat

    def behind(self, answer: ValuesMessage) -> None:
        self.late = tuple(answer.behind)

    def answered(self, number: int, answer: ValuesMessage, flat: NDArray[Any]) -> None:
        message = self.plan.messages[number]
        self._read[message.index] = self._link.note_versions(message.index, answer.versions)
        self.clocks.append(answer.clock)
        arrays, given, at = self._link.layout.arrays, self._given, 0
        if message.whole and not given:
            flat.flags.writeable = False
            self._flats[number] = flat
        elif len(message.runs) > 1:
            for run in message.runs:
                end = at + run.stop - run.start
                if run.name not in given and end - at == arrays[run.name].size:
                    self._found[run.name] = flat[at:end]  # a small array stays where it landed
                else:
                    self._target(run.name)[run.start : run.stop] = flat[at:end]
                at = end
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def values(self) -> Values:
        arrays: dict[str, NDArray[Any]] = {}
        places = {} if self._given else self.plan.places
        for name in self._names if len(places) < len(self._names) else ():
            if name in places:
                continue
            record = self._link.layout.arrays[name]
            flat = self._found.get(name)
            if flat is None:
                flat = self._target(name)
            array = flat.reshape(record.shape)
            array.flags.writeable = False
            arrays[name] = array
        clock = min(self.clocks, default=0)
        pulled = _PulledArrays(self._names, places, self._flats, arrays) if places else arrays
        return Values(pulled, ReadVersions(self._link.store.id, self._read), clock)


class _PulledArrays(Mapping[str, NDArray[Any]]):
    """Pulled arrays by name; those of messages of whole arrays are cut out at their first use."""

    def __init__(
        self,
        names: tuple[str, ...],
        places: Mapping[str, PulledPlace],
        flats: Mapping[int, NDArray[Any]],
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        self._names = names
        self._places = places
        self._flats = flats
        self._arrays = arrays

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            place = self._places[name]
            array = self._flats[place.message][place.start : place.stop].reshape(place.shape)
            self._arrays[name] = array
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _StartValues:
    """First values of a store, as `ShardCopies` loads them."""

    arrays: tuple[str, ...] = ()

    def __init__(self, given: InitialArrays, records: Sequence[ArrayRecord]) -> None:
        self._flat = {record.name: _first_values(given[record.name], record) for record in records}

    def bytes_of(self, shard: ShardSpec) -> int:
        return shard.nbytes

    def cut(self, shard: ShardSpec) -> list[NDArray[Any]]:
        return [self._flat[shard.tensor][shard.start : shard.stop]]


def _first_values(given: Any, record: ArrayRecord) -> NDArray[Any]:
    if isinstance(given, ArraySpec):
        return np.zeros(record.size, record.dtype)
    return flat_values(record, given, "the first value")


def record_type(record: ArrayRecord) -> Callable[[float], Any]:
    """Return the type of an array's values."""
    return np.float32 if record.dtype == "float32" else np.float64


def _targets(
    arrays: Mapping[str, ArrayRecord], names: Sequence[str], out: Mapping[str, NDArray[Any]] | None
) -> dict[str, NDArray[Any]]:
    """Return the flat memory that a pull fills, for the arrays of `out`."""
    if out is None:
        return {}
    if not isinstance(out, Mapping):
        raise StoreError(f"out is a mapping of names to arrays, not {type(out).__name__}")
    found = {}
    for name, array in out.items():
        if name not in names:
            raise StoreError(f"out names array {str(name)[:80]!r}, which is not pulled")
        record = arrays[name]
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype.name) != (
            record.shape,
            record.dtype,
        ):
            shown = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise StoreError(f"out of {name[:80]!r} is {shown}, the array {record.dtype}{record.shape}")
        flags = array.flags
        if not flags.c_contiguous or not flags.writeable or not array.dtype.isnative:
            raise StoreError(
                f"out of {name[:80]!r} must be C-contiguous, writable and of native byte order: give a plain "
                "array"
            )
        found[name] = array.reshape(-1)
    return found


def _checked_rate(rate: object) -> float | None:
    if rate is None or (isinstance(rate, Real) and 0 <= float(rate) <= MOST_RATE):
        return None if rate is None else float(rate)
    raise StoreError(f"rate is a number from 0 to {MOST_RATE:g}, not {rate!r}")


def consistency_of(slack: int | None, *, is_summed: bool) -> str:
    """Return the text of a consistency, as `ParameterStore.open` takes it."""
    if is_summed:
        return "bsp"
    return "asp" if slack is None else f"ssp:{slack}"


def arrays_of(cluster: ClusterMap, name: str, store: StoreRecord) -> tuple[ArrayRecord, ...]:
    """Return the arrays of a store from the map. Raises ConfigError: see `joined_arrays`."""
    pieces = [cluster.arrays.get(f"stores/{name}/{number}") for number in range(store.pieces)]
    return joined_arrays(store, pieces)


def _compare(wish: StoreWish, store: StoreRecord, arrays: Sequence[ArrayRecord]) -> None:
    """Compare the arrays that a client brings with those of the store.

    Raises:
        StoreError: A name, shape, type, rule or the consistency differs; names the first one.
    """
    there = {array.name: array for array in arrays}
    for mine in wish.records:
        other = there.pop(mine.name, None)
        shown = f"array {mine.name[:80]!r}"
        if other is None:
            raise StoreError(f"store {wish.name!r} has no {shown}; it has {len(arrays)} others")
        if (other.shape, other.dtype) != (mine.shape, mine.dtype):
            raise StoreError(
                f"{shown} is {other.dtype}{other.shape} in store {wish.name!r}, "
                f"and {mine.dtype}{mine.shape} here"
            )
        rules = [
            msgspec.structs.replace(rule, rate=0.0)
            for rule in (store.rules[other.rule], wish.rules[mine.rule])
        ]
        if rules[0] != rules[1]:
            raise StoreError(f"{shown} has rule {rules[0]} in store {wish.name!r}, and {rules[1]} here")
    if there:
        raise StoreError(f"store {wish.name!r} has the further array {next(iter(there))[:80]!r}")
    used = consistency_of(store.slack, is_summed=store.summed_weight > 0)
    asked = consistency_of(wish.slack, is_summed=wish.is_summed)
    if used != asked:
        raise StoreError(f"store {wish.name!r} has consistency {used}, not {asked}: open it with {used!r}")


def _present(cluster: ClusterMap, key: tuple[str, str]) -> StoreRecord:
    """Return a store that is not over.

    Raises:
        StoreError: It failed, or was deleted.
    """
    name, id = key
    store = cluster.stores.get(name)
    if store is None or store.id != id:
        raise StoreError(f"store {name!r} was deleted")
    if store.phase == "failed":
        raise StoreError(f"store {name!r} failed: {store.reason}")
    return store


def _state_of(store: StoreRecord, cluster: ClusterMap) -> str:
    """Return what a store that is not open waits for."""
    servers = len(cluster.live("ps"))
    if store.phase == "placing":
        return (
            f"it needs {max(store.servers, 1)} servers, and {servers} are live; start one with adam-async ps"
        )
    serving = sum(store.id in cluster.nodes[name].serves for name in set(store.buckets))
    return f"{serving} of {len(set(store.buckets))} servers have all values that {store.creator} loads"


def _has_changed(cluster: ClusterMap, key: tuple[str, str], version: int, creator_was_live: bool) -> bool:
    name, id = key
    store = cluster.stores.get(name)
    if store is None or store.id != id or store.changed != version:
        return True
    creator = cluster.nodes.get(store.creator)
    return creator_was_live and (creator is None or not creator.live)
