"""Pure: what a parameter server decides: order, hold, apply, acknowledge; answer pulls.

Theory of operation
-------------------
Pushes and pulls wait in one queue, in the order in which they came. For each shard that a push names
the server *orders* it if the number is the session's last one + 1, answers again for lower numbers, and
answers a gap with the number it wants. `take_batch` hands over the push that has waited longest and
those behind it that are for the same shards (opportunistic batching, AD-42); pushes for other shards do not
part them (`push_queue.py`). The shell applies the batch, in several turns of the loop if it is large, and
reports `Applied`; a push is acknowledged once it is applied. In bsp an ordered push does not queue: it is
*held* and acknowledged at once, and what queues is the sum of a step, once it is complete (`barrier.py`).

Nothing passes a pull in the queue, so a pull contains what its client pushed before it, and a duplicate of a
push that is still queued is not acknowledged before that push is applied. A tick waits there too, so that a
clock never says that a push was applied which was not. A batch that is taken and not yet reported counts as
queued: no values leave the server while those of a shard are anywhere between before and after.

A pull may want a *clock*: values in which all pushes of live replicas up to it are applied. It is *parked*
until they are, or until its deadline. Whom to wait for the server hears from the controllers, perhaps later
than a worker does: pushes and ticks of an epoch that it has not heard of wait until it has, and with them
what their session says behind them, for with the epoch it hears of all replicas that take part. A replica
that nobody has named yet, but that ticks already, is remembered until it is.

What a *life* of a replica pushes and ticks when it has left the live ones is refused: its groups are given to
others. Its worker says it again, at growing intervals, until the map tells it to begin another life; as it is
not acknowledged, no group of it is reported. What came before stays, and is answered again.

A run may have any number of lives, and the server remembers them in bounded memory (`lives.py`). It forgets
the push numbers of a life when `REMEMBERED` later lives of its replica have ended. From then on it refuses
every push of that life, even an applied one, so it applies none twice. The server remembers the newest
`OVER_KEPT` ended lives. A client repeats an open push for `patience_s` only and then fails, so no push comes
from an older life.

Staleness of a push on a shard is the number of pushes applied since the oldest version that its
groups read, less the client's own ones that a local step had already put into the copy they read.

Nothing here waits, sends, reads a clock or touches a value; gradients pass through unopened. Deadlines are
absolute seconds on the caller's clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, assert_never

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
    Record,
    Tick,
)
from adam_async.parameter_server.admission_gate import MOST_GATED, Gated
from adam_async.parameter_server.bsp_barrier import Contribution, Held
from adam_async.parameter_server.events import (
    Acknowledge,
    AcknowledgeRecord,
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
    RecordArrived,
    Refuse,
    ReplicasChanged,
    Request,
    SumApplied,
    TickArrived,
)
from adam_async.parameter_server.push_queue import PushQueue
from adam_async.parameter_server.replay_log import JOINED, NOT_APPLIED, SUMMED, OrderLog
from adam_async.parameter_server.replica_generations import GenerationsOver, keep_newest
from adam_async.parameter_server.shard import Session, Shard
from adam_async.parameter_server.statistics import count_shards
from adam_async.parameter_server.waiting_requests import Parked
from adam_async.run.ids import Replica, ShardId, Version

MAX_BATCH = 32
"""Pushes applied together at most, so that the first of them is not acknowledged too late."""

SHARD_VALUES = 1 << 21
"""Values of a shard times the pushes of a batch at most, for they are applied in one turn of the loop: eight
pushes to the largest shard, of 2^18 values."""

BATCH_VALUES = 1 << 22
"""Values that a push asks for times the pushes of a batch at most: their answers are copied in one turn."""


EARLY_KEPT = 256
"""Maximum number of lives with clocks kept until the map names them."""


class ServerState:
    """The shards of one server in one run, and the pushes and pulls in progress on them.

    Args:
        run: Id of the run.
        generation: Version of the bucket assignment that made this server a primary.
        shards: The shards whose primary this server is.
        clocked: Whether workers wait for one another (ssp, bsp), so that answers to pushes carry a clock.
        group_images: In bsp, where pushes are added up: the images of a whole group. 0 in other modes.
        scale_by_staleness: Whether a push's rate is divided by 1 + its staleness.
        log: Where the order of what is applied is noted.
    """

    def __init__(
        self,
        *,
        run: str,
        generation: int,
        shards: Iterable[Shard],
        clocked: bool = False,
        group_images: int = 0,
        scale_by_staleness: bool = False,
        log: OrderLog | None = None,
    ) -> None:
        self.run = run
        self.generation = generation
        self.shards: Mapping[ShardId, Shard] = {shard.spec.id: shard for shard in shards}
        self._clocked = clocked
        self._group_images = group_images
        self._scales = scale_by_staleness
        self.log = log
        self._queue = PushQueue()
        self._taken: Apply | ApplySum | None = None
        self.parked = Parked()
        self.gated = Gated()
        self._epoch = 0
        self._first_clock = 0
        self._live: Mapping[Replica, int] = {}
        self._known: Mapping[Replica, int] = {}
        self._over = GenerationsOver()
        self._early: dict[tuple[Replica, int], dict[ShardId, int]] = {}
        self.batches = 0
        self.batched_pushes = 0
        if group_images:
            for shard in self.shards.values():
                shard.held = Held(reached=shard.slowest_clock())

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return what is to be done about it now."""
        match event:
            case PushArrived():
                return self._order(event)
            case PullArrived():
                return self._pull(event)
            case Applied():
                return self._applied(event)
            case SumApplied():
                return self._sum_applied(event)
            case RecordArrived():
                return self._record(event)
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
        """Take what waits longest: a batch or a sum to apply, and what can be answered without it.

        The next one may be taken when this one is reported.
        """
        assert self._taken is None
        effects: list[Effect] = []
        while self._queue:
            head = self._queue.take(self._joins, _most_joined)
            if isinstance(head, list):
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
                effects += self.parked.take(head)
        return None, effects

    def _batch(self, pushes: Sequence[QueuedPush]) -> Apply:
        self.batches += 1
        self.batched_pushes += len(pushes)
        return Apply(tuple(pushes), _scaled_rates(pushes) if self._scales else None)

    def _joins(self, follower: QueuedPush, head: QueuedPush) -> bool:
        """Whether a push for the same shards may be applied in one batch with `head`.

        Where staleness decides about rates, each push has to know which of those before it are applied.
        """
        if follower.push.pull != head.push.pull:
            return False  # the answers of a batch are bounded by those of its first push
        return not self._scales or (head.gradients.is_sure and follower.gradients.is_sure)

    @property
    def synchronous(self) -> bool:
        """Whether pushes are held and added up, so that they have to be looked at when they come."""
        return self._group_images > 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to apply, and nothing waits for it."""
        return not self._queue and self._taken is None

    # --- order -------------------------------------------------------------------------------

    def _order(self, event: PushArrived) -> list[Effect]:
        push = event.push
        if push.run != self.run:
            return [Refuse(event.request, "wrong-run", f"this server is on run {self.run}, not {push.run}")]
        session: Session = (push.session, push.incarnation)
        ours = self.shards if push.generation == self.generation else {}
        shards = tuple([ours.get(ShardId(number)) for number in push.shards])
        if self._is_over(push) and _says_news(push, shards, session):
            return [_refuse_over(event.request, push)]
        if push.epoch > self._epoch or session in self.gated:
            return self._gate(event, session)
        accepted: list[int] = []
        problems: list[Problem] = []
        for place, shard in enumerate(shards):
            if shard is None:
                problems.append(Problem(place, NOT_PRIMARY))
                continue
            last, number = shard.last_number.get(session, 0), push.numbers[place]
            if number == last + 1:
                shard.last_number[session] = number
                accepted.append(place)
            elif number <= last:
                shard.duplicates += 1
                problems.append(Problem(place, DUPLICATE))
            else:
                problems.append(Problem(place, GAP, last + 1))
        queued = QueuedPush(event.request, push, shards, event.gradients, accepted, problems)
        if self._group_images:
            assert event.finite is not None
            return self._hold(queued, event.finite)
        if not accepted and self.idle:
            return [self._acknowledgement(queued)]
        self._queue.add(queued)
        return []

    # --- hold (bsp) --------------------------------------------------------------------------

    def _hold(self, queued: QueuedPush, finite: Sequence[bool]) -> list[Effect]:
        push = queued.push
        replica = Replica(push.replica)
        shards: list[Shard] = []
        for place in queued.accepted:
            shard = queued.shards[place]
            assert shard is not None
            assert shard.held is not None
            shards.append(shard)
            contribution = Contribution(replica, queued, place, (push.session, push.incarnation))
            if not (finite[place] and shard.held.contribute(push.clock, contribution)):
                shard.refused += 1
                queued.problems.append(Problem(place, REFUSED))
                self._note(shard, queued, SUMMED | NOT_APPLIED)
        effects: list[Effect] = [self._acknowledgement(queued)]
        self._advance(shards, replica, push.incarnation, push.clock)
        self._reach(shards)
        return effects + self._answer_parked()

    def _reach(self, shards: Iterable[Shard]) -> None:
        """Queue the sums that wait for nobody any more; shards of the same pushes are summed together."""
        if not self._live:
            return
        due: dict[tuple[int, ...], tuple[int, list[Contribution], list[tuple[Shard, list[int]]]]] = {}
        for shard in shards:
            if shard.held is None:
                continue
            for clock, contributions in shard.held.reach(shard.slowest_clock()):
                key = (clock, *(id(each.push) for each in contributions))
                _, _, members = due.setdefault(key, (clock, contributions, []))
                members.append((shard, [each.place for each in contributions]))
        for clock, contributions, members in sorted(due.values(), key=lambda each: each[0]):
            members.sort(key=lambda member: member[1])  # in the order of the pushes, whoever completes them
            pushes = tuple(each.push for each in contributions)
            self._queue.add(
                ApplySum(
                    clock=clock,
                    shards=tuple(shard for shard, _ in members),
                    pushes=pushes,
                    places=tuple(zip(*(places for _, places in members), strict=True)),
                    scale=self._group_images / sum(queued.push.images for queued in pushes),
                )
            )

    def _sum_applied(self, event: SumApplied) -> list[Effect]:
        done = event.sum
        assert done is self._taken
        last = event.first + len(event.finite)
        if last == len(done.shards):
            self._taken = None
        shards = done.shards[event.first : last]
        for at, (shard, finite) in enumerate(zip(shards, event.finite, strict=True), start=event.first):
            assert shard.held is not None
            shard.held.applied(done.clock)
            for number, (queued, places) in enumerate(zip(done.pushes, done.places, strict=True)):
                push, place = queued.push, places[at]
                if finite:
                    since = shard.version - push.versions[place] - push.own_applied[place]
                    shard.count_staleness(push.replica, max(since, 0))
                else:
                    shard.refused += 1
                flags = SUMMED | (JOINED if number else 0) | (0 if finite else NOT_APPLIED)
                self._note(shard, queued, flags)
            shard.version = Version(shard.version + finite)
        return self._answer_parked()

    # --- acknowledge -------------------------------------------------------------------------

    def _applied(self, event: Applied) -> list[Effect]:
        assert event.batch is self._taken
        self._taken = None
        pushes = event.batch.pushes
        shards = event.batch.shards()
        for place, shard, finite in zip(pushes[0].accepted, shards, event.finite, strict=True):
            for queued, ok in zip(pushes, finite, strict=True):
                if ok:
                    push = queued.push
                    since = shard.version - push.versions[place] - push.own_applied[place]
                    shard.count_staleness(push.replica, since if since > 0 else 0)
                    shard.version = Version(shard.version + 1)
                else:
                    shard.refused += 1
                    queued.problems.append(Problem(place, REFUSED))
        for queued in pushes:
            push = queued.push
            self._advance(shards, Replica(push.replica), push.incarnation, push.clock)
        if self.log is not None:
            for shard, finite in zip(shards, event.finite, strict=True):
                for number, (queued, ok) in enumerate(zip(pushes, finite, strict=True)):
                    self._note(shard, queued, (JOINED if number else 0) | (0 if ok else NOT_APPLIED))
        effects: list[Effect] = [self._acknowledgement(queued) for queued in pushes]
        return effects + self._answer_parked()

    def _note(self, shard: Shard, queued: QueuedPush, flags: int) -> None:
        if self.log is not None:
            push = queued.push
            replica_generation = self.log.replica_generation(push.replica, push.session, push.incarnation)
            self.log.note(shard.spec.id, push.clock, replica_generation, flags)

    def _acknowledgement(self, queued: QueuedPush) -> Acknowledge:
        """Answer as things stand now; values go along only if nothing of the push is open."""
        versions = tuple([0 if shard is None else shard.version for shard in queued.shards])
        problems = tuple(queued.problems)
        if not queued.push.pull or any(p.status in (GAP, NOT_PRIMARY) for p in queued.problems):
            return Acknowledge(queued.request, Pushed(versions=versions, problems=problems))
        shards = tuple([shard for shard in queued.shards if shard is not None])
        clock = min([shard.applied_clock() for shard in shards], default=0) if self._clocked else 0
        body = Pushed(versions=versions, problems=problems, clock=clock)
        return Acknowledge(queued.request, body, shards)

    # --- records of steps applied in place ---------------------------------------------------

    def _record(self, event: RecordArrived) -> list[Effect]:
        """Count steps: those of a life that is over too, for they have been applied to the memory already."""
        record = event.record
        if record.run != self.run or record.generation != self.generation:
            return [self._wrong_run(event.request, record)]
        shards = [self.shards.get(ShardId(number)) for number in record.shards]
        session: Session = (record.session, record.incarnation)
        last_step = record.number + len(record.steps) - 1
        ours = [shard for shard in shards if shard is not None]
        if len(ours) < len(shards) or not ours:
            return [Refuse(event.request, "not-primary", f"not the primary of all of {record.shards[:8]}")]
        if self._over.is_forgotten(Replica(record.replica), record.incarnation):
            return [_refuse_over(event.request, record)]  # the server may have counted its number 1 already
        seen = [shard.last_number.get(session, 0) for shard in ours]
        if min(seen) >= last_step:
            for shard in ours:
                shard.duplicates += len(record.steps)
            return [AcknowledgeRecord(event.request)]
        if min(seen) != max(seen) or min(seen) != record.number - 1:
            return [Refuse(event.request, "gap", f"expected step {min(seen) + 1}, not {record.number}")]
        clock = record.steps[-1].clock
        all_steps = Counter([step.staleness for step in record.steps])
        refused = {place for step in record.steps for place in step.refused}
        for place, shard in enumerate(ours):
            shard.last_number[session] = last_step
            applied = all_steps
            if place in refused:
                applied = Counter([step.staleness for step in record.steps if place not in step.refused])
            shard.version = Version(shard.version + applied.total())
            shard.refused += len(record.steps) - applied.total()
            for staleness, steps in applied.items():
                shard.count_staleness(record.replica, staleness, steps)
        self._advance(ours, Replica(record.replica), record.incarnation, clock)
        return [AcknowledgeRecord(event.request)]

    # --- clocks ------------------------------------------------------------------------------

    def _advance(self, shards: Sequence[Shard], replica: Replica, incarnation: int, clock: int) -> None:
        if self._counts(replica, incarnation):
            for shard in shards:
                clocks = shard.clocks
                if clocks.get(replica, 0) < clock:
                    clocks[replica] = clock
        elif self._clocked and (replica, incarnation) not in self._over:
            early = keep_newest(self._early, (replica, incarnation), EARLY_KEPT)
            for shard in shards:
                early[shard.spec.id] = max(early.get(shard.spec.id, 0), clock)

    def _counts(self, replica: Replica, incarnation: int) -> bool:
        """Whether a life's clock goes into the tables: a live one's, or while none is one that was last."""
        live = self._live or self._known
        return live.get(replica) == incarnation or not live

    def _tick(self, event: TickArrived) -> list[Effect]:
        tick = event.tick
        if tick.run != self.run or tick.generation != self.generation:
            return [self._wrong_run(event.request, tick)]
        if self._is_over(tick):
            return [_refuse_over(event.request, tick)]
        if tick.numbers and len(tick.numbers) != len(tick.shards):
            return [Refuse(event.request, "malformed", "shards and numbers of a Tick differ in length")]
        session: Session = (tick.session, tick.incarnation)
        if tick.epoch > self._epoch or session in self.gated:
            return self._gate(event, session)
        for number, last in zip(tick.shards, tick.numbers, strict=False):
            shard = self.shards.get(ShardId(number))
            if shard is not None and shard.last_number.get(session, 0) < last:
                text = f"push {last} on shard {number} has not come, and a tick behind it cannot count"
                return [Refuse(event.request, "gap", text)]
        if not self.idle and not self._group_images:
            self._queue.add(QueuedTick(event.request, tick))
            return []
        return self._ticked(event.request, tick)

    def _ticked(self, request: Request, tick: Tick) -> list[Effect]:
        found = [self.shards.get(ShardId(number)) for number in tick.shards]
        shards = [shard for shard in found if shard is not None]
        self._advance(shards, Replica(tick.replica), tick.incarnation, tick.clock)
        self._reach(shards)
        return [AcknowledgeTick(request), *self._answer_parked()]

    def _replicas_changed(self, event: ReplicasChanged) -> list[Effect]:
        ended = [
            (r, replica_generation)
            for r, replica_generation in self._live.items()
            if event.live.get(r) != replica_generation
        ]
        self._live = live = dict(event.live)
        self._over.begin(live)
        self._forget(
            {self._over.end(replica, replica_generation) for replica, replica_generation in ended}
            - {*live.values()}
        )
        if not live:
            return []  # the tables stay, for whoever joins next starts where the last ones were
        reborn = {
            replica
            for replica, replica_generation in live.items()
            if self._known.get(replica, replica_generation) != replica_generation
        }
        self._known = live
        early = {
            replica: self._early.pop((replica, replica_generation), {})
            for replica, replica_generation in live.items()
        }
        self._early = {key: clocks for key, clocks in self._early.items() if key[0] not in live}
        for number, shard in self.shards.items():
            shard.name_replicas(live)
            staying = {r: c for r, c in shard.clocks.items() if r in live and r not in reborn}
            slowest = min((staying or shard.clocks).values(), default=self._first_clock)
            shard.clocks = {r: max(staying.get(r, slowest), early[r].get(number, 0)) for r in live}
        self._reach(self.shards.values())
        return self._answer_parked()

    def _gate(self, event: PushArrived | TickArrived, session: Session) -> list[Effect]:
        """Hold an event until its epoch begins, and later ones of its session behind it."""
        if self.gated.full:
            return [Refuse(event.request, "busy", f"{MOST_GATED} pushes and ticks wait for the next epoch")]
        self.gated.add(session, event)
        return []

    def _is_over(self, said: Push | Tick) -> bool:
        """Whether it is of a life that was live; one that nobody has named yet is about to begin."""
        replica, replica_generation = Replica(said.replica), said.incarnation
        return self._live.get(replica) != replica_generation and (replica, replica_generation) in self._over

    def _forget(self, replica_generations: Set[int | None]) -> None:
        """Drop the push numbers of lives. From then on the server refuses their pushes."""
        for shard in self.shards.values() if replica_generations - {None} else ():
            for session in [session for session in shard.last_number if session[1] in replica_generations]:
                del shard.last_number[session]

    @property
    def generations_forgotten(self) -> int:
        """Number of lives with dropped push numbers."""
        return self._over.forgotten

    def _epoch_began(self, event: EpochBegan) -> list[Effect]:
        """All groups of the epoch before are trained and acknowledged: no clock is behind any more."""
        self._epoch, self._first_clock = event.number, event.first_clock
        for shard in self.shards.values():
            for replica, clock in shard.clocks.items():
                shard.clocks[replica] = max(clock, event.first_clock)
        self._reach(self.shards.values())
        effects = [effect for waiting in self.gated.take() for effect in self.handle(waiting)]
        return effects + self._answer_parked()

    # --- pulls and readings ------------------------------------------------------------------

    def _pull(self, event: PullArrived) -> list[Effect]:
        pull = event.pull
        shards = self._asked_for(event.request, pull)
        if isinstance(shards, Refuse):
            return [shards]
        queued = QueuedPull(event.request, shards, pull.clock, event.deadline)
        if self.idle:
            return self.parked.take(queued)
        self._queue.add(queued)
        return []

    def _read(self, event: ReadArrived) -> list[Effect]:
        shards = self._asked_for(event.request, event.read)
        if isinstance(shards, Refuse):
            return [shards]
        queued = QueuedRead(event.request, shards, event.deadline)
        if self.idle:
            return self.parked.take(queued)
        self._queue.add(queued)
        return []

    def _asked_for(self, request: Request, asked: Pull | ReadShards) -> tuple[Shard, ...] | Refuse:
        if asked.run != self.run or asked.generation != self.generation:
            return self._wrong_run(request, asked)
        unknown = [number for number in asked.shards if ShardId(number) not in self.shards]
        if unknown:
            return Refuse(request, "not-primary", f"not the primary of shards {unknown[:8]}")
        return tuple([self.shards[ShardId(number)] for number in asked.shards])

    def _answer_parked(self) -> list[Effect]:
        """Answer what can be answered now, unless a batch is being applied: then its end answers."""
        return [] if isinstance(self._taken, Apply) or not self.parked else self.parked.answer()

    def give_up(self, *, now: float) -> list[Effect]:
        """Answer what is parked and whose time is up, without what it wants."""
        return self.parked.give_up(now)

    def next_deadline(self) -> float | None:
        """When `give_up` may next have something to answer; None while nothing is parked."""
        return self.parked.next_deadline()

    def _wrong_run(self, request: Request, asked: Record | Tick | Pull | ReadShards) -> Refuse:
        here = f"{self.run} generation {self.generation}"
        there = f"{asked.run} generation {asked.generation}"
        return Refuse(request, "wrong-run", f"this server is on run {here}, not {there}")

    def forget(self, sessions: Iterable[Session]) -> None:
        """Forget the pushes of sessions whose lives were never live, to make room for other sessions."""
        for session in sessions:
            for shard in self.shards.values():
                shard.last_number.pop(session, None)
            for key in [key for key in self._early if key[1] == session[1]]:
                del self._early[key]

    # --- for the curious ---------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert what must hold between two events."""
        for number, shard in self.shards.items():
            assert shard.spec.id == number
            shard.check_invariants()
        for queued in self._queue:
            if isinstance(queued, QueuedPush):
                assert len(queued.accepted) + len(queued.problems) == len(queued.push.shards)

    def statistics(self) -> dict[str, Any]:
        """What the report says of this server: what its shards counted, who waits, and for whom."""
        return {
            **count_shards(self.shards.values()),
            "parked": len(self.parked),
            "waiting_for": [int(replica) for replica in self.parked.waiting_for()],
            "batches": self.batches,
            "batched_pushes": self.batched_pushes,
        }


