"""Pure: the front of a primary: it orders pushes, puts entries into the log, and answers.

Theory of operation
-------------------
The state of a server has two parts. The `Bundle` (`bundle.py`) has the shards, a function of the log. The
front is volatile: the numbers of ordered pushes that are not yet applied, the queue, and waiting requests.

Pushes and pulls wait in one queue, in order of arrival. For each shard that a push names, the front *orders*
the push if its number is the session's last number + 1. The front answers a lower number again, and answers a
gap with the number that it expects. `take_batch` takes the push that has waited longest, and later pushes for
the same shards (opportunistic batching, AD-42); pushes for other shards do not split a batch
(`push_queue.py`). The batch becomes an entry of the log, the bundle applies it, and the front then
acknowledges its pushes. In bsp an ordered push of gradients skips the queue: it becomes an entry at once, a
*pending contribution*, and the front acknowledges it when the entry is committed. The sum of a step queues
once it is complete (`bsp_barrier.py`).

Without other copies and durable pushes an entry is committed at once. Otherwise `Propose` hands it to the
shell, and `committed` takes it back. Up to `MOST_IN_FLIGHT` batches may be between the two calls.

No request passes a pull in the queue, so a pull contains all pushes queued before it. The front acknowledges
a duplicate of a queued push only after that push is applied. A tick waits in the queue too, so no clock
counts a push that is not applied. A batch that is an entry but not yet applied counts as queued: the server
sends no values of a shard whose batch is only partly applied.

A pull or a reading may need a *clock*: values with all pushes of live replicas up to this clock. The request
waits until these pushes are applied, or until its deadline. In bsp a reader gets exactly that clock
(`kept_shards.py`). The controllers name the live replicas, perhaps after a worker has begun. The begin of an
epoch names all replicas. So pushes and ticks of a later epoch wait for it, and later messages of their
sessions wait behind them. The server keeps the clocks of a replica until the map has the replica.

A data server may ask for the groups that the shards have (`SetsAsked`). The question waits behind all pushes
queued before it, and the front orders no groups of a generation that the newest map does not name. So the
answer is final for all generations that have ended in the map.

The staleness of a push on a shard is the number of pushes applied since the oldest version that its groups
read. It does not count the client's own pushes if local steps had already applied them to the copy that the
groups read.

The front never waits, sends, reads the time, or touches values or gradients. Deadlines are absolute seconds
on the caller's clock.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf
from operator import attrgetter
from typing import assert_never

from adam_async.messages import (
    GAP,
    NOT_PRIMARY,
    BundleSets,
    Pull,
    Push,
    Pushed,
    ReadShards,
    ReportSteps,
    ShardsPinned,
    ShardStates,
    StepsReported,
    Tick,
    Ticked,
    each_of,
    fits,
)
from adam_async.messages.group_sets import MOST_SETS_BOUNDS, LossSum
from adam_async.parameter_server.bsp_barrier import PendingBytes
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    Apply,
    ApplySum,
    Contribute,
    Effect,
    Entry,
    EpochBegan,
    Event,
    ForgetSessions,
    InFlight,
    KeepPin,
    Propose,
    PullArrived,
    PushArrived,
    QueuedPin,
    QueuedPull,
    QueuedPush,
    QueuedSets,
    QueuedTick,
    Refuse,
    ReplicasChanged,
    Request,
    SendSets,
    SetsAsked,
    StepsArrived,
    SumApplied,
    TickArrived,
    VectorsChanged,
    is_torn,
    moves_clocks,
    requests_of,
)
from adam_async.parameter_server.gradients import PushGradients
from adam_async.parameter_server.push_queue import (
    PushQueue,
    has_new_number,
    knows_a_part,
    most_joined,
    order_apart,
    order_groups,
    order_step,
    order_together,
    problems_of,
    refuse_places,
    set_apart,
    shards_named,
)
from adam_async.parameter_server.replay_log import OrderLog
from adam_async.parameter_server.replica_clocks import EndedGenerations
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.parameter_server.shard_group import (
    ShardGroup,
    applied_clock,
    each_tables,
    partly_named,
    tables_of,
    versions_of,
)
from adam_async.parameter_server.vector_steps import answer_to_step
from adam_async.parameter_server.waiting_requests import MOST_WAITING, EpochGate, WaitingRequests
from adam_async.run.group_ranges import groups_of, with_groups
from adam_async.run.ids import Replica, ShardId

MOST_NAMED = 1 << 13
"""Number of shards after which a batch takes no further tick, pull or push."""

MOST_IN_FLIGHT = 4
"""Number of unapplied proposed entries at which the front forms no new batch."""


class ServerState:
    """The shards of one bundle on one server, and the pushes and pulls in progress on them.

    Args:
        generation: Version of the assignment of the store's buckets.
        shards: The shards of the bundle. Events arrive only at its primary, entries at each member.
        clocked: Whether workers wait for one another (ssp, bsp), so that answers to pushes have a clock.
        summed_weight: Weight of a sum in bsp, where pushes are added up; 0 in other modes.
        scale_by_staleness: Whether a push's rate is divided by 1 + its staleness.
        log: Log of the order in which pushes are applied.
        program: Whether the store belongs to a program. In a store of clients, only clients that the map
            names contribute to sums.

    Attributes:
        alone: Whether entries need neither other copies nor a disk, and so are committed at once.
        joins: Whether a batch may have several pushes. A user's rule may refuse any push, so there each push
            is a separate batch.
    """

    def __init__(
        self,
        *,
        store: str,
        generation: int,
        shards: Iterable[Shard],
        clocked: bool = False,
        summed_weight: int = 0,
        scale_by_staleness: bool = False,
        log: OrderLog | None = None,
        program: bool = True,
    ) -> None:
        self.store = store
        self.generation = generation
        self.clocked = clocked
        self.program = program
        self.bundle = Bundle(
            shards,
            clocked=clocked,
            summed_weight=summed_weight,
            scale_by_staleness=scale_by_staleness,
            log=log,
        )
        self.shards = self.bundle.shards
        self.alone = True
        self.joins = True
        self.synchronous = summed_weight > 0
        """Whether pushes are added up (bsp)."""
        self._pending = PendingBytes(sum([shard.values.nbytes for shard in self.shards.values()]))
        self._replicas = self.bundle.replicas
        self._named: Mapping[Replica, int] = {}
        """Live generation of each replica in the newest map, perhaps not yet in an applied entry."""
        self.vectors: Set[int] = frozenset()
        """Numbers of the vectors in the newest map; the entry that names them may not be applied yet."""
        self._queue = PushQueue()
        self._in_flight: deque[InFlight] = deque()
        self.waiting = WaitingRequests()
        self._clocks_moved = False
        """Whether a clock of values may have moved since the last check of the waiting requests."""
        self.epoch_gate = EpochGate()

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return the effects to perform now."""
        match event:
            case PushArrived():
                return self._order(event)
            case PullArrived():
                return self._pull(event)
            case Applied():
                return self._finish(self.bundle.applied(event))
            case SumApplied():
                self._pending.summed(event.sum.pushes, len(event.finite))
                return self._finish(self.bundle.sum_applied(event))
            case StepsArrived():
                return self._report_steps(event)
            case TickArrived():
                return self._tick(event)
            case SetsAsked():
                return self._ask_sets(event)
            case ReplicasChanged():
                self._named = event.live
                return self._enter(event)
            case VectorsChanged():
                self.vectors = frozenset({vector.number for vector in event.vectors})
                return self._enter(event)
            case EpochBegan() | QueuedPin():
                return self._enter(event)
        assert_never(event)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, in flight or being applied."""
        return not self._queue and not self._in_flight and self.bundle.idle

    @property
    def is_free(self) -> bool:
        """Whether no request waits, so that a push may be applied in the call of its arrival."""
        # Does not call `idle`: every push on the short way asks, and one call per part would take most of its
        # time.
        bundle = self.bundle
        return not (
            bundle.taken is not None
            or bundle.ready
            or bundle.pinning
            or self._in_flight
            or self._queue.items
            or self.waiting.requests
            or self.epoch_gate.events
        )

    @property
    def has_work(self) -> bool:
        """Whether `take_batch` has work to give or a batch to form now."""
        return self.bundle.has_work or (bool(self._queue) and len(self._in_flight) < MOST_IN_FLIGHT)

    # --- the role of this server -------------------------------------------------------------

    def lead(self) -> None:
        """Order pushes from now on, after the applied numbers; all committed entries must be applied."""
        # A client sends each uncommitted push of the lost primary again, under a number that must be free.
        for tables in self.bundle.tables():
            tables.ordered = tables.last_number.split()
            tables.ordered_groups = tables.groups
        self._named = self.live

    def follow(self) -> list[Effect]:
        """Refuse all requests: another server is the primary. Entries in flight may still be committed."""
        return self._drop("not-primary", f"this server is no primary of its shards of {self.store} any more")

    # --- the log -----------------------------------------------------------------------------

    def _enter(self, entry: Entry) -> list[Effect]:
        """Put an entry into the log."""
        if self.alone:
            return self.committed(entry)
        self._in_flight.append(InFlight(entry))
        return [Propose(entry)]

    def committed(self, entry: Entry) -> list[Effect]:
        """Take the next committed entry, from this or another primary."""
        return self._finish(self.bundle.commit(entry))

    def _finish(self, done: Sequence[Entry]) -> list[Effect]:
        """Answer the requests of applied entries, and the requests that waited for them."""
        effects: list[Effect] = []
        for entry in done:
            effects += self._answer(entry) if self.alone else self._land(entry)
            if isinstance(entry, QueuedPin):
                effects.append(KeepPin(entry.pin))
            # Messages of the new epoch proceed now, in order; a message of a later epoch waits again.
            if isinstance(entry, EpochBegan):
                effects += [effect for waiting in self.epoch_gate.take() for effect in self.handle(waiting)]
        self._clocks_moved |= self.synchronous or any(map(moves_clocks, done))
        if self.waiting:
            effects += self._answer_waiting()
        return effects

    def _land(self, entry: Entry) -> list[Effect]:
        """Answer the requests that waited for an applied entry, and its own if this primary proposed it."""
        effects: list[Effect] = []
        # Entries of another primary have no requests here.
        for each in self._in_flight:
            if each.entry is entry:
                each.done = True
                effects += self._answer(entry)
                break
        # In bsp a contribution may finish before an earlier assignment, so later requests wait for both.
        while self._in_flight and self._in_flight[0].done:
            for behind in self._in_flight.popleft().behind:
                effects += self._answer_behind(behind)
        return effects

    def _answer(self, entry: Entry) -> list[Effect]:
        match entry:
            case Apply():
                return [self._acknowledgement(queued) for queued in entry.pushes]
            case Contribute():
                self._pending.refused(entry.queued)
                return [self._acknowledgement(entry.queued)]
            case QueuedTick():
                return [Answer(entry.request, Ticked())]
            case QueuedPin():
                return [Answer(entry.request, ShardsPinned())]
            case StepsArrived():
                return [Answer(entry.request, StepsReported())] if entry.request is not None else []
            case ReplicasChanged() | EpochBegan() | VectorsChanged() | ForgetSessions():
                return []
        assert_never(entry)

    def _answer_behind(self, item: QueuedPull | QueuedPush | QueuedSets | QueuedTick) -> list[Effect]:
        match item:
            case QueuedTick():
                return [Answer(item.request, Ticked())]
            case QueuedPush():
                return [self._acknowledgement(item)]
            case QueuedSets():
                return [self._sets_of(item)]
            case QueuedPull():
                return self.waiting.take(item)
        assert_never(item)

    def take_batch(self) -> tuple[Apply | ApplySum | None, list[Effect]]:
        """Take the batch or sum that has waited longest, and the answers to all requests before it.

        The caller may take the next batch or sum when it has reported this one; see `MOST_NAMED`.
        """
        effects: list[Effect] = []
        named = 0
        while True:
            work = self.bundle.take_work()
            is_full = len(self._in_flight) >= MOST_IN_FLIGHT or named >= MOST_NAMED
            if work is not None or not self._queue or is_full:
                return work, effects
            head = self._queue.take(self._joins, most_joined)
            named += shards_named(head)
            if isinstance(head, QueuedTick):
                effects += self._enter_tick(head)
                continue
            pushes = head if isinstance(head, list) else []
            if pushes and (pushes[0].accepted or pushes[0].unapplied):
                effects += self._enter(Apply(tuple(pushes)))
                continue
            # Duplicates queue, so that each is answered after its push.
            items = head if isinstance(head, list) else [head]
            if self._in_flight:
                self._in_flight[-1].behind += items
            else:
                effects += [effect for item in items for effect in self._answer_behind(item)]

    def _joins(self, follower: QueuedPush, head: QueuedPush) -> bool:
        """Return whether a push for the same shards may be applied in one batch with `head`."""
        if not self.joins:
            return False
        # An assignment replaces values, so no gradient joins it. Unapplied places differ from push to push.
        if follower.push.assign or head.push.assign or follower.unapplied or head.unapplied:
            return False
        if follower.push.vector != head.push.vector:
            return False
        return follower.push.pull == head.push.pull  # the answer to the first push bounds the batch

    # --- order -------------------------------------------------------------------------------

    def _order(self, event: PushArrived) -> list[Effect]:
        push = event.push
        if push.store != self.store:
            return [Refuse(event.request, "wrong-run", f"this is store {self.store}, not {push.store}")]
        session: Session = (push.session, push.incarnation)
        # In another version of the assignment no shard may be ours: answer as another server would.
        group = self.bundle.group(push.shards) if push.generation == self.generation else None
        shards: tuple[Shard | None, ...]
        if group is not None:
            shards = group
        else:
            ours = self.shards if push.generation == self.generation else {}
            shards = tuple([ours.get(ShardId(number)) for number in push.shards])
        # Numbers that were ordered before the end are answered again: their pushes took effect.
        if self.is_over(push) and has_new_number(push, shards, session):
            return [_refuse_over(event.request, push)]
        # Later pushes of a waiting session wait too, or their numbers would look like a gap.
        if push.epoch > self.bundle.epoch or session in self.epoch_gate:
            return self._wait_for_epoch(event, session)
        needs_name = bool(push.groups) or (self.synchronous and not self.program)
        if needs_name and not (push.assign or self.is_named(push)) and has_new_number(push, shards, session):
            text = (
                f"the map of this server has no generation {push.incarnation} of replica {push.replica} yet"
            )
            return [Refuse(event.request, "busy", text)]
        if self.synchronous and not push.assign and (text := self._pending.refusal(self._contributor(push))):
            if has_new_number(push, shards, session):
                return [Refuse(event.request, "busy", text)]
        if push.groups and knows_a_part(push, shards, session):
            # In a run the map may end the generation that pushed them; no store's client takes them back.
            code = "busy" if self.program else "partly-known"
            return [Refuse(event.request, code, f"a shard has some of the groups {push.groups[:9]}")]
        # Usually all shards of a push share one table and one number: a single comparison orders the push.
        number = push.numbers
        tables = group.shared() if group is not None and isinstance(number, int) else None
        if push.commands is None and (tables is None or self.synchronous):
            if self._is_unnamed(push) and any(shard and shard.tables.shards > 1 for shard in shards):
                return [self._refuse_split(event.request, push)]
            tables = group.own_tables() if group is not None and isinstance(number, int) else None
        accepted: Sequence[int]
        if group is not None and tables is not None and isinstance(number, int):
            accepted, problems = order_together(group, tables, session, number)
        elif push.commands is not None:
            accepted, problems = order_step(shards, session, number)
        else:
            accepted, problems = order_apart(shards, session, each_of(number, len(shards)))
        queued = QueuedPush(event.request, push, shards, event.gradients, accepted, problems)
        if push.groups:
            order_groups(queued, tables if group is not None else None)
        if event.finite is not None:
            set_apart(queued, event.finite)
        # A number that was never given does not get here: `served_store.py` refuses it.
        if (push.vector or push.commands is not None) and not push.named_vectors() <= self.vectors:
            refuse_places(queued, queued.accepted)
        if self.synchronous and not push.assign:
            return self._contribute(queued)
        # A duplicate waits behind the queued push that it repeats; an empty queue has no such push.
        if not queued.accepted and not queued.unapplied and self.idle:
            return [self._acknowledgement(queued)]
        self._queue.add(queued)
        return []

    def applied_at_once(
        self, push: Push, session: Session, group: ShardGroup, tables: ShardTables, read: int
    ) -> Pushed:
        """Order, enter and count a push that was applied in the call of its arrival; return its answer.

        The steps of `_order`, `_enter` and `_finish`, for a push that `is_free` allows. `at_once.py` has
        checked that all shards of the group expect the push's number.
        """
        tables.ordered[session] += 1
        self.bundle.count_at_once(push, session, group, tables, read)
        self._clocks_moved |= push.clock > 0
        clock = tables.slowest_clock() if self.clocked and push.pull else 0
        return Pushed(versions=int(tables.version), problems=(), clock=clock)

    def may_queue(self, push: Push) -> bool:
        """Return whether a lane's push may be queued: its generation is live, and no message waits for an
        epoch.

        The queue may contain a change of live replicas; until it is applied, lanes do not end.
        """
        return not self.epoch_gate.events and self.is_named(push)

    def queue_checked(
        self,
        request: Request,
        push: Push,
        session: Session,
        group: ShardGroup,
        tables: ShardTables,
        gradients: PushGradients,
    ) -> None:
        """Order and queue a push that `at_once.py` has checked, with the steps of `_order`."""
        tables.ordered[session] += 1
        if push.groups:
            tables.ordered_groups = with_groups(tables.ordered_groups, push.groups)
        self._queue.add(QueuedPush(request, push, group, gradients, group.places, []))

    def orders_at_once(self, push: Push) -> bool:
        """Return whether pushes with the fields of this one need no more than a number and an application."""
        if push.assign or push.epoch > self.bundle.epoch or self.is_over(push):
            return False
        return not self.program or self.is_named(push)

    def is_over(self, message: Push | Tick) -> bool:
        """Return whether a message's generation has ended; False if the map has not named it yet."""
        if self.is_named(message):
            return False
        pair = replica, generation = Replica(message.replica), message.incarnation
        return self.live.get(replica) == generation or pair in self._replicas.ended

    def is_named(self, message: Push | Tick) -> bool:
        """Return whether the generation of a message is live in the newest map."""
        return self._named.get(Replica(message.replica)) == message.incarnation

    def _is_unnamed(self, message: Push | Tick | ReportSteps) -> bool:
        """Return whether the map names generations, but has never named this one.

        The message may come from a client that the map names soon, or from one that invents generations.
        Tables that such a push splits would stay split, and slow all later pushes.
        """
        clocks, replica = self._replicas, Replica(message.replica)
        if not clocks.has_named or clocks.live.get(replica) == message.incarnation:
            return False
        return (replica, message.incarnation) not in clocks.ended

    def _refuse_split(self, request: Request, message: Push | Tick | ReportSteps) -> Refuse:
        text = f"the map of this server has no generation {message.incarnation} of replica {message.replica}"
        return Refuse(request, "busy", f"{text} yet, and its {type(message).__name__} names shards apart")

    def _contribute(self, queued: QueuedPush) -> list[Effect]:
        """Put a contribution to sums into the log. The server answers a repetition after the original."""
        if queued.accepted or queued.unapplied:
            self._pending.add(self._contributor(queued.push), queued)
            return self._enter(Contribute(queued))
        if self._in_flight:
            self._in_flight[-1].behind.append(queued)
            return []
        return [self._acknowledgement(queued)]

    def _contributor(self, push: Push) -> int | None:
        """Return the live replica of a push; None if the map does not name the push's generation."""
        return push.replica if self.live.get(Replica(push.replica)) == push.incarnation else None

    # --- acknowledge -------------------------------------------------------------------------

    def _acknowledgement(self, queued: QueuedPush) -> Answer:
        """Answer a push with the current versions; add the values only if no push to its shards is open."""
        problems = problems_of(queued)
        if queued.push.commands is not None:
            return Answer(queued.request, answer_to_step(queued, problems))
        versions = versions_of(queued.shards)
        # The client sends an open push again, and that answer will bring the values.
        if not queued.push.pull or any(p.status in (GAP, NOT_PRIMARY) for p in queued.problems):
            return Answer(queued.request, Pushed(versions=versions, problems=problems))
        group = queued.shards if isinstance(queued.shards, ShardGroup) else None
        shards = group or tuple([shard for shard in queued.shards if shard is not None])
        clock = applied_clock(shards) if self.clocked else 0
        body = Pushed(versions=versions, problems=problems, clock=clock)
        return Answer(queued.request, body, shards)

    # --- reports of steps applied in place ---------------------------------------------------

    def _report_steps(self, event: StepsArrived) -> list[Effect]:
        """Order steps applied in place, even of an ended generation: the values have them already."""
        report, request = event.report, event.request
        assert request is not None, "a report came on a link"
        if report.store != self.store or report.generation != self.generation:
            return [self._wrong_run(request, report)]
        # All shards of a report count it or none does, so that they agree in number.
        shards = [self.shards.get(ShardId(number)) for number in report.shards]
        session: Session = (report.session, report.incarnation)
        last_step = report.number + len(report.steps) - 1
        ours = [shard for shard in shards if shard is not None]
        if len(ours) < len(shards) or not ours:
            return [Refuse(request, "not-primary", f"not the primary of all of {report.shards[:8]}")]
        if self._replicas.ended.is_forgotten(Replica(report.replica), report.incarnation):
            # Without the report's numbers a repeated report looks like a new one.
            return [_refuse_over(request, report)]
        seen = [tables.ordered[session] for tables in each_tables(ours)]
        # The answer to this report was lost: the values have its steps already.
        if min(seen) >= last_step:
            partly = partly_named(ours)  # these stay shared, without the count
            for tables in each_tables(ours):
                tables.duplicates += 0 if tables in partly else len(report.steps)
            return [Answer(request, StepsReported())]
        if min(seen) != max(seen) or min(seen) != report.number - 1:
            return [Refuse(request, "gap", f"expected step {min(seen) + 1}, not {report.number}")]
        if self._is_unnamed(report) and (any(step.refused for step in report.steps) or partly_named(ours)):
            return [self._refuse_split(request, report)]
        if not (self.alone and self.bundle.idle):  # otherwise apply the numbered entry now
            for tables in tables_of(ours):
                tables.ordered[session] = last_step
        return self._enter(event)

    def count_steps(self, report: ReportSteps) -> list[Effect]:
        """Count steps in the name of a worker that has ended; its late report of them is a repetition."""
        session: Session = (report.session, report.incarnation)
        for tables in tables_of([self.shards[ShardId(number)] for number in report.shards]):
            tables.ordered[session] = report.number + len(report.steps) - 1
        return self._enter(StepsArrived(None, report))

    # --- clocks ------------------------------------------------------------------------------

    def _tick(self, event: TickArrived) -> list[Effect]:
        tick = event.tick
        if tick.store != self.store or tick.generation != self.generation:
            return [self._wrong_run(event.request, tick)]
        if self.is_over(tick):
            return [_refuse_over(event.request, tick)]
        if not fits(len(tick.shards), tick.numbers):
            return [Refuse(event.request, "malformed", "shards and numbers of a Tick differ in length")]
        session: Session = (tick.session, tick.incarnation)
        if tick.epoch > self.bundle.epoch or session in self.epoch_gate:
            return self._wait_for_epoch(event, session)
        # A tick claims all earlier pushes of its session. If a broken link lost one, the clock must wait.
        group = self.bundle.group(tick.shards)
        if (group is None or group.shared() is None) and self._is_unnamed(tick):
            named = [self.shards.get(ShardId(number)) for number in tick.shards]
            if partly_named([shard for shard in named if shard is not None]):
                return [self._refuse_split(event.request, tick)]
        numbered = zip(tick.shards, each_of(tick.numbers, len(tick.shards)), strict=True)
        if group is not None and isinstance(tick.numbers, int) and tick.numbers:
            tables = group.own_tables()
            if tables is not None and tables.ordered[session] >= tick.numbers:
                numbered = zip((), (), strict=True)
        for number, last in numbered:
            shard = self.shards.get(ShardId(number))
            if shard is not None and shard.tables.ordered[session] < last:
                text = f"push {last} on shard {number} has not arrived, and a tick behind it cannot count"
                return [Refuse(event.request, "gap", text)]
        # In bsp gradients skip the queue, so none of this session's gradients can precede the tick.
        if self.idle or self.synchronous:
            return self._enter_tick(QueuedTick(event.request, tick))
        self._queue.add(QueuedTick(event.request, tick))
        return []

    def _enter_tick(self, queued: QueuedTick) -> list[Effect]:
        """Put a tick into the log; a repetition shares the answer of the tick in flight."""
        for each in self._in_flight:
            if isinstance(each.entry, QueuedTick) and each.entry.tick == queued.tick:
                each.behind.append(queued)
                return []
        return self._enter(queued)

    def _wait_for_epoch(self, event: PushArrived | TickArrived, session: Session) -> list[Effect]:
        """Make an event wait until its epoch begins; later events of its session wait behind it."""
        if self.epoch_gate.full:
            return [Refuse(event.request, "busy", f"{MOST_WAITING} pushes and ticks wait for the next epoch")]
        self.epoch_gate.add(session, event)
        return []

    @property
    def ended(self) -> EndedGenerations:
        """Generations that have ended."""
        return self._replicas.ended

    @property
    def live(self) -> Mapping[Replica, int]:
        """Live generation of each replica; empty before the map names any."""
        return self._replicas.live

    # --- questions for groups ----------------------------------------------------------------

    def _ask_sets(self, event: SetsAsked) -> list[Effect]:
        if event.generation != self.generation:
            text = f"store {self.store} is in generation {self.generation} here, not {event.generation}"
            return [Refuse(event.request, "wrong-run", text)]
        trainable = tuple([shard for shard in self.shards.values() if not shard.spec.frozen])
        queued = QueuedSets(event.request, trainable, event.epoch)
        # In bsp a sum in progress does not matter: the sets have its groups since they were contributed.
        if self.idle or (self.synchronous and not self._queue and not self._in_flight):
            return [self._sets_of(queued)]
        self._queue.add(queued)
        return []

    def _sets_of(self, queued: QueuedSets) -> SendSets | Refuse:
        """Answer a question for groups from the counted pushes."""
        epoch, kept = queued.epoch, [*dict.fromkeys([shard.tables for shard in queued.shards])]
        # By identity: comparing values would search a set once for each table that shares it.
        by_id = {id(ranges): ranges for each in kept for ranges in (groups_of(each.groups, epoch),)}
        several = tuple(by_id.values())
        if sum(map(len, several)) > MOST_SETS_BOUNDS:
            text = f"{len(several)} sets of groups are too scattered, {MOST_SETS_BOUNDS} bounds are the most"
            return Refuse(queued.request, "too-large", text)
        clock = self._replicas.newest_clock if self.clocked else 0
        # In a cut replica only the part that computes the loss sends it, to the shards that this part pushes.
        losses = [each.losses.get(epoch, LossSum()) for each in kept]
        most = max(losses, key=attrgetter("images"), default=LossSum())
        body = BundleSets(trainable=bool(several), clock=clock, images=most.images, loss_sum=most.total)
        return SendSets(queued.request, body, several)

    # --- pulls and readings ------------------------------------------------------------------

    def _pull(self, event: PullArrived) -> list[Effect]:
        pull, clock = event.pull, event.pull.clock
        is_reading = isinstance(pull, ReadShards)
        shards = self._asked_for(event.request, pull)
        if isinstance(shards, Refuse):
            return [shards]
        if is_reading and not self.clocked:
            clock = 0  # in asp no clock bounds the replicas, so no reader waits for a clock
        if is_reading and clock and self.synchronous:
            # From here on a sum changes a shard only after the snapshot or the reader has a copy of it.
            if passed := self.bundle.keep_clock(clock, event.link, event.until):
                return [Answer(event.request, ShardStates(arrays=(), passed=passed))]
        vector = 0 if isinstance(pull, ReadShards) else pull.vector
        queued = QueuedPull(event.request, shards, clock, event.deadline, event.link, is_reading, vector)
        # With an empty queue there is no push in front of the pull, and its values may leave now.
        if self.idle:
            return self.waiting.take(queued)
        self._queue.add(queued)
        return []

    def _asked_for(self, request: Request, asked: Pull | ReadShards) -> tuple[Shard, ...] | Refuse:
        if asked.store != self.store or asked.generation != self.generation:
            return self._wrong_run(request, asked)
        group = self.bundle.group(asked.shards)
        if group is not None:
            return group
        unknown = [number for number in asked.shards if ShardId(number) not in self.shards]
        if unknown:
            return Refuse(request, "not-primary", f"not the primary of shards {unknown[:8]}")
        shards = tuple([self.shards[ShardId(number)] for number in asked.shards])
        return shards or Refuse(request, "malformed", f"{type(asked).__name__} names no shard")

    def _answer_waiting(self) -> list[Effect]:
        """Answer the requests whose values are ready, except during a batch or a large sum."""
        if is_torn(self.bundle.taken) or not self._clocks_moved:
            return []
        self._clocks_moved = False
        return self.waiting.answer()

    def give_up(self, *, now: float) -> list[Effect]:
        """Answer requests past their deadline without values; end an old snapshot."""
        if self.bundle.snapshot_until <= now:
            self.bundle.end_snapshot()
        return self.waiting.give_up(now)

    def end(self) -> list[Effect]:
        """Refuse all queued and waiting requests: the store leaves the server."""
        return self._drop("wrong-run", f"store {self.store} left this server")

    def _drop(self, code: str, text: str) -> list[Effect]:
        # Alone, an entry goes straight to the bundle, and `_in_flight` stays empty.
        entries = self.bundle.unfinished() if self.alone else [each.entry for each in self._in_flight]
        requests = [request for entry in entries for request in requests_of(entry)]
        requests += [queued.request for each in self._in_flight for queued in each.behind]
        requests += [queued.request for queued in self._queue]
        requests += [event.request for event in self.epoch_gate.take()]
        requests += self.waiting.drop()
        self.bundle.end_snapshot()
        self._in_flight.clear()
        self._pending.clear()
        self._queue = PushQueue()
        return [Refuse(request, code, text) for request in requests]

    def next_deadline(self) -> float | None:
        """Return the next deadline for `give_up`; None without a deadline."""
        deadline, until = self.waiting.next_deadline(), self.bundle.snapshot_until
        return min(inf if deadline is None else deadline, until) if until < inf else deadline

    def _wrong_run(self, request: Request, asked: ReportSteps | Tick | Pull | ReadShards) -> Refuse:
        here = f"{self.store} generation {self.generation}"
        there = f"{asked.store} generation {asked.generation}"
        return Refuse(request, "wrong-run", f"this is store {here}, not {there}")

    def forget(self, sessions: Sequence[Session]) -> list[Effect]:
        """Forget the pushes of sessions without a live generation, to make room for others."""
        return self._enter(ForgetSessions(tuple(sessions)))

    # --- inspection --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert the invariants between two events."""
        self.bundle.check_invariants()
        for queued in self._queue:
            if isinstance(queued, QueuedPush):
                assert len(queued.accepted) + len(queued.problems) == len(queued.push.shards)
        assert sum([isinstance(each.entry, Apply) for each in self._in_flight]) <= MOST_IN_FLIGHT


def _refuse_over(request: Request, message: Push | Tick | ReportSteps) -> Refuse:
    text = (
        f"generation {message.incarnation} of replica {message.replica} has ended: "
        "other replicas train its groups"
    )
    return Refuse(request, "generation-over", text)
