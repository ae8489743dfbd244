"""The short way of a push against the long one: equal values, numbers and counts, and nothing for misfits."""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from adam_async.messages import Part, Pull, Pushed, unpack
from adam_async.model.rules import Adam, Sgd
from adam_async.parameter_server import apply, at_once
from adam_async.parameter_server.apply import PRODUCTS_PER_VALUE, Applier
from adam_async.parameter_server.at_once import MOST_LANES, ShortWay
from adam_async.parameter_server.events import Applied, EpochBegan, PullArrived, PushArrived, ReplicasChanged
from adam_async.parameter_server.gradients import read_gradients
from adam_async.parameter_server.question_checks import QuestionChecks
from adam_async.parameter_server.replay_log import OrderLog, read_order_log
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.storage import own_shards
from adam_async.run.group_ranges import name_groups
from adam_async.run.ids import BucketId, Replica, ShardId
from adam_async.run.shard_table import ShardSpec
from tests.adam_async.parameter_server.timelines import push_on
from transport import BufferPool, Message, Placed

SIZES = (3, 5, 4)
DTYPE = np.dtype(np.float32)


@dataclass(eq=False)
class Wire:
    """A link, as far as the short way asks it."""

    turn: int = 0
    closed: bool = False
    max_message_bytes: int = 1 << 20
    takes_lent: bool = True
    shares: bool = False
    lend_bytes: float = math.inf
    peer: str = "client:a"

    def abort(self):
        self.closed = True


@dataclass(eq=False)
class Asked:
    """A request whose answers and charges the test keeps."""

    link: Wire
    message: Message
    answers: list = field(default_factory=list)
    charges: list = field(default_factory=list)

    def charge(self, nbytes, then):
        self.charges.append((nbytes, then))

    def reply(self, message, *, lent=False):
        if not self.link.closed:
            self.answers.append(message)

    def copy_out(self):
        """Copy a message in memory of the sender."""
        if type(self.message) is Placed:
            tensors = tuple(each.copy() for each in self.message.tensors)
            self.message = Message(type="Push", tensors=tensors)


class Server:
    """One bundle of a store, whose pushes take the short way if they may, otherwise the long one."""

    def __init__(self, rule=Sgd(), **options):  # noqa: B008 - a frozen value
        bucket = BucketId(0)
        self.specs = [
            ShardSpec(id=ShardId(n), tensor=f"t{n}", start=0, stop=size, row_size=1, bucket=bucket)
            for n, size in enumerate(SIZES)
        ]
        shards = own_shards(self.specs, [rule])
        options = {"store": "run", "generation": 1, "program": False, **options}
        self.state = ServerState(shards=shards, **options)
        self.defects, self.drains = [], []
        self.checks = QuestionChecks(self.state, self.specs, most_weight=8)
        self.short = ShortWay(
            self.state,
            self.checks,
            SimpleNamespace(buffers=BufferPool(), fail=self.defects.append, timeline=None, node="ps-0"),
            None,
            lambda request, push: self.short.take(request, push, charged=True),
            lambda: self.drains.append(1),
            lambda _: None,
        )
        self.applier = Applier(rule, self.specs, DTYPE)
        self.tell(ReplicasChanged({Replica(0): 1, Replica(1): 1}))

    def tell(self, event):
        return self.state.handle(event)

    def short_push(self, link, push, values, charged=False):
        """Try the short way. Returns the answer, or None."""
        asked, drains = Asked(link, Message(type="Push", tensors=tensors_of(values))), len(self.drains)
        taken = self.short.take(asked, push, charged=charged)
        assert taken == bool(asked.answers or asked.charges or len(self.drains) > drains)
        return asked.answers[0] if asked.answers else None

    def long_push(self, link, push, values):
        """Go the long way, at once to its end."""
        group = self.state.bundle.group(push.shards)
        gradients = read_gradients(push, tensors_of(values), self.specs, DTYPE, group)
        self.short.prepare(link, push, self.applier)
        return self.drained(self.tell(PushArrived("push", push, gradients)))

    def drained(self, effects=()):
        """Apply all queued pushes. Returns these effects, and those of the batches."""
        effects = [*effects]
        while True:
            batch, more = self.state.take_batch()
            effects += more
            if batch is None:
                return effects
            rates = batch.rates
            self.applier.apply_pushes(batch.shards(), [each.gradients for each in batch.pushes], rates)
            effects += self.tell(Applied(batch))

    def content(self):
        """All that two servers with the same pushes have in common."""
        shards = self.state.shards.values()
        return [
            (shard.values.tolist(), {k: v.tolist() for k, v in shard.rule_state.items()}) for shard in shards
        ], [shard.tables.content() for shard in shards]


