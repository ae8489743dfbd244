"""From trained groups to steps: the loop's side of training, in asp, ssp and bsp.

Theory of operation
-------------------
A step is `push_every` groups, whose gradients are added up. With one group per step, the step sends the
group's own push buffer, and messages may leave during the backward pass. `ReplicaClock` numbers the steps.

Under ``asp`` a group joins a step once it is trained, and a step is sent as soon as it is complete.

Under ``ssp`` and ``bsp`` a group joins a step when it is admitted. The group that opens a step is admitted
once the copy has the values that it may read; until then the *admission gate* is shut. Steps are sent in
order. The gradients of a step are summed in the order of its groups' leases. At a *sync clock* a *clock
skip*, a tick to all shards, separates two steps.

Under ``ssp``, as under ``asp``, answers to pushes contain values, with their clock. A clock-bound pull
requests the necessary values only if no answer is in transit and the copy is too old. The server answers a
tick when the other replicas have reached the clock.

Under ``bsp`` a clock-bound pull of the new sum follows each step. After the pull the copy has exactly this
sum's clock, and its snapshot is kept for the steps that read it: a step's first group may be admitted before
newer values are installed, and its last group afterwards. A push of clock p waits until the copy has the
values of clock p - 1; see *clocks* below. Workers make no local steps.

*Clocks.* Step c of a replica begins when the replica's clock is c; its push has clock c + 1. Under ``ssp``
and ``bsp`` groups join steps when they are admitted, in lease order. So the same groups make the same step in
every run. At a sync clock, which the data server sends, all replicas have the same clock. The open step ends
short, and the clock *skips* to the sync clock without pushes in between.

Under ``ssp:S`` the values that step c reads contain all pushes of live replicas up to clock c - S. So a
replica is at most S steps ahead of the slowest replica when it begins a step, and S + 1 steps when its push
is counted.

Under ``bsp`` step c reads the values of clock c - lag and no later ones, because the sums of different clocks
differ. At a sync clock the pipeline is empty: the first step there, `base`, reads the values of clock `base`
itself, and so does the next step if sums lag. A run that resumes at a sync clock continues as an
uninterrupted one. A push of clock p waits until the values of clock p - 1 are installed. Until then no server
can have a later clock, so each replica gets the values of each clock.

Errors and statistics of a wait name the slower replicas, which the servers report every `answer_s` / 2.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from adam_async.data_server.client import ImageGroup
from adam_async.errors import DeadlineExceeded, RunFailed
from adam_async.messages import Lease, Values
from adam_async.run.counts import WorkerCounts
from adam_async.runtime.clock import Durations
from adam_async.worker.puller import Snapshot
from adam_async.worker.pusher import Pusher, Step
from adam_async.worker.training import Admitted, Trained
from dataflow import Firing, Tag


class ReplicaClock:
    """Adds groups to steps, and decides the values that a step may read.

    Args:
        start: Clock of the replica at the beginning.
        push_every: Number of groups in a full step.
        pull_every: Number of steps per pull.
        slack: Number of steps by which the replica may be ahead of the slowest replica; with `synchronous`,
            by which sums may lag. None: no bound, as in asp.
        synchronous: Whether a step reads the values of exactly one clock.
    """

    def __init__(
        self,
        *,
        push_every: int,
        start: int = 0,
        pull_every: int = 1,
        slack: int | None = None,
        synchronous: bool = False,
    ) -> None:
        self.push_every = push_every
        self.pull_every = pull_every
        self.bounded = slack is not None
        self.synchronous = synchronous
        self._slack = slack
        self.step = start
        """Number of the step that the next group joins."""
        self.groups = 0
        """Number of groups in the open step."""
        self.base = start
        """The last sync clock."""

    def sync_at(self, clock: int) -> bool:
        """Skip to a sync clock. Returns whether a step was open; the call ends that step short."""
        short = self.groups > 0
        if short:
            self.step += 1
            self.groups = 0
        self.step = max(self.step, clock)
        self.base = max(self.base, clock)
        return short

    @property
    def needs(self) -> int:
        """Clock of the values that the next group reads: exact with `synchronous`, otherwise the minimum."""
        assert self._slack is not None, "without a bound a step needs no clock"
        needed = self.step - self._slack
        return max(needed, self.base) if self.synchronous else needed

    def leaves(self, step: int, landed: int) -> bool:
        """Return whether a complete step may be pushed after the values of clock `landed`."""
        return landed >= step if self.synchronous else True

    def join(self) -> tuple[int, int]:
        """Add the next group to a step; return the step's number, and the group's position in the step."""
        position = self.step, self.groups
        self.groups += 1
        if self.groups == self.push_every:
            self.step += 1
            self.groups = 0
        return position

    def __repr__(self) -> str:
        return f"<ReplicaClock at step {self.step} with {self.groups} groups, sync clock {self.base}>"


OnLanded = Callable[[], None]
"""Function that is called when the values after a group's step are installed."""


