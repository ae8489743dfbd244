"""Decisions of a parameter server, as timelines without a loop, a link or a value."""

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adam_async.messages import (
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    REFUSED,
    Problem,
    Pull,
    ReportSteps,
    StepReport,
    Ticked,
)
from adam_async.parameter_server import push_queue, waiting_requests
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    EpochBegan,
    PullArrived,
    PushArrived,
    Refuse,
    ReplicasChanged,
    SendValues,
    StepsArrived,
    TickArrived,
)
from adam_async.parameter_server.gradients import DeltaPart, PushGradients
from adam_async.parameter_server.log_entries import MOST_BYTES
from adam_async.parameter_server.push_queue import MAX_BATCH
from adam_async.parameter_server.replica_clocks import REMEMBERED
from adam_async.parameter_server.served_store import DETAILS_BYTES
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import count_server
from adam_async.run.ids import Replica
from tests.adam_async.parameter_server.timelines import (
    SENDER,
    Timeline,
    numbers_in,
    push_on,
    shard_of,
    tick_on,
)

ZERO, ONE, TWO = Replica(0), Replica(1), Replica(2)


def replica_generations(*replicas, **incarnations):
    """The live replicas, each in generation 1 unless given otherwise."""
    return ReplicasChanged({replica: incarnations.get(f"of_{replica}", 1) for replica in replicas})


def push_of(shards, numbers, *, read=0, own_applied=0, **fields):
    each = {"versions": (read,) * len(shards), "own_applied": (own_applied,) * len(shards)}
    return push_on(shards, numbers=tuple(numbers), **each, **fields)


class Server(Timeline):
    """A state with a shell of the test: requests are words, batches apply on request."""

    def __init__(self, shards=(0, 1), live=(ZERO,), **options):
        shards = [shard_of(number) for number in shards]
        self.state = ServerState(store="run", generation=1, shards=shards, **options)
        if live is not None:
            self.tell(replica_generations(*live))

    def push(self, request, *args, finite=True, **fields):
        push = push_of(*args, **fields)
        verdict = None if finite is True else finite or [False] * len(push.shards)
        return self.tell(PushArrived(request, push, PushGradients(), verdict))

    def pull(self, request, *shards, store="run", generation=1):
        return self.tell(PullArrived(request, Pull(store=store, generation=generation, shards=shards)))

    def tick(self, request, shards, clock, **fields):
        return self.tell(TickArrived(request, tick_on(shards, clock=clock, **fields)))

    def record(self, request, number, steps, *, shards=(0, 1), **fields):
        """Steps as (clock, staleness) or (clock, staleness, refused places)."""
        plain = [StepReport(clock, 1, staleness, *rest) for clock, staleness, *rest in steps]
        told = tuple(
            [
                msgspec.structs.replace(each, loss_sum=float(sum(numbers_in(each.groups[1:]))))
                for each in plain
            ]
        )
        body = ReportSteps(shards=tuple(shards), number=number, steps=told, **{**SENDER, **fields})
        return self.tell(StepsArrived(request, body))

    def apply(self, outcomes=()):
        """Apply one batch; `outcomes` as in `Applied`."""
        batch, effects = self.state.take_batch()
        if batch is not None:
            effects += self.tell(Applied(batch, outcomes))
        return effects


def answers(effects):
    return [effect.request for effect in effects]


def test_a_push_is_acknowledged_when_it_is_applied_with_the_versions_after_it():
    server = Server()
    assert server.push("a", (0, 1), (1, 1)) == []
    assert not server.state.idle
    (answer,) = server.apply()
    assert isinstance(answer, Answer)
    assert (answer.request, answer.body.versions, answer.body.problems) == ("a", 1, ())
    assert answer.shards == ()
    assert server.state.idle


def test_a_retried_push_is_applied_once_and_answered_again():
    server = Server()
    server.push("a", (0,), (1,))
    server.drain()
    (again,) = server.push("again", (0,), (1,))
    assert again.body.problems == (Problem(0, DUPLICATE),)
    assert again.body.versions == 1
    assert (server.shard().version, server.shard().tables.duplicates) == (1, 1)


