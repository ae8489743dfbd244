"""Pure: what a parameter server decides: order, hold, apply, acknowledge; answer pulls.

Theory of operation
-------------------
Pushes and pulls wait in one queue, in the order in which they came. For each shard that a push names
the server *orders* it if the number is the session's last one + 1, answers again for lower numbers, and
answers a gap with the number it wants. `take_batch` hands over the push at the head of the queue and
those right behind it that are for the same shards (opportunistic batching, AD-42); the shell applies
them and reports `Applied`; a push is acknowledged once it is applied. Between ordering and applying lies
the place where replication and synchronous sums will *hold* a push; nothing is held yet.

Because there is one queue, a pull contains what its client pushed before it, and a duplicate of a push
that is still queued is not acknowledged before that push is applied.

Staleness of a push on a shard is the number of pushes applied since the oldest version that its
groups read, less the client's own ones that a local step had already put into the copy they read.

Nothing here waits, sends, reads a clock or touches a value; gradients pass through unopened.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from adam_async.ids import Replica, ShardId, Version
from adam_async.messages import (
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    REFUSED,
    Problem,
    Pull,
    Push,
    Pushed,
    Record,
    Tick,
)
from adam_async.parameter_server.apply import PushGradients
from adam_async.parameter_server.shard import Session, Shard

Request = Any
"""The shell's handle on a question; passed back in the effect that answers it."""


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PushArrived:
    """A push came in."""

    request: Request
    push: Push
    gradients: PushGradients


@dataclass(frozen=True, slots=True, eq=False)
class RecordArrived:
    """Steps were applied to the shards' memory by compute threads of this process."""

    request: Request
    record: Record


@dataclass(frozen=True, slots=True, eq=False)
class TickArrived:
    """A replica ended a step without pushing some shards."""

    request: Request
    tick: Tick


