"""Pure: what a parameter server decides: order, hold, apply, acknowledge; answer pulls.

Theory of operation
-------------------
A push names its shards and has one number on each. For each shard the server *orders* it if the
number is the last one + 1, answers again for lower numbers, and answers a gap with the number it
wants. An ordered push waits in the shard's queue. `take_batch` hands over everything that is queued
for one shard (opportunistic batching, AD-42); the shell applies it and reports `Applied`; a push is
acknowledged once all its shards are resolved. Between ordering and applying lies the place where
replication and synchronous sums will *hold* a push; nothing is held yet.

A duplicate of a push that is still queued must not be acknowledged before that push is applied, and
a pull must contain what its client pushed before it. Both leave a *mark* in the queues concerned:
an entry without a gradient that is resolved with the batch it falls into.

Staleness of a push on a shard is the number of pushes applied since the oldest version that its
groups read, less the client's own ones that a local step had already put into the copy they read.

Nothing here waits, sends, reads a clock or touches a value; gradients pass through unopened.
"""

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
    Tick,
)
from adam_async.parameter_server.apply import Gradient
from adam_async.parameter_server.shard import Session, Shard

Request = Any
"""The shell's handle on a question; passed back in the effect that answers it."""


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PushArrived:
    """A push came in; `gradients` run parallel to ``push.shards``."""

    request: Request
    push: Push
    gradients: Sequence[Gradient]


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
    """The shell applied a batch; `finite` says for each gradient whether it was."""

    batch: "Apply"
    finite: Sequence[bool]


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The controllers decided which replicas are live."""

    live: tuple[Replica, ...]


Event = PushArrived | TickArrived | PullArrived | Applied | ReplicasChanged


# --- effects ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Apply these gradients to the shard, in this order, then report `Applied`."""

    shard: Shard
    entries: "tuple[_Entry, ...]"

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of the batch, marks left out."""
        return [entry.gradient for entry in self.entries if entry.gradient is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Acknowledge:
    """Answer a push: every shard of it is resolved."""

    request: Request
    body: Pushed


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


Effect = Acknowledge | AcknowledgeTick | SendValues | Refuse


@dataclass(slots=True, eq=False)
class _Pending:
    """A push or pull that is not answered yet."""

    request: Request
    unresolved: int
    push: Push | None
    shards: tuple[Shard, ...]
    versions: list[int]
    problems: list[Problem]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A place in a shard's queue; a mark if it holds no gradient."""

    pending: _Pending
    index: int
    gradient: Gradient | None


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
        self._queues: dict[ShardId, list[_Entry]] = {}
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
            case TickArrived():
                return self._tick(event)
            case ReplicasChanged():
                return self._replicas_changed(event)
        assert_never(event)

    def take_batch(self) -> Apply | None:
        """Take everything queued for the shard that has waited longest; None when all is applied."""
        if not self._queues:
            return None
        shard, entries = next(iter(self._queues.items()))
        del self._queues[shard]
        self.batches += 1
        self.batched_pushes += sum(entry.gradient is not None for entry in entries)
        return Apply(self.shards[shard], tuple(entries))

    @property
    def idle(self) -> bool:
        """Whether no push waits to be applied."""
        return not self._queues

    # --- order -------------------------------------------------------------------------------

    def _order(self, event: PushArrived) -> list[Effect]:
        push = event.push
        if push.run != self.run:
            return [Refuse(event.request, "wrong-run", f"this server is on run {self.run}, not {push.run}")]
        session: Session = (push.session, push.incarnation)
        pending = _Pending(event.request, 0, push, (), [0] * len(push.shards), [])
        ours = push.generation == self.generation
        for index, (number_of_shard, number) in enumerate(zip(push.shards, push.numbers, strict=True)):
            shard = self.shards.get(ShardId(number_of_shard)) if ours else None
            if shard is None:
                pending.problems.append(Problem(index, NOT_PRIMARY))
                continue
            last = shard.last_number.get(session, 0)
            pending.versions[index] = shard.version
            if number == last + 1:
                shard.last_number[session] = number
                self._enqueue(shard, _Entry(pending, index, event.gradients[index]))
            elif number <= last:
                shard.duplicates += 1
                pending.problems.append(Problem(index, DUPLICATE))
                if shard.spec.id in self._queues:
                    self._enqueue(shard, _Entry(pending, index, None))
            else:
                pending.problems.append(Problem(index, GAP, last + 1))
        return [] if pending.unresolved else [self._acknowledgement(pending)]

    def _enqueue(self, shard: Shard, entry: _Entry) -> None:
        entry.pending.unresolved += 1
        self._queues.setdefault(shard.spec.id, []).append(entry)

    # --- acknowledge -------------------------------------------------------------------------

    def _applied(self, event: Applied) -> list[Effect]:
        shard = event.batch.shard
        finite = iter(event.finite)
        effects: list[Effect] = []
        for entry in event.batch.entries:
            pending = entry.pending
            if entry.gradient is not None:
                assert pending.push is not None
                self._count(shard, pending, entry.index, next(finite))
            if pending.push is not None:
                pending.versions[entry.index] = shard.version
            pending.unresolved -= 1
            if pending.unresolved == 0:
                effects.append(
                    self._acknowledgement(pending)
                    if pending.push is not None
                    else SendValues(pending.request, pending.shards)
                )
        return effects

    def _count(self, shard: Shard, pending: _Pending, index: int, finite: bool) -> None:
        push = pending.push
        assert push is not None
        if finite:
            since = shard.version - push.versions[index] - push.own[index]
            shard.staleness[max(since, 0)] += 1
            shard.version = Version(shard.version + 1)
        else:
            shard.refused += 1
            pending.problems.append(Problem(index, REFUSED))
        self._advance(shard, Replica(push.replica), push.clock)

    @staticmethod
    def _acknowledgement(pending: _Pending) -> Acknowledge:
        return Acknowledge(
            pending.request,
            Pushed(versions=tuple(pending.versions), problems=tuple(pending.problems)),
        )

    # --- clocks ------------------------------------------------------------------------------

    def _advance(self, shard: Shard, replica: Replica, clock: int) -> None:
        if replica in self._live or not self._live:
            shard.clocks[replica] = max(shard.clocks.get(replica, 0), clock)

    def _tick(self, event: TickArrived) -> list[Effect]:
        tick = event.tick
        if tick.run != self.run or tick.generation != self.generation:
            return [Refuse(event.request, "wrong-run", f"this server is on run {self.run}, not {tick.run}")]
        for number in tick.shards:
            shard = self.shards.get(ShardId(number))
            if shard is not None:
                self._advance(shard, Replica(tick.replica), tick.clock)
        return [AcknowledgeTick(event.request)]

    def _replicas_changed(self, event: ReplicasChanged) -> list[Effect]:
        self._live = event.live
        for shard in self.shards.values():
            slowest = shard.slowest_clock()
            shard.clocks = {replica: shard.clocks.get(replica, slowest) for replica in event.live}
        return []

    # --- pulls -------------------------------------------------------------------------------

    def _pull(self, event: PullArrived) -> list[Effect]:
        pull = event.pull
        if pull.run != self.run or pull.generation != self.generation:
            text = f"this server is on run {self.run} generation {self.generation}, not {pull.run} {pull.generation}"
            return [Refuse(event.request, "wrong-run", text)]
        unknown = [number for number in pull.shards if ShardId(number) not in self.shards]
        if unknown:
            return [Refuse(event.request, "not-primary", f"not the primary of shards {unknown[:8]}")]
        shards = tuple(self.shards[ShardId(number)] for number in pull.shards)
        pending = _Pending(event.request, 0, None, shards, [], [])
        for index, shard in enumerate(shards):
            if shard.spec.id in self._queues:
                self._enqueue(shard, _Entry(pending, index, None))
        return [] if pending.unresolved else [SendValues(event.request, shards)]

    # --- for the curious ---------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert what must hold between two events."""
        for number, shard in self.shards.items():
            assert shard.spec.id == number
            shard.check_invariants()
        for number, entries in self._queues.items():
            assert entries, f"an empty queue is kept for shard {number}"
            assert all(entry.pending.unresolved > 0 for entry in entries)

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