def test_a_duplicate_of_a_queued_push_is_not_acknowledged_before_it_is_applied():
    server = Server()
    server.push("a", (0,), (1,))
    assert server.push("again", (0,), (1,)) == []
    effects = server.drain()
    assert answers(effects) == ["a", "again"]
    assert effects[1].body.versions == 1
    assert server.shard().version == 1


def test_a_gap_is_answered_with_the_number_that_is_wanted_and_applies_nothing():
    server = Server()
    (answer,) = server.push("late", (0,), (3,))
    assert answer.body.problems == (Problem(0, GAP, 1),)
    server.push("a", (0,), (1,))
    server.drain()
    (answer,) = server.push("late", (0,), (3,))
    assert answer.body.problems == (Problem(0, GAP, 2),)
    assert server.shard().version == 1


def test_each_session_and_each_generation_of_it_has_numbers_of_its_own():
    server = Server()
    for request, session, replica_generation in (("a", 1, 1), ("b", 2, 1), ("c", 1, 2)):
        server.push(request, (0,), (1,), session=session, incarnation=replica_generation)
    server.drain()
    assert server.shard().version == 3
    assert server.shard().last_number == {(1, 1): 1, (2, 1): 1, (1, 2): 1}


def test_shards_that_live_elsewhere_leave_the_others_applied():
    server = Server(shards=(0,))
    server.push("a", (0, 7), (1, 1))
    (answer,) = server.drain()
    assert answer.body.problems == (Problem(1, NOT_PRIMARY),)
    assert answer.body.versions == (1, 0)
    assert server.shard().version == 1


@pytest.mark.parametrize("what", ["push", "pull", "tick", "record"])
def test_another_run_is_refused_by_name(what):
    server = Server()
    effects = {
        "push": lambda: server.push("a", (0,), (1,), store="old"),
        "pull": lambda: server.pull("a", 0, store="old"),
        "tick": lambda: server.tick("a", (0,), 1, store="old"),
        "record": lambda: server.record("a", 1, [(1, 0)], store="old"),
    }[what]()
    (refusal,) = effects
    assert isinstance(refusal, Refuse)
    assert (refusal.request, refusal.code) == ("a", "wrong-run")
    assert "store run" in refusal.text
    assert "old" in refusal.text


def test_a_pull_of_shards_that_live_elsewhere_is_refused_with_their_numbers():
    (refusal,) = Server(shards=(0,)).pull("p", 0, 5)
    assert (refusal.code, refusal.text) == ("not-primary", "not the primary of shards [5]")


def test_a_pull_waits_for_the_pushes_before_it():
    server = Server()
    server.push("a", (0,), (1,))
    assert server.pull("p", 0, 1) == []
    effects = server.drain()
    assert answers(effects) == ["a", "p"]
    assert isinstance(effects[1], SendValues)
    assert [int(shard.spec.id) for shard in effects[1].shards] == [0, 1]


def test_a_push_that_pulls_brings_back_its_shards_unless_part_of_it_is_open():
    server = Server(shards=(0, 1))
    server.push("a", (0, 1), (1, 1), pull=True)
    (answer,) = server.drain()
    assert [int(shard.spec.id) for shard in answer.shards] == [0, 1]
    server.push("b", (0, 1), (2, 9), pull=True)
    (answer,) = server.drain()
    assert answer.shards == ()
    (answer,) = server.push("a again", (0, 1), (1, 1), pull=True)
    assert len(answer.shards) == 2


def test_pushes_for_the_same_shards_are_applied_together_in_the_order_they_came():
    server = Server()
    for number in range(1, 4):
        server.push(f"a{number}", (0,), (number,))
    server.push("other", (1,), (1,))
    server.push("a4", (0,), (4,))
    batch, _ = server.state.take_batch()
    assert [queued.request for queued in batch.pushes] == ["a1", "a2", "a3", "a4"]
    server.tell(Applied(batch))
    assert answers(server.drain()) == ["other"]
    assert (server.state.bundle.batches, server.state.bundle.batched_pushes) == (2, 5)


def taken(server):
    """The requests of each batch that is taken, in order."""
    batches = []
    while not server.state.idle:
        batch, _ = server.state.take_batch()
        if batch is None:
            break
        batches.append([queued.request for queued in batch.pushes])
        server.tell(Applied(batch))
    return batches


