"""Steps on vectors at one server: numbers, answers, copies of their entries, and commands that do no harm."""

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from adam_async.client.connection import MAX_UNACKNOWLEDGED
from adam_async.messages import (
    DUPLICATE,
    GAP,
    MOST_TERMS,
    NOT_PRIMARY,
    REFUSED,
    Command,
    Commands,
    DotProduct,
    Push,
    Pushed,
    pack,
    unpack,
)
from adam_async.model.rules import Sgd
from adam_async.parameter_server.apply import PIECE_WORK, Applier
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Applied, Apply, PushArrived, QueuedPush, VectorsChanged
from adam_async.parameter_server.gradients import DeltaPart, PushGradients
from adam_async.parameter_server.log_entries import decode_entry, encode_entry, without_shards
from adam_async.parameter_server.question_checks import QuestionChecks
from adam_async.parameter_server.shard import MOST_DOTS, Shard
from adam_async.parameter_server.shard_pieces import copy_piece, load_piece, read_piece
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.store_work import begin_work
from adam_async.parameter_server.vector_steps import CALL_WORK, LEAST_PARTS, MOST_PROBLEMS, answer_to_step
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import VectorRecord, vector_key
from tests.adam_async.parameter_server.timelines import SENDER
from transport import RemoteProtocolError

SHARDS, SIZE = 5, 6
X, Y = VectorRecord("x", number=1), VectorRecord("y", ("b",), number=2)
MOVE = Commands((Command(1, ((1.0, 1), (2.0, 0))),), (DotProduct(1, 0),))


def new_shards():
    found = []
    for number in range(SHARDS):
        array = "w" if number < SHARDS - 1 else "b"
        span = (number * SIZE, (number + 1) * SIZE) if array == "w" else (0, SIZE)
        place = {"row_size": 1, "bucket": BucketId(0), "dtype": "float64"}
        spec = ShardSpec(id=ShardId(number), tensor=array, start=span[0], stop=span[1], **place)
        found.append(Shard(spec=spec, values=np.arange(SIZE) + number * 1.5, rule_state={}))
    return found


class Server:
    """A primary without copies, or another member that takes its entries."""

    def __init__(self, shards=None):
        self.state = ServerState(store="run", generation=1, shards=shards or new_shards(), program=False)
        self.specs = [shard.spec for shard in self.state.shards.values()]
        self.applier = Applier(Sgd(), self.specs, "float64")
        self.state.handle(VectorsChanged((X, Y)))
        self.entries = []

    @property
    def bundle(self) -> Bundle:
        return self.state.bundle

    def work(self):
        """Apply what waits; returns the answers by request."""
        answers = {}
        while True:
            batch, effects = self.state.take_batch()
            answers |= {effect.request: effect.body for effect in effects}
            if batch is None:
                return answers
            assert isinstance(batch, Apply)
            self.entries.append(encode_entry(batch))
            current = begin_work(batch, lambda spec: self.applier, 0.0)
            current.work.run()
            done = self.state.handle(Applied(batch, current.outcomes))
            answers |= {effect.request: effect.body for effect in done}

    def step(self, commands, number=1, **fields):
        """Send a step; returns its answer."""
        named = {"clock": 0, "weight": 1, "rate": 0.0, "parts": (), "versions": 0, "own_applied": 0}
        push = Push(
            **SENDER | named | {"shards": tuple(range(SHARDS)), "numbers": number} | fields,
            assign=True,
            commands=commands,
        )
        effects = self.state.handle(PushArrived("step", push, PushGradients()))
        return ({effect.request: effect.body for effect in effects} | self.work())["step"]

    def vector(self, number):
        return np.concatenate([shard.vector(number) for shard in self.state.shards.values()])


def test_a_repeated_step_is_not_applied_and_gets_its_first_answer_after_later_changes():
    server = Server()
    first = server.step(MOVE)
    assert server.vector(1).tolist() == (2 * server.vector(0)).tolist()
    assert math.fsum(first.dots[0]) == math.fsum((server.vector(1) * server.vector(0)).tolist())
    server.step(Commands((Command(0, ()),), ()), number=2)
    again = server.step(MOVE)
    assert again.dots == first.dots
    assert {problem.status for problem in again.problems} == {DUPLICATE}
    assert not server.vector(0).any()


