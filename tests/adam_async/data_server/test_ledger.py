"""A ledger that was copied is the ledger that it was copied from, whatever happened and whatever will."""

import dataclasses
import math

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.ledger import Entry, Ledger
from adam_async.data_server.ledger_replication import Part
from adam_async.data_server.state import (
    DrainAsked,
    GroupsReported,
    LeaseAsked,
    Opening,
    OpenLog,
    Parked,
    ReplicasChanged,
    TimePassed,
)
from adam_async.messages import CopyLedger, pack, packed_tensor, read_packed_tensor
from adam_async.run.ids import Replica
from tests.adam_async.data_server import test_leases_at_random as at_random
from tests.adam_async.data_server.scene import Scene, began, finished

pytestmark = pytest.mark.thorough

ALL = 1_000_000


def carried(value, expected):
    """A value after its way over a link."""
    message = pack(CopyLedger(run="run", term=1), [packed_tensor(value)])
    return read_packed_tensor(message, expected, 1 << 20)


def bits(value):
    """Return bytes that differ if values differ, values that are no numbers included."""
    return msgspec.msgpack.encode(value)


def known(state):
    """All that can be seen of a state."""
    replicas = sorted(state.replica_generations)
    outcome = state.unreported()
    return bits(
        [
            state.statistics(),
            state.opening(),
            state.next_deadline(),
            [(replica, state.upcoming(replica, 99)) for replica in replicas],
            outcome is not None and dataclasses.astuple(outcome),
        ]
    )


def encoded(effects):
    return bits([(type(effect).__name__, dataclasses.astuple(effect)) for effect in effects])


def read_anew(ledger, count):
    """Return a new copy of a ledger, read so many entries at a time."""
    number, opening = ledger.begin()
    copy = None
    while copy is None or copy.stop < ledger.stop:
        entries = ledger.read(copy.stop if copy else number, count)
        part = Part(
            first=number, settled=0, entries=tuple(entries), opening=opening if copy is None else None
        )
        part = carried(part, Part)
        copy = copy or Ledger(part.opening, first=part.first)
        for entry in part.entries:
            copy.append(entry)
    return copy


class Written:
    """A state with its ledger. Each copy gets every entry, and has the same effects after it."""

    def __init__(self, partitions):
        self.ledger = Ledger(Opening(partitions=partitions))
        self.history: list[Entry] = []
        self.done: list[bytes] = []
        """Effects of each entry when it was appended."""
        self.settled: list[bytes] = []
        """Effects of each entry when it was settled."""
        self.copies: list[Ledger] = []

    def handle(self, event, *, now):
        entry = Entry(now, event)
        self.history.append(entry)
        twin = self.copies[0] if self.copies else None
        self.ledger.append(entry)
        effects = self.ledger._unsettled[-1].effects
        self.done.append(encoded(effects))
        for copy in self.copies:
            copy.append(carried(entry, Entry))
            assert encoded(copy._unsettled[-1].effects) == encoded(effects)
        assert twin is None or known(twin.state) == known(self.ledger.state)
        return effects

    def settle(self, number):
        begin = self.ledger.settled
        for each in self.ledger.settle(number):
            assert each.event is self.history[begin].event
            self.settled.append(encoded(each.effects))
            begin += 1
        assert begin == self.ledger.settled == max(begin, min(number, self.ledger.stop))

    def __getattr__(self, name):
        return getattr(self.ledger.state, name)


class WrittenScene(Scene):
    def __init__(self, *, partitions=1):
        super().__init__(partitions=partitions)
        self.state = Written(partitions)