def push_of(number, *, shards=(0, 1, 2), session=7, replica=0, **fields):
    sender = {"session": session, "replica": replica, "clock": 0, "rate": 0.5, "pull": True}
    return push_on(shards, **{**sender, "numbers": (number,) * len(shards), **fields})


FACTORS = (Part(factors=False, count=1), Part(factors=True, count=1), Part(factors=True, count=1))
"""Parts of a push with factors of its last two shards."""


def tensors_of(values):
    return values if isinstance(values, tuple) else (values,)


def factors_of(seed, images=2):
    """The tensors of a push of `FACTORS`."""
    shapes = (3,), (1, images), (5, images), (1, images), (4, images)
    dice = np.random.default_rng(seed)
    return tuple(dice.standard_normal(shape).astype(DTYPE) for shape in shapes)


def values_of(seed, shards=(0, 1, 2)):
    size = sum(SIZES[n] for n in shards)
    return np.random.default_rng(seed).standard_normal(size).astype(DTYPE)


def on_its_lane(**options):
    """A server and a link with a lane: the first push has taken the long way."""
    server, link = Server(**options), Wire()
    server.long_push(link, push_of(1), values_of(0))
    return server, link


@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9), Adam()], ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"clocked": True}, {"scale_by_staleness": True}, {"program": True}], ids=repr
)
def test_both_ways_give_the_same_values_numbers_clocks_and_logs(rule, options):
    short, long = Server(rule, **options), Server(rule, **options)
    links, taken, dice = [Wire(), Wire()], 0, Random(3)
    numbers = {(client, shards): 0 for client in (0, 1) for shards in ((0, 1), (2,))}
    for step in range(60):
        client, shards = dice.choice(sorted(numbers))
        numbers[client, shards] += 1
        number = numbers[client, shards]
        read = max(short.state.shards[ShardId(shards[0])].version - dice.randrange(3), 0)
        push = push_of(
            number,
            shards=shards,
            session=client + 7,
            replica=client,
            rate=dice.choice([0.5, 0.25]),
            versions=(read,) * len(shards),
            own_applied=(dice.randrange(2) if number > 1 else 0,) * len(shards),
            clock=number if options.get("clocked") else 0,
            groups=name_groups(1, (step, 3 * step + 60)) if step % 3 and options.get("program") else (),
        )
        link, values = links[client], values_of(step, shards)
        link.turn += 1
        answer = short.short_push(link, push, values)
        taken += answer is not None
        if answer is None:
            short.long_push(link, push, values)
        effects = long.long_push(link, push, values)
        if answer is not None:
            assert unpack(answer, Pushed) == effects[-1].body
            after = np.concatenate([long.state.shards[ShardId(n)].values for n in shards])
            assert answer.tensors[0].tolist() == after.tolist()
    assert taken == 55, "a lane for each client and group, and the first push of all separates the tables"
    assert short.content() == long.content()
    short.state.check_invariants()