@pytest.mark.parametrize("dots", [0, 2, MOST_TERMS])
def test_a_repetition_with_another_number_of_dot_products_gets_none(dots):
    server = Server()
    server.step(MOVE)
    again = server.step(Commands((), (DotProduct(1, 0),) * dots))
    assert {problem.status for problem in again.problems} == {DUPLICATE}
    assert again.dots == ()


def test_an_answer_has_the_dot_products_of_all_shards_or_none():
    server = Server()
    server.step(MOVE)
    server.state.shards[ShardId(2)].dots.clear()
    assert server.step(MOVE).dots == ()


def test_pushes_for_a_vector_and_for_the_values_are_two_batches():
    server = Server()
    before = server.vector(0)
    gradients = PushGradients((DeltaPart(np.ones(SIZE * SHARDS), (SIZE,) * SHARDS, 1.0, finite=True),))
    places = {"shards": tuple(range(SHARDS)), "rate": 1.0, "assign": False}
    for number, vector in ((1, 1), (2, 0)):
        push = push_with(None, numbers=number, vector=vector, **places)
        server.state.handle(PushArrived(f"push {number}", push, gradients))
    server.work()
    assert (server.vector(1) == 1).all()
    assert (server.vector(0) == before - 1).all()


def test_shards_go_on_sharing_their_tables_and_versions_count_changes_of_values():
    server = Server()
    server.bundle.share_equal_tables()
    server.step(MOVE)
    assert server.bundle.count_tables() == 1
    assert [shard.version for shard in server.state.shards.values()] == [0] * SHARDS
    server.step(Commands((Command(0, ((0.5, 0),), "w"),), ()), number=2)
    assert [shard.version for shard in server.state.shards.values()] == [1] * (SHARDS - 1) + [0]
    assert server.bundle.count_tables() == 2
    server.state.check_invariants()


def test_a_gap_is_named_and_a_server_of_another_assignment_takes_no_step():
    server = Server()
    answer = server.step(MOVE, number=3)
    assert (answer.problems[0].status, answer.problems[0].expected, answer.dots) == (GAP, 1, ())
    answer = server.step(MOVE, generation=2, shards=(0,))
    assert [problem.status for problem in answer.problems] == [NOT_PRIMARY]
    assert not server.vector(1).any()


def test_numbers_of_shards_that_were_pushed_apart_travel_one_by_one():
    server = Server()
    for shard in list(server.state.shards.values())[:2]:
        shard.separate().ordered[SENDER["session"], SENDER["incarnation"]] = 4
    answer = server.step(MOVE, number=(5, 5, 1, 1, 1))
    assert (answer.problems, answer.versions) == ((), 0)
    assert server.step(MOVE, number=(6, 6, 2, 2, 2)).problems == ()


def test_an_answer_is_short_for_any_number_of_shards():
    server = Server()
    server.step(MOVE)
    answer = server.step(MOVE)
    assert len(answer.problems) <= MOST_PROBLEMS
    assert [len(parts) for parts in answer.dots] == [LEAST_PARTS]


def test_a_step_that_names_a_deleted_vector_is_refused_whole():
    server = Server()
    server.state.handle(VectorsChanged((Y,)))
    before = server.vector(0).copy()
    answer = server.step(Commands((Command(0, ()), Command(1, ((1.0, 0),))), (DotProduct(1, 0),)))
    assert {problem.status for problem in answer.problems} == {REFUSED}
    assert server.vector(0).tolist() == before.tolist()
    assert server.step(MOVE).problems[0].status == REFUSED, "a repetition is refused again"


def test_a_term_without_an_array_of_the_target_refuses_only_those_shards():
    server = Server()
    answer = server.step(Commands((Command(1, ((1.0, 0),)), Command(1, ((1.0, 2),))), ()))
    assert {problem.status for problem in answer.problems} == {REFUSED}
    assert [problem.index for problem in answer.problems] == list(range(SHARDS - 1))
    assert [bool(shard.vector(1).any()) for shard in server.state.shards.values()] == [False] * SHARDS


@pytest.mark.parametrize("terms", [((1e308, 0), (1e308, 0)), ((1.7e308, 0),)])
def test_a_result_that_is_not_finite_changes_nothing_on_its_shards(terms):
    server = Server()
    before = [shard.values.copy() for shard in server.state.shards.values()]
    answer = server.step(Commands((Command(1, ((2.0, 0),)), Command(0, terms)), (DotProduct(0, 0),)))
    assert REFUSED in {problem.status for problem in answer.problems}
    for shard, values in zip(server.state.shards.values(), before, strict=True):
        assert np.isfinite(shard.values).all()
        assert (shard.values == values).all()
        assert not shard.vector(1).any()


