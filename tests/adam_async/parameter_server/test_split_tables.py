"""Tables that shards share, and pushes that split them: memory per shard, and clients that may split them."""

import gc
import tracemalloc

import pytest

from adam_async.messages import ReportSteps, StepReport, Ticked
from adam_async.model.rules import Sgd
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    PushArrived,
    Refuse,
    ReplicasChanged,
    StepsArrived,
    TickArrived,
)
from adam_async.parameter_server.gradients import PushGradients
from adam_async.parameter_server.question_checks import MOST_SESSIONS
from adam_async.parameter_server.shard import BySession, ShardTables
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.storage import own_shards
from tests.adam_async.parameter_server.copies import spec_of
from tests.adam_async.parameter_server.timelines import SENDER, push_on, tick_on

SHARDS = 200

PROMISED_BYTES = 24 << 10
"""Memory of the tables of a shard for one client that the map names; docs/explanation/security.md has it."""

WORKER, CLIENT, INVENTED = (0, 7), (1, 9), (5, 77)
"""Replica and generation of a worker and a client that the map names, and of one that it does not name."""


class Server:
    """A server of small shards, whose batches apply at once."""

    def __init__(self, live=(WORKER, CLIENT), **options):
        specs = [spec_of(number, f"t{number}", 0, 2) for number in range(SHARDS)]
        self.state = ServerState(store="run", generation=1, shards=own_shards(specs, [Sgd()]), **options)
        self.state.handle(ReplicasChanged(dict(live)))

    def push(self, sender, shards, numbers, *, session=1, read=0, is_finite=True):
        sender = {"session": session, "incarnation": sender[1], "replica": sender[0], "clock": 0, "rate": 0.0}
        numbers_of = {"numbers": tuple(numbers), "versions": (read,) * len(shards)}
        push = push_on(shards, **sender, **numbers_of)
        finite = None if is_finite else [False] * len(shards)
        effects = self.state.handle(PushArrived(None, push, PushGradients(), finite))
        while self.state.has_work:
            work, more = self.state.take_batch()
            effects += more
            if work is not None:
                effects += self.state.handle(Applied(work))
        return effects[0]

    def tables(self):
        return self.state.bundle.count_tables()


EVERY = range(SHARDS)
MIXED = (*(1,) * (SHARDS - 1), 2)
"""Numbers of which the last leaves a gap."""


