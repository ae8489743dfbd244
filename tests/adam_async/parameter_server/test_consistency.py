"""Replicas that wait for one another: clocks, pulls for a clock, and the sums of bsp."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adam_async.messages import DUPLICATE, GAP, REFUSED, Problem, Pull, ReadShards, Ticked, Values
from adam_async.parameter_server import bsp_barrier, events, replica_clocks, state
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    Apply,
    ApplySum,
    EpochBegan,
    PullArrived,
    PushArrived,
    QueuedPull,
    Refuse,
    ReplicasChanged,
    SendValues,
    SumApplied,
    TickArrived,
)
from adam_async.parameter_server.gradients import DeltaPart, PushGradients
from adam_async.parameter_server.replay_log import (
    JOINED,
    NOT_APPLIED,
    SKIPPED,
    SUMMED,
    OrderLog,
    read_order_log,
)
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import count_server
from adam_async.run.ids import Replica
from tests.adam_async.parameter_server.timelines import Timeline, push_on, shard_of, tick_on

GROUP = 4
"""Images of a whole group."""


def push_of(replica, clock, numbers, *, replica_generation=1, read=0, **fields):
    """A push on the shards that are the keys of `numbers`."""
    versions = (read,) * len(numbers)
    fields = {"weight": GROUP, "rate": 0.5, "session": replica, "replica": replica, "clock": clock, **fields}
    numbers_of = {"numbers": tuple(numbers.values()), "versions": versions, "incarnation": replica_generation}
    return push_on(numbers, **numbers_of, **fields)


def tick_of(replica, clock, shards, *, numbers=0, replica_generation=1, epoch=0):
    sender = {"session": replica, "replica": replica, "incarnation": replica_generation}
    return tick_on(shards, clock=clock, numbers=numbers, epoch=epoch, **sender)


class Server(Timeline):
    """A state with a shell of the test: it applies on request, and notes the pushes in each shard."""

    def __init__(self, *, synchronous, shards=(0, 1), live=(0, 1), record=False, **options):
        self.state = ServerState(
            store="run",
            generation=1,
            shards=[shard_of(number) for number in shards],
            clocked=True,
            summed_weight=GROUP if synchronous else 0,
            log=OrderLog(shards) if record else None,
            **options,
        )
        self.applied = {number: [] for number in shards}
        self.sums = {number: [] for number in shards}
        self.now = 0.0
        self.replica_generations(*live)

    def replica_generations(self, *live, **incarnations):
        return self.tell(ReplicasChanged({Replica(r): incarnations.get(f"of_{r}", 1) for r in live}))

    def push(self, request, *args, finite=True, **fields):
        push = push_of(*args, **fields)
        return self.tell(PushArrived(request, push, PushGradients(), [finite] * len(push.shards)))

    def tick(self, request, *args, **fields):
        return self.tell(TickArrived(request, tick_of(*args, **fields)))

    def pull(self, request, clock, *, shards=(0, 1), wait_s=1.0):
        pull = Pull(store="run", generation=1, shards=shards, clock=clock, wait_s=wait_s)
        return self.tell(PullArrived(request, pull, self.now + wait_s))

    def read(self, request, *, shards=(0, 1), clock=0, wait_s=1.0, link=None):
        body = ReadShards(store="run", generation=1, shards=shards, clock=clock)
        return self.tell(PullArrived(request, body, self.now + wait_s, link, self.now + 2 * wait_s))

    def later(self, seconds):
        self.now += seconds
        return self.state.give_up(now=self.now)

    def apply(self):
        batch, effects = self.state.take_batch()
        if isinstance(batch, Apply):
            for place, shard in zip(batch.pushes[0].accepted, batch.shards(), strict=True):
                assert batch.pushes[0].shards[place] is shard
                done = [queued.push for queued in batch.pushes]
                self.applied[shard.spec.id] += [(push.replica, push.incarnation, push.clock) for push in done]
            effects += self.tell(Applied(batch))
        elif isinstance(batch, ApplySum):
            for at, shard in enumerate(batch.shards):
                parts = [q.push for q in batch.pushes]
                assert all(
                    push.shards[places[at]] == shard.spec.id
                    for push, places in zip(parts, batch.places, strict=True)
                )
                self.applied[shard.spec.id] += [
                    (push.replica, push.incarnation, push.clock) for push in parts
                ]
                self.sums[shard.spec.id].append((batch.clock, [push.replica for push in parts], batch.scale))
            effects += self.tell(SumApplied(batch, [True] * len(batch.shards)))
        return effects


def requests(effects):
    return [effect.request for effect in effects]


MODES = pytest.mark.parametrize("synchronous", [False, True], ids=["ssp", "bsp"])


# --- pulls for a clock -----------------------------------------------------------------------


@MODES
def test_a_pull_for_a_clock_is_answered_when_the_last_replica_gets_there(synchronous):
    server = Server(synchronous=synchronous)
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.drain()
    assert server.pull("p", 1) == []
    server.push("b", 1, 1, {0: 1})
    assert "p" not in requests(server.drain())  # shard 1 still waits for replica 1
    effects = server.tick("t", 1, 1, [1], numbers=[0]) + server.drain()
    (values,) = [effect for effect in effects if isinstance(effect, SendValues)]
    assert values.request == "p"
    assert server.applied[0] == [(0, 1, 1), (1, 1, 1)]


@MODES
def test_a_late_answer_to_a_pull_has_the_clock_and_the_replicas_behind(synchronous):
    server = Server(synchronous=synchronous, live=(0, 1, 2))
    server.tick("t", 0, 5, [0, 1])
    server.tick("t", 1, 2, [0, 1])
    server.tick("t", 2, 3, [0, 1])
    assert server.pull("p", 3, wait_s=0.5) == []
    assert server.state.next_deadline() == 0.5
    assert count_server([server.state]).waiting == 1
    assert count_server([server.state]).waiting_for == [1]
    assert server.later(0.4) == []
    (answer,) = server.later(0.1)
    assert (answer.request, answer.body) == ("p", Values(versions=(), clock=2, behind=(1,)))
    assert server.state.next_deadline() is None


@MODES
def test_a_pull_for_a_clock_that_has_come_is_answered_at_once(synchronous):
    server = Server(synchronous=synchronous)
    server.tick("t", 0, 2, [0, 1])
    server.tick("t", 1, 2, [0, 1])
    (answer,) = server.pull("p", 2)
    assert isinstance(answer, SendValues)


@MODES
def test_a_dead_replica_delays_no_other(synchronous):
    server = Server(synchronous=synchronous)
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.drain()
    assert server.pull("p", 1) == []
    effects = server.replica_generations(0) + server.drain()
    assert requests(effects) == ["p"]
    assert server.applied == {0: [(0, 1, 1)], 1: [(0, 1, 1)]}


def test_a_tick_does_not_overtake_a_push_that_waits_to_be_applied():
    server = Server(synchronous=False, live=(0,))
    server.push("a", 0, 1, {0: 1})
    assert server.tick("t", 0, 2, [0], numbers=[1]) == []
    assert server.shard().applied_clock() == 0
    assert requests(server.drain()) == ["a", "t"]
    assert server.shard().applied_clock() == 2


@MODES
def test_a_tick_behind_a_push_that_was_lost_is_refused_until_the_push_has_come(synchronous):
    server = Server(synchronous=synchronous, live=(0,))
    (refusal,) = server.tick("t", 0, 2, [1, 0], numbers=[0, 1])
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.text) == (
        "gap",
        "push 1 on shard 0 has not arrived, and a tick behind it cannot count",
    )
    assert [server.shard(number).applied_clock() for number in (0, 1)] == [0, 0]
    server.push("a", 0, 1, {0: 1})
    server.drain()
    (answer,) = server.tick("t", 0, 2, [1, 0], numbers=[0, 1])
    assert isinstance(answer.body, Ticked)
    assert [server.shard(number).applied_clock() for number in (0, 1)] == [2, 2]


def test_a_tick_whose_numbers_do_not_fit_its_shards_is_refused():
    (refusal,) = Server(synchronous=False).tick("t", 0, 2, [0, 1], numbers=[0])
    assert (refusal.code, refusal.text) == ("malformed", "shards and numbers of a Tick differ in length")


def test_under_ssp_the_values_of_a_push_say_up_to_which_clock_they_are_complete():
    server = Server(synchronous=False)
    server.push("a", 0, 1, {0: 1, 1: 1}, pull=True)
    (answer,) = server.drain()
    assert answer.body.clock == 0
    server.tick("t", 1, 3, [0, 1])
    server.push("a", 0, 2, {0: 2, 1: 2}, pull=True)
    (answer,) = server.drain()
    assert answer.body.clock == 2


# --- live replicas ---------------------------------------------------------------------------


@MODES
def test_a_replica_that_joins_starts_at_the_slowest_clock_and_is_waited_for(synchronous):
    server = Server(synchronous=synchronous)
    for replica, clock in ((0, 4), (1, 3)):
        server.tick("t", replica, clock, [0, 1])
    server.replica_generations(0, 1, 2)
    assert server.shard().clocks == {0: 4, 1: 3, 2: 3}
    server.tick("t", 1, 4, [0, 1])
    assert server.shard().applied_clock() == 3
    assert server.pull("p", 4) == []
    assert requests(server.tick("t", 2, 4, [0, 1])) == ["t", "p"]


@MODES
def test_a_replica_that_ticks_before_the_map_names_it_is_remembered(synchronous):
    server = Server(synchronous=synchronous)
    (answer,) = server.tick("early", 2, 9, [0, 1], replica_generation=7)
    assert isinstance(answer.body, Ticked)
    assert server.shard().clocks == {0: 0, 1: 0}
    server.replica_generations(0, 1, 2, of_2=7)
    assert server.shard().clocks == {0: 0, 1: 0, 2: 9}


@MODES
def test_ticks_of_another_generation_do_not_count_for_the_live_one(synchronous):
    server = Server(synchronous=synchronous)
    server.tick("late", 1, 9, [0, 1], replica_generation=6)
    server.replica_generations(0, 1, of_1=7)
    assert server.shard().clocks == {0: 0, 1: 0}
    server.tick("still late", 1, 9, [0, 1], replica_generation=6)
    assert server.shard().clocks == {0: 0, 1: 0}


@MODES
def test_a_new_generation_of_a_replica_starts_at_the_slowest_clock_of_the_others(synchronous):
    server = Server(synchronous=synchronous)
    server.tick("t", 0, 3, [0, 1])
    server.tick("t", 1, 5, [0, 1])
    server.replica_generations(0, 1, of_1=2)
    assert server.shard().clocks == {0: 3, 1: 3}


@MODES
def test_an_event_that_waits_for_its_epoch_is_refused_if_its_generation_ends_first(synchronous):
    server = Server(synchronous=synchronous)
    assert server.push("p", 1, 5, {0: 1, 1: 1}, epoch=2) == []
    assert server.tick("t", 1, 6, [0, 1], epoch=2) == []
    server.replica_generations(0, 1, of_1=7)
    refusals = server.tell(EpochBegan(2, 4))
    assert [(each.request, each.code) for each in refusals] == [
        ("p", "generation-over"),
        ("t", "generation-over"),
    ]
    assert server.state.idle
    assert server.shard().last_number == {}
    assert server.shard().clocks == {0: 4, 1: 4}


@MODES
def test_pushes_and_ticks_of_an_epoch_wait_until_the_server_knows_it(synchronous):
    server = Server(synchronous=synchronous, live=(0,))
    assert server.push("a", 0, 1, {0: 1}, epoch=1) == []
    assert server.tick("t", 0, 1, [1]) == []  # it stays behind what came before it
    assert server.state.idle
    server.replica_generations(0, 1)
    effects = server.tell(EpochBegan(1, 0)) + server.drain()
    assert sorted(requests(effects)) == ["a", "t"]
    assert server.shard().clocks == {0: 1, 1: 0}
    assert server.shard(1).applied_clock() == 0  # with the epoch it heard of replica 1, and waits for it


@MODES
def test_when_an_epoch_begins_no_replica_is_behind_its_first_clock(synchronous):
    server = Server(synchronous=synchronous)
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.drain()
    assert server.pull("p", 3) == []
    effects = server.tell(EpochBegan(2, 3)) + server.drain()
    assert requests(effects) == ["p"]
    assert server.shard().clocks == {0: 3, 1: 3}
    assert server.applied[0] == [(0, 1, 1)]


@MODES
def test_the_first_replica_to_join_starts_at_the_first_clock_of_the_epoch(synchronous):
    server = Server(synchronous=synchronous, live=())
    server.tell(EpochBegan(4, 30))
    server.replica_generations(0)
    assert server.shard().clocks == {0: 30}
    assert server.shard().applied_clock() == 30


# --- sums ------------------------------------------------------------------------------------


def test_a_contribution_is_acknowledged_at_once_and_applied_with_the_last_one():
    server = Server(synchronous=True)
    (answer,) = server.push("a", 0, 1, {0: 1, 1: 1})
    assert isinstance(answer, Answer)
    assert (answer.body.versions, answer.body.problems) == (0, ())
    assert server.state.idle
    assert count_server([server.state]).pending_contributions == 2
    server.push("b", 1, 1, {0: 1, 1: 1})
    assert server.applied == {0: [], 1: []}
    server.drain()
    assert server.applied == {0: [(0, 1, 1), (1, 1, 1)], 1: [(0, 1, 1), (1, 1, 1)]}
    shard = server.shard()
    assert (shard.version, shard.staleness, shard.applied_clock()) == (1, {0: 2}, 1)
    assert count_server([server.state]).pending_contributions == 0
    assert (server.state.bundle.batches, server.state.bundle.batched_pushes) == (1, 2)


def test_a_sum_is_in_the_order_of_replicas_and_not_of_arrival():
    server = Server(synchronous=True, live=(0, 1, 2))
    for replica in (2, 0, 1):
        server.push(replica, replica, 1, {0: 1, 1: 1})
    server.drain()
    assert server.sums == {number: [(1, [0, 1, 2], 1 / 3)] for number in (0, 1)}


def test_a_contribution_that_is_not_finite_counts_no_weight_and_ticks():
    server = Server(synchronous=True)
    (answer,) = server.push("bad", 0, 1, {0: 1, 1: 1}, finite=False)
    assert answer.body.problems == (Problem(0, REFUSED), Problem(1, REFUSED))
    server.push("good", 1, 1, {0: 1, 1: 1}, weight=2)
    server.drain()
    assert server.sums[0] == [(1, [1], GROUP / 2)]
    assert (server.shard().tables.refused, server.shard().clocks) == (1, {0: 1, 1: 1})


def test_a_clock_without_contributions_passes_without_a_sum():
    server = Server(synchronous=True)
    for replica in (0, 1):
        server.tick("t", replica, 4, [0, 1])
    assert server.state.idle
    assert (server.shard().applied_clock(), server.shard().version) == (4, 0)


def test_a_retry_of_a_pending_contribution_is_answered_again_and_summed_once():
    server = Server(synchronous=True)
    server.push("a", 0, 1, {0: 1, 1: 1})
    (again,) = server.push("a again", 0, 1, {0: 1, 1: 1})
    assert again.body.problems == (Problem(0, DUPLICATE), Problem(1, DUPLICATE))
    server.push("b", 1, 1, {0: 1, 1: 1})
    server.drain()
    assert server.applied[0] == [(0, 1, 1), (1, 1, 1)]


def test_sums_are_applied_clock_after_clock_when_one_replica_runs_ahead():
    server = Server(synchronous=True, live=(0, 1))
    for clock in (1, 2):
        server.push(clock, 0, clock, {0: clock, 1: clock})
    server.push("b", 1, 1, {0: 1, 1: 1})
    server.push("c", 1, 2, {0: 2, 1: 2})
    assert server.shard().applied_clock() == 0
    server.apply()
    assert server.shard().applied_clock() == 1
    server.drain()
    assert [clock for clock, _, _ in server.sums[0]] == [1, 2]
    assert server.shard().applied_clock() == 2


def test_a_contribution_of_a_replica_that_died_after_it_is_used():
    server = Server(synchronous=True, live=(0, 1))
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.replica_generations(1)
    server.push("b", 1, 1, {0: 1, 1: 1})
    server.drain()
    assert server.sums[0] == [(1, [0, 1], 1 / 2)]


def test_a_contribution_that_comes_after_its_sum_is_refused():
    server = Server(synchronous=True, live=(0, 1))
    server.push("b", 1, 1, {0: 1, 1: 1})
    server.replica_generations(1)
    server.drain()
    (late,) = server.push("late", 0, 1, {0: 1, 1: 1}, replica_generation=2)
    assert late.body.problems == (Problem(0, REFUSED), Problem(1, REFUSED))
    assert server.applied[0] == [(1, 1, 1)]


def test_a_session_contributes_to_a_clock_once():
    server = Server(synchronous=True, live=(0, 1))
    server.push("a", 0, 1, {0: 1, 1: 1})
    (again,) = server.push("again", 0, 1, {0: 2, 1: 2})
    assert again.body.problems == (Problem(0, REFUSED), Problem(1, REFUSED))
    assert count_server([server.state]).pending_contributions == 2


def test_shards_of_one_step_that_came_in_different_messages_are_summed_each_when_complete():
    server = Server(synchronous=True, live=(0, 1))
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.push("b0", 1, 1, {0: 1})
    server.drain()
    assert (server.applied[0], server.applied[1]) == ([(0, 1, 1), (1, 1, 1)], [])
    server.push("b1", 1, 1, {1: 1})
    server.drain()
    assert server.applied[1] == [(0, 1, 1), (1, 1, 1)]


def test_a_sum_is_in_the_order_of_its_pushes_whatever_order_its_last_tick_has():
    server = Server(synchronous=True, live=(0, 1))
    server.push("a", 0, 1, {1: 1, 0: 1})
    server.tick("t", 1, 1, (0, 1))
    batch, _ = server.state.take_batch()
    assert [shard.spec.id for shard in batch.shards] == [1, 0]
    assert batch.places == ((0, 1),)


def test_shards_are_read_when_their_clock_is_reached():
    server = Server(synchronous=True, live=(0, 1))
    server.push("a", 0, 1, {0: 1, 1: 1})
    assert server.read("r", clock=1, wait_s=0.5) == []
    server.push("b", 1, 1, {0: 1, 1: 1})
    (answer,) = server.drain()
    assert (answer.clock, [shard.version for shard in answer.shards]) == (1, [1, 1])
    server.push("a", 0, 2, {0: 2, 1: 2})
    assert server.read("r", clock=2, wait_s=0.5) == []
    (refusal,) = server.later(0.5)
    assert (refusal.code, refusal.text) == (
        "not-settled",
        "the values of clock 2 wait for all replicas; behind: 1",
    )


def test_shards_are_read_behind_the_pushes_before():
    server = Server(synchronous=False)
    server.push("a", 0, 1, {0: 1})
    assert server.read("r") == []
    assert requests(server.drain()) == ["a", "r"]


# --- scaling and records ---------------------------------------------------------------------


def entries_of(server, number):
    log = read_order_log(server.state.bundle.log.packed())
    return [
        (log.clients[entry["client"]].replica, int(entry["clock"]), int(entry["flags"]))
        for entry in log.entries[number]
    ]


def test_the_log_names_pushes_in_order_batches_and_what_was_refused():
    server = Server(synchronous=False, record=True)
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.push("bad", 1, 1, {0: 1, 1: 1}, finite=False)
    server.push("c", 0, 2, {0: 2, 1: 2})
    server.drain()
    server.push("d", 1, 2, {0: 2})
    server.drain()
    first = [(0, 1, 0), (1, 1, NOT_APPLIED), (0, 2, 0)]
    assert entries_of(server, 0) == [*first, (1, 2, 0)]
    assert entries_of(server, 1) == first


def test_the_log_names_the_contributors_of_each_sum():
    server = Server(synchronous=True, record=True)
    server.push("b", 1, 1, {0: 1, 1: 1})
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.push("bad", 0, 2, {0: 2, 1: 2}, finite=False)
    server.push("c", 1, 2, {0: 2, 1: 2})
    server.drain()
    assert entries_of(server, 0) == [
        (0, 2, SUMMED | NOT_APPLIED),
        (0, 1, SUMMED),
        (1, 1, SUMMED | JOINED),
        (1, 2, SUMMED),
    ]


def test_the_log_tells_pushes_that_no_gradient_would_get_applied_from_refused_gradients():
    server = Server(synchronous=False, record=True)
    server.push("a", 0, 1, {0: 1, 1: 1}, groups=(1, 3, 4))
    server.push("again", 1, 1, {0: 1, 1: 1}, groups=(1, 3, 4))
    server.drain()
    assert entries_of(server, 0) == [(0, 1, 0), (1, 1, NOT_APPLIED | SKIPPED)]
    server = Server(synchronous=True, record=True)
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.push("twice", 0, 1, {0: 2, 1: 2})
    server.push("b", 1, 1, {0: 1, 1: 1})
    server.drain()
    late, summed = (0, 1, SUMMED | NOT_APPLIED | SKIPPED), [(0, 1, SUMMED), (1, 1, SUMMED | JOINED)]
    assert entries_of(server, 0) == [late, *summed]


def test_a_sum_that_is_not_finite_changes_no_version_and_passes_its_clock():
    server = Server(synchronous=True, record=True)
    server.push("a", 0, 1, {0: 1, 1: 1})
    server.push("b", 1, 1, {0: 1, 1: 1})
    batch, _ = server.state.take_batch()
    server.tell(SumApplied(batch, [False, True]))
    assert (server.shard(0).version, server.shard(0).tables.refused) == (0, 2)
    assert (server.shard(1).version, server.shard(1).tables.refused) == (1, 0)
    assert [server.shard(number).applied_clock() for number in (0, 1)] == [1, 1]
    assert [flags for _, _, flags in entries_of(server, 0)] == [
        SUMMED | NOT_APPLIED,
        SUMMED | JOINED | NOT_APPLIED,
    ]


# --- any interleaving ------------------------------------------------------------------------


@dataclass(eq=False)
class Worker:
    """One generation of a replica: its counters, and its unanswered messages."""

    replica: int
    replica_generation: int
    clock: int
    live: bool = True
    numbers: dict = field(default_factory=lambda: {0: 0, 1: 0})
    open: list = field(default_factory=list)
    unanswered: list = field(default_factory=list)
    """(clock, shards, whether finite) of each push."""
    heard: dict | None = None
    """Last number on each shard when the generation ended."""

    @property
    def session(self):
        return self.replica, self.replica_generation


class Replicas(RuleBasedStateMachine):
    """Replicas push, tick, pull, lose messages, repeat them, die and join; batches apply when they like."""

    SHARDS = (0, 1)
    synchronous = False
    replica = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.server = Server(synchronous=self.synchronous, live=(0, 1, 2))
        self.workers = {replica: Worker(replica, 1, 0) for replica in range(3)}
        self.dead = []
        self.requests = 0
        self.pulls = {}
        self.reached = dict.fromkeys(self.SHARDS, 0)

    # Messages of a worker, and its handling of answers.

    def say(self, worker, event, *, lost):
        worker.open.append(event)
        if not lost:
            self.take(self.server.tell(event))

    def say_again(self, worker):
        for event in list(worker.open):
            self.take(self.server.tell(event))

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, SendValues):
                self.check_pulled(effect)
                continue
            worker, number = effect.request
            if isinstance(effect, Answer):
                settled = all(problem.status != GAP for problem in getattr(effect.body, "problems", ()))
            else:
                settled = False
                assert effect.code == ("gap" if worker.live else "generation-over")
            if settled:
                worker.open = [event for event in worker.open if event.request[1] != number]

    def check_pulled(self, effect):
        worker, clock = self.pulls.pop(effect.request)
        for other in self.workers.values():
            for at, shards, finite in other.unanswered:
                for number in shards:
                    if other.live and finite and at <= clock:
                        assert (other.replica, other.replica_generation, at) in self.server.applied[number], (
                            worker,
                            clock,
                        )

    # Events.

    @rule(replica=replica, pushed=st.sets(st.sampled_from(SHARDS)), finite=st.booleans(), lost=st.booleans())
    def steps(self, replica, pushed, finite, lost):
        worker = self.workers[replica]
        worker.clock += 1
        if pushed:
            for shard in pushed:
                worker.numbers[shard] += 1
            self.requests += 1
            request = (worker, self.requests)
            numbers = {shard: worker.numbers[shard] for shard in sorted(pushed)}
            push = push_of(replica, worker.clock, numbers, replica_generation=worker.replica_generation)
            if worker.live:
                worker.unanswered.append((worker.clock, sorted(pushed), finite))
            event = PushArrived(request, push, PushGradients(), [finite] * len(pushed))
            self.say(worker, event, lost=lost)
        rest = sorted(set(self.SHARDS) - pushed)
        if rest:
            self.ticks(worker, rest, lost=lost)

    def ticks(self, worker, shards, *, lost):
        self.requests += 1
        numbers = [worker.numbers[shard] for shard in shards]
        tick = tick_of(
            worker.replica,
            worker.clock,
            shards,
            numbers=numbers,
            replica_generation=worker.replica_generation,
        )
        self.say(worker, TickArrived((worker, self.requests), tick), lost=lost)

    @rule(replica=replica)
    def says_again(self, replica):
        self.say_again(self.workers[replica])

    @rule(replica=replica, ahead=st.integers(-1, 1))
    def pulls_for_a_clock(self, replica, ahead):
        worker = self.workers[replica]
        self.requests += 1
        clock = max(worker.clock + ahead, 1)
        self.pulls[self.requests] = (worker, clock)
        self.take(self.server.pull(self.requests, clock, wait_s=1e9))

    @rule()
    def applies(self):
        self.take(self.server.apply())

    @rule(replica=replica)
    def dies(self, replica):
        worker = self.workers[replica]
        if worker.live and sum(other.live for other in self.workers.values()) > 1:
            worker.live = False
            worker.heard = self.last_numbers(worker)
            self.tell_replica_generations()

    @rule(replica=replica)
    def joins_in_a_new_life(self, replica):
        old = self.workers[replica]
        if not old.live:
            self.dead.append(old)
            worker = self.workers[replica] = Worker(replica, old.replica_generation + 1, 0)
            self.tell_replica_generations()
            clocks = [self.server.shard(number).clocks[replica] for number in self.SHARDS]
            worker.clock = max(clocks)
            self.ticks(worker, self.SHARDS, lost=False)

    @precondition(lambda self: self.dead)
    @rule(which=st.integers(0, 9))
    def the_dead_say_again_what_was_open(self, which):
        self.say_again(self.dead[which % len(self.dead)])

    def last_numbers(self, worker):
        return {shard: self.server.shard(shard).tables.ordered[worker.session] for shard in self.SHARDS}

    def tell_replica_generations(self):
        live = {Replica(w.replica): w.replica_generation for w in self.workers.values() if w.live}
        self.take(self.server.tell(ReplicasChanged(live)))

    # Invariants.

    @invariant()
    def nothing_is_heard_of_a_life_that_is_over(self):
        for worker in (*self.workers.values(), *self.dead):
            assert worker.live or self.last_numbers(worker) == worker.heard

    @invariant()
    def nothing_is_applied_twice_and_clocks_never_go_back(self):
        self.server.state.check_invariants()
        for number in self.SHARDS:
            applied = self.server.applied[number]
            assert len(set(applied)) == len(applied)
            clock = self.server.shard(number).applied_clock()
            assert clock >= self.reached[number]
            self.reached[number] = clock
            clocks = [each for each, _, _ in self.server.sums[number]]
            assert all(a < b for a, b in pairwise(clocks))
            assert all(replicas == sorted(replicas) for _, replicas, _ in self.server.sums[number])

    def teardown(self):
        """All repeat lost messages and tick to the clock of the first one: then no message is open."""
        clocks = [worker.clock for worker in (*self.workers.values(), *self.dead)]
        last = max([*clocks, *(clock for _, clock in self.pulls.values())]) + 1
        for worker in self.workers.values():
            self.say_again(worker)
            if worker.live:
                worker.clock = last
                self.ticks(worker, self.SHARDS, lost=False)
        self.take(self.server.drain())
        self.nothing_is_applied_twice_and_clocks_never_go_back()
        assert not [worker for worker in self.workers.values() if worker.live and worker.open]
        assert not self.pulls
        assert count_server([self.server.state]).pending_contributions == 0
        for worker in self.workers.values():
            for clock, shards, finite in worker.unanswered:
                if worker.live and finite:
                    for number in shards:
                        assert (worker.replica, worker.replica_generation, clock) in self.server.applied[
                            number
                        ]


class SynchronousReplicas(Replicas):
    synchronous = True


class ForgetfulReplicas(Replicas):
    """Generations come and go, and the server remembers one ended generation of a replica."""

    def __init__(self):
        super().__init__()
        self.kept, replica_clocks.REMEMBERED = replica_clocks.REMEMBERED, 1
        self.workers = {replica: Worker(replica, 1000 * (replica + 1), 0) for replica in range(3)}
        self.tell_replica_generations()

    def teardown(self):
        replica_clocks.REMEMBERED = self.kept
        super().teardown()

    @invariant()
    def nothing_is_heard_of_a_life_that_is_over(self):
        for worker in (*self.workers.values(), *self.dead):
            forgotten = dict.fromkeys(self.SHARDS, 0)
            assert worker.live or self.last_numbers(worker) in (worker.heard, forgotten)

    @invariant()
    def sessions_are_bounded(self):
        for number in self.SHARDS:
            assert len(self.server.shard(number).last_number) <= 2 * len(self.workers)


for machine in (Replicas, SynchronousReplicas, ForgetfulReplicas):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestReplicas = Replicas.TestCase
TestSynchronousReplicas = SynchronousReplicas.TestCase
TestForgetfulReplicas = ForgetfulReplicas.TestCase


def test_in_a_store_of_clients_only_clients_with_a_place_contribute_to_sums():
    server = Server(synchronous=True, program=False)
    (refusal,) = server.push("a", 2, 1, {0: 1, 1: 1}, replica_generation=9)
    assert (refusal.code, server.state.shards[0].last_number) == ("busy", {})
    server.replica_generations(0, 1, 2, of_2=9)
    (answer,) = server.push("a", 2, 1, {0: 1, 1: 1}, replica_generation=9)
    assert isinstance(answer, Answer)


def test_a_store_that_leaves_refuses_what_waits():
    server = Server(synchronous=False)
    server.push("a push", 0, 1, {0: 1, 1: 1})
    server.pull("a pull behind it", 1)
    server.push("an early push", 1, 1, {0: 1, 1: 1}, epoch=5)
    refusals = server.state.end()
    assert {each.request for each in refusals} == {"a push", "a pull behind it", "an early push"}
    assert {each.code for each in refusals} == {"wrong-run"}
    assert server.state.next_deadline() is None


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_replica_has_bounded_gradients_in_memory_and_its_repetitions_are_answered(monkeypatch, is_recorded):
    monkeypatch.setattr(bsp_barrier, "PENDING_BYTES", 0)
    monkeypatch.setattr(bsp_barrier, "CONTRIBUTION_BYTES", 0)
    server = Server(synchronous=True, live=(0, 1))

    def push(request, replica, clock, number):
        size = 32 if replica == 0 else 2  # 8 values of 8 bytes are four times those of the two shards
        flat, reads = np.zeros(size), None
        if is_recorded:  # the push has the same size, with the reads of its groups
            flat, reads = flat[:1], np.zeros(flat[1:].nbytes, np.uint8)
        gradients = PushGradients((DeltaPart(flat, (len(flat),), 0.5, finite=True),), reads=reads)
        return server.tell(PushArrived(request, push_of(replica, clock, {0: number}), gradients))

    assert isinstance(push("a", 0, 1, 1)[0], Answer)
    (refusal,) = push("b", 0, 2, 2)
    assert (type(refusal), refusal.code) == (Refuse, "busy")
    (again,) = push("a again", 0, 1, 1)
    assert again.body.problems == (Problem(0, DUPLICATE),)
    push("c", 1, 1, 1)
    server.drain()
    (acknowledged,) = push("b", 0, 2, 2)
    assert acknowledged.body.problems == ()


def test_a_round_answers_a_bounded_number_of_ticks(monkeypatch):
    monkeypatch.setattr(state, "MOST_NAMED", 4)
    server = Server(synchronous=False)
    server.push("p", 0, 1, {0: 1, 1: 1})
    for clock in range(1, 8):
        assert server.tick(clock, 0, clock, (0, 1)) == []
    batch, _ = server.state.take_batch()
    server.tell(Applied(batch))
    rounds = []
    while not server.state.idle:
        work, effects = server.state.take_batch()
        assert work is None
        rounds.append([effect.request for effect in effects])
    assert rounds == [[1, 2], [3, 4], [5, 6], [7]]


@pytest.mark.parametrize(("most", "early"), [(1, []), (2, ["a"])])
def test_a_pull_is_answered_during_a_sum_only_if_its_shards_change_at_once(monkeypatch, most, early):
    monkeypatch.setattr(events, "PIECE_WORK", most)
    server = Server(synchronous=True, live=(0, 1))
    for replica in (0, 1):
        server.push(replica, replica, 1, {0: 1, 1: 1})
    work, _ = server.state.take_batch()
    assert server.state.waiting.take(QueuedPull("a", (server.shard(),), 1, 9.0)) == []
    first = server.tell(SumApplied(work, [True]))
    assert [effect.request for effect in first] == early
    assert [effect.request for effect in server.tell(SumApplied(work, [True], 1))] == ["a"][len(early) :]