def test_a_member_that_takes_the_entries_has_the_same_bits_and_answers():
    server, member = Server(), Server()
    server.step(MOVE)
    server.step(
        Commands((Command(2, ((3.0, 0),)), Command(0, ((0.5, 0), (1.0, 1)), "w")), (DotProduct(2, 2),)), 2
    )
    server.step(Commands((Command(0, ((1.7e308, 0), (1.7e308, 0))),), ()), number=3)
    for parts in server.entries:
        member.bundle.commit(decode_entry(parts, member.bundle, member.specs))
        member.work()
    for mine, other in zip(server.state.shards.values(), member.state.shards.values(), strict=True):
        assert mine.values.tobytes() == other.values.tobytes()
        assert {k: v.tobytes() for k, v in mine.rule_state.items()} == {
            k: v.tobytes() for k, v in other.rule_state.items()
        }
        assert (mine.dots, mine.tables.content()) == (
            other.dots,
            {**other.tables.content(), "ordered": {**mine.tables.content()["ordered"]}},
        )


def test_a_joining_member_takes_a_step_on_the_shards_that_lack_it():
    server, member = Server(), Server()
    piece = copy_piece(server.bundle, server.specs[:2])
    server.step(MOVE)
    later = copy_piece(server.bundle, server.specs[2:])
    for specs, tensors in ((server.specs[:2], piece), (server.specs[2:], later)):
        load_piece(member.bundle, read_piece(member.bundle, specs, member.specs, tensors))
    absent = frozenset(spec.id for spec in server.specs[2:])
    entry = decode_entry(server.entries[0], member.bundle, member.specs)
    member.bundle.absent = absent
    member.bundle.commit(without_shards(entry, absent))
    member.work()
    assert member.vector(1).tobytes() == server.vector(1).tobytes()
    assert all(shard.dots == server.state.shards[n].dots for n, shard in member.state.shards.items())


def test_a_piece_with_a_vector_of_another_shape_is_refused():
    server, member = Server(), Server()
    for bad in (np.zeros(SIZE + 1), np.zeros(SIZE, np.float32)):
        server.state.shards[ShardId(0)].rule_state[vector_key(1)] = bad
        with pytest.raises(RemoteProtocolError):
            read_piece(member.bundle, member.specs, member.specs, copy_piece(server.bundle, server.specs))


def test_a_shard_keeps_the_dot_products_of_all_open_steps_of_a_client():
    (shard,) = new_shards()[:1]
    for number in range(MAX_UNACKNOWLEDGED):
        shard.keep_dots((1, 2, number), (0.5,) * MOST_TERMS)

    assert len(shard.dots) == MAX_UNACKNOWLEDGED


def test_a_shard_forgets_the_dot_products_of_answered_and_of_the_oldest_steps_and_of_forgotten_sessions():
    (shard,) = new_shards()[:1]
    for number in range(3 * MOST_DOTS):
        shard.keep_dots((number, 2, 1), (0.5, 0.25))
        shard.keep_dots((1, 2, number), (0.5,))
    assert sum(map(len, shard.dots.values())) in range(MOST_DOTS - 1, MOST_DOTS + 1)
    assert next(reversed(shard.dots)) == (1, 2, 3 * MOST_DOTS - 1)
    assert sum(step[:2] == (1, 2) for step in shard.dots) == MAX_UNACKNOWLEDGED
    shard.forget_dots(lambda step: step[1] == 2)
    assert shard.dots == {}


def begun(server, commands):
    """Return the work of a step on all shards of a server."""
    push = push_with(commands, shards=tuple(range(len(server.specs))))
    server.state.handle(PushArrived("step", push, PushGradients()))
    batch, _ = server.state.take_batch()
    return begin_work(batch, lambda spec: server.applier, 0.0)


def test_a_large_shard_takes_several_pieces_of_work():
    spec = ShardSpec(id=ShardId(0), tensor="w", start=0, stop=3 * PIECE_WORK, row_size=1, bucket=BucketId(0))
    server = Server([Shard(spec=spec, values=np.ones(3 * PIECE_WORK, np.float32), rule_state={})])
    server.applier = Applier(Sgd(), server.specs, "float32")
    current = begun(server, Commands((Command(1, ((2.0, 0), (1.0, 0))),), ()))
    rounds = 0
    while not current.work.done:
        current.work.run(1)
        rounds += 1
    assert rounds > 6
    assert (server.vector(1) == 3).all()