@dataclass(frozen=True, slots=True, eq=False)
class PullArrived:
    """A client wants the values of shards."""

    request: Request
    pull: Pull


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """The shell applied a batch; `finite` says, shard by shard, for each push whether it was applied."""

    batch: "Apply"
    finite: Sequence[Sequence[bool]]


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The controllers decided which replicas are live."""

    live: tuple[Replica, ...]


Event = PushArrived | RecordArrived | TickArrived | PullArrived | Applied | ReplicasChanged


# --- effects ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class QueuedPush:
    """A push that waits to be applied, or is being applied."""

    request: Request
    push: Push
    shards: tuple[Shard | None, ...]
    """Shard of each place of the push; None where it is not ours."""
    gradients: PushGradients
    accepted: Sequence[int]
    """Places whose number was the next one; the others are in `problems`."""
    problems: list[Problem]


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPull:
    """A pull that waits for the pushes before it."""

    request: Request
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Apply these pushes, shard by shard and per shard in this order, then report `Applied`.

    All of them have the same accepted places and the same shards there.
    """

    pushes: tuple[QueuedPush, ...]

    def shards(self) -> list[Shard]:
        """The shards to apply to, one for each accepted place."""
        first = self.pushes[0]
        found = [first.shards[place] for place in first.accepted]
        return [shard for shard in found if shard is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Acknowledge:
    """Answer a push; with the values of `shards`, if there are any."""

    request: Request
    body: Pushed
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AcknowledgeRecord:
    """Answer a record."""

    request: Request


@dataclass(frozen=True, slots=True, eq=False)
class AcknowledgeTick:
    """Answer a tick."""

    request: Request


@dataclass(frozen=True, slots=True, eq=False)
class SendValues:
    """Answer a pull with a copy of these shards as they are now."""

    request: Request
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Refuse:
    """Answer with an error: code and a sentence."""

    request: Request
    code: str
    text: str


Effect = Acknowledge | AcknowledgeRecord | AcknowledgeTick | SendValues | Refuse

MAX_BATCH = 32
"""Pushes applied together at most, so that the first of them is not acknowledged too late."""


class ServerState:
    """The shards of one server in one run, and the pushes and pulls in progress on them.

    Args:
        run: Id of the run.
        generation: Version of the bucket assignment that made this server a primary.
        shards: The shards whose primary this server is.
    """

    def __init__(self, *, run: str, generation: int, shards: Iterable[Shard]) -> None:
        self.run = run
        self.generation = generation
        self.shards: Mapping[ShardId, Shard] = {shard.spec.id: shard for shard in shards}
        self._queue: deque[QueuedPush | QueuedPull] = deque()
        self._live: tuple[Replica, ...] = ()
        self.batches = 0
        self.batched_pushes = 0

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return what is to be done about it now."""
        match event:
            case PushArrived():
                return self._order(event)
            case PullArrived():
                return self._pull(event)
            case Applied():
                return self._applied(event)
            case RecordArrived():
                return self._record(event)
            case TickArrived():
                return self._tick(event)
            case ReplicasChanged():
                return self._replicas_changed(event)
        assert_never(event)

    def take_batch(self) -> tuple[Apply | None, list[Effect]]:
        """Take the head of the queue: a batch to apply, and what can be answered without it."""
        queue = self._queue
        effects: list[Effect] = []
        while queue:
            head = queue.popleft()
            if isinstance(head, QueuedPull):
                effects.append(SendValues(head.request, head.shards))
            elif not head.accepted:
                effects.append(self._acknowledgement(head))
            else:
                pushes = [head]
                while queue and len(pushes) < MAX_BATCH and _joins(queue[0], head):
                    follower = queue.popleft()
                    assert isinstance(follower, QueuedPush)
                    pushes.append(follower)
                self.batches += 1
                self.batched_pushes += len(pushes)
                return Apply(tuple(pushes)), effects
        return None, effects

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._queue

    # --- order -------------------------------------------------------------------------------

    def _order(self, event: PushArrived) -> list[Effect]:
        push = event.push
        if push.run != self.run:
            return [Refuse(event.request, "wrong-run", f"this server is on run {self.run}, not {push.run}")]
        session: Session = (push.session, push.incarnation)
        ours = self.shards if push.generation == self.generation else {}
        shards = tuple([ours.get(ShardId(number)) for number in push.shards])
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
        if not accepted and not self._queue:
            return [self._acknowledgement(queued)]
        self._queue.append(queued)
        return []

    # --- acknowledge -------------------------------------------------------------------------

    def _applied(self, event: Applied) -> list[Effect]:
        pushes = event.batch.pushes
        shards = event.batch.shards()
        for place, shard, finite in zip(pushes[0].accepted, shards, event.finite, strict=True):
            for queued, ok in zip(pushes, finite, strict=True):
                push = queued.push
                if ok:
                    since = shard.version - push.versions[place] - push.own[place]
                    shard.staleness[since if since > 0 else 0] += 1
                    shard.version = Version(shard.version + 1)
                else:
                    shard.refused += 1
                    queued.problems.append(Problem(place, REFUSED))
                self._advance(shard, Replica(push.replica), push.clock)
        return [self._acknowledgement(queued) for queued in pushes]

    @staticmethod
    def _acknowledgement(queued: QueuedPush) -> Acknowledge:
        """Answer as things stand now; values go along only if nothing of the push is open."""
        versions = tuple([0 if shard is None else shard.version for shard in queued.shards])
        body = Pushed(versions=versions, problems=tuple(queued.problems))
        if not queued.push.pull or any(p.status in (GAP, NOT_PRIMARY) for p in queued.problems):
            return Acknowledge(queued.request, body)
        shards = tuple([shard for shard in queued.shards if shard is not None])
        return Acknowledge(queued.request, body, shards)

    # --- records of steps applied in place ---------------------------------------------------

    def _record(self, event: RecordArrived) -> list[Effect]:
        record = event.record
        if record.run != self.run or record.generation != self.generation:
            return [self._wrong_run(event.request, record)]
        shards = [self.shards.get(ShardId(number)) for number in record.shards]
        session: Session = (record.session, record.incarnation)
        last_step = record.number + len(record.steps) - 1
        ours = [shard for shard in shards if shard is not None]
        if len(ours) < len(shards) or not ours:
            return [Refuse(event.request, "not-primary", f"not the primary of all of {record.shards[:8]}")]
        seen = [shard.last_number.get(session, 0) for shard in ours]
        if min(seen) >= last_step:
            for shard in ours:
                shard.duplicates += len(record.steps)
            return [AcknowledgeRecord(event.request)]
        if min(seen) != max(seen) or min(seen) != record.number - 1:
            return [Refuse(event.request, "gap", f"expected step {min(seen) + 1}, not {record.number}")]
        clock = record.steps[-1].clock
        for place, shard in enumerate(ours):
            shard.last_number[session] = last_step
            for step in record.steps:
                if place in step.refused:
                    shard.refused += 1
                else:
                    shard.version = Version(shard.version + 1)
                    shard.staleness[step.staleness] += 1
            self._advance(shard, Replica(record.replica), clock)
        return [AcknowledgeRecord(event.request)]

    # --- clocks ------------------------------------------------------------------------------

    def _advance(self, shard: Shard, replica: Replica, clock: int) -> None:
        if replica in self._live or not self._live:
            shard.clocks[replica] = max(shard.clocks.get(replica, 0), clock)

    def _tick(self, event: TickArrived) -> list[Effect]:
        tick = event.tick
        if tick.run != self.run or tick.generation != self.generation:
            return [self._wrong_run(event.request, tick)]
        for number in tick.shards:
            shard = self.shards.get(ShardId(number))
            if shard is not None:
                self._advance(shard, Replica(tick.replica), tick.clock)
        return [AcknowledgeTick(event.request)]

    def _replicas_changed(self, event: ReplicasChanged) -> list[Effect]:
        self._live = event.live
        if not event.live:
            return []  # the table stays, for whoever joins next starts where the last ones were
        for shard in self.shards.values():
            staying = [shard.clocks[replica] for replica in event.live if replica in shard.clocks]
            slowest = min(staying or shard.clocks.values(), default=0)
            shard.clocks = {replica: shard.clocks.get(replica, slowest) for replica in event.live}
        return []

    # --- pulls -------------------------------------------------------------------------------

    def _pull(self, event: PullArrived) -> list[Effect]:
        pull = event.pull
        if pull.run != self.run or pull.generation != self.generation:
            return [self._wrong_run(event.request, pull)]
        unknown = [number for number in pull.shards if ShardId(number) not in self.shards]
        if unknown:
            return [Refuse(event.request, "not-primary", f"not the primary of shards {unknown[:8]}")]
        shards = tuple([self.shards[ShardId(number)] for number in pull.shards])
        if not self._queue:
            return [SendValues(event.request, shards)]
        self._queue.append(QueuedPull(event.request, shards))
        return []

    def _wrong_run(self, request: Request, asked: Record | Tick | Pull) -> Refuse:
        here = f"{self.run} generation {self.generation}"
        there = f"{asked.run} generation {asked.generation}"
        return Refuse(request, "wrong-run", f"this server is on run {here}, not {there}")

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
        """What the report says of this server: versions, staleness, clocks, refused, duplicates."""
        histogram: dict[int, int] = {}
        for shard in self.shards.values():
            for staleness, count in shard.staleness.items():
                histogram[staleness] = histogram.get(staleness, 0) + count
        return {
            "shards": len(self.shards),
            "versions": {str(n): int(s.version) for n, s in self.shards.items()},
            "staleness": {str(k): v for k, v in sorted(histogram.items())},
            "clocks": {str(n): {str(r): c for r, c in s.clocks.items()} for n, s in self.shards.items()},
            "refused": sum(shard.refused for shard in self.shards.values()),
            "duplicates": sum(shard.duplicates for shard in self.shards.values()),
            "batches": self.batches,
            "batched_pushes": self.batched_pushes,
        }


def _joins(queued: QueuedPush | QueuedPull, head: QueuedPush) -> bool:
    """Whether a queue entry may be applied in one batch with `head`."""
    return (
        isinstance(queued, QueuedPush)
        and queued.push.shards == head.push.shards
        and queued.accepted == head.accepted
    )
