"""Training on a copy within a bound of the other replicas (``ssp:S``), or in lockstep with them (``bsp``).

Theory of operation
-------------------
Groups get their places in steps when they are admitted (`clocks.py`), and the step that a group would open
is admitted when the values that it may read are here; until then the *gate* is shut. Steps leave in their
order, each when all its groups are trained, its gradients added up in the order of their leases. Where
replicas meet, a *jump* stands between two steps: a tick to all shards.

Under ``ssp`` values come as under ``asp``, in the answers to pushes, with their clock; only if nothing is on
its way and what is here is too old, a clock-bound pull asks for what is needed, and is answered when the
others have got there.

Under ``bsp`` each step is followed by a clock-bound pull of the sum that it is part of. When all of it has
landed the copy is exactly of that clock, and a snapshot of it is kept for the steps that are to read it: the
first of its groups may be admitted before newer values land, and the last one after that. A push of clock p
leaves only when the values of clock p - 1 are here; see `clocks.py`. Local steps are not made.

What is waited for is named: the servers tell, every half of `answer_s`, who is behind.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from adam_async.data_server.client import ImageGroup
from adam_async.errors import DeadlineExceeded, RunFailed
from adam_async.messages import Values
from adam_async.parameter_server.client import ParameterClient
from adam_async.run.ids import ShardId
from adam_async.worker.puller import Puller
from adam_async.worker.push_plan import PushBuffer
from adam_async.worker.replica_clock import ReplicaClock
from adam_async.worker.stepper import Pusher, Step
from adam_async.worker.training import Admitted, GroupTrainer, Trained
from adam_async.worker.weights import Snapshot, WorkerWeights

Shards = tuple[tuple[str, tuple[ShardId, ...]], ...]
"""Servers, and for each some shards of it that one message names."""


@dataclass(slots=True, eq=False)
class OrderedStep:
    """A step whose groups have their places."""

    number: int
    """Steps that lie behind it."""
    epoch: int
    needed: int
    """Clock of the values that its groups read: at least, and under bsp exactly."""
    read: Snapshot | None
    """What all of them read, under bsp."""
    admitted: int = 0
    closed: bool = False
    """No more groups join it."""
    buffer: PushBuffer | None = None
    trained: list[Trained] = field(default_factory=list)
    """Those that are added up."""
    early: dict[int, Trained] = field(default_factory=dict)
    """Those that were trained before one that comes before them."""
    on_landed: Callable[[], None] | None = None
    """Of its last group."""
    leaving: Step | None = None
    """What has begun to leave before it is complete."""

    @property
    def complete(self) -> bool:
        """Whether it may leave."""
        return self.closed and len(self.trained) == self.admitted


@dataclass(frozen=True, slots=True)
class Jump:
    """The replica's clock goes on to where all meet."""

    clock: int
    epoch: int