@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9), Adam()], ids=repr)
@pytest.mark.parametrize("options", [{}, {"clocked": True}, {"scale_by_staleness": True}], ids=repr)
def test_both_ways_give_the_same_for_pushes_with_factors(rule, options):
    short, long, link = Server(rule, **options), Server(rule, **options), Wire()
    for server in (short, long):
        server.long_push(link, push_of(1, parts=FACTORS), factors_of(0))
    for number in range(2, 20):
        push = push_of(number, parts=FACTORS, versions=(max(number - 3, 0),) * 3)
        link.turn += 1
        answer = short.short_push(link, push, factors_of(number), charged=True)
        effects = long.long_push(link, push, factors_of(number))
        assert unpack(answer, Pushed) == effects[-1].body
    assert short.content() == long.content()


def test_a_push_with_factors_asks_for_room_because_its_answer_is_larger_than_itself():
    server, link = Server(), Wire()
    server.long_push(link, push_of(1, parts=FACTORS), factors_of(0))
    link.turn += 1
    asked, push = Asked(link, Message(type="Push", tensors=factors_of(1))), push_of(2, parts=FACTORS)
    assert server.short.take(asked, push)
    ((nbytes, then),) = asked.charges
    assert (nbytes, asked.answers) == (4 * sum(SIZES), [])
    then()
    assert len(asked.answers) == 1


@pytest.mark.parametrize(
    "tensors",
    [
        factors_of(1)[:-1],
        (*factors_of(1), factors_of(1)[0]),
        (*factors_of(1)[:4], factors_of(1, images=3)[4]),
        tuple(tensor.astype(np.float64) for tensor in factors_of(1)),
        (*factors_of(1)[:4], np.full((4, 2), np.nan, DTYPE)),
        (*factors_of(1)[:3], np.full((1, 2), 1e20, DTYPE), np.full((4, 2), 1e20, DTYPE)),
        (factors_of(1)[0], np.ones(2, DTYPE), *factors_of(1)[2:]),
    ],
    ids=["fewer", "more", "images", "float64", "nan", "overflows", "vector"],
)
def test_factors_that_do_not_fit_or_may_not_be_finite_change_nothing(tensors):
    server, link = Server(), Wire()
    server.long_push(link, push_of(1, parts=FACTORS), factors_of(0))
    link.turn += 1
    before = deepcopy(server.content())
    assert server.short_push(link, push_of(2, parts=FACTORS), tensors, charged=True) is None
    assert server.content() == before


def test_factors_of_too_many_images_take_the_long_way_in_pieces(monkeypatch):
    monkeypatch.setattr(at_once, "PIECE_WORK", sum(SIZES))
    server, link = Server(), Wire()
    server.long_push(link, push_of(1, parts=FACTORS), factors_of(0))
    for number, images in enumerate((PRODUCTS_PER_VALUE, PRODUCTS_PER_VALUE + 1), start=2):
        link.turn += 1
        answer = server.short_push(link, push_of(number, parts=FACTORS), factors_of(1, images), charged=True)
        assert (answer is None) == (images > PRODUCTS_PER_VALUE)


@pytest.mark.parametrize(
    "misfit",
    [
        {"numbers": 1},
        {"numbers": 3},
        {"numbers": (2, 2, 3)},
        {"numbers": (2, 2)},
        {"versions": 2},
        {"versions": (0, 1, 0)},
        {"versions": ()},
        {"own_applied": 2},
        {"own_applied": (0, 1, 0)},
        {"clock": 1 << 50},
        {"session": 8},
        {"incarnation": 2},
        {"replica": 1},
        {"weight": 2},
        {"generation": 2},
        {"epoch": 1},
        {"assign": True},
        {"pull": False},
        {"groups": (1, 3)},
        {"groups": (1, 3, 3)},
        {"groups": (1, 0, 4, 2, 5)},
        {"parts": (Part(factors=True, count=3),)},
        {"parts": (Part(factors=False, count=1), Part(factors=False, count=2))},
        {"shards": (0, 2, 1)},
    ],
    ids=repr,
)
def test_a_push_that_differs_from_its_lane_changes_nothing(misfit):
    server, link = on_its_lane()
    link.turn += 1
    before = deepcopy(server.content())
    push = msgspec.structs.replace(push_of(2), **misfit)
    assert server.short_push(link, push, values_of(1)) is None
    assert server.content() == before
    assert server.short_push(link, push_of(2), values_of(1)) is not None


