"""Shards that share memory and tables have the bits and counts of shards that share nothing."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.messages import Pull, Pushed, Ticked
from adam_async.model.rules import Adagrad, Adam, Sgd
from adam_async.parameter_server import shard_group
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.events import (
    Applied,
    PullArrived,
    PushArrived,
    ReplicasChanged,
    SendValues,
    TickArrived,
)
from adam_async.parameter_server.gradients import read_gradients
from adam_async.parameter_server.shard import MOST_LOST, Shard, Sheet, leave_lent
from adam_async.parameter_server.shard_group import MOST_MOVED, ShardGroup, count_groups, versions_of
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.storage import own_shards
from adam_async.run import group_ranges
from adam_async.run.group_ranges import has_groups, name_groups
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import SHEETS
from tests.adam_async.parameter_server.timelines import push_on, tick_on
from transport import Region
from transport.regions import region_of

SIZES = (3, 1, 5, 2, 2048, 4)
RULES = [Sgd(), Sgd(momentum=0.9), Adagrad(), Adam()]


def specs_of(sizes=SIZES, *, rules=1, dtype="float64"):
    return [
        ShardSpec(
            id=ShardId(n),
            tensor=f"t{n}",
            start=0,
            stop=size,
            row_size=1,
            bucket=BucketId(0),
            dtype=dtype,
            rule=n % rules,
        )
        for n, size in enumerate(sizes)
    ]


def apart(shards):
    """The same shards, each with memory and tables of its own."""
    return [
        Shard(
            spec=shard.spec,
            values=shard.values.copy(),
            rule_state={name: array.copy() for name, array in shard.rule_state.items()},
        )
        for shard in shards
    ]


class Server:
    """One store whose batches are applied at once."""

    def __init__(self, shards, rule, *, clocked):
        self.specs = [shard.spec for shard in shards]
        self.state = ServerState(store="run", generation=1, shards=shards, clocked=clocked)
        self.applier = Applier(rule, self.specs, self.specs[0].dtype)
        self.state.handle(ReplicasChanged({0: 1, 1: 1}))

    def handle(self, event):
        effects = self.state.handle(event)
        while True:
            batch, more = self.state.take_batch()
            effects += more
            if batch is None:
                return [self.text_of(effect) for effect in effects]
            self.applier.apply_pushes(batch.shards(), [each.gradients for each in batch.pushes])
            effects += self.state.handle(Applied(batch))

    @staticmethod
    def text_of(effect):
        shards = getattr(effect, "shards", ())
        versions = [int(shard.version) for shard in shards]
        return type(effect).__name__, effect.request, getattr(effect, "body", None), versions

    def push(self, request, push, flat):
        group = self.state.bundle.group(push.shards)
        gradients = read_gradients(push, [flat], self.specs, flat.dtype, group)
        return self.handle(PushArrived(request, push, gradients))

    def check_equal(self, other):
        for number, shard in self.state.shards.items():
            twin = other.state.shards[number]
            shard.check_invariants()
            assert shard.values.tobytes() == twin.values.tobytes()
            for name, array in shard.rule_state.items():
                assert array.tobytes() == twin.rule_state[name].tobytes()
            for name in ("version", "clocks", "staleness_of", "refused", "duplicates", "groups"):
                assert getattr(shard.tables, name) == getattr(twin.tables, name), (number, name)
            assert shard.last_number == twin.last_number, number


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("clocked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_pushes_pulls_and_ticks_of_any_shards_leave_what_separate_shards_have(rule, clocked, seed):
    shards = own_shards(specs_of(), [rule])
    one, other = Server(shards, rule, clocked=clocked), Server(apart(shards), rule, clocked=clocked)
    dice = np.random.default_rng(seed)
    messages = [(0, 1, 2), (3, 4, 5), (0, 1, 2, 3, 4, 5)] if seed else [(0, 1, 2), (3, 4, 5)]
    numbers = {}
    for step in range(60):
        replica = int(dice.integers(2))
        some = messages[dice.integers(len(messages))]
        if seed == 2 and dice.random() < 0.2:
            some = tuple(int(n) for n in dice.permutation(6)[: dice.integers(1, 6)])
        kind = dice.random()
        if kind < 0.7:
            repeated = dice.random() < 0.1
            for number in some:
                numbers[replica, number] = numbers.get((replica, number), 0) + (not repeated)
            flat = dice.normal(size=sum(SIZES[number] for number in some))
            if dice.random() < 0.1:
                flat[dice.integers(len(flat))] = np.inf
            current = [int(other.state.shards[ShardId(number)].version) for number in some]
            push = push_on(
                some,
                session=replica,
                replica=replica,
                clock=step if clocked else 0,
                numbers=tuple(max(numbers[replica, number], 1) for number in some),
                versions=tuple(max(version - int(dice.integers(2)), 0) for version in current),
                pull=bool(dice.random() < 0.5),
                groups=name_groups(1, (step % 40,)) if step % 5 else (),
            )
            with np.errstate(over="ignore", invalid="ignore"):
                answers = one.push(step, push, flat)
                assert answers == other.push(step, push, flat)
            assert isinstance(answers[0][2], Pushed)
        elif kind < 0.9:
            event = PullArrived(step, Pull(store="run", generation=1, shards=some))
            answers = one.handle(event)
            assert answers == other.handle(event)
            assert answers[0][0] == SendValues.__name__
        else:
            last = tuple(numbers.get((replica, number), 0) for number in some)
            tick = tick_on(some, session=replica, replica=replica, clock=step, numbers=last)
            answers = one.handle(TickArrived(step, tick))
            assert answers == other.handle(TickArrived(step, tick))
            assert answers[0][2] == Ticked()
        one.check_equal(other)


def test_small_shards_of_a_message_are_one_strip_and_share_tables_until_one_is_named_alone():
    shards = own_shards(specs_of((4, 4, 4)), [Adam()])
    both, rest = ShardGroup(shards[:2]), ShardGroup(shards[2:])
    assert [len(strip.shards) for strip in both.strips] == [2]
    assert np.shares_memory(both.strips[0].values, shards[1].values)
    assert both.shared() is None  # the third one has the same tables
    tables = both.own_tables()
    tables.version += 1
    assert [shard.version for shard in shards] == [1, 1, 0]
    assert versions_of(both) == 1
    shards[1].version += 1
    assert both.own_tables() is None
    assert versions_of(both) == (1, 2)
    assert rest.own_tables().version == 0


def test_shards_with_equal_sets_share_one_and_a_push_to_some_leaves_the_others():
    shards = own_shards(specs_of(), [Sgd()])
    tables = [shard.separate() for shard in shards]
    count_groups(push_on((0,), groups=(1, 0, 4), loss_sum=2.0), tables, tables)
    assert len({(id(each.groups), id(each.losses)) for each in tables}) == 1
    before, losses = tables[0].groups, tables[0].losses
    count_groups(push_on((0,), groups=(1, 2, 6), loss_sum=3.0), tables[:2], tables[:1])
    assert tables[0].groups is tables[1].groups == {1: (0, 6)}
    assert [each.losses[1].total for each in tables[:3]] == [5.0, 2.0, 2.0]
    assert {id(each.groups) for each in tables[2:]} == {id(before)}
    assert before == {1: (0, 4)}
    assert losses[1].total == 2.0
    split = shards[0].tables.split(0)
    assert split.groups is tables[0].groups


@pytest.mark.parametrize("flat", [np.ones(6), np.full(6, np.inf)], ids=["known", "refused"])
def test_shards_go_on_sharing_tables_after_a_push_that_is_not_applied(flat):
    server = Server(own_shards(specs_of((1, 2, 3)), [Sgd()]), Sgd(), clocked=False)
    for replica, gradients in enumerate((np.ones(6), flat)):
        with np.errstate(over="ignore", invalid="ignore"):
            push = push_on((0, 1, 2), session=replica, replica=replica, clock=0, groups=(1, 0, 4))
            server.push("push", push, gradients)
    (tables,) = {shard.tables for shard in server.state.shards.values()}
    assert (tables.version, tables.known) == (1, 1)
    assert tables.last_number.whole() == {(0, 1): 1, (1, 1): 1}


def test_equal_sets_of_split_tables_are_searched_once_for_the_groups_of_a_push(monkeypatch):
    shards = own_shards(specs_of((1,) * 200), [Sgd()])
    server = Server(shards, Sgd(), clocked=False)
    for shard in shards:
        shard.separate().ordered_groups = {1: (100, 200)}
    searched = []
    monkeypatch.setattr(
        group_ranges, "has_groups", lambda *asked: searched.append(asked) or has_groups(*asked)
    )
    push = push_on(range(200), session=0, clock=0, groups=(1, 0, 1, 2, 3))
    server.push("push", push, np.ones(200))
    assert {shard.version for shard in shards} == {1}
    assert len(searched) == 2, "when the push arrives, and when it is ordered"


def test_equal_sets_that_are_not_shared_are_shared_after_the_next_push():
    shards = own_shards(specs_of(), [Sgd()])
    tables = [shard.separate() for shard in shards]
    for each in tables:
        each.groups = {1: (0, 4)}
    count_groups(push_on((0,), groups=(1, 2, 6)), tables, tables)
    assert {id(each.groups) for each in tables} == {id(tables[0].groups)}
    assert tables[0].groups == {1: (0, 6)}


def test_a_strip_has_at_most_the_values_that_a_round_applies(monkeypatch):
    monkeypatch.setattr(shard_group, "STRIP_VALUES", 8)
    group = ShardGroup(own_shards(specs_of((4, 4, 1, 9, 2)), [Sgd()]))
    assert [len(strip.values) for strip in group.strips] == [8, 1, 9, 2]


def test_a_store_makes_no_group_of_unknown_repeated_or_mixed_shards():
    state = ServerState(store="run", generation=1, shards=own_shards(specs_of(rules=2), [Sgd(), Adam()]))
    assert state.bundle.group((0, 2, 4)) is state.bundle.group((0, 2, 4))
    for numbers in ((0, 1), (0, 0), (0, 6), ()):
        assert state.bundle.group(numbers) is None


class Family:
    """Shards in two groups and in one of all, whose values readers borrow and pushes change."""

    def __init__(self):
        self.shards = own_shards(specs_of((1024, 2048, 1024)), [Sgd()])
        self.memory = self.shards[0].memory
        self.groups = [ShardGroup(self.shards), ShardGroup(self.shards[:2]), ShardGroup(self.shards[2:])]
        self.memory.forget = lambda memory: [group.forget(memory) for group in self.groups]
        self.applier = Applier(Sgd(), specs_of((1024, 2048, 1024)), "float64")
        self.loans = []
        """Region, range, view and a copy of each loan."""
        self.expected = np.zeros(4096)

    def publish(self):
        if len(self.memory.sheets) < 2:
            array = Region.allocate(4096 * 8, is_published=True)
            self.memory.sheets.append(Sheet(array.view(np.float64), region_of(array.data)[0]))

    def borrow(self, group):
        group.renew()
        if group.flat is not None and group.sheet is not None and group.sheet.region is not None:
            lent = group.begin * 8, group.end * 8
            group.sheet.region.lend(lent)
            self.loans.append((group.sheet.region, lent, group.flat, group.flat.copy()))

    def give_back(self, number, is_lost):
        region, lent, _, _ = self.loans[number]
        if is_lost:
            region.is_lost = True
        else:
            region.give_back(lent)
            del self.loans[number]

    def push(self, group, is_short):
        group.renew()
        sheet, gradient = group.next_sheet() if is_short else None, np.ones(group.size)
        if not is_short:
            leave_lent(group)
            group.renew()
        elif sheet is not None and group.flat is not None:
            assert self.applier.batches.step(group.flat, sheet.values[group.begin : group.end], gradient, 1.0)
            group.move(sheet, with_values=False)
            gradient = None
        elif sheet is not None:
            group.move(sheet, with_values=True)
        if gradient is not None:
            self.applier.batches.apply(group.strips, [gradient], [1.0])
        self.expected[group.begin : group.end] -= 1

    def check(self):
        for _, _, view, copy in self.loans:
            np.testing.assert_array_equal(view, copy)
        for shard in self.shards:
            end = shard.offset + len(shard.values)
            np.testing.assert_array_equal(shard.values, self.expected[shard.offset : end])
        for group in self.groups:
            group.renew()
            values = self.expected[group.begin : group.end]
            np.testing.assert_array_equal(np.concatenate(group.flats), values)
            assert group.flat is None or np.array_equal(group.flat, values)
        assert len(self.memory.sheets) <= 2


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "batch", "borrow", "return", "lose"]), st.integers(0, 5)),
        max_size=40,
    )
)
def test_no_value_changes_while_a_reader_has_it_and_no_push_is_lost(events):
    family = Family()
    for event, number in events:
        group = family.groups[number % 3]
        family.publish()
        if event in ("push", "batch"):
            family.push(group, event == "push")
        elif event == "borrow":
            family.borrow(group)
        elif family.loans:
            family.give_back(number % len(family.loans), event == "lose")
        family.check()


def test_neighbours_that_are_pushed_one_after_the_other_come_to_one_sheet():
    family = Family()
    _, first, second = family.groups
    for _ in range(2):
        family.publish()
    family.push(second, True)
    for _ in range(3):
        for group in (first, second):
            family.push(group, True)
            family.borrow(group)
        assert first.sheet is second.sheet is not family.memory.private
        for _ in range(2):
            family.give_back(0, False)


def test_private_memory_that_no_shard_uses_is_freed():
    family = Family()
    private = weakref.ref(family.memory.private.values)
    for _ in range(2):
        family.publish()
    family.push(family.groups[1], True)
    assert private() is not None
    family.push(family.groups[2], True)
    family.groups.pop(0)
    gc.collect()
    assert private() is None


def test_readers_that_die_with_values_of_shards_that_no_push_moves_fill_no_memory():
    family, shards = Family(), own_shards(specs_of((512,) * 8), [Sgd()])
    family.shards, family.memory = shards, shards[0].memory
    family.groups = [ShardGroup([shard]) for shard in shards]
    regions = []
    for group in family.groups:
        for _ in range(2):
            before = len(family.memory.sheets)
            if family.memory.may_publish():
                family.publish()
            regions += [weakref.ref(each.region) for each in family.memory.sheets[before:]]
        family.push(group, True)
        family.borrow(group)
        while family.loans:
            family.give_back(0, True)
            family.loans.pop()
        family.memory.next_sheet(group.sheet, group.begin, group.end)
    gc.collect()
    assert sum(each() is not None for each in regions) <= SHEETS + MOST_LOST
    for group in family.groups * 3:
        family.push(group, True)
    gc.collect()
    family.push(family.groups[0], True)
    assert family.memory.may_publish()


def test_groups_that_no_client_uses_any_more_keep_no_memory_that_shards_have_left():
    family = Family()
    idle = ShardGroup(family.shards[1:])
    family.groups.append(idle)
    for _ in range(2):
        family.publish()
    family.push(family.groups[0], True)
    idle.renew()
    regions = [weakref.ref(sheet.region) for sheet in family.memory.sheets]
    privates = []
    for _ in range(3):
        for _ in range(3):
            family.borrow(family.groups[0])
            family.push(family.groups[0], True)
        idle.renew()
        privates.append(weakref.ref(family.memory.private.values))
        while family.loans:
            family.give_back(0, False)
        family.push(family.groups[0], True)
    family.borrow(family.groups[0])
    family.give_back(0, True)
    family.loans.clear()
    family.push(family.groups[0], True)
    gc.collect()
    assert [each() for each in privates] == [None] * 3
    assert sum(each() is not None for each in regions) == 1


def test_a_group_of_many_shards_copies_only_those_that_are_lent():
    shards = own_shards(specs_of((64,) * (MOST_MOVED + 1)), [Sgd()])
    whole, some = ShardGroup(shards), ShardGroup(shards[:2])
    memory = whole.memory
    array = Region.allocate(memory.private.values.nbytes, is_published=True)
    memory.sheets.append(Sheet(array.view(np.float64), region_of(array.data)[0]))
    some.move(some.next_sheet(), with_values=True)
    whole.renew()
    assert whole.next_sheet() is None
    memory.sheets[0].region.lend((0, 8))
    whole.leave_lent()
    assert [shard.sheet is memory.private for shard in shards] == [True, False, *[True] * (MOST_MOVED - 1)]
    assert len(np.concatenate(whole.flats)) == whole.size


def test_sheets_for_which_a_group_waits_are_allocated_for_neighbours_on_different_sheets():
    family = Family()
    family.publish()
    family.push(family.groups[1], True)
    assert ShardGroup(family.shards).flat is None
    assert ShardGroup(family.shards).may_lend


def test_shards_that_come_together_after_their_group_was_made_count_their_steps():
    sizes = (1024, 2048)
    shards = own_shards(specs_of(sizes), [Adam()])
    memory = shards[0].memory
    for _ in range(SHEETS):
        array = Region.allocate(sum(sizes) * 8, is_published=True)
        memory.sheets.append(Sheet(array.view(np.float64), region_of(array.data)[0]))
    shards[0].move(memory.sheets[0])
    group = ShardGroup(shards)
    assert not group.has_counts
    group.move(memory.sheets[1], with_values=True)
    assert len(group.strips) == 1
    assert group.has_counts
    shards[1].move(memory.sheets[0])
    group.renew()
    assert not group.has_counts