class ClockedStepper:
    """Collects groups into steps in the order of their leases, and is the gate that they come through.

    Args:
        pusher: What sends steps.
        client: Where ticks go.
        puller: How values come back.
        trainer: Whose push buffers groups are added up in.
        weights: The worker's copy.
        clock: The replica's.
        replica: Its number, for messages.
        push_every: Groups of a full step.
        pull_every: Steps per pull.
        synchronous: Whether the run is ``bsp``.
        most_steps: Steps that may be in the making.
        shards: All shards of the model.
        silent: Those of frozen layers.
        timeout_s: The slowest clock advances at least this often while we wait.
    """

    def __init__(
        self,
        *,
        pusher: Pusher,
        client: ParameterClient,
        puller: Puller,
        trainer: GroupTrainer,
        weights: WorkerWeights,
        clock: ReplicaClock,
        replica: int,
        push_every: int,
        pull_every: int,
        synchronous: bool,
        most_steps: int,
        shards: Shards,
        silent: Shards,
        timeout_s: float,
    ) -> None:
        self._pusher = pusher
        self._client = client
        self._puller = puller
        self._trainer = trainer
        self._weights = weights
        self._clock = clock
        self._replica = replica
        self._push_every = push_every
        self._pull_every = pull_every
        self._synchronous = synchronous
        self._most_steps = most_steps
        self._shards = shards
        self._silent = silent
        self._timeout_s = timeout_s
        self._queue: deque[OrderedStep | Jump] = deque()
        self._met = clock.base
        self._epoch = 0
        self.said = clock.step
        """The clock that servers know of, or will when they have read what is on its way."""
        self._reads: dict[int, Snapshot] = {}
        self._landed = -1
        self._landings = 0
        self._bound = -1
        self._broken: RunFailed | None = None
        self._changed = asyncio.Event()
        self._advanced = True
        self._advanced_at = 0.0
        self._behind: dict[int, Values] = {}
        self._waits_before = -1
        self._waits = 0
        self._wait_s = 0.0
        self._waiting_for = ""
        if synchronous and weights.clock == weights.newest:
            self._keep(weights.clock)

    # --- the gate ----------------------------------------------------------------------------

    def opens_for(self, group: ImageGroup) -> bool:
        """Whether the next group may be admitted; what it tells of meetings is heard in any case."""
        if group.sync_clock:
            self.meet(group.sync_clock)
        if group.clock > self._clock.step:
            self._epoch = group.lease.epoch
            self.meet(group.clock)
        if self._clock.groups:
            return True
        return len(self._queue) < self._most_steps and self._has_values()

    def _has_values(self) -> bool:
        needed = self._clock.needs
        return needed in self._reads if self._synchronous else self._weights.clock >= needed

    def admit(self, group: ImageGroup) -> Admitted:
        """Give the group its place; the gate must be open for it."""
        self._epoch = group.lease.epoch
        needed = self._clock.needs
        place = self._clock.join()
        if not place.index:
            read = self._read_of(needed) if self._synchronous else None
            self._queue.append(OrderedStep(place.step, group.lease.epoch, needed, read))
        step = self._queue[-1]
        assert isinstance(step, OrderedStep)
        step.admitted += 1
        step.closed = not self._clock.groups
        return Admitted(group, step, place.index, step.read)

    def _read_of(self, needed: int) -> Snapshot:
        for clock in [clock for clock in self._reads if clock < needed]:
            del self._reads[clock]
        return self._reads[needed]

    def meet(self, clock: int) -> None:
        """All replicas meet at this clock: a step that is being filled ends short, and we tick up to it."""
        if self._clock.meet(clock):
            step = self._queue[-1]
            assert isinstance(step, OrderedStep)
            step.closed = True
        elif clock <= self._met:
            return
        self._met = max(self._met, clock)
        self._queue.append(Jump(clock, self._epoch))
        self._leave()

    async def wait(self) -> None:
        """Wait for anything that may open the gate. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: The slowest clock has not advanced for `waits.clock_s`, or no own step has
                left; names who is behind.
            RunFailed: Servers sent the values of another clock.
        """
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self._changed.clear()
        if self._has_values() or self.said < self._clock.needs:
            # For a step of our own that is to leave first: nobody else is late.
            await self._wait_for_own(f"step {self.said} of replica {self._replica} to be trained")
            return
        if self._waits_before != self._clock.step:
            self._waits_before = self._clock.step
            self._waits += 1
            self._advanced = True
        if self._advanced:
            self._advanced, self._advanced_at = False, begin
        self._waiting_for = self._who()
        self._ask()
        try:
            async with asyncio.timeout_at(self._advanced_at + self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            what = f"{self._who()}: step {self._clock.step} needs the values of clock {self._clock.needs}"
            raise DeadlineExceeded(what, self._timeout_s) from None
        finally:
            self._wait_s += loop.time() - begin
            self._waiting_for = ""

    async def _wait_for_own(self, what: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(what, self._timeout_s) from None

    def _ask(self) -> None:
        """Ask for the values that are needed, unless something is on its way that may bring them."""
        needed = self._clock.needs
        if not self._landings and self._bound < needed:
            self._pull(needed)

    def _who(self) -> str:
        behind = sorted({replica for values in self._behind.values() for replica in values.behind})
        if not behind:
            return f"clock {self._clock.needs}"
        slowest = min(values.clock for values in self._behind.values())
        return f"replica{'s' * (len(behind) > 1)} {', '.join(map(str, behind))} at clock {slowest}"

    # --- steps -------------------------------------------------------------------------------

    def add(self, trained: Trained, on_landed: Callable[[], None]) -> None:
        """Take a trained group. Never waits.

        `on_landed` is called when the values that follow the group's step are installed; at once, if it is
        not the last group of a full step.

        Raises:
            RunFailed: The group read what it may not read.
        """
        admitted = trained.admitted
        assert admitted is not None
        step: OrderedStep = admitted.step
        self._check_read(step, trained)
        if trained.ahead is not None:
            trained.ahead.over = True
        step.early[admitted.index] = trained
        if admitted.index == self._push_every - 1:
            step.on_landed = on_landed
        else:
            on_landed()
        while len(step.trained) in step.early:
            self._add_up(step, step.early.pop(len(step.trained)))
        self._leave()

    def ahead(self, trained: Trained, messages: Sequence[int], on_landed: Callable[[], None]) -> None:
        """Let messages of a group's step leave that are complete, while the rest is computed. Never waits.

        Only where it is this step's turn to leave; otherwise they leave with the rest.

        Raises:
            RunFailed: The group read what it may not read.
        """
        admitted, ahead = trained.admitted, trained.ahead
        assert admitted is not None
        assert ahead is not None
        step: OrderedStep = admitted.step
        if ahead.over or self._queue[0] is not step or not self._clock.leaves(step.number, self._landed):
            return
        self._check_read(step, trained)
        if step.leaving is None:
            step.leaving = self._begin(step, trained.buffer, [trained], on_landed)
        self._pusher.push_ahead(step.leaving, messages)

    def _check_read(self, step: OrderedStep, trained: Trained) -> None:
        if trained.read.clock < step.needed:
            raise RunFailed(
                f"step {step.number} of replica {self._replica} read values of clock {trained.read.clock}, "
                f"and needs those of {step.needed}"
            )

    def _add_up(self, step: OrderedStep, trained: Trained) -> None:
        step.trained.append(trained)
        if self._push_every == 1:
            step.buffer = trained.buffer
            return
        if step.buffer is None:
            step.buffer = self._trainer.step_buffers.take()
            step.buffer.clear()
        step.buffer.add(trained.buffer)
        self._trainer.group_buffers.give_back(trained.buffer)

    def _leave(self) -> None:
        """Let go what is complete, in order."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Jump):
                self._jump(head)
            elif head.complete and self._clock.leaves(head.number, self._landed):
                self._send(head)
            else:
                return
            self._queue.popleft()
            self._changed.set()

    def _begin(
        self,
        ready: OrderedStep,
        buffer: PushBuffer,
        groups: list[Trained],
        on_landed: Callable[[], None] | None,
    ) -> Step:
        """Make a step ready to leave whose turn it is."""
        assert self.said <= ready.number, (self.said, ready.number)
        self.said = ready.number + 1
        step = Step(buffer, groups, self.said, ready.epoch)
        for server, shards in self._silent:
            self._client.tick(server, shards, self.said, epoch=ready.epoch)
        if self._synchronous or self.said % self._pull_every:
            self._pusher.begin(step, None)
        else:
            self._landings += 1
            self._pusher.begin(step, partial(self._pulled, on_landed))
        return step

    def _send(self, ready: OrderedStep) -> None:
        on_landed = ready.on_landed
        step = ready.leaving
        if step is None:
            assert ready.buffer is not None
            step = self._begin(ready, ready.buffer, ready.trained, on_landed)
        # Its groups know their step: what they read would be kept until a garbage collector finds the circle.
        ready.trained, ready.on_landed, ready.leaving = [], None, None
        self._pusher.finish(step)
        if self._synchronous:
            self._pull(self.said)
        elif step.landing is None and on_landed is not None:
            on_landed()

    def _jump(self, jump: Jump) -> None:
        if jump.clock <= self.said:
            return
        self.said = jump.clock
        for server, shards in self._shards:
            self._client.tick(server, shards, jump.clock, epoch=jump.epoch)
        if self._synchronous:
            self._pull(jump.clock)

    # --- values ------------------------------------------------------------------------------

    def _pulled(self, on_landed: Callable[[], None] | None) -> None:
        """The values that follow a push are installed."""
        self._landings -= 1
        self._arrived()
        if on_landed is not None:
            on_landed()

    def _pull(self, clock: int) -> None:
        self._bound = clock
        self._puller.pull(partial(self._bound_landed, clock), clock=clock, on_behind=self._on_behind)

    def _bound_landed(self, clock: int) -> None:
        if clock == self._bound and self._synchronous:
            if self._weights.clock == self._weights.newest == clock:
                self._keep(clock)
            else:
                self._broken = RunFailed(
                    f"replica {self._replica} asked for the sum of clock {clock}, and got values of clocks "
                    f"{self._weights.clock} to {self._weights.newest}"
                )
        self._arrived()
        self._leave()

    def _keep(self, clock: int) -> None:
        self._landed = clock
        self._reads[clock] = self._weights.snapshot()

    def _arrived(self) -> None:
        self._behind.clear()
        self._advanced = True
        self._changed.set()

    def _on_behind(self, place: int, values: Values) -> None:
        old = self._behind.get(place)
        self._behind[place] = values
        self._advanced = self._advanced or old is None or values.clock > old.clock
        self._changed.set()

    def statistics(self) -> dict[str, Any]:
        """The replica's clock, how often and how long it waited for others, and for whom it does now."""
        return {
            "clock": self.said,
            "clock_waits": self._waits,
            "clock_wait_s": self._wait_s,
            "waiting_for": self._waiting_for,
        }