@pytest.mark.parametrize(
    "values",
    [
        np.full(12, np.nan, DTYPE),
        np.full(12, np.inf, DTYPE),
        np.full(12, 1e38, DTYPE),
        np.ones(11, DTYPE),
        np.ones((3, 4), DTYPE),
        np.ones(12, np.float64),
    ],
    ids=["nan", "infinite", "overflows", "short", "matrix", "float64"],
)
def test_values_that_are_not_surely_finite_and_fitting_change_nothing(values):
    server, link = on_its_lane()
    link.turn += 1
    before = deepcopy(server.content())
    assert server.short_push(link, push_of(2), values) is None
    assert server.content() == before


@pytest.mark.parametrize("again", [(1, 0, 4), (1, 2, 6)], ids=["all", "some"])
def test_groups_that_the_shards_have_take_the_long_way(again):
    server, link = Server(program=True), Wire()
    server.long_push(link, push_of(1, groups=(1, 0, 4)), values_of(1))
    link.turn += 1
    assert server.short_push(link, push_of(2, groups=again), values_of(2)) is None
    assert server.short_push(link, push_of(2, groups=(1, 4, 8)), values_of(2)) is not None
    link.turn += 1
    assert server.short_push(link, push_of(3, groups=(1, 6, 9)), values_of(3)) is None


def test_a_generation_that_the_map_has_not_named_takes_the_long_way():
    server, link = Server(program=True), Wire()
    early = {"incarnation": 2, "replica": 0}
    server.long_push(link, push_of(1, **early), values_of(1))
    link.turn += 1
    assert server.short_push(link, push_of(2, groups=(1, 0, 4), **early), values_of(2)) is None


@pytest.mark.parametrize("takes_lent", [True, False])
def test_values_are_lent_to_links_that_take_them_and_copied_for_others(takes_lent):
    server, link = on_its_lane()
    link.turn, link.takes_lent = 1, takes_lent
    answer = server.short_push(link, push_of(2), values_of(1))
    shards = server.state.shards.values()
    assert any(np.shares_memory(answer.tensors[0], shard.values) for shard in shards) == takes_lent
    assert answer.tensors[0].tolist() == [value for shard in shards for value in shard.values]


def test_a_lane_takes_one_push_in_a_turn_of_its_link():
    server, link = on_its_lane()
    link.turn += 1
    assert server.short_push(link, push_of(2), values_of(1)) is not None
    assert server.short_push(link, push_of(3), values_of(2)) is None
    link.turn += 1
    assert server.short_push(link, push_of(3), values_of(2)) is not None


@pytest.mark.parametrize("parts", [FACTORS, push_of(1).parts], ids=["factors", "flat"])
@pytest.mark.parametrize("options", [{}, {"scale_by_staleness": True}, {"program": True}], ids=repr)
def test_pushes_that_queue_behind_others_join_as_on_the_long_way(parts, options):
    values = factors_of if parts is FACTORS else values_of
    short, long, link = Server(**options), Server(**options), Wire()
    for server in (short, long):
        server.long_push(link, push_of(1, parts=parts), values(0))
    number = 1
    for size in (1, 3, 2):
        pushes = []
        for _ in range(size):
            number += 1
            groups = name_groups(1, (number, 3 * number + 60)) if options.get("program") else ()
            versions = (max(number - 3, 0),) * len(SIZES)
            pushes.append(push_of(number, parts=parts, versions=versions, groups=groups))
        for push in pushes:
            server, tensors = long, tensors_of(values(push.numbers))
            gradients = read_gradients(push, tensors, server.specs, DTYPE)
            assert server.tell(PushArrived("push", push, gradients)) == []
            short.short._lanes[link, push.shards].turn = link.turn  # the turn of this link is used up
            assert short.short_push(link, push, tensors, charged=True) is None
        assert len(short.drains) == number - 1
        answers, expected = short.drained(), long.drained()
        assert [each.body for each in answers] == [each.body for each in expected]
    assert (short.state.bundle.batches, long.state.bundle.batches) == (4, 4)
    assert short.content() == long.content()
    short.state.check_invariants()