def _most_joined(head: QueuedPush) -> int:
    """Return the largest number of pushes in a batch that begins with this one."""
    sizes = [len(shard.values) for shard in head.shards if shard is not None]
    most = min(MAX_BATCH, SHARD_VALUES // max(sizes, default=1))
    return min(most, BATCH_VALUES // sum(sizes)) if head.push.pull and sizes else most


def _says_news(push: Push, shards: Sequence[Shard | None], session: Session) -> bool:
    """Whether a shard has not had its number yet."""
    numbered = zip(shards, push.numbers, strict=True)
    return any(shard is not None and shard.last_number.get(session, 0) < number for shard, number in numbered)


def _refuse_over(request: Request, said: Push | Tick | Record) -> Refuse:
    text = f"life {said.incarnation} of replica {said.replica} is over: others train what it was given"
    return Refuse(request, "life-over", text)


def _scaled_rates(pushes: Sequence[QueuedPush]) -> tuple[tuple[float, ...], ...]:
    """For each push its rate on each accepted place, divided by 1 + the staleness that it will have there."""
    rates = []
    for before, queued in enumerate(pushes):
        push, mine = queued.push, []
        for place in queued.accepted:
            shard = queued.shards[place]
            assert shard is not None
            since = shard.version + before - push.versions[place] - push.own_applied[place]
            mine.append(push.rate / (1 + max(since, 0)))
        rates.append(tuple(mine))
    return tuple(rates)
