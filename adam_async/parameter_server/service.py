"""The parameter-server role: shards in memory, pushes in, acknowledgements and values out.

All code that touches shard values runs on the event loop's thread: the server is the single writer of its
shards, and reads between batches need no lock. A round of the loop does a bounded amount of work, counted and
not timed, and a large batch takes several rounds (`TURN_WORK`), so a heartbeat waits for milliseconds,
however long the queue is. Batches (AD-42) form from the pushes that arrive meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.controller.role import Role, RoleSettings, reply_or_fail, reply_when_room
from adam_async.messages import (
    Body,
    GetRecord,
    Loaded,
    LoadShards,
    Pull,
    Push,
    ReadShards,
    Record,
    Recorded,
    RecordPart,
    Tick,
    Ticked,
    Values,
    pack,
    part_refusal,
)
from adam_async.model.kernels import available_kernels, make_batches
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network as Model
from adam_async.model.rules import Rule, make_rule
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.apply import Applier, PushGradients, Work
from adam_async.parameter_server.decode_push import read_gradients
from adam_async.parameter_server.events import (
    Acknowledge,
    AcknowledgeRecord,
    AcknowledgeTick,
    Applied,
    Apply,
    ApplySum,
    Effect,
    EpochBegan,
    PullArrived,
    PushArrived,
    ReadArrived,
    RecordArrived,
    Refuse,
    ReplicasChanged,
    SendBehind,
    SendStates,
    SendValues,
    SumApplied,
    TickArrived,
)
from adam_async.parameter_server.question_checks import (
    MOST_WAIT_S,
    QUESTION_TYPES,
    SESSION_TYPES,
    QuestionChecks,
)
from adam_async.parameter_server.replay_log import OrderLog
from adam_async.parameter_server.sender_checks import SenderChecks
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import load_states, read_states
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import ServerStatistics
from adam_async.parameter_server.storage import ShardStorage, StoragePool, initial_values
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config, Waits
from adam_async.run.ids import Replica, ShardId
from adam_async.run.partition import run_table
from adam_async.run.shard_table import ShardSpec
from adam_async.runtime.clock import Timer
from adam_async.runtime.machine import ProcessMemory, process_memory
from adam_async.runtime.timeline import Timeline
from dataflow import MakePool, WaitTimedOut
from transport import BufferPool, Identity, Link, Message, Network, Request

logger = logging.getLogger(__name__)

COMPILE_S = 120.0
"""Seconds for which the end of a run waits for a kernel that is compiling: a thread cannot be stopped."""

TURN_WORK = 1 << 20
"""Work after which a round of the loop ends, see `PIECE_WORK`: four gradients for the largest shard."""


class ParameterServer(Role):
    """One parameter server, from `async with` to its end.

    Args:
        network: Network of its listener and links.
        address: Address of its listener.
        controller: The controller's address.
        identity: Its role, node id and incarnation.
        waits: Deadlines.
        buffers: Memory for copies of values on their way out.
        storage_pool: Memory of the shards, which roles of one process may share.
        timeline: Timeline that notes applied batches, records and messages.
        layers: Kinds of layers that a model may use.
        make_pool: Makes the pool that compiles the rule's kernels; without it, NumPy applies the rule.
        process_memory: See `Role`.

    Cancelling the block ends it between two batches; queued pushes are dropped unacknowledged.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: str,
        controller: str,
        identity: Identity,
        waits: Waits,
        buffers: BufferPool,
        storage_pool: StoragePool | None = None,
        timeline: Timeline | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        make_pool: MakePool | None = None,
        process_memory: Callable[[], ProcessMemory] = process_memory,
    ) -> None:
        super().__init__(
            RoleSettings(
                network=network,
                address=address,
                identity=identity,
                waits=waits,
                controller=controller,
                timeline=timeline,
                process_memory=process_memory,
            )
        )
        self._buffers = buffers
        self._layers = layers
        self._make_pool = make_pool
        self._storage_pool = storage_pool or StoragePool()
        self._storage: ShardStorage | None = None
        self._draining = False
        self._run = ""
        self._resumed = False
        self._applier: Applier | None = None
        self._work: _Work | None = None
        """The batch or sum that was taken from the queue and is not finished."""
        self._specs: tuple[ShardSpec, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self.state: ServerState | None = None
        """State of its run; None before it has all shards of one."""
        self._preparing: ServerState | None = None
        self._checks: QuestionChecks
        self._sender_checks = SenderChecks()
        """Checks and sessions (both above) of the run in preparation or in progress."""
        self._leaving: set[Link] = set()
        """Links that are closing because the peer sent in the name of another."""
        self._missing: set[int] = set()
        self._complete = asyncio.Event()
        self._timer = Timer(self._next_deadline, self._due)

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"follow": self._follow(), "timer": self._timer.run(), "ready": self._announce()}

    # --- the run -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take up each run that places buckets here; follow its live replicas and its epochs."""
        live: dict[Replica, int] | None = None
        epoch = 0
        async for cluster in self._membership.changes():
            run = cluster.run
            if run is None or self._identity.node not in cluster.buckets:
                continue
            if run.id != self._run:
                await self._take_up(cluster)
                live, epoch = None, 0
            state = self.state or self._preparing
            assert state is not None
            now_live = {
                Replica(replica): replica_generation
                for replica, replica_generation in cluster.replica_generations().items()
            }
            if now_live != live:
                live = now_live
                self._sender_checks.replica_generations_changed(
                    {
                        (replica, replica_generation): frozenset(
                            (name, cluster.nodes[name].incarnation) for name in cluster.members(replica)
                        )
                        for replica, replica_generation in live.items()
                    }
                )
                self._follow_up(state, state.handle(ReplicasChanged(live)))
            begun = cluster.epoch
            if begun is not None and begun.run == run.id and begun.number != epoch:
                epoch = begun.number
                self._checks.epoch_began(epoch, first_clock=begun.first_clock, groups=begun.groups)
                self._follow_up(state, state.handle(EpochBegan(epoch, begun.first_clock)))

    def _follow_up(self, state: ServerState, effects: Sequence[Effect]) -> None:
        self._perform(effects)
        self._drain_soon(state)

    async def _take_up(self, cluster: ClusterMap) -> None:
        """Allocate and initialise the shards of the buckets whose primary this server is."""
        run = cluster.run
        assert run is not None
        self.state = self._work = None
        config = msgspec.convert(run.config, Config)
        self._dtype = np.dtype(config.dtype)
        model = Model(ModelSpec.from_dict(run.spec), dtype=self._dtype, layers=self._layers)
        table = run_table(run, model)
        rule = make_rule(config.rule, momentum=config.momentum, weight_decay=config.weight_decay)
        in_place = config.weights == "aliased"
        storage = self._storage = self._storage_pool.provide(
            run.id, lambda: ShardStorage(model.parameters, rule, self._dtype, in_place=in_place)
        )
        dice = Dice(config.seed)
        shards = []
        for spec in table.shards:
            if cluster.buckets[spec.bucket] != self._identity.node:
                continue
            values = storage.values(spec)
            values[:] = initial_values(model, dice, spec)
            shards.append(Shard(spec=spec, values=values, rule_state=storage.rule_state(spec)))
            await asyncio.sleep(0)  # a large model has many shards, and heartbeats must not wait for all
        self._specs = table.shards
        self._applier = Applier(rule, [shard.spec for shard in shards], self._dtype)
        make_pool = self._make_pool
        if make_pool is not None and not in_place and available_kernels(config.kernels) == "numba":
            self._spawn("kernels", self._compile(self._applier, rule, self._dtype, make_pool))
        self._preparing = ServerState(
            run=run.id,
            generation=cluster.generation,
            shards=shards,
            clocked=config.slack is not None,
            group_images=config.images_per_group if config.synchronous else 0,
            scale_by_staleness=config.scale_by_staleness,
            log=OrderLog([int(shard.spec.id) for shard in shards]) if config.record else None,
        )
        resumed = run.resumed
        self._checks = QuestionChecks(
            self._preparing,
            most_images=config.images_per_group * config.push_every,
            resumed_epoch=resumed.epoch if resumed is not None else 0,
            resumed_clock=resumed.clock if resumed is not None else 0,
        )
        self._sender_checks = SenderChecks()
        self._run = run.id
        self._resumed = run.resumed is not None
        self._missing = {shard.spec.id for shard in shards} if self._resumed else set()
        logger.info("%s has %d shards of run %s", self._identity.node, len(shards), run.id)
        self._begin_if_complete()

    async def _compile(
        self, applier: Applier, rule: Rule, dtype: "np.dtype[Any]", make_pool: MakePool
    ) -> None:
        """Change to compiled kernels of the rule when they are ready; they give the same bits."""
        name = f"{self._identity.node}-kernels"
        try:
            async with make_pool(threads=1, name=name, close_timeout_s=COMPILE_S) as pool:
                applier.batches = await pool.run(make_batches, rule, dtype, "numba")
        except (OSError, RuntimeError, WaitTimedOut) as error:
            logger.warning("NumPy applies the rule, because compiling its kernel failed: %s", error)

    def _begin_if_complete(self) -> None:
        """Begin a resumed run when the driver has loaded all its shards; any other at once."""
        if not self._missing and self._preparing is not None:
            self.state, self._preparing = self._preparing, None
            self._complete.set()

    async def _announce(self) -> None:
        """Report this server ready for each run that it has taken up."""
        while True:
            await self._complete.wait()
            self._complete.clear()
            await self._membership.set_node(ready=self._run)

    # --- questions ---------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        try:
            await super()._on_link(link)
        finally:
            # The budget of the link paid for its waiting pushes. The worker sends them again on another link.
            if self.state is not None:
                self.state.epoch_gate.keep(lambda request: request.is_open)

    def _answer(self, request: Request, body: Body) -> None:
        if isinstance(body, Push) and body.pull and self.state is not None:
            # Charge on arrival: the answer has values and their versions, so it cannot wait for room later.
            shards = self.state.shards
            nbytes = 0
            for number in set(body.shards):
                shard = shards.get(ShardId(number))
                if shard is not None:
                    nbytes += shard.values.nbytes
            request.charge(nbytes, partial(self._take, request, body))
        else:
            self._take(request, body)

    def _take(self, request: Request, body: Body) -> None:
        """Pass a question to the state, and perform its effects."""
        state, timeline = self.state, self._timeline
        if state is None:
            if isinstance(body, LoadShards):
                self._load(request, body)
                return
            request.fail("not-ready", f"{self._identity.node} {self._not_ready_text()}")
            return
        begin = timeline.clock() if timeline is not None else 0.0
        if not self._may_ask(request, body):
            return
        match body:
            case Push():
                gradients, finite = PushGradients(), None
                if body.run == state.run:
                    gradients = read_gradients(body, request.message.tensors, self._specs, self._dtype)
                    if state.synchronous:
                        finite = self._check_gradients(body, gradients)
                effects = state.handle(PushArrived(request, body, gradients, finite))
            case Pull():
                deadline = self._loop.time() + min(body.wait_s, MOST_WAIT_S) if body.clock else 0.0
                effects = state.handle(PullArrived(request, body, deadline))
            case ReadShards():
                deadline = self._loop.time() + self._waits.answer_s / 2
                effects = state.handle(ReadArrived(request, body, deadline))
            case Record():
                effects = state.handle(RecordArrived(request, body))
            case Tick():
                effects = state.handle(TickArrived(request, body))
            case LoadShards():
                effects = []
                self._load(request, body)
            case GetRecord():
                effects = []
                self._send_record(request, body, state)
            case _:
                super()._answer(request, body)
                return
        if effects:
            self._perform(effects)
        if state.waiting.fresh:
            self._keep_deadline(state)
        if timeline is not None and isinstance(body, Record):
            timeline.recorded(self._identity.node, body, begin)
        if not self._draining:
            self._drain_soon(state)

    def _may_ask(self, request: Request, body: Body) -> bool:
        """Refuse an invalid question, and close the link of a peer that sends in the name of another."""
        assert self.state is not None
        if isinstance(body, QUESTION_TYPES):
            refusal = self._checks.refusal(body, most_bytes=request.link.max_message_bytes)
            if refusal is not None:
                request.fail(*refusal)
                return False
        if isinstance(body, SESSION_TYPES) and body.run == self.state.run:
            text = self._sender_checks.refusal(request.link.peer, body)
            if text:
                request.fail("not-yours", text)
                self._close_behind(request.link, text)
                return False
            if surplus := self._sender_checks.surplus():
                self.state.forget(surplus)
        return True

    def _close_behind(self, link: Link, text: str) -> None:
        """Close a link once its peer has the refusal, so that one with an old identity learns the reason."""
        if link not in self._leaving:
            self._leaving.add(link)
            logger.warning("%s: %s; its link is closed", self._identity.node, text)
            closing = self._spawn(f"closes {link.peer.node}", link.aclose())
            closing.add_done_callback(lambda _: self._leaving.discard(link))

    def _not_ready_text(self) -> str:
        if self._preparing is None:
            return "has not taken up a run"
        return f"waits for {len(self._missing)} shards of the resumed run {self._run}"

    def _check_gradients(self, push: Push, gradients: PushGradients) -> list[bool]:
        """Check each gradient of a contribution: the server acknowledges it before it applies it."""
        assert self._applier is not None
        return self._applier.check_finite([self._specs[number] for number in push.shards], gradients)

    def _load(self, request: Request, body: LoadShards) -> None:
        """Load shards of a resumed run; a repetition after all are loaded changes nothing."""
        state = self._preparing or self.state
        if state is None or (body.run, body.generation) != (state.run, state.generation):
            request.fail("wrong-run", f"{self._identity.node} is not preparing run {body.run}")
        elif not self._resumed:
            request.fail("not-resumed", f"run {body.run} began anew: its shards are not loaded")
        else:
            if self._preparing is not None:
                self._missing -= load_states(state.shards, body, request.message.tensors)
                self._begin_if_complete()
            request.reply(pack(Loaded(left=len(self._missing))))

    def _send_record(self, request: Request, body: GetRecord, state: ServerState) -> None:
        if body.run != state.run or state.log is None:
            request.fail("no-record", f"{self._identity.node} keeps no record of run {body.run}")
            return
        log = np.frombuffer(state.log.packed(), np.uint8)
        refusal = part_refusal(body, len(log), most_bytes=request.link.max_message_bytes)
        if refusal is not None:
            request.fail(*refusal)
            return
        part = log[body.start : body.stop]
        reply_when_room(request, part.nbytes, lambda: pack(RecordPart(total=len(log)), [part]))

    def _keep_deadline(self, state: ServerState) -> None:
        state.waiting.fresh = False
        self._timer.rearm()

    def _next_deadline(self) -> float | None:
        return self.state.next_deadline() if self.state is not None else None

    def _due(self) -> None:
        if self.state is not None:
            self._perform(self.state.give_up(now=self._loop.time()))

    # --- effects -----------------------------------------------------------------------------

    def _drain_soon(self, state: ServerState) -> None:
        if not state.idle and not self._draining:
            self._draining = True
            self._loop.call_soon(self._callbacks.run, self._drain)

    def _drain(self) -> None:
        """Do one round's work on the queue; continue in the next round while there is more."""
        state = self.state  # None while the server prepares another run
        try:
            if state is not None:
                self._apply_some(state)
        finally:
            self._draining = False
        if state is not None:
            self._drain_soon(state)

    def _apply_some(self, state: ServerState) -> None:
        room = TURN_WORK
        while room > 0:
            if self._work is None:
                batch, effects = state.take_batch()
                if effects:
                    self._perform(effects)
                if state.waiting.fresh:
                    self._keep_deadline(state)
                if batch is None:
                    return
                self._work = self._begin(batch)
            room -= self._step(state, self._work, room)

    def _begin(self, batch: Apply | ApplySum) -> "_Work":
        applier, timeline = self._applier, self._timeline
        assert applier is not None
        begin = timeline.clock() if timeline is not None else 0.0
        if isinstance(batch, ApplySum):
            gradients = []
            for queued, places in zip(batch.pushes, batch.places, strict=True):
                whole = places == tuple(range(len(queued.push.shards)))
                gradients.append(queued.gradients if whole else queued.gradients.only(places))
            work = applier.work_on_sum(batch.shards, gradients, scale=batch.scale, rate=batch.rate)
            return _Work(batch, batch.shards, work, begin)
        shards = batch.shards()
        whole = len(shards) == len(batch.pushes[0].push.shards)
        gradients = [
            queued.gradients if whole else queued.gradients.only(queued.accepted) for queued in batch.pushes
        ]
        return _Work(batch, shards, applier.work_on(shards, gradients, batch.rates), begin)

    def _step(self, state: ServerState, current: "_Work", room: int) -> int:
        """Do a bounded amount of work on the current batch, and report finished shards. Returns the work."""
        batch, work = current.batch, current.work
        before = len(work.finite)
        try:
            done = work.run(room)
        except BaseException:
            self._work = None
            raise
        # The last piece of a sum may finish all shards before the work reports its end.
        over = work.done or (isinstance(batch, ApplySum) and len(work.finite) == len(current.shards))
        if over:
            self._work = None
        if isinstance(batch, ApplySum):
            # Each shard of a sum is done at once, and pulls may read it before the others are done.
            sums = [finite for (finite,) in work.finite[before:]]
            if sums:
                self._perform(state.handle(SumApplied(batch, sums, before)))
        elif work.done:
            effects = state.handle(Applied(batch, work.finite))
            self._perform(effects)
            done += sum([_values_count(each.shards) for each in effects if isinstance(each, Acknowledge)])
        if over and self._timeline is not None:
            covered = _values_count(current.shards)
            pushes = [queued.push for queued in batch.pushes]
            self._timeline.applied(self._identity.node, pushes, covered, current.begin)
        return done

    def _perform(self, effects: Sequence[Effect]) -> None:
        shared: dict[tuple[Link, tuple[Shard, ...]], NDArray[Any]] = {}
        for effect in effects:
            match effect:
                case Acknowledge() if effect.shards:
                    # Answers to pushes of one client that were applied together share one copy.
                    key = (effect.request.link, effect.shards)
                    values = shared.get(key)
                    if values is None:
                        values = shared[key] = self._copy(effect.shards)
                    reply_or_fail(effect.request, pack(effect.body, [values]))
                case Acknowledge():
                    reply_or_fail(effect.request, pack(effect.body))
                case SendValues():
                    nbytes = _values_bytes(effect.shards)
                    reply_when_room(effect.request, nbytes, partial(self._values, effect.shards))
                case SendBehind():
                    behind = tuple([int(replica) for replica in effect.behind])
                    late = Values(versions=(), clock=effect.clock, behind=behind)
                    reply_or_fail(effect.request, pack(late))
                case SendStates():
                    nbytes = _states_bytes(effect.shards)
                    reply_when_room(effect.request, nbytes, partial(self._states, effect.shards))
                case AcknowledgeRecord():
                    reply_or_fail(effect.request, pack(Recorded()))
                case AcknowledgeTick():
                    reply_or_fail(effect.request, pack(Ticked()))
                case Refuse():
                    effect.request.fail(effect.code, effect.text)

    def _values(self, shards: Sequence[Shard]) -> Message:
        body = Values(
            versions=tuple([shard.version for shard in shards]),
            clock=min((shard.applied_clock() for shard in shards), default=0),
        )
        return pack(body, [self._copy(shards)])

    def _states(self, shards: Sequence[Shard]) -> Message:
        assert self._applier is not None
        return pack(*read_states(shards, self._applier.rule))

    def _copy(self, shards: Sequence[Shard]) -> NDArray[Any]:
        """Copy shards one after the other into pooled memory: links never read live values."""
        dtype = self._dtype
        size = 0
        for shard in shards:
            size += len(shard.values)
        copy: NDArray[Any] = self._buffers.lend(size * dtype.itemsize, dtype, (size,))[0]
        at = 0
        for shard in shards:
            end = at + len(shard.values)
            copy[at:end] = shard.values
            at = end
        return copy

    def statistics(self) -> ServerStatistics:
        """Counts of the server, and of its shards in the run in progress or just ended."""
        counts = self.state.statistics() if self.state is not None else ServerStatistics()
        counts.traffic = self._traffic.rows()
        counts.process = self.process_memory()
        return counts

    def __repr__(self) -> str:
        return f"<ParameterServer {self._identity.node} at {self.address} run {self._run or 'none'}>"


@dataclass(slots=True, frozen=True)
class _Work:
    """A batch or a sum in progress."""

    batch: Apply | ApplySum
    shards: Sequence[Shard]
    work: Work
    begin: float
    """Time of its begin, on the timeline's clock."""


def _values_count(shards: Sequence[Shard]) -> int:
    return sum([len(shard.values) for shard in shards])


def _values_bytes(shards: Sequence[Shard]) -> int:
    return sum([shard.values.nbytes for shard in shards])


def _states_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of shards with the arrays of their rule."""
    return sum([array.nbytes for shard in shards for array in (shard.values, *shard.rule_state.values())])