def test_a_push_of_groups_that_a_queued_push_has_takes_the_long_way():
    server, link = Server(program=True), Wire()
    server.long_push(link, push_of(1, groups=(1, 0, 1)), values_of(0))
    lane = server.short._lanes[link, (0, 1, 2)]
    lane.turn = link.turn
    assert server.short_push(link, push_of(2, groups=(1, 1, 2)), values_of(1), charged=True) is None
    for groups in ((1, 1, 2), (1, 1, 3)):
        asked = Asked(link, Message(type="Push", tensors=(values_of(2),)))
        assert not server.short.take(asked, push_of(3, groups=groups), charged=True)
    assert len(server.drains) == 1


def test_a_push_behind_the_end_of_its_generation_takes_the_long_way():
    server, link = on_its_lane()
    server.short._lanes[link, (0, 1, 2)].turn = link.turn
    assert server.short_push(link, push_of(2), values_of(1), charged=True) is None
    server.state.take_batch()
    server.tell(ReplicasChanged({Replica(0): 2, Replica(1): 1}))  # waits behind the batch
    asked = Asked(link, Message(type="Push", tensors=(values_of(2),)))
    assert not server.short.take(asked, push_of(3), charged=True)
    assert len(server.drains) == 1


def placed(values):
    """A push in memory that its sender can change, as a link within a host delivers it."""
    view = values.view()
    view.flags.writeable = False
    return Placed(
        type="Push", tensors=(view,), region=1, start=0, specs=(), payload=memoryview(values).cast("B")
    )


@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9), Adam()], ids=repr)
@pytest.mark.parametrize("block", [1, 2, 4, 32])
def test_a_push_is_applied_from_memory_of_its_sender_as_from_a_copy(rule, block, monkeypatch):
    monkeypatch.setattr(apply, "BLOCK", block)
    short, long, link = Server(rule), Server(rule), Wire()
    for server in (short, long):
        server.long_push(link, push_of(1), values_of(0))
    for number in range(2, 10):
        link.turn += 1
        asked = Asked(link, placed(values_of(number)))
        assert short.short.take(asked, push_of(number))
        effects = long.long_push(link, push_of(number), values_of(number))
        assert unpack(asked.answers[0], Pushed) == effects[-1].body
    assert short.content() == long.content()
    assert short.state.bundle.cut_pushes == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", [Sgd(), Adam()], ids=repr)