def test_pushes_of_two_messages_each_join_message_by_message():
    server = Server(shards=(0, 1, 2, 3))
    for session, name in ((1, "A"), (2, "B"), (3, "C")):
        server.push(f"{name}0", (0, 1), (1, 1), session=session)
        server.push(f"{name}1", (2, 3), (1, 1), session=session)
    assert taken(server) == [["A0", "B0", "C0"], ["A1", "B1", "C1"]]


def test_a_push_passes_no_push_with_which_it_shares_a_shard():
    server = Server(shards=(0, 1, 2))
    server.push("a", (0,), (1,), session=1)
    server.push("both", (0, 1), (1, 1), session=2)
    server.push("b", (0,), (2,), session=1)
    server.push("apart", (2,), (1,), session=1)
    assert taken(server) == [["a"], ["both"], ["b"], ["apart"]]


def test_a_push_passes_no_pull():
    server = Server()
    server.push("a", (0,), (1,))
    server.pull("pull", 0)
    server.push("b", (0,), (2,))
    batch, _ = server.state.take_batch()
    assert [queued.request for queued in batch.pushes] == ["a"]
    server.tell(Applied(batch))
    batch, effects = server.state.take_batch()
    assert answers(effects) == ["pull"]
    assert [queued.request for queued in batch.pushes] == ["b"]


def test_the_rest_of_a_group_waits_behind_the_other_groups():
    server = Server()
    for number in range(1, MAX_BATCH + 2):
        server.push(f"a{number}", (0,), (number,))
    server.push("other", (1,), (1,))
    assert taken(server)[1:] == [["other"], [f"a{MAX_BATCH + 1}"]]


def test_no_value_leaves_while_a_batch_is_being_applied():
    server = Server()
    server.push("a", (0,), (1,))
    batch, _ = server.state.take_batch()
    assert not server.state.idle
    assert server.pull("pull", 0) == []
    assert server.push("again", (0,), (1,), pull=True) == []
    assert server.tick("tick", (0,), 2) == []
    assert answers(server.tell(Applied(batch))) == ["a"]
    _, effects = server.state.take_batch()
    assert answers(effects) == ["pull", "again", "tick"]
    assert server.state.idle


@pytest.mark.parametrize(("size", "most"), [(1 << 18, 8), (1 << 17, 16), (1 << 10, MAX_BATCH), (1 << 30, 1)])
def test_a_batch_is_as_large_as_one_turn_can_apply(size, most):
    server = Server()
    server.shard().values = np.broadcast_to(np.zeros(1), (size,))
    for number in range(1, MAX_BATCH + 3):
        server.state.handle(PushArrived(number, push_of((0,), (number,)), PushGradients()))
    batch, _ = server.state.take_batch()
    assert len(batch.pushes) == most


def test_a_batch_has_a_limit():
    server = Server()
    for number in range(1, MAX_BATCH + 3):
        server.push(number, (0,), (number,))
    batch, _ = server.state.take_batch()
    assert len(batch.pushes) == MAX_BATCH


def test_a_batch_is_an_entry_that_the_other_copies_take(monkeypatch):
    assert push_queue.BATCH_BYTES + MAX_BATCH * DETAILS_BYTES <= MOST_BYTES
    gradients = PushGradients((DeltaPart(np.zeros(2, np.float32), (2,), 1.0, True),))
    monkeypatch.setattr(push_queue, "BATCH_BYTES", 3 * gradients.nbytes)
    server = Server()
    for number in range(1, 8):
        server.state.handle(PushArrived(number, push_of((0,), (number,)), gradients))
    batch, _ = server.state.take_batch()
    assert len(batch.pushes) == 3


def test_staleness_counts_what_was_applied_since_the_read_less_what_was_in_the_copy():
    server = Server(live=(ZERO, ONE))
    for number, (read, own_applied) in enumerate([(0, 0), (0, 0), (1, 0), (1, 2), (0, 9)], start=1):
        server.push(number, (0,), (number,), read=read, own_applied=own_applied)
        server.drain()
    # at versions 0 to 4: 0, 1, 2-1, 3-1-2, less than nothing
    assert server.shard().staleness == {0: 3, 1: 2}