class Histories:
    """Rules that settle and copy the ledger of the leases in between."""

    SCENE = WrittenScene

    @property
    def written(self):
        return self.scene.state

    @rule(back=st.integers(0, 30))
    def all_but_a_few_are_settled(self, back):
        self.written.settle(self.written.ledger.stop - back)

    @rule(count=st.integers(1, 7))
    def somebody_reads_it_anew(self, count):
        copy = read_anew(self.written.ledger, count)
        assert known(copy.state) == known(self.written.ledger.state)
        assert copy.last_now == self.written.ledger.last_now
        self.written.copies = [copy, *self.written.copies[:1]]

    @invariant()
    def what_is_not_settled_is_never_let_go(self):
        written, ledger = self.written, self.written.ledger
        number, _ = ledger.begin()
        for first in {ledger.settled, number}:
            assert list(ledger.read(first, ALL)) == written.history[first:]
        assert written.settled == written.done[: ledger.settled]

    @invariant()
    def settled_epochs_are_let_go(self):
        begun = [n for n, entry in enumerate(self.written.history) if isinstance(entry.event, EpochBegan)]
        newest = max((number for number in begun if number <= self.written.ledger.settled), default=0)
        oldest = self.written.ledger._first
        assert oldest == newest
        assert oldest == 0 or self.written.ledger.read(oldest - 1, 1) is None


MACHINES = (
    at_random.Leases,
    at_random.CutLeases,
    at_random.WarmLeases,
    at_random.LeasesOfThreeParts,
    at_random.ResumedLeases,
    at_random.ClosingLeases,
    at_random.WarmClosingLeases,
    at_random.PooledLeases,
    at_random.ClosingPool,
    at_random.Rounds,
    at_random.CutRounds,
    at_random.RoundsOfOne,
    at_random.WarmRounds,
    at_random.PausingRounds,
    at_random.ResumedRounds,
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_reader_of_the_ledger_has_the_state_and_goes_on_like_it(machine):
    written = type(f"Written{machine.__name__}", (Histories, machine), {})
    run_state_machine_as_test(
        written, settings=settings(max_examples=10, stateful_step_count=40, deadline=None)
    )


def test_the_pace_of_replicas_is_copied_with_the_epoch():
    written = type("WrittenUneven", (Histories, at_random.UnevenPool), {})
    run_state_machine_as_test(
        written, settings=settings(max_examples=5, stateful_step_count=20, deadline=None)
    )


ASKED = LeaseAsked(
    request=("data-1", 3),
    replica=Replica(2),
    replica_generation=7,
    partition=1,
    position=4,
    heard=-1,
    count=3,
    wait_s=0.5,
)


@pytest.mark.parametrize(
    "event",
    [
        began(
            6,
            warm=2,
            finished=((0, 1), (3, 4)),
            behind=(Replica(1),),
            carried_images=b"\x81\x00",
            loss=math.nan,
        ),
        ReplicasChanged({Replica(0): 2**53 + 1, Replica(3): 5}),
        GroupsReported(
            Replica(0),
            7,
            0,
            (finished(1, loss=math.nan), finished(2, loss=math.inf), finished(3, loss=0.1)),
            ("data-0", 2),
        ),
        GroupsReported(Replica(0), 7, 0, ()),
        DrainAsked(3),
        TimePassed(),
        ASKED,
    ],
    ids=lambda event: type(event).__name__,
)
def test_every_event_is_carried_whole_losses_that_are_no_numbers_included(event):
    entry = Entry(0.1 + 0.2, event)
    read = carried(entry, Entry)
    assert type(read.event) is type(event)
    assert bits(read) == bits(entry)
    part = Part(first=5, settled=3, entries=(entry, entry), whole=False)
    assert bits(carried(part, Part)) == bits(part)


def test_an_opening_is_carried_whole():
    logs = (OpenLog(Replica(1), 8, 12, (12, 11)), OpenLog(Replica(0), 7, 0, (0, 0)))
    opening = Opening(
        partitions=2, clock=5, logs=logs, parked=(Parked(ASKED, 1.5),), late_reports=2, leased=9
    )
    part = Part(first=0, settled=0, opening=opening)
    assert bits(carried(part, Part)) == bits(part)
    assert bits(Ledger(carried(part, Part).opening).state.opening()) == bits(opening)