@pytest.mark.parametrize("step", range(7))
def test_a_client_that_changes_a_checked_gradient_loses_its_link_and_changes_no_value_to_infinity(
    bad, rule, step, monkeypatch
):
    monkeypatch.setattr(apply, "BLOCK", 2)  # the shards of 3, 5 and 4 values are one strip of 6 blocks
    server, link = on_its_lane(rule=rule)
    link.turn += 1
    values, applied = values_of(1), []
    before = [shard.values.copy() for shard in server.state.shards.values()]
    check = apply.is_finite

    def change_then_check(block, rate):
        if len(applied) == step:  # behind the check of all, and `step` blocks
            values[:] = bad
        applied.append(block)
        return check(block, rate)

    original = server.applier.apply_changing

    def changed_at_its_begin(*arguments):
        if step == 0:
            values[:] = bad
        return original(*arguments)

    monkeypatch.setattr(server.applier, "apply_changing", changed_at_its_begin)
    monkeypatch.setattr(apply, "is_finite", change_then_check)
    asked = Asked(link, placed(values))
    assert server.short.take(asked, push_of(2))
    after = [shard.values for shard in server.state.shards.values()]
    assert all(np.isfinite(array).all() for array in after)
    assert all(np.isfinite(array).all() for each in server.state.shards.values()
               for array in each.rule_state.values())  # fmt: skip
    is_cut = step < 5  # the change after the copy of the last block comes too late
    assert link.closed == is_cut
    assert bool(asked.answers) == (not is_cut)
    assert server.state.bundle.cut_pushes == is_cut
    if step:
        assert not all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert server.state.shards[ShardId(0)].version == 2
    assert not server.defects
    again = Asked(Wire(), Message(type="Push", tensors=(values_of(1),)))
    assert not server.short.take(again, push_of(2)), "its number is used up"


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_push_that_waits_is_copied_before_it_is_checked(is_alone):
    server, link = on_its_lane()
    if is_alone:
        server.short._lanes[link, (0, 1, 2)].turn = link.turn
        push = push_of(2, pull=True)
        values = values_of(1)
        asked = Asked(link, placed(values))
        assert server.short.take(asked, push, charged=True)
        values[:] = np.nan
        assert np.isfinite(asked.message.tensors[0]).all()
        server.drained()
    else:
        values = factors_of(1)
        asked = Asked(link, Placed(type="Push", tensors=values, region=1, start=0, specs=(),
                                   payload=memoryview(b"")))  # fmt: skip
        server.long_push(link, push_of(2, parts=FACTORS), values)
        link.turn += 1
        assert server.short.take(asked, push_of(3, parts=FACTORS), charged=True)
    assert type(asked.message) is Message
    assert all(np.isfinite(shard.values).all() for shard in server.state.shards.values())


def test_a_push_does_not_pass_what_waits():
    server, link = on_its_lane()
    link.turn += 1
    later = push_of(2)
    gradients = read_gradients(later, (values_of(1),), server.specs, DTYPE)
    server.tell(PushArrived("queued", later, gradients))
    assert server.short_push(link, push_of(3), values_of(2)) is None
    batch, _ = server.state.take_batch()
    assert server.short_push(link, push_of(3), values_of(2)) is None
    server.tell(Applied(batch))
    assert server.short_push(link, push_of(3), values_of(2)) is not None


def test_a_push_does_not_pass_a_pull_that_waits_for_a_clock():
    server, link = Server(clocked=True), Wire()
    server.long_push(link, push_of(1, clock=1), values_of(0))
    server.tell(PullArrived("pull", Pull(store="run", generation=1, shards=(0,), clock=1), 9.0))
    link.turn += 1
    assert server.short_push(link, push_of(2, clock=2), values_of(1)) is None


@pytest.mark.parametrize(
    "event",
    [
        ReplicasChanged({Replica(0): 2, Replica(1): 1}),
        ReplicasChanged({Replica(0): 1}),
        EpochBegan(1, 0),
        "forget",
    ],
    ids=["reborn", "left", "epoch", "forgotten"],
)
def test_a_lane_ends_with_what_its_checks_depend_on(event):
    server, link = on_its_lane()
    if event == "forget":
        server.state.forget([(7, 1)])
    else:
        server.tell(event)
    link.turn += 1
    assert server.short_push(link, push_of(2), values_of(1)) is None


def test_a_lane_ends_when_a_message_splits_its_tables():
    server, link = on_its_lane()
    server.long_push(link, push_of(1, shards=(0,), session=9, replica=1), values_of(1, (0,)))
    link.turn += 1
    assert server.short_push(link, push_of(2), values_of(2)) is None