def test_clocks_advance_with_pushes_and_ticks_and_never_go_back():
    server = Server(live=(ZERO, ONE))
    server.push("a", (0,), (1,), clock=3)
    server.drain()
    (answer,) = server.tick("t", (0, 1, 99), 5)
    assert isinstance(answer.body, Ticked)
    server.push("b", (0,), (2,), clock=4)
    server.drain()
    assert server.shard(0).clocks == {ZERO: 5, ONE: 0}
    assert server.shard(1).clocks == {ZERO: 5, ONE: 0}
    assert server.shard(0).tables.slowest_clock() == 0


def test_a_lost_replica_leaves_the_minimum_and_moves_no_clock_any_more():
    server = Server(live=(ZERO, ONE))
    server.tick("t", (0,), 7)
    server.tell(replica_generations(ZERO))
    assert server.shard().tables.slowest_clock() == 7
    server.tick("late", (0,), 3, replica=1)
    assert server.shard().clocks == {ZERO: 7}


def test_a_joining_replica_starts_at_the_slowest_clock_of_those_that_stay():
    server = Server(live=(ZERO, ONE))
    server.tick("t", (0,), 10)
    server.tick("t", (0,), 4, replica=1)
    server.tell(replica_generations(ZERO, ONE, TWO))
    assert server.shard().clocks[TWO] == 4
    server.tell(replica_generations(ZERO))
    server.tell(replica_generations(ZERO, ONE))
    assert server.shard().clocks == {ZERO: 10, ONE: 10}


def test_a_replica_that_joins_an_empty_run_starts_at_the_clocks_of_the_last_ones():
    server = Server(live=(ZERO, ONE))
    server.tick("t", (0,), 10)
    server.tick("t", (0,), 8, replica=1)
    server.tell(replica_generations())
    server.tell(replica_generations(TWO))
    assert server.shard().clocks == {TWO: 8}


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("what", ["push", "tick"])
def test_a_message_of_an_ended_generation_is_refused_and_changes_nothing(what, unseen):
    server = Server(live=(ZERO, ONE))
    server.push("first", (0,), (1,), clock=3)
    server.drain()
    if not unseen:
        server.tell(replica_generations(ONE))
    server.tell(replica_generations(ZERO, ONE, of_0=2))
    before = counted(server), dict(server.shard().clocks)
    (refusal,) = {
        "push": lambda: server.push("late", (0,), (2,), clock=4),
        "tick": lambda: server.tick("late", (0,), 4),
    }[what]()
    assert isinstance(refusal, Refuse)
    assert (refusal.request, refusal.code) == ("late", "generation-over")
    assert "generation 1 of replica 0 has ended" in refusal.text
    assert server.state.idle
    assert (counted(server), server.shard().clocks) == before


def test_pushes_from_before_the_end_of_a_generation_stay_and_are_answered_again():
    server = Server(live=(ZERO, ONE))
    server.push("a", (0, 1), (1, 1))
    server.tell(replica_generations(ONE))
    (answer,) = server.drain()
    assert (answer.request, answer.body.problems) == ("a", ())
    (again,) = server.push("a again", (0, 1), (1, 1))
    assert again.body.problems == (Problem(0, DUPLICATE), Problem(1, DUPLICATE))
    (refusal,) = server.push("part of it is new", (0, 1), (1, 2))
    assert refusal.code == "generation-over"
    assert (server.shard(0).version, server.shard(1).version) == (1, 1)


def test_a_generation_that_the_map_has_not_named_is_served_while_its_predecessor_is_live():
    server = Server(live=(ZERO, ONE))
    server.push("early", (0,), (1,), incarnation=2)
    server.tick("early too", (0,), 1, incarnation=2)
    (answer, _) = server.drain()
    assert answer.body.problems == ()
    server.tell(replica_generations(ZERO, ONE, of_0=2))
    server.push("late", (0,), (1,), incarnation=1)
    assert server.state.idle
    server.push("on", (0,), (2,), incarnation=2)
    server.drain()
    assert server.shard().version == 2