def test_a_client_that_the_map_does_not_name_splits_no_tables():
    server = Server()
    assert isinstance(server.push(WORKER, EVERY, (1,) * SHARDS), Answer)
    assert isinstance(server.push(INVENTED, EVERY, (1,) * SHARDS), Answer)
    sender = {**SENDER, "incarnation": 77, "replica": 5}
    tick = tick_on((3, 4), **{**sender, "clock": 0})
    steps = ReportSteps(number=2, shards=(3, 4), steps=(StepReport(0, 1, 0, ()),), **sender)
    for answer in (
        server.push(INVENTED, [3], [2]),
        server.push(INVENTED, EVERY, MIXED),
        server.push(INVENTED, EVERY[::2], (2,) * (SHARDS // 2)),
        server.push(INVENTED, EVERY[::2], (2,) * (SHARDS // 2), is_finite=False),
        server.state.handle(TickArrived(None, tick))[0],
        server.state.handle(StepsArrived(object(), steps))[0],
    ):
        assert isinstance(answer, Refuse)
        assert answer.code == "busy"
        assert "has no generation 77 of replica 5 yet" in answer.text
    assert server.tables() == 1
    assert isinstance(server.push(INVENTED, EVERY, (1,) * SHARDS), Answer)  # a repetition


def test_a_client_may_split_tables_once_the_map_names_it_and_an_ended_one_gets_its_answers_again():
    server = Server(live=(WORKER, CLIENT))
    assert isinstance(server.push(CLIENT, [3], [1]), Answer)
    assert server.tables() == 2
    server.state.handle(ReplicasChanged(dict([WORKER])))
    assert isinstance(server.push(CLIENT, [3], [1]), Answer)
    assert isinstance(server.push(CLIENT, [3, 4], [1, 1]), Refuse)
    assert server.tables() == 2


def test_in_bsp_a_client_that_the_map_does_not_name_splits_no_tables():
    server = Server(clocked=True, summed_weight=1)
    assert server.push(INVENTED, EVERY, (1,) * SHARDS).code == "busy"
    assert server.tables() == 1


def test_a_tick_on_all_shards_leaves_the_shards_of_each_message_together():
    server = Server(clocked=True)
    server.push(WORKER, EVERY[:50], (1,) * 50)
    server.push(WORKER, EVERY[50:], (1,) * 150)
    assert server.tables() == 2
    for replica, generation in (WORKER, INVENTED):
        tick = tick_on(EVERY, incarnation=generation, replica=replica)
        assert isinstance(server.state.handle(TickArrived(None, tick))[0].body, Ticked)
    assert server.tables() == 2
    assert {shard.clocks[0] for shard in server.state.shards.values()} == {1}
    assert {shard.tables.early[INVENTED] for shard in server.state.shards.values()} == {1}


def measured(action):
    """Return the memory that an action leaves, in bytes."""
    gc.collect()
    tracemalloc.start()
    try:
        action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_split_shares_the_numbers_of_all_earlier_sessions():
    server = Server()
    for session in range(1500):
        for tables in server.state.bundle.tables():
            tables.last_number[session, 1] = tables.ordered[session, 1] = 1
            tables.refuse((session, 1), 1)

    def split():
        for number in EVERY:
            server.push(CLIENT, [number], [1])

    assert measured(split) < SHARDS * (4 << 10)
    assert server.tables() == SHARDS
    assert all(len(shard.tables.last_number.whole()) == 1501 for shard in server.state.shards.values())


@pytest.mark.slow
def test_one_named_client_adds_at_most_the_promised_memory_for_each_shard():
    server, attacked = Server(), EVERY[:20]

    def attack():
        for session in range(MOST_SESSIONS):
            for number in range(1, 41):
                finite = number > 20
                for shard in attacked:
                    read = max(server.state.shards[shard].version - number**2, 0)
                    server.push(CLIENT, [shard], [number], session=session, read=read, is_finite=finite)

    assert measured(attack) < len(attacked) * PROMISED_BYTES
    assert server.tables() == len(attacked) + 1


def test_split_tables_are_equal_and_go_on_apart():
    tables = ShardTables(shards=3)
    for session in range(100):
        tables.last_number[session, 1] = tables.ordered[session, 1] = session
        tables.count_staleness(1, session % 5)
    other = tables.split(1)
    assert tables.equals(other)
    assert (tables.shards, other.shards) == (2, 1)
    other.last_number[7, 1] = 1000
    other.count_staleness(1, 2)
    assert (tables.last_number[7, 1], other.last_number[7, 1], other.last_number[8, 1]) == (7, 1000, 8)
    assert (tables.staleness_of[1][2], other.staleness_of[1][2]) == (20, 21)
    tables.count_staleness(1, 3)
    assert (tables.staleness_of[1][3], other.staleness_of[1][3]) == (21, 20)
    assert not tables.equals(other)
    third = tables.split(1)
    for each in (tables, other, third):
        each.forget_session((7, 1))
    assert [each.last_number[7, 1] for each in (tables, other, third)] == [0, 0, 0]
    assert (7, 1) not in tables.last_number.whole()


def test_own_entries_stay_few_and_shared_ones_are_found():
    numbers = BySession(0)
    for session in range(1000):
        numbers[session, 1] = session
        numbers.split()
    assert len(numbers) <= 64
    assert [numbers[session, 1] for session in (0, 500, 999, 1000)] == [0, 500, 999, 0]
    assert numbers.whole() == {(session, 1): session for session in range(1000)}
