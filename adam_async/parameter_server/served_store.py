"""One bundle of a store on one server: its questions, its batches and its answers.

All code here that touches shard values runs on the event loop's thread. Except in a run in place, the server
is the single writer of its shards, and reads between batches need no lock. A round of the loop does a bounded
amount of work, counted and not timed, and a large batch takes several rounds, so a heartbeat waits for
milliseconds, however long the queue is. Batches (AD-42) form from the pushes that arrive during this work.

The shards of one rule and one type are a *family*. Each family has an applier, and a question names shards of
one family only.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from adam_async.errors import counted
from adam_async.messages import (
    Body,
    GetRecord,
    KeepStill,
    Loaded,
    LoadShards,
    MapShards,
    PinShards,
    Pull,
    Push,
    ReadGroupSets,
    ReadShards,
    ReportSteps,
    Statistics,
    Tick,
    UnmapShards,
    pack,
)
from adam_async.model.vectors import VECTORS
from adam_async.parameter_server.answers import Answers, send_record, values_count
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.at_once import ShortWay
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    ApplySum,
    Effect,
    Entry,
    EpochBegan,
    KeepPin,
    Pin,
    Propose,
    PullArrived,
    PushArrived,
    QueuedPin,
    ReplicasChanged,
    SetsAsked,
    StepsArrived,
    SumApplied,
    TickArrived,
    VectorsChanged,
    is_torn,
)
from adam_async.parameter_server.gradients import PushGradients, read_gradients
from adam_async.parameter_server.mapped_workers import MappedWorkers, unreported_steps
from adam_async.parameter_server.question_checks import (
    MOST_WAIT_S,
    QUESTION_TYPES,
    SESSION_TYPES,
    QuestionChecks,
    SenderChecks,
)
from adam_async.parameter_server.replay_log import OrderLog, most_read_bytes
from adam_async.parameter_server.replication.local_copy import Bundle as BundleFacts
from adam_async.parameter_server.shard import FamilyMemory, Shard, ShardTables, set_vectors
from adam_async.parameter_server.shard_pieces import pieces_of
from adam_async.parameter_server.shard_transfer import load_states
from adam_async.parameter_server.sheets import StoreSheets
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import StoreReports
from adam_async.parameter_server.storage import NotedStep
from adam_async.parameter_server.store_host import StoreHost, compile_kernels, kernels_of, shards_of
from adam_async.parameter_server.store_pins import StorePins
from adam_async.parameter_server.store_work import StoreWork, begin_work
from adam_async.parameter_server.user_applier import appliers_of
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.ids import Replica, ShardId
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.run.store_record import (
    ArrayRecord,
    BundleRecord,
    StoreRecord,
    VectorRecord,
    newest_vector,
    served_word,
)
from transport import Link, Request

logger = logging.getLogger(__name__)

DETAILS_BYTES = 1 << 20
"""Size reserved in a message for the details of a push on its way to the other copies, in bytes."""


class ServedStore:
    """The shards of one bundle of a store on one server, from its placement to its end.

    Without a log (one copy, no durable pushes) the server is the primary. With a log the primary starts the
    log once it has all values, and the other members begin with empty shards (`bundle_copy.py`).

    Args:
        store: The store.
        arrays: Its arrays.
        home: Name of the bundle.
        record: Record of the bundle in the cluster map.
        host: Services of the server.
    """

    def __init__(
        self,
        store: StoreRecord,
        arrays: Sequence[ArrayRecord],
        home: str,
        record: BundleRecord,
        host: StoreHost,
    ) -> None:
        self.store = store
        self.home = home
        self._host = host
        self._arrays = arrays
        self._table = shard_table(arrays, shard_bytes=store.shard_bytes)
        self._specs = self._table.shards
        self._rules = store.rules
        self.reports = StoreReports(Statistics(node=host.node, role="ps"), host.now, host.spawn)
        self._appliers: Mapping[tuple[int, str], Applier] = {}
        self._work: StoreWork | None = None
        """Batch or sum that was taken from the queue and is not finished; None if there is none."""
        self._has_refused = False
        """Whether a rule of the user has refused a push."""
        self._closing: set[Link] = set()
        """Links that close because their peers sent in the name of others."""
        self._vectors, self._vectors_made = store.vectors, store.vectors_made
        """Vectors in the newest map, and the highest number of one so far."""
        specs = [spec for spec in self._specs if store.buckets[spec.bucket] == home]
        self._pushed_to = tuple([spec.id for spec in specs if not spec.frozen])
        """Shards that the commands of a step are for."""
        self._largest = max([spec.nbytes for spec in specs if not spec.frozen], default=0)
        """Size of the largest of them, in bytes."""
        self._pieces = pieces_of(specs, in_place=store.in_place)
        self.sheets = StoreSheets(store.id, home, host)
        self._make()
        self.mapped = None
        """Workers of other processes on the memory of this store; None for a store that takes pushes."""
        if self._storage is not None:
            self.mapped = MappedWorkers(self._storage, host, self._count_mapped)
            if host.disk is not None:
                host.disk.still = self._storage.still
        self._saver = host.disk.saver(home, self._pieces) if host.disk is not None else None
        self._pins = StorePins(store, home, self._specs, self._pieces, host, self._drain_soon)
        self._copy: BundleCopy | None = None
        if self._saver is not None:
            self._saver.is_ready, self._saver.wake = self._has_values, self._rest
            self._saver.bundle, self._saver.resume = lambda: self.state.bundle, self._drain_soon
        self._record = record
        self._cluster: ClusterMap | None = None
        self._is_over = False
        self.is_primary = not store.has_log
        """Whether this server orders pushes and answers. With a log the first primary begins once it has all
        values."""
        if record.primary != host.me or (store.has_log and not self._missing):
            self._missing.clear()
            self._start_copy()
        self._compilations: list[asyncio.Task[None]] = []
        self._compiles = host.make_pool is not None and not store.in_place and kernels_of(store) == "numba"
        self._compile()
        if self._vectors:
            self._compile(of_vectors=True)
        logger.info("%s has %s of store %s", host.node, counted(len(self.state.shards), "shard"), store.id)

    def _compile(self, *, of_vectors: bool = False) -> None:
        """Begin to compile the kernels of the rules, or of vectors, if the store uses compiled ones."""
        if self._compiles:
            name = f"{VECTORS if of_vectors else 'kernels'}-{self.store.id}-{self.home}"
            work = compile_kernels(self._appliers, self._host, of_vectors=of_vectors)
            self._compilations.append(self._host.spawn(name, work))

    def _make(self) -> None:
        """Make the shards, zeroed, with their front."""
        store = self.store
        self._storage, shards = shards_of(
            store, self.home, self._table, self._arrays, self._rules, self._host
        )
        host = self._host
        self._answers = Answers(
            host.buffers, self._rules, self._drain_soon, self._is_torn, host.spawn, self.sheets.publish
        )
        # The appliers of earlier shards are kept: they may have compiled kernels.
        self._appliers = self._appliers or appliers_of(
            shards, self._rules, host.rules, refused=self._note_refusal
        )
        self._applier = next(iter(self._appliers.values()), None)
        self.state = ServerState(
            store=store.id,
            generation=store.generation,
            shards=shards,
            clocked=store.slack is not None,
            summed_weight=store.summed_weight,
            scale_by_staleness=store.scale_by_staleness,
            # Only the driver of a run reads the log, and a replay has no assignments.
            log=OrderLog([int(shard.spec.id) for shard in shards])
            if store.record and store.program
            else None,
            program=bool(store.program),
        )
        self.state.bundle.keeps_pins = host.pins is not None
        # Only pushes on the short way move values to sheets.
        is_short = host.at_once and not any(each.may_refuse for each in self._appliers.values())
        self._memories = list({id(m): m for shard in shards if (m := shard.memory) is not None}.values())
        """Memory of each rule and type."""
        for memory in self._memories:
            memory.lacks_sheets, memory.forget = is_short and store.value_arrays > 1, self._forget_places
        self._set_vectors()
        self._known_vectors: tuple[VectorRecord, ...] | None = None
        """Vectors that the log has from this primary; None if it has none yet."""
        self._checks = QuestionChecks(
            self.state,
            self._specs,
            most_weight=store.most_weight,
            resumed_epoch=store.first_epoch,
            resumed_clock=store.first_clock,
        )
        changed = self._changed if self._host.disk is not None else None
        self.short = ShortWay(
            *(self.state, self._checks, self._host, changed),
            self._take_charged,
            self._drain_soon,
            self.sheets.publish,
        )
        self._sender_checks = SenderChecks(program=bool(store.program), creator=store.creator)
        self.state.alone = not store.has_log
        self.state.joins = not any(applier.may_refuse for applier in self._appliers.values())
        self._missing = {int(shard.spec.id) for shard in shards}
        self._live: dict[Replica, int] | None = None
        self._epoch = 0

    def _set_vectors(self) -> None:
        """Give the shards the vectors of the map, before the log has an entry."""
        self.state.bundle.vectors = self._vectors
        set_vectors(self.state.shards.values(), self._vectors)

    @property
    def complete(self) -> bool:
        """Whether this server is the primary, and all its shards have values."""
        return self.is_primary and not self._missing

    @property
    def lacks_values(self) -> bool:
        """Whether the map names this server as the primary, and shards have no values yet."""
        return bool(self._missing) and self._record.primary == self._host.me

    def home_of(self, shards: Sequence[int]) -> str:
        """Return the home of the first shard of a message; empty if the store has no such shard."""
        if not shards or shards[0] >= len(self._specs):
            return ""
        return self.store.buckets[self._specs[shards[0]].bucket]

    # --- copies --------------------------------------------------------------------------------

    def _start_copy(self) -> None:
        """Begin this copy of a bundle with a log: the store has several copies, or durable pushes."""
        store, host = self.store, self._host
        facts = BundleFacts(
            store=store.id, home=self.home, pieces=len(self._pieces), min_in_sync=store.min_in_sync_in_force
        )
        self._copy = BundleCopy(
            host.me,
            facts,
            self._record,
            copies=store.copies,
            shards=self,
            saver=self._saver,
            pieces=self._pieces,
            table=self._specs,
            host=host,
        )
        self._copy.start()

    @property
    def copy(self) -> BundleCopy | None:
        """Copy of a bundle with a log; None without a log, or before the primary has all values."""
        return self._copy

    @property
    def bundle(self) -> Bundle:
        """The shards; `reset` replaces them."""
        return self.state.bundle

    def committed(self, entry: Entry) -> None:
        """Take a committed entry, and do its work in later rounds of the loop."""
        self._perform(self.state.committed(entry))
        self._drain_soon()

    def reset(self) -> None:
        """Begin with new, empty shards: the server joins, or declines if it lacks memory."""
        self._work = None
        text = f"{self._host.node} has begun bundle {self.home} anew, with the values of the primary"
        self._answers.refuse("not-primary", text)
        if self._saver is not None:
            self._saver.drop()
            self._saver.all_touched()
            self.state.bundle.end_cut()
            self._saver.moved()
        self.state.bundle.end_pin()
        try:
            self._make()
        except MemoryError:
            self._host.declines(self)
        self._missing.clear()

    def lead(self) -> None:
        """Order pushes and answer requests from now on."""
        self.is_primary = True
        self.state.lead()
        self._live, self._epoch, self._known_vectors = None, 0, None
        self._host.loaded()  # only reported primaries count as ready for workers that join later
        logger.debug("%s is the primary of bundle %s of store %s", self._host.node, self.home, self.store.id)
        if self._cluster is not None:
            self._follow_map(self._cluster)

    def follow(self) -> None:
        """Refuse all requests from now on: another server is the primary."""
        self.is_primary = False
        self._perform(self.state.follow())

    def took_pins(self) -> None:
        """Remove the pins from the disk that were given up while this server was away."""
        self._pins.remove_given_up(self.bundle)

    def leave(self) -> None:
        """Drop the shards: the server is no member any more."""
        self._host.left(self)

    # --- the disk ------------------------------------------------------------------------------

    def _forget_places(self, memory: FamilyMemory) -> None:
        """Forget where values are: all of these keep memory that no shard uses any more."""
        self.state.bundle.forget_places(memory)
        self.short.forget_places(memory)
        for applier in self._appliers.values():
            applier.batches.forget()

    def _changed(self, shards: Sequence[Shard], updates: int) -> None:
        if self._saver is not None:
            self._saver.touched([shard.spec.id for shard in shards], updates)

    def _has_values(self) -> bool:
        if not self.store.has_log:
            return self.complete
        return self._copy is not None and self._copy.is_whole

    def _rest(self) -> None:
        """Let the saver copy a piece if the shards are between two entries; otherwise the saver waits."""
        if self._saver is None or not self._saver.has_request:
            return
        if self._copy is not None:
            self._copy.work_done()
        elif self.state.bundle.idle:
            changes = self._saver.changes
            self._saver.copy_requested(self.state.bundle, lambda _: (0, changes))

    # --- workers of other processes in place ------------------------------------------------------

    def _count_mapped(self, body: MapShards, steps: Iterable[NotedStep]) -> int:
        """Count the steps of a worker that it has not reported, and return the number of those cut off."""
        # A worker may know of an epoch before this server.
        noted = {(step.epoch, step.group): step for step in steps if step.epoch >= self._epoch}.values()
        cut = 0
        shards: dict[ShardTables, list[int]] = {}
        for number in self._pushed_to:
            shards.setdefault(self.state.shards[number].tables, []).append(number)
        for tables, named in shards.items():
            try:
                reports = unreported_steps(body, noted, tables)
            except msgspec.ValidationError as error:
                return self._refuse_notes(body, str(error))
            if not reports:
                continue
            report = ReportSteps(
                store=body.store,
                session=body.session,
                incarnation=body.incarnation,
                replica=body.replica,
                generation=body.generation,
                shards=tuple(named),
                number=tables.ordered[body.session, body.incarnation] + 1,
                steps=reports,
            )
            if refusal := self._checks.refusal(report, most_bytes=0):
                return self._refuse_notes(body, refusal.text)
            cut = max(cut, sum(step.loss_sum is None for step in reports))
            self._follow_up(self.state.count_steps(report))
            if self._saver is not None:
                self._saver.touched(map(ShardId, named), len(reports))
        return cut

    def _refuse_notes(self, body: MapShards, text: str) -> int:
        logger.warning("%s: notes of a worker of replica %s: %s", self._host.node, body.replica, text)
        return 0

    # --- the map -------------------------------------------------------------------------------

    def map_changed(self, cluster: ClusterMap) -> None:
        """Follow the members of the bundle, the replicas that push to the store, and its epochs."""
        self._cluster = cluster
        store = cluster.store(self.store.id)
        if store is not None and store.vectors != self._vectors:
            if not self._vectors_made:
                self._compile(of_vectors=True)
            self._vectors, self._vectors_made = store.vectors, store.vectors_made
            if self._host.disk is not None:
                self._host.disk.record_changed(store)
            if self._missing:  # before the log begins, the values to load have these vectors
                self._set_vectors()
        record = cluster.bundle(self.store.id, self.home)
        if record is not None:
            self._record = record
            if self._copy is not None:
                self._copy.record_changed(record)
        if self.is_primary:
            self._follow_map(cluster)

    def _follow_map(self, cluster: ClusterMap) -> None:
        state, store = self.state, cluster.store(self.store.id)
        assert store is not None
        pushers = cluster.pushers(store)
        live = {Replica(replica): generation for replica, (generation, _) in pushers.items()}
        if live != self._live:
            self._live = live
            self._sender_checks.replica_generations_changed(
                {
                    (Replica(replica), generation): members
                    for replica, (generation, members) in pushers.items()
                }
            )
            self._follow_up(state.handle(ReplicasChanged(live)))
        if self._vectors != (self._known_vectors or ()) or (
            self._known_vectors is None and state.bundle.vectors
        ):
            self._follow_up(state.handle(VectorsChanged(self._vectors)))
        self._known_vectors = self._vectors
        begun = cluster.epoch
        if store.program:
            if begun is not None and begun.run == store.program and begun.number != self._epoch:
                self._epoch_began(begun.number, begun.first_clock, groups=begun.groups)
        elif store.epoch != self._epoch:
            self._epoch_began(store.epoch, store.first_clock, groups=None)

    def _epoch_began(self, number: int, first_clock: int, *, groups: int | None) -> None:
        self._epoch = number
        self._checks.epoch_began(number, first_clock=first_clock, groups=groups)
        self._follow_up(self.state.handle(EpochBegan(number, first_clock)))

    def _follow_up(self, effects: Sequence[Effect]) -> None:
        self._perform(effects)
        self._drain_soon()

    # --- questions -----------------------------------------------------------------------------

    def link_closed(self) -> None:
        """Drop the requests of closed links that wait for an epoch or for a clock.

        No link's budget counts the memory of these requests any more, and the peer sends them again on
        another link.
        """
        if self.mapped is not None:
            self.mapped.links_closed()
        self.short.links_closed()
        self.state.epoch_gate.keep(lambda request: request.is_open)
        self.state.waiting.keep(lambda request: request.is_open)
        snapshot = self.state.bundle.snapshot
        if snapshot is not None and snapshot.link.closed:
            self.state.bundle.end_snapshot()
            self._drain_soon()

    def answer(self, request: Request, body: Body) -> bool:
        """Answer a question, now or later. Returns whether the store takes messages of this type."""
        if self._is_refused(request, body):
            return True
        commands = body.commands if isinstance(body, Push) else None
        if isinstance(body, Push) and commands is not None and body.generation == self.store.generation:
            # The new values of a shard have memory beside the old ones until its step is done.
            nbytes = self._largest * len({command.into for command in commands.combine})
            body = msgspec.structs.replace(body, shards=self._pushed_to)
            request.charge(nbytes, partial(self._take_charged, request, body))
            return True
        if isinstance(body, Push) and body.pull and not self._missing:
            # Charge on arrival: the answer has values and their versions, so it cannot wait for room later.
            shards, group = self.state.shards, self.state.bundle.group(body.shards)
            if group is not None:
                nbytes = group.nbytes
            else:
                found = [shards.get(ShardId(number)) for number in set(body.shards)]
                nbytes = sum([shard.values.nbytes for shard in found if shard is not None])
            request.charge(nbytes, partial(self._take_charged, request, body))
            return True
        return self._take(request, body)

    def _is_refused(self, request: Request, body: Body) -> bool:
        """Refuse a question that this server does not answer now. Returns whether it was refused."""
        if self._is_over:
            request.fail("wrong-run", f"store {self.store.id} left this server")
            return True
        if self._copy is None and self.is_primary:
            return False
        refusal = self._why_not_now(isinstance(body, LoadShards))
        if refusal is not None:
            request.fail(*refusal)
        return refusal is not None

    def _take_charged(self, request: Request, push: Push) -> None:
        """Take a push after a wait for room, unless the store or this primary has ended."""
        if not self._is_refused(request, push) and not self.short.take(request, push, charged=True):
            self._take(request, push)

    def _why_not_now(self, loads: bool) -> tuple[str, str] | None:
        """Return the code and the text of the refusal of all questions; None if this server answers them."""
        node, primary, copy = self._host.node, self._record.primary, self._copy
        if copy is None:
            if loads and self._missing:
                return None
            return "not-ready", f"{node} lacks values of {len(self._missing)} shards of store {self.store.id}"
        if self.is_primary and not copy.is_stuck:
            return None
        if self.is_primary or primary == self._host.me:
            why = copy.why_not_committing() or "it applies the entries of the primary before it"
            return "not-ready", f"{node}, the primary of bundle {self.home}, has to wait: {why}"
        text = f"{node} is no primary of bundle {self.home}"
        return "not-primary", f"{text}, {primary[0]} is" if primary is not None else text

    def _take(self, request: Request, body: Body) -> bool:
        """Pass a question to the state, and perform its effects."""
        state, host = self.state, self._host
        if isinstance(body, LoadShards):
            self._load(request, body)
            return True
        if self._missing:
            text = f"{host.node} lacks values of {len(self._missing)} shards of store {self.store.id}"
            request.fail("not-ready", text)
            return True
        timeline = host.timeline
        begin = timeline.clock() if timeline is not None else 0.0
        if not self._may_ask(request, body) or self._is_early(request, body):
            return True
        match body:
            case Push():
                arrived = self._read_push(request, body)
                if arrived is None:
                    return True
                effects = state.handle(arrived)
            case Pull():
                deadline = host.now() + min(body.wait_s, MOST_WAIT_S) if body.clock else 0.0
                effects = state.handle(PullArrived(request, body, deadline, request.link))
            case ReadShards():
                until = host.now() + host.waits.answer_s
                deadline = until - host.waits.answer_s / 2
                effects = state.handle(PullArrived(request, body, deadline, request.link, until))
                state.waiting.fresh = True
            case ReportSteps():
                effects = state.handle(StepsArrived(request, body))
                if self._saver is not None:
                    self._saver.touched(map(ShardId, body.shards), len(body.steps))
            case Tick():
                effects = state.handle(TickArrived(request, body))
            case ReadGroupSets():
                refusal = self._checks.refusal_of_sets(body, self._cluster)
                if refusal is not None:
                    request.fail(*refusal)
                    return True
                if self.mapped is not None and self.mapped.waits_for(
                    state.ended, partial(self.answer, request, body)
                ):
                    return True
                effects = state.handle(SetsAsked(request, body.generation, body.epoch))
            case MapShards() | UnmapShards() | KeepStill():
                self._take_mapped(request, body)
                return True
            case GetRecord():
                effects = []
                send_record(request, body, state.bundle.log)
            case PinShards():
                code, text = self._pins.refusal(body, state.bundle)
                if text:
                    request.fail(code, text)
                    return True
                effects = state.handle(QueuedPin(request, Pin(body.name, body.pin, body.removes)))
            case _:
                return False
        if effects:
            self._perform(effects)
        if state.waiting.fresh:
            self._keep_deadline()
        if timeline is not None and isinstance(body, ReportSteps):
            timeline.recorded(host.node, body, begin)
        if state.has_work:
            host.drain_soon(self)
        return True

    def _take_mapped(self, request: Request, body: MapShards | UnmapShards | KeepStill) -> None:
        """Pass a message about the mapped memory on, if the run trains in place and is the one it names."""
        is_of_another = isinstance(body, MapShards) and body.generation != self.store.generation
        if self.mapped is None or is_of_another:
            request.fail("wrong-run", f"store {self.store.id} is not trained in place as asked")
        else:
            self.mapped.take(request, body)

    def _read_push(self, request: Request, push: Push) -> PushArrived | None:
        """Return a push with its gradients; None if it is refused."""
        request.copy_out()
        if self._copy is not None and self._refuse_large(request):
            return None
        if push.recorded and (text := self._fault_of_reads(request, push)):
            request.fail("malformed", text)
            return None
        finite, group = None, self.state.bundle.group(push.shards)
        dtype = self._dtype_of(push.shards)
        gradients = read_gradients(push, request.message.tensors, self._specs, dtype, group)
        if not gradients.is_sure:
            finite = self._check_gradients(push, gradients)
            gradients = gradients.trusted()
        elif self._host.at_once and push.shards and not (push.assign or push.vector):
            self.short.prepare(request.link, push, self._applier_of(self._specs[push.shards[0]]))
        return PushArrived(request, push, gradients, finite)

    def _refuse_large(self, request: Request) -> bool:
        """Refuse a push that is too large to travel on to the other copies with its details."""
        size = sum([tensor.nbytes for tensor in request.message.tensors])
        most = request.link.max_message_bytes - DETAILS_BYTES
        if size > most:
            text = f"a push of {size} bytes; {most} are the most with {self.store.copies} copies: split it"
            request.fail("malformed", text)
        return size > most

    def _fault_of_reads(self, request: Request, push: Push) -> str:
        """Return why the log cannot have the reads of a push; empty if it can."""
        if self.state.bundle.log is None:
            return f"a Push with reads, and store {self.store.id} is not recorded"
        most = most_read_bytes(push.groups, shards=len(self._specs), arrays=self.store.arrays)
        tensors = request.message.tensors
        # One piece of the loop's work copies them into the log.
        if tensors and tensors[-1].nbytes > most:
            return f"reads of {tensors[-1].nbytes} bytes, and those of its groups have at most {most}"
        return ""

    def _dtype_of(self, numbers: Sequence[int]) -> np.dtype[Any]:
        """Return the type of the first shard of a push; a push of no known shard is refused later."""
        number = numbers[0] if numbers else 0
        return np.dtype(self._specs[number].dtype if number < len(self._specs) else np.float32)

    def _may_ask(self, request: Request, body: Body) -> bool:
        """Refuse an invalid question, and close the link of a peer that sends in the name of another."""
        # Elsewhere it would count groups without a gradient, also after their generation has ended.
        if isinstance(body, ReportSteps) and not self.store.in_place:
            request.fail("malformed", f"ReportSteps: store {self.store.id} is not trained in place")
            return False
        # Its step would count once for each shard of a tensor, and could come while the values are still.
        if isinstance(body, Push) and self.store.in_place:
            request.fail("malformed", f"Push: store {self.store.id} is trained in place")
            return False
        if isinstance(body, QUESTION_TYPES):
            refusal = self._checks.refusal(body, most_bytes=request.link.max_message_bytes)
            if refusal is not None:
                request.fail(*refusal)
                return False
        # A reading at a clock keeps copies for one reader, the driver.
        if isinstance(body, ReadShards) and (text := self._sender_checks.read_refusal(request.link.peer)):
            self._refuse_sender(request, text)
            return False
        if isinstance(body, SESSION_TYPES):
            text = self._sender_checks.refusal(request.link.peer, body)
            if text:
                self._refuse_sender(request, text)
                return False
            if surplus := self._sender_checks.surplus(self.state.bundle.count_tables):
                self._perform(self.state.forget(surplus))
        return True

    def _is_early(self, request: Request, body: Body) -> bool:
        """Refuse a question that names a vector before the map of this server has it."""
        newest = 0
        if isinstance(body, Push) and (body.vector or body.commands is not None):
            newest = max(body.named_vectors(), default=0)
        elif isinstance(body, Pull):
            newest = body.vector
        return self._lacks_vector(request, newest)

    def _lacks_vector(self, request: Request, newest: int) -> bool:
        """Refuse a question for now if the map of this server has not named a vector yet."""
        if newest > self._vectors_made:
            text = f"the map of {self._host.node} has {self._vectors_made} vectors, and not {newest} yet"
            request.fail("not-ready", text)
        return newest > self._vectors_made

    def _refuse_sender(self, request: Request, text: str) -> None:
        """Refuse a request, and close its link once the peer has the refusal.

        A peer with an old identity learns the reason.
        """
        request.fail("not-yours", text)
        link = request.link
        if link not in self._closing:
            self._closing.add(link)
            logger.warning("%s: %s; its link is closed", self._host.node, text)
            closing = self._host.spawn(f"closes {link.peer.node}", link.aclose())
            closing.add_done_callback(lambda _: self._closing.discard(link))

    def _check_gradients(self, push: Push, gradients: PushGradients) -> list[bool]:
        """Check each gradient. The result is part of the entry, so all copies use the same one."""
        specs = [self._specs[number] for number in push.shards]
        return self._applier_of(specs[0]).check_finite(specs, gradients) if specs else []

    def _applier_of(self, spec: ShardSpec) -> Applier:
        if len(self._appliers) == 1:
            assert self._applier is not None
            return self._applier
        return self._appliers[spec.rule, spec.dtype]

    def _load(self, request: Request, body: LoadShards) -> None:
        """Load shards before the start; once all are loaded, a repetition changes nothing."""
        state = self.state
        if text := self._sender_checks.load_refusal(request.link.peer):
            self._refuse_sender(request, text)
            return
        if body.generation != state.generation:
            request.fail("wrong-run", f"store {body.store} is in generation {state.generation} here")
            return
        if self._lacks_vector(request, newest_vector(body.arrays)):
            return
        if self._missing:
            self._missing -= load_states(
                state.shards, body, request.message.tensors, is_new=not self.store.program
            )
            if not self._missing:
                # Shards whose tables stay apart would have no lane, see `at_once.py`.
                state.bundle.share_equal_tables()
                if self.store.has_log:
                    self._start_copy()
                if self._saver is not None:
                    self._saver.all_touched()
                self._host.loaded()
        request.reply(pack(Loaded(left=len(self._missing))))

    def _keep_deadline(self) -> None:
        self.state.waiting.fresh = False
        self._host.rearm()

    def end(self) -> None:
        """Refuse all queued and waiting requests: the store leaves the server."""
        self._is_over = True
        self.sheets.end()
        self.end_compilation()
        if self.mapped is not None:
            self.mapped.end(lets_go=True)
        self.short.end()
        self.state.bundle.end_pin()
        self._perform(self.state.end())
        self._answers.refuse("wrong-run", f"store {self.store.id} left this server")
        disk, saver = self._host.disk, self._saver
        if disk is None or saver is None:
            return
        if disk.left(saver):
            self._host.spawn(f"retires-{self.store.id}", disk.retire(is_over=False))
        else:
            self._host.spawn(f"parts-{self.store.id}-{self.home}", disk.part(saver))

    def end_compilation(self) -> None:
        """Give up a compilation of kernels: the server must not wait for it at its end."""
        for compilation in self._compilations:
            compilation.cancel()

    def next_deadline(self) -> float | None:
        """Return the next deadline of a waiting request; None if no request waits."""
        return self.state.next_deadline()

    def give_up(self) -> None:
        """Answer the waiting requests whose deadline has passed."""
        self._follow_up(self.state.give_up(now=self._host.now()))

    # --- effects -------------------------------------------------------------------------------

    def _drain_soon(self) -> None:
        if self.state.has_work:
            self._host.drain_soon(self)

    def apply_some(self, room: int) -> bool:
        """Do about `room` of the queued work, see `PIECE_WORK`. Returns whether there is more."""
        state = self.state
        while room > 0:
            if self._work is None:
                batch, effects = state.take_batch()
                if effects:
                    self._perform(effects)
                if state.waiting.fresh:
                    self._keep_deadline()
                if batch is None:
                    break
                begin = self._host.timeline.clock() if self._host.timeline is not None else 0.0
                self._work = begin_work(batch, self._applier_of, begin)
                state.bundle.keep(self._work.shards)
            if any(memory.moves for memory in self._memories):
                self._work.leave_lent()
            room -= self._step(state, self._work, room)
            if self._copy is not None and state.bundle.taken is None:
                self._copy.work_done()
                state = self.state  # a member that joins begins with new shards
        return state.has_work

    def _step(self, state: ServerState, current: StoreWork, room: int) -> int:
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
            # A shard of a sum is reported once it is done, so pulls may read it before the others are done.
            sums = [finite for (finite,) in work.finite[before:]]
            if sums:
                self._perform(state.handle(SumApplied(batch, sums, before)))
                self._changed(current.shards[before : before + len(sums)], len(batch.pushes))
        elif work.done:
            effects = state.handle(Applied(batch, current.outcomes))
            self._perform(effects)
            self._changed(current.shards, len(batch.pushes))
            done += sum([values_count(each.shards) for each in effects if isinstance(each, Answer)])
        if over:
            self._answers.whole()
        if over and self._host.timeline is not None:
            covered = values_count(current.shards)
            pushes = [queued.push for queued in batch.pushes]
            self._host.timeline.applied(self._host.node, pushes, covered, current.begin)
        return done

    def _note_refusal(self, text: str) -> None:
        """Report the first refusal of a push by a rule of the user; the statistics count the others."""
        # A client may push for hours what a rule refuses, and each push would have a line in the log.
        logger.debug("%s: %s", self._host.node, text)
        if not self._has_refused:
            self._has_refused = True
            self._host.notice(f"{self._host.node}: {text}; the statistics of servers count further ones")

    def _is_torn(self) -> bool:
        """Return whether the batch in progress has changed values that no version counts."""
        return self._work is not None and is_torn(self._work.batch)

    def _perform(self, effects: Sequence[Effect]) -> None:
        if self._copy is not None:
            for effect in effects:
                if isinstance(effect, Propose):
                    self._copy.propose(effect.entry)
        if self._saver is not None:
            for effect in effects:
                if isinstance(effect, KeepPin):
                    self._pins.keep(effect.pin, self.bundle, self._saver, self._cluster)
        self._answers.perform(effects, self.state.bundle.snapshot)
        if self.state.bundle.cut is not None and self._saver is not None:
            self._saver.moved()

    def __repr__(self) -> str:
        return f"<ServedStore {self.store.id} {len(self.state.shards)} shards, {len(self._missing)} missing>"


def words_of(every: Collection[ServedStore]) -> tuple[str, ...]:
    """Return the words (`served_word`) of the stores that a server serves.

    After a failover the server may be the primary of several bundles of a store, and all need their values.
    """
    lacking = {served_word(each.store) for each in every if each.lacks_values}
    return tuple(sorted({served_word(each.store) for each in every if each.complete} - lacking))