def test_with_no_live_replica_ended_generations_are_refused_and_new_ones_served():
    server = Server(live=(ZERO, ONE))
    server.tell(replica_generations())
    for replica in (ZERO, ONE):
        (refusal,) = server.push("late", (0,), (1,), replica=replica)
        assert refusal.code == "generation-over"
    assert server.push("first of another", (0,), (1,), incarnation=2) == []
    assert [effect.body.problems for effect in server.drain()] == [()]


def test_a_generation_that_is_live_again_is_served_again():
    server = Server(live=(ZERO, ONE))
    server.tell(replica_generations(ONE))
    server.tell(replica_generations(ZERO, ONE))
    assert server.push("a", (0,), (1,)) == []
    assert [effect.body.problems for effect in server.drain()] == [()]


def test_a_push_of_a_forgotten_generation_is_refused_also_if_it_was_applied():
    server = Server(live=(ZERO,))
    server.push("a", (0,), (1,))
    server.record("in place", 1, [(1, 0)], incarnation=1, shards=(1,))
    server.drain()
    for replica_generation in range(2, REMEMBERED + 3):
        server.tell(replica_generations(ZERO, of_0=replica_generation))
    assert (1, 1) not in server.shard().last_number
    (refusal,) = server.push("a again", (0,), (1,))
    assert refusal.code == "generation-over"
    (refusal,) = server.record("in place again", 1, [(1, 0)], incarnation=1, shards=(1,))
    assert refusal.code == "generation-over"
    assert (server.shard(0).version, server.shard(1).version) == (1, 1)


def test_only_the_newest_ended_generations_are_remembered():
    server = Server(live=(ZERO, ONE))
    newest = 3 * REMEMBERED
    for replica_generation in range(2, newest + 1):
        server.tell(replica_generations(ZERO, ONE, of_0=replica_generation))
    for replica_generation in range(newest - REMEMBERED, newest):
        (refusal,) = server.tick("late", (0,), 9, incarnation=replica_generation)
        assert refusal.code == "generation-over"
    assert server.state.bundle.replicas.ended.forgotten == newest - 1 - REMEMBERED


def counted(server, number=0):
    shard, tables = server.shard(number), server.shard(number).tables
    return shard.version, shard.last_number, dict(shard.staleness), tables.refused, tables.duplicates


def test_a_record_that_is_partly_known_is_refused_and_counts_nothing():
    server = Server()
    server.record("a", 1, [(1, 0)])
    before = counted(server)
    (refusal,) = server.record("b", 1, [(1, 0), (2, 0)])
    assert (refusal.code, refusal.text) == ("gap", "expected step 2, not 1")
    assert counted(server) == before


def test_records_of_other_sessions_and_generations_have_numbers_of_their_own():
    server = Server(live=(ZERO, ONE))
    server.record("a", 1, [(1, 0)])
    server.record("b", 1, [(1, 1)], session=2, replica=1)
    server.record("c", 1, [(2, 2)], incarnation=2)  # a life that the controllers have not named yet
    assert counted(server) == (3, {(1, 1): 1, (2, 1): 1, (1, 2): 1}, {0: 1, 1: 1, 2: 1}, 0, 0)
    assert server.shard().clocks == {ZERO: 1, ONE: 1}
    server.tell(replica_generations(ZERO, ONE, of_0=2))
    server.record("d", 2, [(3, 0)], incarnation=2)
    assert server.shard().clocks == {ZERO: 3, ONE: 1}


def test_the_record_of_a_replica_that_was_given_up_moves_no_clock():
    server = Server(live=(ZERO, ONE))
    server.tell(replica_generations(ZERO))
    server.record("late", 1, [(9, 0)], replica=1)
    assert server.shard().clocks == {ZERO: 0}
    assert server.shard().version == 1


def test_a_shard_counts_the_groups_of_each_push_that_it_takes_or_refuses():
    server = Server()
    server.push("first", (0, 1), (1, 1), groups=(1, 0, 2))
    server.push("first again", (0, 1), (1, 1), groups=(1, 0, 2))
    server.drain()
    server.push("repeated", (0, 1), (1, 1), groups=(1, 0, 2))
    server.push("gap", (0, 1), (3, 3), groups=(1, 5, 6))
    assert server.shard(0).tables.groups == {1: (0, 2)}
    server.push("not finite", (0, 1), (2, 2), finite=[True, False], groups=(1, 7, 8))
    server.push("no groups", (0, 1), (3, 3))
    server.drain()
    assert server.shard(0).tables.groups == server.shard(1).tables.groups == {1: (0, 2, 7, 8)}