@pytest.mark.parametrize("array", ["", "no array"])
def test_many_small_shards_take_several_pieces_of_work(array):
    server = Server()
    commands = (Command(1, ((2.0, 0),) * 16, array),) * MOST_TERMS
    current = begun(server, Commands(commands, (DotProduct(1, 0, array),) * MOST_TERMS))
    work = 0
    while not current.work.done:
        work += current.work.run(1)
    assert work >= (SHARDS if array else SHARDS * MOST_TERMS * 8) * CALL_WORK


def test_an_answer_with_numbers_of_extremely_different_sizes_fits_into_its_frame():
    values = [(-1.0) ** n * 1.1 * 10.0**exponent for n, exponent in enumerate(range(-300, 300))]
    for dots in (1, MOST_TERMS):
        push = push_with(Commands((), (DotProduct(0, 0),) * dots), shards=tuple(range(len(values))))
        shards = [new_shards()[0] for _ in values]
        for shard, value in zip(shards, values, strict=True):
            shard.keep_dots((push.session, push.incarnation, 1), (value,) * dots)
        answer = answer_to_step(QueuedPush("step", push, tuple(shards), PushGradients(), (), []), ())
        assert len(pack(answer).meta) < 12 << 10
        unpack(pack(answer), Pushed)
        found = [sum(map(Fraction, parts)) for parts in answer.dots]
        assert found == ([sum(map(Fraction, values))] if dots == 1 else [])


@pytest.mark.parametrize("commands", [Commands((), ()), Commands((), (DotProduct(0, 0),))])
def test_an_answer_has_the_highest_epoch_of_all_shards(commands):
    shards = new_shards()
    for epoch, shard in enumerate(shards):
        shard.separate().ordered_groups = {epoch: (0, 4), 7 * epoch: (0, 1)}
    push = push_with(commands, shards=tuple(range(len(shards))))
    queued = QueuedPush("step", push, tuple(shards), PushGradients(), (), [])

    assert answer_to_step(queued, ()).epoch == 7 * (len(shards) - 1) > 0


# --- bad messages ----------------------------------------------------------------------------


def push_with(commands, **fields):
    named = {"clock": 0, "weight": 1, "rate": 0.0, "parts": (), "shards": (0, 1), "numbers": 1, "versions": 0}
    return Push(**SENDER | named | {"own_applied": 0, "assign": True, "commands": commands} | fields)


@pytest.mark.parametrize(
    "fields", [{"assign": False}, {"pull": True}, {"vector": 1}, {"clock": 3}, {"groups": (1, 0, 1)}]
)
def test_commands_with_fields_of_gradients_are_malformed(fields):
    server = Server()
    checks = QuestionChecks(server.state, server.specs, most_weight=16)
    assert checks.refusal(push_with(MOVE), most_bytes=1 << 20) is None
    refusal = checks.refusal(push_with(MOVE, **fields), most_bytes=1 << 20)
    assert refusal is not None
    assert refusal.code == "malformed"


@pytest.mark.parametrize(
    "commands",
    [
        Commands((Command(1, ((1.0, 0),) * 10_000),), ()),
        Commands((Command(1, ()),) * (MOST_TERMS + 1), ()),
        Commands((), (DotProduct(0, 0),) * (MOST_TERMS + 1)),
        Commands((Command(1, ((math.nan, 0),)),), ()),
        Commands((Command(1, ((math.inf, 0),)),), ()),
        Commands((Command(1, (), "w" * 2000),), ()),
        Commands((Command(-1, ()),), ()),
        Commands((Command(1, ((1.0, 1 << 40),)),), ()),
    ],
)
def test_commands_out_of_bounds_are_malformed(commands):
    with pytest.raises(RemoteProtocolError, match="malformed Push"):
        unpack(pack(push_with(commands)), Push)


def test_commands_of_the_largest_step_fit_into_the_meta_of_a_frame():
    terms = tuple((0.1 * number, number) for number in range(12))
    commands = Commands(tuple(Command(n, terms) for n in range(MOST_TERMS)), (DotProduct(1, 2),) * MOST_TERMS)
    assert len(msgspec.msgpack.encode(push_with(commands))) < 16 << 10
