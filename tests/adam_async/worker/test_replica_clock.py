"""In any order of events replicas stay within their bound, read only allowed values, and every wait ends.

The world of these tests is a model: some replicas with a real `ReplicaClock` each, and one shard whose
server is a table of their clocks. The model lists the enabled events, and the test draws the next one:
groups end in any order, pushes arrive in any order, an answer is written at any time after it was due.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.worker.stepper import ReplicaClock


@dataclass
class Step:
    needed: int
    groups: int = 0
    trained: int = 0
    closed: bool = False


@dataclass
class Replica:
    clock: ReplicaClock
    epochs: list[int]
    """Groups left, epoch by epoch."""
    values: int = 0
    """Clock of the newest values."""
    landed: set[int] = field(default_factory=lambda: {0})
    """All clocks of which it has had the values; it keeps those that it still needs."""
    said: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    running: list[tuple[int, int]] = field(default_factory=list)
    asked: int | None = None
    sync_clock: bool = False


class World:
    def __init__(self, *, slack, synchronous, push_every, shares):
        self.slack, self.synchronous = slack, synchronous
        self.push_every = push_every
        self.replicas = [
            Replica(
                ReplicaClock(start=0, push_every=push_every, slack=slack, synchronous=synchronous),
                list(epochs),
            )
            for epochs in shares
        ]
        self.ends = []
        for epoch in zip(*shares, strict=True):
            rounds = max(-(-groups // push_every) for groups in epoch)
            self.ends.append((self.ends[-1] if self.ends else 0) + rounds)
        self.epoch = 0
        self.reads: list[tuple[int, int]] = []

    @property
    def slowest(self):
        return min(replica.said for replica in self.replicas)

    def enabled(self):
        """Events that may happen now."""
        for replica in self.replicas:
            clock, left = replica.clock, replica.epochs[self.epoch]
            if left and (clock.groups or self.may_read(replica)):
                yield self.admit, replica
            for position in replica.running:
                yield self.train, replica, position
            if not left and not replica.sync_clock:
                yield self.sync, replica
            head = replica.steps.get(replica.said)
            if head is not None and head.closed and head.trained == head.groups:
                if clock.leaves(replica.said, replica.values):
                    yield self.push, replica
            if head is None and replica.sync_clock and replica.said < clock.base:
                yield self.jump, replica
            if replica.asked is not None and self.slowest >= replica.asked:
                yield self.land, replica
            if (
                not self.synchronous
                and replica.asked is None
                and replica.values < clock.needs <= self.slowest
            ):
                yield self.ask, replica, clock.needs

    def may_read(self, replica):
        needed = replica.clock.needs
        return needed in replica.landed if self.synchronous else replica.values >= needed

    def admit(self, replica):
        needed, position = replica.clock.needs, replica.clock.join()
        number, index = position
        if not index:
            assert number - self.slowest <= self.slack or self.synchronous
            replica.steps[number] = Step(needed)
        step = replica.steps[number]
        step.groups += 1
        step.closed = not replica.clock.groups
        replica.running.append(position)
        replica.epochs[self.epoch] -= 1
        self.reads.append((number, needed if self.synchronous else replica.values))

    def train(self, replica, position):
        replica.running.remove(position)
        replica.steps[position[0]].trained += 1

    def sync(self, replica):
        replica.sync_clock = True
        number = replica.clock.step
        if replica.clock.sync_at(self.ends[self.epoch]):
            replica.steps[number].closed = True

    def push(self, replica):
        del replica.steps[replica.said]
        replica.said += 1
        assert replica.said - self.slowest <= self.slack + 1
        if self.synchronous:
            self.ask(replica, replica.said)

    def jump(self, replica):
        replica.said = replica.clock.base
        if self.synchronous:
            self.ask(replica, replica.said)

    def ask(self, replica, needed):
        replica.asked = needed

    def land(self, replica):
        if self.synchronous:
            # The newest there is, however late the answer was written: and it is the one that was asked for.
            assert self.slowest == replica.asked
        replica.values = max(replica.values, self.slowest)
        replica.landed.add(replica.values)
        replica.asked = None

    def next_epoch(self):
        end = self.ends[self.epoch]
        if all(r.sync_clock and r.said == end and not r.running and not r.steps for r in self.replicas):
            self.epoch += 1
            for replica in self.replicas:
                replica.sync_clock = False

    def run(self, data):
        while self.epoch < len(self.ends):
            moves = list(self.enabled())
            assert moves, "everybody waits for somebody"
            act, *what = data.draw(st.sampled_from(moves))
            act(*what)
            self.next_epoch()


SHARES = st.integers(1, 4).flatmap(
    lambda replicas: st.lists(
        st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=replicas, max_size=replicas
    )
)


@given(data=st.data(), shares=SHARES, slack=st.integers(0, 3), push_every=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_replicas_stay_within_their_bound_and_read_what_it_asks_for(data, shares, slack, push_every):
    world = World(slack=slack, synchronous=False, push_every=push_every, shares=shares)
    world.run(data)
    assert all(clock >= step - slack for step, clock in world.reads)
    assert len(world.reads) == sum(map(sum, shares))


@given(data=st.data(), shares=SHARES, lag=st.integers(0, 1), push_every=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_in_lockstep_each_step_reads_one_clock_that_follows_from_its_number(data, shares, lag, push_every):
    world = World(slack=lag, synchronous=True, push_every=push_every, shares=shares)
    world.run(data)
    bases = [0, *world.ends]
    for step, clock in world.reads:
        base = max(base for base in bases if base <= step)
        assert clock == max(base, step - lag)


def clock_of(**options):
    return ReplicaClock(**{"start": 0, "push_every": 3, "slack": 0, "synchronous": True, **options})


def test_groups_fill_steps_in_the_order_in_which_they_come():
    clock = clock_of(start=7, push_every=2)
    positions = [clock.join() for _ in range(5)]
    assert positions == [(7, 0), (7, 1), (8, 0), (8, 1), (9, 0)]


def test_a_step_ends_short_at_a_sync_clock():
    clock = clock_of()
    assert clock.join() == (0, 0)
    assert clock.sync_at(4)
    assert clock.join() == (4, 0)
    assert clock_of().sync_at(2) is False, "no step was being filled"


def test_an_earlier_sync_clock_changes_nothing():
    clock = clock_of(start=5, slack=1)
    clock.sync_at(5)
    clock.sync_at(3)
    assert (clock.step, clock.needs) == (5, 5)


@pytest.mark.parametrize(("slack", "synchronous", "needs"), [(2, False, 8), (0, True, 10), (1, True, 9)])
def test_the_clock_that_a_step_needs_follows_from_its_number(slack, synchronous, needs):
    clock = clock_of(push_every=1, slack=slack, synchronous=synchronous)
    for _ in range(10):
        clock.join()
    assert clock.needs == needs