def test_a_shard_takes_each_group_once_whichever_session_sends_it():
    server = Server(live=(ZERO, ONE))
    server.push("first", (0,), (1,), groups=(1, 0, 2))
    server.push("again", (0, 1), (1, 1), session=2, replica=1, clock=3, groups=(1, 0, 2))
    effects = server.drain()
    (again,) = [each.body for each in effects if each.request == "again"]
    assert again.problems == (Problem(0, DUPLICATE),)
    assert [server.shard(number).version for number in (0, 1)] == [1, 1]
    assert [server.shard(number).tables.groups for number in (0, 1)] == [{1: (0, 2)}, {1: (0, 2)}]
    assert server.shard(0).clocks[ONE] == 3, "it counts as a tick"
    # Its number is used up: a repetition is a repetition, and the next push follows.
    (repeated,) = server.push("repeated", (0, 1), (1, 1), session=2, replica=1, clock=3, groups=(1, 0, 2))
    assert repeated.body.problems == (Problem(0, DUPLICATE), Problem(1, DUPLICATE))
    server.push("next", (0, 1), (2, 2), session=2, replica=1, groups=(1, 2, 3))
    server.drain()
    assert [server.shard(number).version for number in (0, 1)] == [2, 2]


def test_a_group_that_waits_in_the_queue_is_taken_once():
    server = Server(live=(ZERO, ONE))
    server.push("first", (0, 1), (1, 1), groups=(1, 0, 1))
    server.push("again", (0, 1), (1, 1), session=2, replica=1, groups=(1, 0, 1))
    assert server.shard().tables.groups == {}, "nothing is applied yet"
    server.drain()
    assert server.shard().version == 1
    assert server.shard().last_number == {(1, 1): 1, (2, 1): 1}


@pytest.mark.parametrize("waits", [True, False])
def test_a_push_with_some_known_groups_must_wait_and_uses_no_number(waits):
    server = Server(live=(ZERO, ONE))
    server.push("first", (0,), (1,), groups=(1, 0, 1))
    if not waits:
        server.drain()
    (refusal,) = server.push("mixed", (0, 1), (1, 1), session=2, replica=1, groups=(1, 0, 2))
    assert (refusal.code, refusal.text) == ("busy", "a shard has some of the groups (1, 0, 2)")
    server.push("rest", (0, 1), (1, 1), session=2, replica=1, groups=(1, 1, 2))
    server.drain()
    assert server.shard(0).tables.groups == {1: (0, 2)}
    assert server.shard(1).tables.groups == {1: (1, 2)}


def test_a_repetition_of_a_push_with_other_groups_beside_it_is_answered():
    server = Server()
    server.push("first", (0, 1), (1, 1), groups=(1, 0, 2))
    server.drain()
    (repeated,) = server.push("repeated", (0, 1), (1, 1), groups=(1, 1, 3))
    assert repeated.body.problems == (Problem(0, DUPLICATE), Problem(1, DUPLICATE))


def test_in_bsp_a_known_group_is_no_contribution_and_the_sum_does_not_wait():
    server = Server(live=(ZERO, ONE), clocked=True, summed_weight=1)
    server.push("zero", (0, 1), (1, 1), groups=(1, 0, 1))
    server.push("one", (0, 1), (1, 1), session=2, replica=1, groups=(1, 0, 1))
    assert server.shard().clocks == {ZERO: 1, ONE: 1}
    work = server.state.bundle.take_work()
    assert (work.clock, [queued.request for queued in work.pushes]) == (1, ["zero"])


def test_a_new_primary_knows_the_counted_groups_and_no_ordered_ones():
    server = Server(live=(ZERO, ONE))
    server.push("counted", (0, 1), (1, 1), groups=(1, 0, 1))
    server.drain()
    server.push("ordered", (0, 1), (2, 2), groups=(1, 1, 2))
    server.state.follow()
    server.state.lead()
    server.push("ordered again", (0, 1), (2, 2), groups=(1, 1, 2))
    server.push("counted again", (0, 1), (1, 1), session=2, replica=1, groups=(1, 0, 1))
    server.drain()
    assert server.shard().version == 2
    assert server.shard().tables.groups == {1: (0, 2)}