@dataclass(frozen=True, slots=True)
class ClockSkip:
    """An advance of the replica's clock to a sync clock, without pushes."""

    clock: int
    epoch: int


def is_returned(lease: Lease) -> bool:
    """Return whether a group was leased to a lost replica before, so that some shards may have it already.

    A returned group is a separate step: a shard takes a step whole, or refuses it whole.
    """
    return lease.attempt > 1


class Stepper:
    """Collects groups into steps and sends them; in ssp and bsp, also the admission gate of the groups.

    Args:
        clock: Arithmetic of the replica's clock, with its bound and its cadence.
        pusher: Sends the steps.
        replica: Number of the replica, for messages.
        most_steps: Maximum number of steps that are open or wait to be sent, in ssp and bsp.
        timeout_s: Deadline of a wait for other replicas, in seconds.
        landed: Called with a group's tag when the values after its step are installed; at once if the group
            is not the last of a full step. None if no group waits for values.
    """

    def __init__(
        self,
        clock: ReplicaClock,
        pusher: Pusher,
        *,
        replica: int = 0,
        most_steps: int = 1,
        timeout_s: float = 0.0,
        landed: Callable[[Tag], None] | None = None,
    ) -> None:
        self._clock = clock
        self._pusher = pusher
        self._trainer = pusher.trainer
        self._weights = pusher.puller.weights
        self._replica = replica
        self._most_steps = most_steps
        self._timeout_s = timeout_s
        self._landed = landed
        self._open: Step | None = None
        """The step that the next group joins; None if the next group opens a new step."""
        self._queue: deque[Step | ClockSkip] = deque()
        """Unsent steps in order, in ssp and bsp."""
        self._sync_clock = 0
        self._epoch = 0
        self.sent = 0
        """Clock that the servers have, or will have after all messages in transit."""
        self._reads: dict[int, Snapshot] = {}
        """Snapshots that steps may read under bsp, by clock."""
        self._newest = -1
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
        self._waited = Durations()
        self._waiting_for = ""

    def start(self, clock: int) -> None:
        """Set the replica's clock from the first values, before the first group."""
        self._clock.sync_at(clock)
        self.sent = self._sync_clock = self._clock.step
        # A first pull may mix clocks of several servers. Then a clock-bound pull brings the exact values.
        if self._clock.synchronous and self._weights.clock == self._weights.newest:
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
        if is_returned(group.lease):
            self.close()
        # The values suffice for the whole open step, because all its groups read by the same rule.
        if self._open is not None:
            return True
        # Unsent steps keep their push buffers, so their number is bounded.
        return len(self._queue) < self._most_steps and self._has_values()

    def _has_values(self) -> bool:
        needed = self._clock.needs
        return needed in self._reads if self._clock.synchronous else self._weights.clock >= needed

    def admit(self, group: ImageGroup) -> Admitted:
        """Add the group to its step; requires an open gate."""
        self._epoch = group.lease.epoch
        step, index = self._join(group.lease)
        return Admitted(group, step, index, step.read)

    def _join(self, lease: Lease) -> tuple[Step, int]:
        """Add the next group to the open step, or to a new one; also return its position in the step."""
        alone = is_returned(lease)
        if alone:
            self.close()
        clock, step = self._clock, self._open
        needed = clock.needs if clock.bounded else 0
        number, index = clock.join()
        if step is None:
            step = self._open = Step(self._pusher, number, self._epoch, needed)
            if clock.synchronous:
                step.read = self._read_of(needed)
            if clock.bounded:
                self._queue.append(step)
        step.joined += 1
        if alone:
            clock.sync_at(clock.base)
        if not clock.groups:
            step.closed, self._open = True, None
        return step, index

    def _read_of(self, needed: int) -> Snapshot:
        # Steps open in order of their clocks, so no later step reads an older snapshot.
        for clock in [clock for clock in self._reads if clock < needed]:
            del self._reads[clock]
        return self._reads[needed]

    def sync_at(self, clock: int) -> None:
        """Apply a sync clock: the open step ends short, and the replica ticks up to the clock."""
        if not self.close() and clock <= self._sync_clock:
            return  # the gate checks a group until it is admitted, and a flush repeats the sync clock
        self._clock.sync_at(clock)
        self._sync_clock = max(self._sync_clock, clock)
        self._queue.append(ClockSkip(clock, self._epoch))
        self._send_ready()

    def close(self) -> bool:
        """End the open step short: no more groups come for now. Returns whether a step was open."""
        step, self._open = self._open, None
        if step is None:
            return False
        self._clock.sync_at(self._clock.base)
        step.closed = True
        if self._clock.bounded:
            self._send_ready()
        else:
            self._send(step)
        return True

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
        begin = since = loop.time()
        self._changed.clear()
        # If an own step must be sent first, the other replicas are not late.
        is_own = self._has_values() or self.sent < self._clock.needs
        if not is_own:
            # Several calls wait for one step, because each change wakes the caller. Count the step once.
            if self._waits_before != self._clock.step:
                self._waits_before = self._clock.step
                self._waits += 1
                self._advanced = True
            # The deadline is per advance of the slowest clock, so only an advance moves it.
            if self._advanced:
                self._advanced, self._advanced_at = False, begin
            since = self._advanced_at
            self._waiting_for = self._replicas_behind()
            self._ask()
        try:
            async with asyncio.timeout_at(since + self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            if self._pusher.client.lacks_copies:
                self._advanced = True  # no replica can advance: the deadline begins anew
                return
            what = f"step {self.sent} of replica {self._replica} to be trained"
            if not is_own:
                need = f"step {self._clock.step} needs the values of clock {self._clock.needs}"
                what = f"{self._replicas_behind()}: {need}"
            raise DeadlineExceeded(what, self._timeout_s) from None
        finally:
            if not is_own:
                self._waited.add(loop.time() - begin)
                self._waiting_for = ""

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

    def add(self, firing: Firing, trained: Trained) -> None:
        """Take a trained group. Never waits.

        Raises:
            RunFailed: The group read values that are too old.
        """
        step, index = (trained.step, trained.index) if trained.step is not None else self._join(trained.lease)
        if trained.read.clock < step.needed:
            raise self._too_old(step, trained)
        # The step refers to its group; without this line, its reads stay until the garbage collector runs. A
        # section reported from now on is too late: its messages are sent with the rest.
        trained.step, trained.over = None, True
        # Only the last group of a full step waits; a short step has none.
        if self._landed is not None:
            if index == self._clock.push_every - 1:
                step.on_landed = partial(self._landed, firing.tag)
            else:
                self._landed(firing.tag)
        # Threads finish groups in any order. A sum in the order of the leases has the same bits in every run.
        step.early[index] = trained
        while (group := step.early.pop(step.added, None)) is not None:
            step.added += 1
            if self._clock.push_every == 1:
                step.buffer, step.groups = group.buffer, [group]
            else:
                self._add_up(step, group)
        if self._clock.bounded:
            self._send_ready()
        elif step.closed:  # all the step's groups are trained, because they join afterwards
            self._send(step)

    def ahead(self, messages: Sequence[int], firing: Firing, trained: Trained | None) -> None:
        """Send complete messages of a group's step while the rest is computed. Never waits.

        In ssp and bsp the messages are sent early only if the step is the next to be sent; otherwise with the
        rest.

        Raises:
            RunFailed: The group read values that are too old.
        """
        if trained is None or trained.over:  # a short group is sent at once, and has no sections
            return
        if trained.step is None:
            trained.step, trained.index = self._join(trained.lease)
        step: Step = trained.step
        if self._clock.bounded:
            if self._queue[0] is not step or not self._clock.leaves(step.number, self._newest):
                return
            if trained.read.clock < step.needed:
                raise self._too_old(step, trained)
        if not step.begun:
            step.buffer, step.groups = trained.buffer, [trained]
            if self._landed is not None:
                step.on_landed = partial(self._landed, firing.tag)
            self._begin(step)
        self._pusher.push_ahead(step, messages)

    def _too_old(self, step: Step, trained: Trained) -> RunFailed:
        # The gate should rule out old values. A wrong read would silently break the guarantee of the run.
        return RunFailed(
            f"step {step.number} of replica {self._replica} read values of clock {trained.read.clock}, "
            f"and needs those of {step.needed}"
        )

    def _add_up(self, step: Step, group: Trained) -> None:
        step.groups.append(group)
        if step.buffer is None:
            step.buffer = self._trainer.step_buffers.take()
            step.buffer.clear()
        step.buffer.add(group.buffer)
        self._trainer.group_buffers.give_back(group.buffer)

    def _send_ready(self) -> None:
        """Send complete steps and clock skips, in order."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, ClockSkip):
                self._skip_clock(head)
            elif head.closed and head.added == head.joined and self._clock.leaves(head.number, self._newest):
                self._send(head)
            else:
                return
            self._queue.popleft()
            self._changed.set()

    def _begin(self, step: Step) -> None:
        """Prepare the push of the step that is sent next."""
        assert self.sent <= step.number, (self.sent, step.number)
        clock, pusher = self._clock, self._pusher
        self.sent = step.number + 1
        on_landed = step.on_landed
        # In bsp the answer to a push has no sum yet; a clock-bound pull follows the step.
        pulls = not clock.synchronous and self.sent % clock.pull_every == 0
        if clock.bounded:
            # Frozen layers have no gradients. Without a tick their shards would hold the clock back.
            pusher.tick(pusher.plan.silent, self.sent, step.epoch)
            on_landed = partial(self._pulled, on_landed)
            self._landings += pulls
        pusher.begin(step, self.sent, pulls=pulls, on_landed=on_landed)

    def _send(self, step: Step) -> None:
        if not step.begun:
            self._begin(step)
        self._pusher.finish(step)
        if self._clock.synchronous:
            self._pull(self.sent)
        elif step.landing is None and step.on_landed is not None:
            step.on_landed()

    def _skip_clock(self, skip: ClockSkip) -> None:
        # A push carries its own clock, so a skip to a clock that a step has reached needs no tick.
        if skip.clock <= self.sent:
            return
        self.sent = skip.clock
        self._pusher.tick(self._pusher.plan.ticked, skip.clock, skip.epoch)
        # The first step after the skip reads the values of exactly this clock.
        if self._clock.synchronous:
            self._pull(skip.clock)

    # --- values ------------------------------------------------------------------------------

    def _pulled(self, on_landed: OnLanded | None) -> None:
        """Note that the values after a push are installed."""
        self._landings -= 1
        self._arrived()
        if on_landed is not None:
            on_landed()

    def _pull(self, clock: int) -> None:
        self._bound = clock
        on_landed = partial(self._bound_landed, clock)
        self._pusher.puller.pull(on_landed, clock=clock, on_behind=self._on_behind)

    def _bound_landed(self, clock: int) -> None:
        # If the clocks differ, a later pull has replaced this one; check the later values instead.
        if clock == self._bound and self._clock.synchronous:
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
        self._newest = clock
        self._reads[clock] = self._weights.snapshot()

    def _arrived(self) -> None:
        self._behind.clear()
        self._advanced = True
        self._changed.set()

    def _on_behind(self, number: int, values: Values) -> None:
        old = self._behind.get(number)
        self._behind[number] = values
        # Any advance of the clock restarts the deadline, however far the needed clock is.
        self._advanced = self._advanced or old is None or values.clock > old.clock
        self._changed.set()

    def count_into(self, counts: WorkerCounts) -> None:
        """Fill in the replica's clock, and its waits for other replicas."""
        counts.clock = self.sent
        counts.clock_waits = self._waits
        counts.clock_wait_s = self._waited.total_s
        counts.clock_wait_buckets = self._waited.buckets
        counts.waiting_for = self._waiting_for