@pytest.mark.parametrize(
    ("options", "fields", "most"),
    [
        ({"summed_weight": 2}, {"clock": 1}, 1 << 20),
        ({}, {"assign": True}, 1 << 20),
        ({}, {"epoch": 1}, 1 << 20),
        ({}, {"incarnation": 9, "replica": 5}, 1 << 20),
        ({}, {}, 64),
    ],
    ids=["bsp", "assignment", "early epoch", "unnamed", "large answer"],
)
def test_some_pushes_have_no_lane(options, fields, most):
    server, link = Server(**options), Wire(max_message_bytes=most)
    push = msgspec.structs.replace(push_of(1), **fields)
    server.short.prepare(link, push, server.applier)
    link.turn += 1
    is_plain = fields == {"incarnation": 9, "replica": 5}
    # The map may name this client later: until then its pushes count, as on the long way.
    assert (server.short_push(link, push, values_of(0)) is not None) == is_plain


def test_a_push_of_an_ended_generation_has_no_lane():
    server, link = Server(), Wire()
    server.tell(ReplicasChanged({Replica(0): 2, Replica(1): 1}))
    server.short.prepare(link, push_of(1), server.applier)
    link.turn += 1
    assert server.short_push(link, push_of(1), values_of(0)) is None


def test_bundles_with_a_log_have_no_lanes():
    server, link = Server(), Wire()
    server.state.alone = False
    server.short.prepare(link, push_of(1), server.applier)
    assert server.short_push(link, push_of(1), values_of(0)) is None


def test_lanes_of_closed_links_end_and_lanes_are_bounded():
    server, links = Server(), [Wire() for _ in range(MOST_LANES + 1)]
    for link in links:
        server.short.prepare(link, push_of(1), server.applier)
    assert len(server.short._lanes) == 1
    links[-1].closed = True
    server.short.links_closed()
    assert len(server.short._lanes) == 0


def test_a_kernel_that_fails_ends_the_server_and_no_number_is_used():
    server, link = on_its_lane()

    def apply(*_):
        raise MemoryError("no scratch")

    server.applier.batches.apply = apply
    link.turn += 1
    with pytest.raises(MemoryError):
        server.short_push(link, push_of(2), values_of(1))
    assert [str(defect) for defect in server.defects] == ["no scratch"]
    assert server.state.shards[ShardId(0)].tables.ordered.whole() == {(7, 1): 1}


def test_a_push_whose_answer_has_no_memory_is_applied_and_reaches_the_disk():
    server, link, changed = Server(), Wire(), []

    class NoMemory(Asked):
        def reply(self, message, *, lent=False):
            raise MemoryError("no memory for an answer")

    server.short._changed = lambda *given: changed.append(given)
    server.long_push(link, push_of(1), values_of(0))
    with pytest.raises(MemoryError):
        server.short.take(NoMemory(link, Message(type="Push", tensors=(values_of(1),))), push_of(2))
    group = server.state.bundle.group((0, 1, 2))
    assert (changed, server.defects) == ([(group, 1)], [])
    assert server.state.shards[ShardId(0)].last_number == {(7, 1): 2}


def test_pushes_of_a_recorded_bundle_take_the_long_way_which_notes_them():
    server, link = Server(log=OrderLog(range(len(SIZES)))), Wire()
    server.long_push(link, push_of(1, clock=1), values_of(0))
    link.turn += 1
    assert server.short_push(link, push_of(2, clock=2), values_of(1)) is None
    server.long_push(link, push_of(2, clock=2), values_of(1))
    entries = read_order_log(server.state.bundle.log.packed()).entries
    assert [each["clock"].tolist() for each in entries.values()] == [[1, 2]] * len(SIZES)


def test_a_push_with_reads_takes_the_long_way_although_its_lane_is_there():
    server, link = on_its_lane()
    link.turn += 1
    assert server.short_push(link, push_of(2, recorded=True), values_of(1)) is None


def test_a_push_that_is_counted_in_part_ends_the_server(monkeypatch):
    server, link = on_its_lane()

    def count(*_):
        raise MemoryError("no memory for the counts")

    monkeypatch.setattr(server.state.bundle, "count_at_once", count)
    link.turn += 1
    with pytest.raises(MemoryError):
        server.short_push(link, push_of(2), values_of(1))
    assert [str(defect) for defect in server.defects] == ["no memory for the counts"]
