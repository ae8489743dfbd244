"""Training on a copy within a bound of the other replicas (``ssp:S``), or in lockstep with them (``bsp``).

Theory of operation
-------------------
A group joins a step when it is admitted (`replica_clock.py`). The group that opens a step is admitted when
the copy has the values that the group may read; until then the *admission gate* is shut. Steps are pushed in
their order. The gradients of a step are summed in the order of its groups' leases. With one group per step,
messages may be sent during the backward pass. At a *sync clock* a *clock skip*, a tick to all shards,
separates two steps.

Under ``ssp``, as under ``asp``, answers to pushes contain values, with their clock. A clock-bound pull
requests the necessary values only if no answer is in transit and the copy is too old; the server answers the
pull when the other replicas have reached the clock.

Under ``bsp`` a clock-bound pull of the new sum follows each step. After the pull the copy has exactly the
clock of this sum, and its snapshot is kept for the steps that read it: the first group of a step may be
admitted before newer values are installed, and the last one afterwards. A push of clock p waits until the
copy has the values of clock p - 1; see `replica_clock.py`. Workers make no local steps.

Errors and statistics of a wait name the slower replicas, which the servers report every `answer_s` / 2.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from adam_async.data_server.client import ImageGroup
from adam_async.errors import DeadlineExceeded, RunFailed
from adam_async.messages import Values
from adam_async.parameter_server.client import ParameterClient
from adam_async.run.config import Config
from adam_async.run.ids import ShardId
from adam_async.worker.puller import Puller
from adam_async.worker.push_plan import PushBuffer
from adam_async.worker.replica_clock import ReplicaClock
from adam_async.worker.statistics import WorkerStatistics
from adam_async.worker.stepper import Pusher, Step
from adam_async.worker.training import Admitted, GroupTrainer, Trained
from adam_async.worker.weights import Snapshot

Shards = tuple[tuple[str, tuple[ShardId, ...]], ...]
"""Pairs of a server and some of its shards, for one message each."""


@dataclass(slots=True, eq=False)
class OrderedStep:
    """A step that groups join at their admission."""

    number: int
    """Number of the step: the replica's clock before the step."""
    epoch: int
    needed: int
    """Clock of the values that the step's groups read: the exact clock under bsp, otherwise the minimum."""
    read: Snapshot | None
    """Values that all groups of the step read, under bsp."""
    admitted: int = 0
    closed: bool = False
    """Whether no more groups join the step."""
    buffer: PushBuffer | None = None
    trained: list[Trained] = field(default_factory=list)
    """Trained groups whose gradients are in the sum of the step."""
    early: dict[int, Trained] = field(default_factory=dict)
    """Trained groups that wait until an earlier group of the step is trained, by their position in the
    step."""
    on_landed: Callable[[], None] | None = None
    """Callback of the step's last group."""
    leaving: Step | None = None
    """Push of the step; None before its first message is sent."""

    @property
    def complete(self) -> bool:
        """Whether all groups of the step are trained."""
        return self.closed and len(self.trained) == self.admitted


@dataclass(frozen=True, slots=True)
class ClockSkip:
    """An advance of the replica's clock to a sync clock, without pushes."""

    clock: int
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class Ticks:
    """Ticks of the replica's clock to the servers.

    Attributes:
        client: Sends the ticks.
        shards: All shards that the worker pushes or ticks.
        silent: Shards of frozen tensors among them.
    """

    client: ParameterClient
    shards: Shards
    silent: Shards


