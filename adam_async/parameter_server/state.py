"""Pure: decisions of a parameter server: order, collect, apply and acknowledge pushes; answer pulls.

Theory of operation
-------------------
Pushes and pulls wait in one queue, in the order of their arrival. For each shard that a push names, the
server *orders* it if its number is the session's last one + 1, answers a lower number again, and answers a
gap with the number that it expects. `take_batch` takes the push that has waited longest, and those behind it
for the same shards (opportunistic batching, AD-42); pushes for other shards do not split a batch
(`push_queue.py`). The shell applies the batch, in several rounds of the loop if it is large, and reports
`Applied`; a push is acknowledged once it is applied. In bsp an ordered push does not queue: it becomes a
*pending contribution* and is acknowledged at once. The sum of a step queues once it is complete
(`bsp_barrier.py`).

Nothing passes a pull in the queue, so a pull contains all earlier pushes of its client, and a duplicate of a
queued push is not acknowledged before that push is applied. A tick waits there too, so that no clock counts a
push that is not applied. A batch that is taken and not yet reported counts as queued: no values leave the
server while those of a shard are between before and after.

A pull may need a *clock*: values in which all pushes of live replicas up to it are applied. It waits until
they are, or until its deadline. The controllers name the live replicas, and may reach the server later than a
worker: pushes and ticks of an epoch that the server does not know yet wait for it, and later ones of the same
session wait behind them, because with the epoch the server learns all replicas that take part. Clocks of a
replica that ticks before the map names it are kept until the map does.

The staleness of a push on a shard is the number of pushes applied since the oldest version that its groups
read, less the client's own ones that a local step had already put into the copy they read.

Nothing here waits, sends, reads a clock or touches a value; gradients pass through unopened. Deadlines are
absolute seconds on the caller's clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import assert_never

from adam_async.messages import (
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    REFUSED,
    Problem,
    Pull,
    Push,
    Pushed,
    ReadShards,
    ReportSteps,
    Tick,
)
from adam_async.parameter_server.bsp_barrier import Contribution, PendingContributions
from adam_async.parameter_server.events import (
    Acknowledge,
    AcknowledgeSteps,
    AcknowledgeTick,
    Applied,
    Apply,
    ApplySum,
    Effect,
    EpochBegan,
    Event,
    PullArrived,
    PushArrived,
    QueuedPull,
    QueuedPush,
    QueuedRead,
    QueuedTick,
    ReadArrived,
    Refuse,
    ReplicasChanged,
    Request,
    StepsArrived,
    SumApplied,
    TickArrived,
)
from adam_async.parameter_server.push_queue import PushQueue
from adam_async.parameter_server.replay_log import JOINED, NOT_APPLIED, SUMMED, OrderLog
from adam_async.parameter_server.replica_clocks import ReplicaClocks
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.parameter_server.shard_group import ShardGroup, applied_clock, same
from adam_async.parameter_server.statistics import (
    ServerStatistics,
    StoreStatistics,
    count_clients,
    count_shards,
)
from adam_async.parameter_server.waiting_requests import MOST_WAITING, EpochGate, WaitingRequests
from adam_async.run.ids import Replica, ShardId, Version

MOST_GROUPS = 256
"""Maximum number of groups of shards that a server keeps: peers choose the shards of their messages."""

MAX_BATCH = 32
"""Maximum number of pushes of a batch, so that the first of them is not acknowledged too late."""

SHARD_VALUES = 1 << 21
"""Maximum of a shard's values times the pushes of a batch: eight pushes to the largest shard, of 2^18 values.
One round of the loop applies them."""

BATCH_VALUES = 1 << 22
"""Maximum of the values that a push asks for times the pushes of a batch: one round of the loop copies their
answers."""


class ServerState:
    """The shards of one store on one server, and the pushes and pulls in progress on them.

    Args:
        generation: Version of the bucket assignment that made this server a primary.
        shards: The shards whose primary this server is.
        clocked: Whether workers wait for one another (ssp, bsp), so that answers to pushes carry a clock.
        summed_weight: Weight of a sum in bsp, where pushes are added up; 0 in other modes.
        scale_by_staleness: Whether a push's rate is divided by 1 + its staleness.
        log: Log of the order in which pushes are applied.
        program: Whether the store belongs to a program. In one of clients only those with a place in the map
            contribute to sums.
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
        self.shards: Mapping[ShardId, Shard] = {shard.spec.id: shard for shard in shards}
        self.clocked = clocked
        self.program = program
        self._summed_weight = summed_weight
        self._scales = scale_by_staleness
        self.log = log
        self._groups: dict[tuple[int, ...], ShardGroup] = {}
        self._queue = PushQueue()
        self._taken: Apply | ApplySum | None = None
        self.waiting = WaitingRequests()
        self.epoch_gate = EpochGate()
        self._epoch = 0
        self._replicas = ReplicaClocks(clocked=clocked)
        self.batches = 0
        self.batched_pushes = 0
        if summed_weight:
            for shard in self.shards.values():
                shard.pending = PendingContributions(reached=shard.slowest_clock())

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; returns the effects to perform now."""
        match event:
            case PushArrived():
                return self._order(event)
            case PullArrived():
                return self._pull(event)
            case Applied():
                return self._applied(event)
            case SumApplied():
                return self._sum_applied(event)
            case StepsArrived():
                return self._report_steps(event)
            case TickArrived():
                return self._tick(event)
            case ReadArrived():
                return self._read(event)
            case ReplicasChanged():
                return self._replicas_changed(event)
            case EpochBegan():
                return self._epoch_began(event)
        assert_never(event)

    def take_batch(self) -> tuple[Apply | ApplySum | None, list[Effect]]:
        """Take the batch or sum that has waited longest, and the answers to everything in front of it.

        The next one may be taken when this one is reported.
        """
        assert self._taken is None
        effects: list[Effect] = []
        while self._queue:
            head = self._queue.take(self._joins, _most_joined)
            if isinstance(head, list):
                # Duplicates alone have nothing to apply. They queued so that their answer follows their push.
                if head[0].accepted:
                    self._taken = self._batch(head)
                    return self._taken, effects
                effects += [self._acknowledgement(queued) for queued in head]
            elif isinstance(head, ApplySum):
                self.batches += 1
                self.batched_pushes += len(head.pushes)
                self._taken = head
                return head, effects
            elif isinstance(head, QueuedTick):
                effects += self._ticked(head.request, head.tick)
            else:
                effects += self.waiting.take(head)
        return None, effects

    def _batch(self, pushes: Sequence[QueuedPush]) -> Apply:
        self.batches += 1
        self.batched_pushes += len(pushes)
        return Apply(tuple(pushes), _scaled_rates(pushes) if self._scales else None)

    def _joins(self, follower: QueuedPush, head: QueuedPush) -> bool:
        """Whether a push for the same shards may be applied in one batch with `head`.

        If rates depend on staleness, the rate of a push depends on how many of those before it are applied.
        """
        if follower.push.assign or head.push.assign:
            return False
        if follower.push.pull != head.push.pull:
            return False  # the size of a batch is bounded by the answer to its first push
        # A gradient that may not be finite may be refused, and then the pushes behind it are less stale.
        return not self._scales or (head.gradients.is_sure and follower.gradients.is_sure)

    @property
    def synchronous(self) -> bool:
        """Whether pushes are added up, so that the server must check their gradients on arrival."""
        return self._summed_weight > 0

    def group(self, numbers: tuple[int, ...]) -> ShardGroup | None:
        """Return the shards of a message; None if one is not here, or named twice, or of another family."""
        group = self._groups.get(numbers)
        if group is None:
            found = [shard for number in numbers if (shard := self.shards.get(ShardId(number))) is not None]
            families = {(shard.spec.rule, shard.spec.dtype) for shard in found}
            if not len(found) == len(numbers) == len(set(numbers)) or len(families) != 1:
                return None
            if len(self._groups) >= MOST_GROUPS:
                self._groups.clear()
            group = self._groups[numbers] = ShardGroup(found)
        return group

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or being applied."""
        return not self._queue and self._taken is None

    # --- order -------------------------------------------------------------------------------

    def _order(self, event: PushArrived) -> list[Effect]:
        push = event.push
        if push.store != self.store:
            return [Refuse(event.request, "wrong-run", f"this is store {self.store}, not {push.store}")]
        session: Session = (push.session, push.incarnation)
        # In another version of the assignment no shard may be ours: answer as another server would.
        group = self.group(push.shards) if push.generation == self.generation else None
        shards: tuple[Shard | None, ...]
        if group is not None:
            shards = group
        else:
            ours = self.shards if push.generation == self.generation else {}
            shards = tuple([ours.get(ShardId(number)) for number in push.shards])
        # Numbers that were ordered before the end are answered again: their pushes took effect.
        if self._replicas.is_over(push) and _has_new_number(push, shards, session):
            return [_refuse_over(event.request, push)]
        # Later pushes of a waiting session wait too, or their numbers would look like a gap.
        if push.epoch > self._epoch or session in self.epoch_gate:
            return self._wait_for_epoch(event, session)
        if self._summed_weight and not self.program and self._is_early(push, shards, session):
            text = f"the map of this server has no generation {push.incarnation} of client {push.replica} yet"
            return [Refuse(event.request, "busy", text)]
        tables = group.own_tables() if group is not None and same(push.numbers) else None
        accepted: Sequence[int]
        if group is not None and tables is not None:
            accepted, problems = _order_together(group, tables, session, push.numbers[0])
        else:
            accepted, problems = _order_apart(shards, session, push.numbers)
        queued = QueuedPush(event.request, push, shards, event.gradients, accepted, problems)
        if self._summed_weight and not push.assign:
            assert event.finite is not None
            return self._contribute(queued, event.finite)
        # A duplicate waits behind the queued push that it repeats; with an empty queue there is none.
        if not accepted and self.idle:
            return [self._acknowledgement(queued)]
        self._queue.add(queued)
        return []

    def _is_early(self, push: Push, shards: Sequence[Shard | None], session: Session) -> bool:
        """Whether a push would contribute to a sum before the map names its client."""
        if push.assign or self._replicas.live.get(Replica(push.replica)) == push.incarnation:
            return False
        return _has_new_number(push, shards, session)

    # --- contributions to sums (bsp) ---------------------------------------------------------

    def _contribute(self, queued: QueuedPush, finite: Sequence[bool]) -> list[Effect]:
        push = queued.push
        replica = Replica(push.replica)
        shards: list[Shard] = []
        for place in queued.accepted:
            shard = queued.shards[place]
            assert shard is not None
            assert shard.pending is not None
            shards.append(shard)
            # A refused gradient still ticks below: the other replicas do not wait for it.
            contribution = Contribution(replica, queued, place, (push.session, push.incarnation))
            if not (finite[place] and shard.pending.contribute(push.clock, contribution)):
                shard.refused += 1
                queued.problems.append(Problem(place, REFUSED))
                self._note(shard, queued, SUMMED | NOT_APPLIED)
        effects: list[Effect] = [self._acknowledgement(queued)]
        self._replicas.advance(shards, replica, push.incarnation, push.clock)
        self._reach(shards)
        return effects + self._answer_waiting()

    def _reach(self, shards: Iterable[Shard]) -> None:
        """Queue the sums that are complete; shards of the same pushes are summed together."""
        # Until the map names live replicas, a sum cannot know which ones it waits for.
        if not self._replicas.live:
            return
        due: dict[tuple[int, ...], tuple[int, list[Contribution], list[tuple[Shard, list[int]]]]] = {}
        for shard in shards:
            if shard.pending is None:
                continue
            for clock, contributions in shard.pending.reach(shard.slowest_clock()):
                # Shards with the same contributions make one sum: one job instead of one per shard.
                key = (clock, *(id(each.push) for each in contributions))
                _, _, members = due.setdefault(key, (clock, contributions, []))
                members.append((shard, [each.place for each in contributions]))
        for clock, contributions, members in sorted(due.values(), key=lambda each: each[0]):
            # In the order of the pushes, so that bits do not depend on which shard was completed first.
            members.sort(key=lambda member: member[1])
            pushes = tuple(each.push for each in contributions)
            self._queue.add(
                ApplySum(
                    clock=clock,
                    shards=tuple(shard for shard, _ in members),
                    pushes=pushes,
                    places=tuple(zip(*(places for _, places in members), strict=True)),
                    scale=self._summed_weight / sum(queued.push.weight for queued in pushes),
                )
            )

    def _sum_applied(self, event: SumApplied) -> list[Effect]:
        done = event.sum
        assert done is self._taken
        # The shards of a sum are reported as they are done, perhaps in several rounds of the loop.
        last = event.first + len(event.finite)
        if last == len(done.shards):
            self._taken = None
        shards = done.shards[event.first : last]
        for at, (shard, finite) in enumerate(zip(shards, event.finite, strict=True), start=event.first):
            assert shard.pending is not None
            shard.pending.applied(done.clock)
            for number, (queued, places) in enumerate(zip(done.pushes, done.places, strict=True)):
                push, place = queued.push, places[at]
                if finite:
                    since = shard.version - push.versions[place] - push.own_applied[place]
                    shard.count_staleness(push.replica, max(since, 0))
                else:
                    shard.refused += 1
                flags = SUMMED | (JOINED if number else 0) | (0 if finite else NOT_APPLIED)
                self._note(shard, queued, flags)
            # The whole sum is one step of the rule, so one version.
            shard.version = Version(shard.version + finite)
        return self._answer_waiting()

    # --- acknowledge -------------------------------------------------------------------------

    def _applied(self, event: Applied) -> list[Effect]:
        assert event.batch is self._taken
        self._taken = None
        pushes = event.batch.pushes
        shards = event.batch.shards()
        if not _count_together(shards, pushes, event.finite):
            _count_apart(shards, pushes, event.finite)
        # Clocks advance after the values: a pull for a clock must find its pushes applied.
        for queued in pushes:
            push = queued.push
            self._replicas.advance(shards, Replica(push.replica), push.incarnation, push.clock)
        if self.log is not None:
            for shard, finite in zip(shards, event.finite, strict=True):
                for number, (queued, ok) in enumerate(zip(pushes, finite, strict=True)):
                    self._note(shard, queued, (JOINED if number else 0) | (0 if ok else NOT_APPLIED))
        effects: list[Effect] = [self._acknowledgement(queued) for queued in pushes]
        return effects + self._answer_waiting()

    def _note(self, shard: Shard, queued: QueuedPush, flags: int) -> None:
        if self.log is not None:
            push = queued.push
            replica_generation = self.log.replica_generation(push.replica, push.session, push.incarnation)
            self.log.note(shard.spec.id, push.clock, replica_generation, flags)

    def _acknowledgement(self, queued: QueuedPush) -> Acknowledge:
        """Answer a push with the current versions; with values only if no shard of it is open."""
        group = queued.shards if isinstance(queued.shards, ShardGroup) else None
        versions: tuple[int, ...]
        if group is not None:
            versions = group.versions()
        else:
            versions = tuple([0 if shard is None else shard.version for shard in queued.shards])
        problems = tuple(queued.problems)
        # The client sends an open push again, and that answer will bring the values.
        if not queued.push.pull or any(p.status in (GAP, NOT_PRIMARY) for p in queued.problems):
            return Acknowledge(queued.request, Pushed(versions=versions, problems=problems))
        shards = group or tuple([shard for shard in queued.shards if shard is not None])
        clock = applied_clock(shards) if self.clocked else 0
        body = Pushed(versions=versions, problems=problems, clock=clock)
        return Acknowledge(queued.request, body, shards)

    # --- reports of steps applied in place ---------------------------------------------------

    def _report_steps(self, event: StepsArrived) -> list[Effect]:
        """Count steps applied in place, also those of an ended generation: the memory has them already."""
        report = event.report
        if report.store != self.store or report.generation != self.generation:
            return [self._wrong_run(event.request, report)]
        # Every report is counted on all its shards or on none, so that they agree in number.
        shards = [self.shards.get(ShardId(number)) for number in report.shards]
        session: Session = (report.session, report.incarnation)
        last_step = report.number + len(report.steps) - 1
        ours = [shard for shard in shards if shard is not None]
        if len(ours) < len(shards) or not ours:
            return [Refuse(event.request, "not-primary", f"not the primary of all of {report.shards[:8]}")]
        if self._replicas.ended.is_forgotten(Replica(report.replica), report.incarnation):
            # Without its numbers a repeated report cannot be told from a new one.
            return [_refuse_over(event.request, report)]
        seen = [shard.last_number.get(session, 0) for shard in ours]
        if min(seen) >= last_step:
            for shard in ours:
                shard.duplicates += len(report.steps)
            return [AcknowledgeSteps(event.request)]
        if min(seen) != max(seen) or min(seen) != report.number - 1:
            return [Refuse(event.request, "gap", f"expected step {min(seen) + 1}, not {report.number}")]
        clock = report.steps[-1].clock
        all_steps = Counter([step.staleness for step in report.steps])
        refused = {place for step in report.steps for place in step.refused}
        for place, shard in enumerate(ours):
            shard.separate().last_number[session] = last_step
            applied = all_steps
            if place in refused:
                applied = Counter([step.staleness for step in report.steps if place not in step.refused])
            shard.version = Version(shard.version + applied.total())
            shard.refused += len(report.steps) - applied.total()
            for staleness, steps in applied.items():
                shard.count_staleness(report.replica, staleness, steps)
        self._replicas.advance(ours, Replica(report.replica), report.incarnation, clock)
        return [AcknowledgeSteps(event.request)]

    # --- clocks ------------------------------------------------------------------------------

    def _tick(self, event: TickArrived) -> list[Effect]:
        tick = event.tick
        if tick.store != self.store or tick.generation != self.generation:
            return [self._wrong_run(event.request, tick)]
        if self._replicas.is_over(tick):
            return [_refuse_over(event.request, tick)]
        if tick.numbers and len(tick.numbers) != len(tick.shards):
            return [Refuse(event.request, "malformed", "shards and numbers of a Tick differ in length")]
        session: Session = (tick.session, tick.incarnation)
        if tick.epoch > self._epoch or session in self.epoch_gate:
            return self._wait_for_epoch(event, session)
        # A tick claims all earlier pushes of its session. If a broken link lost one, the clock must wait.
        group = self.group(tick.shards)
        tables = group.own_tables() if group is not None and tick.numbers and same(tick.numbers) else None
        apart = zip(tick.shards, tick.numbers, strict=False)
        if tables is not None and tables.last_number.get(session, 0) >= tick.numbers[0]:
            apart = zip((), (), strict=True)
        for number, last in apart:
            shard = self.shards.get(ShardId(number))
            if shard is not None and shard.last_number.get(session, 0) < last:
                text = f"push {last} on shard {number} has not arrived, and a tick behind it cannot count"
                return [Refuse(event.request, "gap", text)]
        # In bsp pushes do not queue, so no queued push of the session can be in front of the tick.
        if not self.idle and not self._summed_weight:
            self._queue.add(QueuedTick(event.request, tick))
            return []
        return self._ticked(event.request, tick)

    def _ticked(self, request: Request, tick: Tick) -> list[Effect]:
        shards: Sequence[Shard] | None = self.group(tick.shards)
        if shards is None:
            found = [self.shards.get(ShardId(number)) for number in tick.shards]
            shards = [shard for shard in found if shard is not None]
        self._replicas.advance(shards, Replica(tick.replica), tick.incarnation, tick.clock)
        self._reach(shards)
        return [AcknowledgeTick(request), *self._answer_waiting()]

    def _replicas_changed(self, event: ReplicasChanged) -> list[Effect]:
        self._forget(self._replicas.change(event.live, self.shards.values()))
        if not event.live:
            return []
        self._reach(self.shards.values())
        return self._answer_waiting()

    def _wait_for_epoch(self, event: PushArrived | TickArrived, session: Session) -> list[Effect]:
        """Let an event wait until its epoch begins, and later ones of its session behind it."""
        if self.epoch_gate.full:
            return [Refuse(event.request, "busy", f"{MOST_WAITING} pushes and ticks wait for the next epoch")]
        self.epoch_gate.add(session, event)
        return []

    def _forget(self, replica_generations: Set[int | None]) -> None:
        """Drop the push numbers of generations. From then on the server refuses their pushes."""
        for tables in self._tables() if replica_generations - {None} else ():
            for session in [session for session in tables.last_number if session[1] in replica_generations]:
                del tables.last_number[session]

    def _tables(self) -> Iterable[ShardTables]:
        return {id(shard.tables): shard.tables for shard in self.shards.values()}.values()

    @property
    def live(self) -> Mapping[Replica, int]:
        """Live generation of each replica; empty before the map names any."""
        return self._replicas.live

    @property
    def generations_forgotten(self) -> int:
        """Number of generations with dropped push numbers."""
        return self._replicas.ended.forgotten

    def _epoch_began(self, event: EpochBegan) -> list[Effect]:
        """Raise all clocks to the first one of the epoch: the groups before it are all acknowledged."""
        self._epoch = event.number
        self._replicas.epoch_began(event.first_clock, self.shards.values())
        self._reach(self.shards.values())
        effects = [effect for waiting in self.epoch_gate.take() for effect in self.handle(waiting)]
        return effects + self._answer_waiting()

    # --- pulls and readings ------------------------------------------------------------------

    def _pull(self, event: PullArrived) -> list[Effect]:
        pull = event.pull
        shards = self._asked_for(event.request, pull)
        if isinstance(shards, Refuse):
            return [shards]
        queued = QueuedPull(event.request, shards, pull.clock, event.deadline)
        # With an empty queue there is no push in front of the pull, and its values may leave now.
        if self.idle:
            return self.waiting.take(queued)
        self._queue.add(queued)
        return []

    def _read(self, event: ReadArrived) -> list[Effect]:
        shards = self._asked_for(event.request, event.read)
        if isinstance(shards, Refuse):
            return [shards]
        queued = QueuedRead(event.request, shards, event.deadline)
        if self.idle:
            return self.waiting.take(queued)
        self._queue.add(queued)
        return []

    def _asked_for(self, request: Request, asked: Pull | ReadShards) -> tuple[Shard, ...] | Refuse:
        if asked.store != self.store or asked.generation != self.generation:
            return self._wrong_run(request, asked)
        group = self.group(asked.shards)
        if group is not None:
            return group
        unknown = [number for number in asked.shards if ShardId(number) not in self.shards]
        if unknown:
            return Refuse(request, "not-primary", f"not the primary of shards {unknown[:8]}")
        shards = tuple([self.shards[ShardId(number)] for number in asked.shards])
        return shards or Refuse(request, "malformed", f"{type(asked).__name__} names no shard")

    def _answer_waiting(self) -> list[Effect]:
        """Answer the requests whose values are ready, unless a batch is in progress: its end answers them."""
        return [] if isinstance(self._taken, Apply) or not self.waiting else self.waiting.answer()

    def give_up(self, *, now: float) -> list[Effect]:
        """Answer the waiting requests whose deadline has passed, without values."""
        return self.waiting.give_up(now)

    def end(self) -> list[Effect]:
        """Refuse all queued and waiting requests: the store leaves the server."""
        requests: list[Request] = []
        if isinstance(self._taken, Apply):
            requests += [queued.request for queued in self._taken.pushes]
        requests += [queued.request for queued in self._queue if not isinstance(queued, ApplySum)]
        requests += [event.request for event in self.epoch_gate.take()]
        requests += self.waiting.drop()
        return [Refuse(request, "wrong-run", f"store {self.store} left this server") for request in requests]

    def next_deadline(self) -> float | None:
        """The next deadline of a waiting request, for `give_up`; None if none waits."""
        return self.waiting.next_deadline()

    def _wrong_run(self, request: Request, asked: ReportSteps | Tick | Pull | ReadShards) -> Refuse:
        here = f"{self.store} generation {self.generation}"
        there = f"{asked.store} generation {asked.generation}"
        return Refuse(request, "wrong-run", f"this is store {here}, not {there}")

    def forget(self, sessions: Iterable[Session]) -> None:
        """Forget the pushes of sessions whose generations were never live, to make room for others."""
        for session in sessions:
            for tables in self._tables():
                tables.last_number.pop(session, None)
            self._replicas.forget_early(session[1])  # the session's incarnation is its replica generation

    # --- inspection --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert the invariants between two events."""
        for number, shard in self.shards.items():
            assert shard.spec.id == number
            shard.check_invariants()
        for queued in self._queue:
            if isinstance(queued, QueuedPush):
                assert len(queued.accepted) + len(queued.problems) == len(queued.push.shards)

    def store_statistics(self) -> StoreStatistics:
        """Counts of the store on this server, for its clients."""
        shards = self.shards.values()
        return StoreStatistics(
            shards=len(shards),
            bytes=sum([shard.values.nbytes for shard in shards]),
            state_bytes=sum([array.nbytes for shard in shards for array in shard.rule_state.values()]),
            versions={str(shard.spec.id): int(shard.version) for shard in shards},
            clients=count_clients(shards),
            refused=sum([shard.refused for shard in shards]),
            duplicates=sum([shard.duplicates for shard in shards]),
            waiting=len(self.waiting),
            waiting_for=[int(replica) for replica in self.waiting.waiting_for()],
            batches=self.batches,
            batched_pushes=self.batched_pushes,
        )

    def statistics(self) -> ServerStatistics:
        """Counts of the shards, and of the requests that wait."""
        counts = count_shards(self.shards.values())
        counts.parked = len(self.waiting)
        counts.waiting_for = [int(replica) for replica in self.waiting.waiting_for()]
        counts.batches = self.batches
        counts.batched_pushes = self.batched_pushes
        return counts