def test_a_forgotten_session_and_an_ended_generation_leave_their_groups():
    server = Server(live=(ZERO, ONE))
    server.push("push", (0, 1), (1, 1), groups=(1, 0, 2))
    server.drain()
    server.tell(replica_generations(ONE))
    server.state.forget([(1, 1)])
    assert not server.shard().last_number
    assert server.shard().tables.groups == {1: (0, 2)}
    server.tell(EpochBegan(2, 0))
    assert server.shard().tables.groups == {1: (0, 2)}


def test_the_groups_of_reported_steps_are_counted_on_every_shard_refused_or_not():
    server = Server()
    steps = [(1, 0, (), (1, 4, 5)), (2, 0, (1,), (1, 5, 6)), (3, 0, (), (2, 0, 1)), (4, 0)]
    server.record("steps", 1, steps)
    server.record("again", 1, steps)
    server.record("a group of a lost worker", 1, steps[:1], session=2)
    for number in (0, 1):
        assert server.shard(number).tables.groups == {1: (4, 6), 2: (0, 1)}


@pytest.mark.parametrize("finite", [True, [True, False]])
def test_in_bsp_a_contribution_counts_its_groups_before_its_sum_is_complete(finite):
    server = Server(live=(ZERO, ONE), clocked=True, summed_weight=2)
    server.push("push", (0, 1), (1, 1), finite=finite, groups=(1, 3, 4))
    assert server.shard(0).pending.clock == 0
    assert [server.shard(number).tables.groups for number in (0, 1)] == [{1: (3, 4)}] * 2
    server.push("late", (0, 1), (2, 2), clock=1, groups=(1, 4, 5))
    assert server.shard(1).tables.groups == {1: (3, 5)}, "a refused contribution uses up its groups"


def test_statistics_add_up():
    server = Server()
    server.push("a", (0, 1), (1, 1))
    server.push("b", (0, 1), (2, 2), finite=False)
    server.drain()
    server.push("a", (0, 1), (1, 1))
    counts = count_server([server.state])
    assert counts.versions == {"0": 1, "1": 1}
    assert counts.staleness == {"0": 2}
    assert (counts.refused, counts.duplicates) == (2, 2)


class Pushes(RuleBasedStateMachine):
    """Clients push, repeat, skip and pull; batches apply at random. A model of one line each checks."""

    SHARDS = (0, 1, 2)
    sessions = st.integers(1, 2)
    chosen = st.lists(st.sampled_from(SHARDS), min_size=1, max_size=3, unique=True)

    def __init__(self):
        super().__init__()
        self.server = Server(shards=self.SHARDS, live=(ZERO, ONE, TWO))
        self.requests = 0
        self.open = set()
        self.last = {}
        self.applied = dict.fromkeys(self.SHARDS, 0)

    def asked(self):
        self.requests += 1
        self.open.add(self.requests)
        return self.requests

    def take(self, effects):
        for effect in effects:
            assert effect.request in self.open, "a question is answered once"
            self.open.remove(effect.request)

    @rule(session=sessions, shards=chosen, finite=st.booleans(), pull=st.booleans())
    def pushes(self, session, shards, finite, pull):
        request = self.asked()
        numbers = []
        for shard in shards:
            self.last[session, shard] = self.last.get((session, shard), 0) + 1
            numbers.append(self.last[session, shard])
            self.applied[shard] += finite
        self.take(
            self.server.push(
                request, shards, numbers, session=session, replica=session, pull=pull, finite=finite
            )
        )

    @rule(session=sessions, shards=chosen, back=st.integers(0, 3))
    def repeats(self, session, shards, back):
        numbers = [self.last.get((session, shard), 0) - back for shard in shards]
        if min(numbers) >= 1:
            self.take(self.server.push(self.asked(), shards, numbers, session=session, replica=session))

    @rule(session=sessions, shards=chosen, ahead=st.integers(2, 4))
    def jumps(self, session, shards, ahead):
        numbers = [self.last.get((session, shard), 0) + ahead for shard in shards]
        self.take(self.server.push(self.asked(), shards, numbers, session=session, replica=session))

    @rule(shards=chosen)
    def pulls(self, shards):
        self.take(self.server.pull(self.asked(), *shards))

    @rule()
    def applies(self):
        self.take(self.server.apply())

    @invariant()
    def numbers_are_those_of_the_model(self):
        self.server.state.check_invariants()
        for (session, shard), number in self.last.items():
            assert self.server.shard(shard).tables.ordered[session, 1] == number
        if self.server.state.idle:
            for (session, shard), number in self.last.items():
                assert self.server.shard(shard).last_number[session, 1] == number
            assert not self.open
            assert {n: self.server.shard(n).version for n in self.SHARDS} == self.applied

    def teardown(self):
        self.take(self.server.drain())
        self.numbers_are_those_of_the_model()


