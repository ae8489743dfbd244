"""A reader gets all shards at one clock of bsp, and a disk those at a pin, while later work is applied."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.messages import ReadShards, pack, read_state_tables, state_tables
from adam_async.messages.group_sets import UNITS, LossSum
from adam_async.model.rules import Sgd
from adam_async.parameter_server import kept_shards
from adam_async.parameter_server import shard as shard_module
from adam_async.parameter_server.answers import Answers
from adam_async.parameter_server.bundle import MOST_KNOWN_PINS
from adam_async.parameter_server.events import (
    ApplySum,
    KeepPin,
    Pin,
    QueuedPin,
    ReplicasChanged,
    SendStates,
    SumApplied,
)
from adam_async.parameter_server.log_entries import decode_entry, encode_entry
from adam_async.parameter_server.shard_transfer import copy_shard, state_of
from adam_async.run.config import Waits
from adam_async.run.group_ranges import is_dropped
from adam_async.run.ids import ShardId
from tests.adam_async.parameter_server.copies import HERE, PIECES, TABLE, Copy, RandomPrimary
from tests.adam_async.parameter_server.test_bundle import MODES
from tests.adam_async.parameter_server.test_consistency import Server
from tests.adam_async.parameter_server.test_service import push_of, talk
from tests.adam_async.runs import NETWORKS, servers_of, until
from transport import RemoteProtocolError

SHARDS = (0, 1, 2)
LINK = object()


class Trained(Server):
    """A server with one replica, whose values are the number of its sums, and the clock of the last one."""

    def __init__(self):
        super().__init__(synchronous=True, shards=SHARDS, live=(0,))

    def step(self, clock):
        """Push a step of one group on all shards, as one message."""
        numbers, groups = dict.fromkeys(SHARDS, clock), (1, clock - 1, clock)
        return self.push(f"push {clock}", 0, clock, numbers, groups=groups)

    def apply(self):
        """Apply the next sum, or a part of it; return the shards, or None if none may be applied now."""
        sum_, effects = self.state.take_batch()
        self.effects = effects
        if sum_ is None:
            return None
        assert isinstance(sum_, ApplySum)
        self.state.bundle.keep(sum_.shards)
        for shard in sum_.shards:
            shard.values[:] = shard.values[0] + 1, sum_.clock
        self.effects += self.tell(SumApplied(sum_, [True] * len(sum_.shards)))
        return [int(shard.spec.id) for shard in sum_.shards]

    def apply_all(self):
        while self.state.has_work:
            self.apply()

    def at(self, *shards):
        """Take shards out of the snapshot, as an answer does; they have the groups up to its clock."""
        copies = [self.state.bundle.snapshot.take(ShardId(number)) for number in shards]
        assert all(copy is not None for copy in copies)
        for number, copy in zip(shards, copies, strict=True):
            assert copy.state.shard == number
            clock = self.state.bundle.snapshot.clock
            assert copy.state.groups == {1: (0, clock)}
            assert copy.state.losses == {1: LossSum(4 * clock, UNITS * sum(range(clock)))}
        return [(copy.state.version, tuple(copy.values), copy.state.clocks) for copy in copies]


def steps(server, *clocks):
    for clock in clocks:
        server.step(clock)
    server.apply_all()


def with_reader(**options):
    """A server after its first step, whose shards a reader asked for at that clock."""
    server = Trained()
    server.read("r", shards=SHARDS, clock=1, link=LINK, **options)
    steps(server, 1)
    return server


@given(clock=st.integers(2, 6), order=st.permutations(SHARDS), when=st.lists(st.integers(1, 8), min_size=3))
def test_every_shard_is_read_at_the_clock_however_late(clock, order, when):
    server = Trained()
    steps(server, 1)
    assert server.read("r", shards=SHARDS, clock=clock, link=LINK) == []
    due = sorted(max(each, clock) for each in when)[: len(SHARDS)]
    reads = list(zip(due, order, strict=True))
    for at in range(2, 10):
        steps(server, at)
        while reads and reads[0][0] <= at:
            assert server.at(reads.pop(0)[1]) == [(clock, (clock, clock), {0: clock})]
    assert not reads
    assert server.state.bundle.snapshot.over
    assert server.state.bundle.snapshot.copied_bytes == 0
    assert tuple(server.shard().values) == (9, 9)


def test_the_answer_of_a_reading_is_due_at_its_clock_and_names_it():
    server = Trained()
    steps(server, 1)
    assert server.read("r", shards=SHARDS, clock=2, link=LINK) == []
    server.step(2)
    server.apply()
    (answer,) = server.effects
    assert isinstance(answer, SendStates)
    assert (answer.request, answer.clock) == ("r", 2)


def test_a_clock_that_a_shard_has_passed_is_answered_with_the_clock_of_that_shard():
    server = Trained()
    steps(server, 1, 2, 3)
    (passed,) = server.read("r", shards=(1,), clock=2, link=LINK)
    assert passed.body.passed == 3
    assert server.state.bundle.snapshot is None
    server.step(4)
    sum_, _ = server.state.take_batch()
    (passed,) = server.read("r", shards=(1,), clock=3, link=LINK)
    assert passed.body.passed == 4, "the values of a sum in progress are those of no clock"
    server.tell(SumApplied(sum_, [True] * len(sum_.shards)))
    (answer,) = server.read("r", shards=(1,), clock=4, link=LINK)
    assert isinstance(answer, SendStates)


def test_shards_read_in_time_are_not_copied():
    server = with_reader()
    assert server.at(0, 2) == [(1, (1, 1), {0: 1})] * 2
    steps(server, 2)
    snapshot = server.state.bundle.snapshot
    assert snapshot.copied_bytes == server.shard(1).values.nbytes
    assert server.at(1) == [(1, (1, 1), {0: 1})]


def test_without_room_for_copies_a_sum_waits_for_the_reader_and_then_goes_on(monkeypatch):
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", 16)
    server = with_reader()
    server.step(2)
    assert server.apply() == [0]
    assert not server.state.has_work
    assert server.apply() is None
    assert server.at(0) == [(1, (1, 1), {0: 1})]
    assert server.apply() == [1]
    assert server.at(2) == [(1, (1, 1), {0: 1})]
    assert server.apply() == [2]
    assert server.at(1) == [(1, (1, 1), {0: 1})]
    steps(server, 3)
    assert [tuple(server.shard(number).values) for number in SHARDS] == [(3, 3)] * 3


def test_a_sum_without_memory_for_a_copy_goes_on_and_the_reader_gets_no_shards(monkeypatch):
    def fail(shard, **_):
        raise MemoryError

    server = with_reader()
    monkeypatch.setattr(kept_shards, "copy_shard", fail)
    steps(server, 2, 3)
    assert [tuple(server.shard(number).values) for number in SHARDS] == [(3, 3)] * 3
    snapshot = server.state.bundle.snapshot
    assert [snapshot.take(ShardId(number)) for number in SHARDS] == [None] * 3


def test_one_round_makes_few_copies(monkeypatch):
    monkeypatch.setattr(kept_shards, "ROUND_BYTES", 32)
    server = with_reader()
    server.step(2)
    assert [server.apply(), server.apply()] == [[0, 1], [2]]


def test_a_shard_is_read_without_the_groups_of_contributions_that_are_due_or_wait_for_a_replica():
    server = with_reader()
    server.replica_generations(0, 1)
    server.tick("tick", 1, 2, SHARDS)
    for clock in (2, 3):
        server.step(clock)
    pending = server.shard().pending
    assert (len(pending.due), len(pending.waiting)) == (1, 1)
    assert server.at(0) == [(1, (1, 1), {0: 1, 1: 1})]
    server.apply_all()
    copied = copy_shard(server.shard()).state
    assert (copied.groups, copied.losses) == ({1: (0, 2)}, {1: LossSum(8, UNITS)})


def test_the_groups_of_all_pending_contributions_leave_a_copy_of_the_set_together(monkeypatch):
    server, calls = with_reader(), []
    server.replica_generations(0, 1)
    for clock in range(2, 6):
        server.step(clock)
    without = shard_module.without_groups
    monkeypatch.setattr(shard_module, "without_groups", lambda *args: calls.append(args) or without(*args))
    assert copy_shard(server.shard()).state.groups == {1: (0, 1)}
    assert [named for _, named in calls] == [(1, 1, 5)]


def test_a_reader_that_asks_for_no_more_shards_holds_no_sum_up(monkeypatch):
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", 16)
    server = with_reader(wait_s=1.0)
    server.step(2)
    server.apply_all()
    assert server.state.next_deadline() == 2.0
    server.later(1.9)
    assert not server.state.has_work
    server.later(0.1)
    assert server.apply() == [1, 2]
    assert server.state.next_deadline() is None


def test_a_reader_that_asks_for_the_same_shard_again_holds_no_sum_up(monkeypatch):
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", 16)
    server = with_reader(wait_s=1.0)
    server.step(2)
    server.apply_all()
    for _ in range(4):
        server.later(0.9)
        server.read("again", shards=(0,), clock=1, link=LINK, wait_s=1.0)
        server.apply_all()
    assert {server.shard(number).applied_clock() for number in SHARDS} == {2}


def test_another_reading_replaces_the_snapshot_and_its_waiting_answers_have_no_shards():
    server = with_reader()
    before = server.state.bundle.snapshot
    server.read("s", shards=SHARDS, clock=2, link=object())
    assert before.take(ShardId(0)) is None
    steps(server, 2, 3)
    assert server.at(*SHARDS) == [(2, (2, 2), {0: 2})] * 3


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_parts_of_a_sum_are_the_sum(parts):
    server = Trained()
    server.step(1)
    sum_, _ = server.state.take_batch()
    first, rest = sum_.split(parts)
    others = rest if rest is not None else SimpleNamespace(shards=(), places=((),))
    assert (*first.shards, *others.shards) == sum_.shards
    assert tuple((*a, *b) for a, b in zip(first.places, others.places, strict=True)) == sum_.places
    assert {first.clock, getattr(others, "clock", 1)} == {1}
    np.testing.assert_array_equal([shard.spec.id for shard in sum_.shards], [ShardId(n) for n in SHARDS])


async def test_a_sum_goes_on_at_once_after_an_answer_that_has_waited_for_room(monkeypatch):
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", 1)
    send, waiting = Answers._send_when_room, []

    def without_room(*arguments):
        waiting.append(arguments)

    monkeypatch.setattr(Answers, "_send_when_room", without_room)
    async with servers_of(NETWORKS["local"](), consistency="bsp", images_per_group=4, servers=1) as servers:
        (server,) = servers.servers
        server.state.handle(ReplicasChanged({0: 1}))
        every = tuple(servers.shards())
        zeros = np.zeros(sum(servers.table.shards[number].size for number in every), np.float32)
        address, driver = servers.map.nodes["ps-0"].address, servers.identity("driver", 1)
        async with servers.network.connect(address, driver, timeout_s=50.0) as reader, talk(servers) as link:
            read = ReadShards(store="run", generation=servers.map.generation, shards=every, clock=1)
            answer = reader.call_nowait(pack(read), timeout_s=50.0)
            await until(lambda: server.state.bundle.snapshot is not None)
            for clock in (1, 2):
                push = push_of(servers, every, clock=clock, numbers=(clock,) * len(every), weight=4)
                await link.call(pack(push, [zeros]), timeout_s=50.0)
            assert not server.state.idle
            assert not server.state.has_work
            send(*waiting.pop())
            async with asyncio.timeout(Waits().answer_s / 2):
                await until(lambda: {shard.version for shard in servers.shards().values()} == {2})
            await answer


def test_the_set_of_an_epoch_whose_groups_all_wait_stays():
    """A run that goes on from such a copy would train the epochs again whose sets are dropped."""
    server = Trained()
    for number in SHARDS:
        tables = server.shard(number).separate()
        tables.groups = tables.ordered_groups = {1: (0, 4), 2: (0, 4), 3: (0, 4)}
        tables.losses = dict.fromkeys((1, 2, 3), LossSum(16, sum(range(4)) * UNITS))
    groups = (4, 0, 1)
    server.push("push 1", 0, 1, dict.fromkeys(SHARDS, 1), groups=groups)
    assert server.shard().tables.groups == {2: (0, 4), 3: (0, 4), 4: (0, 1)}
    state = copy_shard(server.shard()).state
    assert state.groups == {2: (0, 4), 3: (0, 4), 4: ()}
    assert is_dropped(state.groups, 1)
    (read,), _ = read_state_tables(state_tables([state]), most_shards=1)
    assert read.groups == state.groups


# --- pins -----------------------------------------------------------------------------

STEPS = 60
BY_NUMBER = {number: specs for number, specs in enumerate(PIECES) if specs}


def states_in(bundle):
    """Everything of the shards that a pin keeps."""
    found = {}
    for number, shard in bundle.shards.items():
        clock = shard.applied_clock() if shard.pending is not None else None
        arrays = {name: array.tobytes() for name, array in shard.rule_state.items()}
        found[number] = state_of(shard, clock=clock), shard.values.tobytes(), arrays
    return found


def taken(copies, *, pieces=None):
    """All shards of a pin, as the disk takes them."""
    left, found = dict(pieces or BY_NUMBER), {}
    while left:
        for spec in left.pop(copies.next_of(left)):
            copy = copies.take(spec.id)
            arrays = {name: array.tobytes() for name, array in copy.rule_state.items()}
            found[spec.id] = copy.state, copy.values.tobytes(), arrays
    return found


def pin_of(number, **options):
    return QueuedPin("pin", Pin("a-name", number, **options))


def copy_of(mode):
    copy = Copy(Sgd(momentum=0.9), **MODES[mode])
    copy.bundle.keeps_pins = True
    return copy


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
def test_all_members_keep_the_state_after_the_entries_before_the_pin(mode, seed):
    """The primary has entries in flight, the model applies one at a time, a third member none at a pin."""
    primary, model, member = RandomPrimary(copy_of(mode), seed), copy_of(mode), copy_of(mode)
    model.bundle.keeps_pins = False
    primary.live()
    for _ in range(STEPS):
        primary.step()
    primary.note(primary.copy.state.handle(pin_of(7)))
    for _ in range(STEPS):
        primary.step()
    primary.settle()
    expected = None
    for parts in primary.log:
        if isinstance(decode_entry(parts, model.bundle, TABLE), QueuedPin):
            expected = states_in(model.bundle)
        model.take(parts)
        member.take(parts)
    assert expected is not None
    assert expected != states_in(model.bundle), "entries after the pin have changed shards"
    for each in (primary.copy, member):
        assert taken(each.bundle.pinning) == expected
        assert each.bundle.pinning.copied_bytes == 0
    assert model.digest() == member.digest() == primary.copy.digest()


def test_in_bsp_a_pin_waits_for_the_sums_before_it_and_entries_wait_behind_it():
    primary = RandomPrimary(copy_of("bsp"), 3)
    primary.live()
    bundle = primary.copy.bundle
    while not bundle.ready:
        primary.push()
        primary.commit()
    clocks = {number: dict(shard.clocks) for number, shard in bundle.shards.items()}
    bundle.commit(pin_of(7))
    assert bundle.pinning is None
    primary.tick()
    while primary.proposed:
        primary.commit()
    assert any(isinstance(entry, QueuedPin) for entry in bundle.unfinished())
    assert not bundle.idle
    assert {number: dict(shard.clocks) for number, shard in bundle.shards.items()} == clocks
    while not bundle.idle:
        primary.work()
    assert bundle.pinning is not None


def some(copy, seed=1):
    """A primary with one replica that pushes to all shards."""
    primary = RandomPrimary(copy, seed)
    primary.live()
    primary.settle()
    return primary


def test_work_waits_while_the_copies_have_no_room(monkeypatch):
    sizes = [sum([kept_shards.bytes_of(shard)]) for shard in copy_of("asp").bundle.shards.values()]
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", max(sizes))
    primary = some(copy_of("asp"))
    bundle = primary.copy.bundle
    primary.note(primary.copy.state.handle(pin_of(7)))
    primary.settle()
    while bundle.has_work or not bundle.ready:
        primary.push()
        primary.commit()
        primary.work()
    before, copies = bundle.entries_applied, bundle.pinning
    assert copies.copied_bytes > 0
    primary.work()
    assert bundle.entries_applied == before, "it waits for the disk"
    taken(copies)
    assert bundle.has_work
    primary.settle()
    assert bundle.entries_applied > before


def test_a_repeated_pin_has_no_effect_and_one_that_was_given_up_does_not_come_back():
    copy = copy_of("asp")
    assert isinstance(copy.state.committed(pin_of(7))[-1], KeepPin)
    first = copy.bundle.pinning
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is first
    copy.bundle.pinning = None
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is None
    copy.state.committed(pin_of(7, removes=True))
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is None
    assert copy.bundle.pins == {7: True}
    for number in range(100, 100 + MOST_KNOWN_PINS):
        copy.state.committed(pin_of(number, removes=True))
    assert len(copy.bundle.pins) == MOST_KNOWN_PINS
    assert 7 not in copy.bundle.pins


def test_the_removal_of_a_pin_ends_its_copies():
    copy = copy_of("asp")
    copy.state.committed(pin_of(7))
    copies = copy.bundle.pinning
    copy.state.committed(pin_of(7, removes=True))
    assert copies.is_given_up
    assert [copies.take(spec.id) for spec in HERE] == [None] * len(HERE)


def test_a_member_with_shards_of_another_position_keeps_no_pin():
    copy = copy_of("asp")
    copy.bundle.absent = frozenset({HERE[0].id})
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is None
    assert copy.bundle.pins == {7: False}


@pytest.mark.parametrize(
    "pin",
    [
        Pin("a/../b", 7),
        Pin("", 7),
        Pin("x" * 65, 7),
        Pin("a\n", 7),
        Pin("a-name", 1 << 60),
        Pin("a-name", -1),
    ],
)
def test_a_pin_out_of_bounds_in_an_entry_is_refused(pin):
    with pytest.raises(RemoteProtocolError, match="details"):
        decode_entry(encode_entry(QueuedPin(None, pin)), copy_of("asp").bundle, TABLE)


def test_a_pin_in_an_entry_is_read():
    pin = Pin("Best-1.0_x", 7, removes=True)
    parts = encode_entry(QueuedPin(None, pin))
    assert decode_entry(parts, copy_of("asp").bundle, TABLE).pin == pin
    assert all(isinstance(tensor, np.ndarray) for part in parts for tensor in part)