def _most_joined(head: QueuedPush) -> int:
    """Return the largest number of pushes in a batch that begins with this one."""
    if isinstance(head.shards, ShardGroup):
        largest, size = head.shards.largest, head.shards.size
    else:
        sizes = [len(shard.values) for shard in head.shards if shard is not None]
        largest, size = max(sizes, default=1), sum(sizes)
    # One round of the loop applies each shard at once: the largest one bounds the batch.
    most = min(MAX_BATCH, SHARD_VALUES // largest)
    return min(most, BATCH_VALUES // size) if head.push.pull and size else most


def _order_together(
    group: ShardGroup, tables: ShardTables, session: Session, number: int
) -> tuple[Sequence[int], list[Problem]]:
    """Order a push with one number on all shards of a group. Returns accepted places, and problems."""
    last = tables.last_number.get(session, 0)
    if number == last + 1:
        tables.last_number[session] = number
        return group.places, []
    if number <= last:
        tables.duplicates += 1
        return (), [Problem(place, DUPLICATE) for place in group.places]
    return (), [Problem(place, GAP, last + 1) for place in group.places]


def _order_apart(
    shards: Sequence[Shard | None], session: Session, numbers: Sequence[int]
) -> tuple[Sequence[int], list[Problem]]:
    """Order a push shard by shard. Returns accepted places, and problems."""
    accepted: list[int] = []
    problems: list[Problem] = []
    for place, shard in enumerate(shards):
        if shard is None:
            problems.append(Problem(place, NOT_PRIMARY))
            continue
        last, number = shard.last_number.get(session, 0), numbers[place]
        if number == last + 1:
            shard.separate().last_number[session] = number
            accepted.append(place)
        elif number <= last:
            shard.duplicates += 1
            problems.append(Problem(place, DUPLICATE))
        else:
            problems.append(Problem(place, GAP, last + 1))
    return accepted, problems


def _count_together(
    shards: Sequence[Shard], pushes: Sequence[QueuedPush], finite: Sequence[Sequence[bool]]
) -> bool:
    """Count applied pushes of a group with shared tables. Returns False if its tables or outcomes differ."""
    tables = shards.own_tables() if isinstance(shards, ShardGroup) else None
    if tables is None or not all(finite[0]) or finite.count(finite[0]) != len(finite):
        return False
    if not all(same(queued.push.versions) and same(queued.push.own_applied) for queued in pushes):
        return False
    for queued in pushes:
        push = queued.push
        since = tables.version - push.versions[0] - push.own_applied[0]
        # Negative if the client claims more own pushes than were applied: it counts as current.
        tables.count_staleness(push.replica, max(since, 0))
        tables.version = Version(tables.version + 1)
    return True


def _count_apart(
    shards: Sequence[Shard], pushes: Sequence[QueuedPush], finite: Sequence[Sequence[bool]]
) -> None:
    """Count applied and refused pushes shard by shard."""
    for place, shard, of_pushes in zip(pushes[0].accepted, shards, finite, strict=True):
        tables = shard.separate()
        for queued, ok in zip(pushes, of_pushes, strict=True):
            if ok:
                push = queued.push
                since = tables.version - push.versions[place] - push.own_applied[place]
                tables.count_staleness(push.replica, max(since, 0))
                tables.version = Version(tables.version + 1)
            else:
                tables.refused += 1
                queued.problems.append(Problem(place, REFUSED))


def _has_new_number(push: Push, shards: Sequence[Shard | None], session: Session) -> bool:
    """Whether a push has a number that one of its shards has not ordered."""
    numbered = zip(shards, push.numbers, strict=True)
    return any(shard is not None and shard.last_number.get(session, 0) < number for shard, number in numbered)


def _refuse_over(request: Request, message: Push | Tick | ReportSteps) -> Refuse:
    text = (
        f"generation {message.incarnation} of replica {message.replica} has ended: "
        "other replicas train its groups"
    )
    return Refuse(request, "generation-over", text)


def _scaled_rates(pushes: Sequence[QueuedPush]) -> tuple[tuple[float, ...], ...]:
    """The rates of each push on its accepted places, each divided by 1 + the staleness on that shard."""
    rates = []
    for before, queued in enumerate(pushes):
        push, mine = queued.push, []
        for place in queued.accepted:
            shard = queued.shards[place]
            assert shard is not None
            # Each push before it in the batch will be one version: `is_sure` rules out that one is refused.
            since = shard.version + before - push.versions[place] - push.own_applied[place]
            mine.append(push.rate / (1 + max(since, 0)))
        rates.append(tuple(mine))
    return tuple(rates)