class BoundedStepper:
    """Collects groups into steps in the order of their leases, and is the admission gate of these groups.

    Args:
        config: The run.
        pusher: Sends the steps.
        ticks: Ticks without a push.
        puller: Pulls values, and has the worker's copy.
        trainer: Owner of the push buffers.
        replica: Number of the replica, for messages.
        most_steps: Maximum number of steps that are open or wait to be sent.
    """

    def __init__(
        self,
        config: Config,
        *,
        pusher: Pusher,
        ticks: Ticks,
        puller: Puller,
        trainer: GroupTrainer,
        replica: int,
        most_steps: int,
    ) -> None:
        assert config.slack is not None
        self._pusher = pusher
        self._ticks = ticks
        self._puller = puller
        self._trainer = trainer
        self._weights = puller.weights
        self._replica = replica
        self._push_every = config.push_every
        self._pull_every = config.pull_every
        self._synchronous = config.synchronous
        self._most_steps = most_steps
        self._timeout_s = config.waits.clock_s
        self._clock = ReplicaClock(
            start=0, push_every=config.push_every, slack=config.slack, synchronous=config.synchronous
        )
        self._queue: deque[OrderedStep | ClockSkip] = deque()
        self._sync_clock = 0
        self._epoch = 0
        self.sent = 0
        """Clock that the servers have, or will have after all messages in transit."""
        self._reads: dict[int, Snapshot] = {}
        """Snapshots that steps may read under bsp, by clock."""
        self._landed = -1
        """Clock of the newest snapshot."""
        self._landings = 0
        """Number of pulls after pushes whose values are not installed yet."""
        self._bound = -1
        """Clock of the last clock-bound pull."""
        self._broken: RunFailed | None = None
        self._changed = asyncio.Event()
        self._advanced = True
        """Whether the slowest clock has advanced since the wait began."""
        self._advanced_at = 0.0
        self._behind: dict[int, Values] = {}
        """Last answer that named slower replicas, by the index of the request."""
        self._waits_before = -1
        self._waits = 0
        self._wait_s = 0.0
        self._waiting_for = ""

    def start(self, clock: int) -> None:
        """Set the replica's clock from the first values, before the first group."""
        self._clock.sync_at(clock)
        self.sent = self._sync_clock = self._clock.step
        # A first pull may mix clocks of several servers. Then a clock-bound pull brings the exact values.
        if self._synchronous and self._weights.clock == self._weights.newest:
            self._keep(self._weights.clock)

    # --- admission gate ----------------------------------------------------------------------

    def opens_for(self, group: ImageGroup) -> bool:
        """Return whether the next group may be admitted; in either case apply its sync clock."""
        if group.sync_clock:
            self.sync_at(group.sync_clock)
        # A group begins no earlier than its clock. A replica that joined late ticks up to the group's clock.
        if group.clock > self._clock.step:
            self._epoch = group.lease.epoch
            self.sync_at(group.clock)
        # The values suffice for the whole open step, because all its groups read by the same rule.
        if self._clock.groups:
            return True
        # Unsent steps keep their push buffers, so their number is bounded.
        return len(self._queue) < self._most_steps and self._has_values()

    def _has_values(self) -> bool:
        needed = self._clock.needs
        return needed in self._reads if self._synchronous else self._weights.clock >= needed

    def admit(self, group: ImageGroup) -> Admitted:
        """Add the group to its step; requires an open gate."""
        self._epoch = group.lease.epoch
        needed = self._clock.needs
        position = self._clock.join()
        if not position.index:
            read = self._read_of(needed) if self._synchronous else None
            self._queue.append(OrderedStep(position.step, group.lease.epoch, needed, read))
        step = self._queue[-1]
        assert isinstance(step, OrderedStep)
        step.admitted += 1
        step.closed = not self._clock.groups
        return Admitted(group, step, position.index, step.read)

    def _read_of(self, needed: int) -> Snapshot:
        # Steps open in order of their clocks, so no later step reads an older snapshot.
        for clock in [clock for clock in self._reads if clock < needed]:
            del self._reads[clock]
        return self._reads[needed]

    def sync_at(self, clock: int) -> None:
        """Apply a sync clock: the open step ends short, and the replica ticks up to the clock."""
        if self._clock.sync_at(clock):
            step = self._queue[-1]
            assert isinstance(step, OrderedStep)
            step.closed = True
        elif clock <= self._sync_clock:
            return  # the gate checks a group until its admission, and a flush repeats the sync clock
        self._sync_clock = max(self._sync_clock, clock)
        self._queue.append(ClockSkip(clock, self._epoch))
        self._send_ready()

    async def wait(self) -> None:
        """Wait for an event that may open the gate. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: For `waits.clock_s` the slowest clock has not advanced, or this replica has sent
                no step, although no pushes wait for copies; the error names the replicas.
            RunFailed: Servers sent the values of another clock.
        """
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self._changed.clear()
        if self._has_values() or self.sent < self._clock.needs:
            # An own step must be sent first, so the other replicas are not late.
            await self._wait_for_own(f"step {self.sent} of replica {self._replica} to be trained")
            return
        # Several calls wait for one step, because each change wakes the caller. Count the step once.
        if self._waits_before != self._clock.step:
            self._waits_before = self._clock.step
            self._waits += 1
            self._advanced = True
        # The deadline is per advance of the slowest clock, so only an advance moves it.
        if self._advanced:
            self._advanced, self._advanced_at = False, begin
        self._waiting_for = self._replicas_behind()
        self._ask()
        try:
            async with asyncio.timeout_at(self._advanced_at + self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            if self._ticks.client.lacks_copies:
                self._advanced = True  # no replica can advance: the deadline begins anew
                return
            behind = self._replicas_behind()
            need = f"step {self._clock.step} needs the values of clock {self._clock.needs}"
            raise DeadlineExceeded(f"{behind}: {need}", self._timeout_s) from None
        finally:
            self._wait_s += loop.time() - begin
            self._waiting_for = ""

    async def _wait_for_own(self, what: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            if not self._ticks.client.lacks_copies:
                raise DeadlineExceeded(what, self._timeout_s) from None

    def _ask(self) -> None:
        """Request the necessary values, unless an answer in transit may contain them."""
        needed = self._clock.needs
        if not self._landings and self._bound < needed:
            self._pull(needed)

    def _replicas_behind(self) -> str:
        behind = sorted({replica for values in self._behind.values() for replica in values.behind})
        if not behind:
            return f"clock {self._clock.needs}"
        slowest = min(values.clock for values in self._behind.values())
        return f"replica{'s' * (len(behind) > 1)} {', '.join(map(str, behind))} at clock {slowest}"

    # --- steps -------------------------------------------------------------------------------

    def add(self, trained: Trained, on_landed: Callable[[], None]) -> None:
        """Take a trained group. Never waits.

        `on_landed` is called when the values after the group's step are installed; at once if the group is
        not the last of a full step.

        Raises:
            RunFailed: The group read values that are too old.
        """
        admitted = trained.admitted
        assert admitted is not None
        step: OrderedStep = admitted.step
        self._check_read(step, trained)
        # A section reported from now on is too late: its messages are sent with the rest.
        if trained.ahead is not None:
            trained.ahead.over = True
        step.early[admitted.index] = trained
        # Only the last group of a full step waits; a short step has none.
        if admitted.index == self._push_every - 1:
            step.on_landed = on_landed
        else:
            on_landed()
        # Threads finish groups in any order. A sum in the order of the leases has the same bits in every run.
        while len(step.trained) in step.early:
            self._add_up(step, step.early.pop(len(step.trained)))
        self._send_ready()

    def ahead(self, trained: Trained, messages: Sequence[int], on_landed: Callable[[], None]) -> None:
        """Send complete messages of a group's step while the rest is computed. Never waits.

        The messages are sent early only if the step is the next to be sent; otherwise with the rest.

        Raises:
            RunFailed: The group read values that are too old.
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
        # The gate should rule out old values. A wrong read would silently break the guarantee of the run.
        if trained.read.clock < step.needed:
            raise RunFailed(
                f"step {step.number} of replica {self._replica} read values of clock {trained.read.clock}, "
                f"and needs those of {step.needed}"
            )

    def _add_up(self, step: OrderedStep, trained: Trained) -> None:
        step.trained.append(trained)
        # The buffer of a single group is the step's buffer, without a copy.
        if self._push_every == 1:
            step.buffer = trained.buffer
            return
        if step.buffer is None:
            step.buffer = self._trainer.step_buffers.take()
            step.buffer.clear()
        step.buffer.add(trained.buffer)
        self._trainer.group_buffers.give_back(trained.buffer)

    def _send_ready(self) -> None:
        """Send complete steps and clock skips, in order."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, ClockSkip):
                self._skip_clock(head)
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
        """Prepare the push of the step that is sent next."""
        assert self.sent <= ready.number, (self.sent, ready.number)
        self.sent = ready.number + 1
        step = Step(buffer, groups, self.sent, ready.epoch)
        # Frozen layers have no gradients. Without a tick their shards would hold the clock back.
        for server, shards in self._ticks.silent:
            self._ticks.client.tick(server, shards, self.sent, epoch=ready.epoch)
        # In bsp the answer to a push has no sum yet; a clock-bound pull follows the step.
        if self._synchronous or self.sent % self._pull_every:
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
        # Groups and step refer to each other. Without this line, reads stay until the garbage collector runs.
        ready.trained, ready.on_landed, ready.leaving = [], None, None
        self._pusher.finish(step)
        if self._synchronous:
            self._pull(self.sent)
        elif step.landing is None and on_landed is not None:
            on_landed()

    def _skip_clock(self, skip: ClockSkip) -> None:
        # A push carries its own clock, so a skip to a clock that a step has reached needs no tick.
        if skip.clock <= self.sent:
            return
        self.sent = skip.clock
        for server, shards in self._ticks.shards:
            self._ticks.client.tick(server, shards, skip.clock, epoch=skip.epoch)
        # The first step after the skip reads the values of exactly this clock.
        if self._synchronous:
            self._pull(skip.clock)

    # --- values ------------------------------------------------------------------------------

    def _pulled(self, on_landed: Callable[[], None] | None) -> None:
        """Note that the values after a push are installed."""
        self._landings -= 1
        self._arrived()
        if on_landed is not None:
            on_landed()

    def _pull(self, clock: int) -> None:
        self._bound = clock
        self._puller.pull(partial(self._bound_landed, clock), clock=clock, on_behind=self._on_behind)

    def _bound_landed(self, clock: int) -> None:
        # If the clocks differ, a later pull has replaced this one, and the later values are checked instead.
        if clock == self._bound and self._synchronous:
            if self._weights.clock == self._weights.newest == clock:
                self._keep(clock)
            else:
                self._broken = RunFailed(
                    f"replica {self._replica} asked for the sum of clock {clock}, and got values of clocks "
                    f"{self._weights.clock} to {self._weights.newest}"
                )
        self._arrived()
        self._send_ready()

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
        # Any advance of the clock restarts the deadline, however far the needed clock is.
        self._advanced = self._advanced or old is None or values.clock > old.clock
        self._changed.set()

    def count_into(self, counts: WorkerStatistics) -> None:
        """Fill in the replica's clock, and its waits for other replicas."""
        counts.clock = self.sent
        counts.clock_waits = self._waits
        counts.clock_wait_s = self._wait_s
        counts.waiting_for = self._waiting_for