Pushes.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPushes = Pushes.TestCase


def test_an_event_that_waits_for_an_epoch_delays_its_own_session_only():
    server = Server()
    assert server.tick("ahead", (0,), 1, session=9, replica=1, epoch=1) == []
    assert server.push("behind", (0,), (1,), session=9) == []
    server.push("other", (0,), (1,), session=1)
    batch, _ = server.state.take_batch()
    assert [queued.request for queued in batch.pushes] == ["other"]


def test_events_that_wait_for_an_epoch_are_bounded(monkeypatch):
    monkeypatch.setattr(waiting_requests, "MOST_WAITING", 2)
    server = Server()
    tick = tick_on((0,), session=9, replica=1, epoch=1)
    assert [server.state.handle(TickArrived(n, tick)) for n in range(2)] == [[], []]
    (refused,) = server.state.handle(TickArrived(2, tick))
    assert (refused.request, refused.code) == (2, "busy")
    server.state.handle(EpochBegan(1, 0))
    assert server.state.handle(TickArrived(3, tick)) != []


def test_a_session_that_is_forgotten_leaves_nothing():
    server = Server()
    server.push("one", (0,), (1,), session=9)
    server.state.forget([(9, 1)])
    assert server.shard().last_number == {}


def test_a_push_that_the_rule_refuses_uses_up_its_number_and_groups_and_is_refused_again():
    server = Server(clocked=True)
    server.push("a", (0, 1), (1, 1), groups=(1, 0, 2), clock=1)
    (answer,) = server.apply([[False], [True]])
    assert (answer.request, answer.body.versions) == ("a", (0, 1))
    assert answer.body.problems == (Problem(0, REFUSED),)
    assert [server.shard(number).tables.refused for number in (0, 1)] == [1, 0]
    assert [server.shard(number).tables.groups for number in (0, 1)] == [{1: (0, 2)}] * 2
    assert [dict(server.shard(number).clocks) for number in (0, 1)] == [{0: 1}] * 2
    (again,) = server.push("again", (0, 1), (1, 1), groups=(1, 0, 2), clock=1)
    assert again.body.problems == (Problem(0, REFUSED), Problem(1, DUPLICATE))
    server.push("b", (0, 1), (2, 2), groups=(1, 2, 4), clock=2)
    (answer,) = server.apply([[False], [False]])
    assert answer.body.problems == (Problem(0, REFUSED), Problem(1, REFUSED))
    server.state.check_invariants()


def test_each_push_of_a_batch_is_taken_or_refused_by_itself():
    server = Server()
    for number in (1, 2, 3):
        server.push(number, (0, 1), (number, number))
    effects = server.apply([[True, False, True], [True, True, False]])
    assert [effect.body.problems for effect in effects] == [
        (),
        (Problem(0, REFUSED),),
        (Problem(1, REFUSED),),
    ]
    assert [server.shard(number).version for number in (0, 1)] == [2, 2]
    assert [server.shard(number).tables.refused for number in (0, 1)] == [1, 1]


def test_pushes_to_a_rule_of_the_user_are_batches_of_their_own():
    server = Server()
    server.state.joins = False
    for number in (1, 2):
        server.push(number, (0,), (number,))
    assert answers(server.apply()) == [1]
    assert answers(server.apply()) == [2]
