"""A question for the groups that the shards of a bundle have, as timelines without a loop or a link.

After the answer, no group of a generation that has ended in the map appears on a shard.
"""

from dataclasses import replace

import numpy as np
import pytest

from adam_async.messages import BundleSets
from adam_async.messages.group_sets import KEPT_EPOCHS, MOST_GROUP
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    ApplySum,
    EpochBegan,
    Propose,
    PushArrived,
    Refuse,
    ReplicasChanged,
    SendSets,
    SetsAsked,
    SumApplied,
    TickArrived,
)
from adam_async.parameter_server.gradients import PushGradients
from adam_async.parameter_server.state import ServerState
from adam_async.run.group_ranges import common_and_others, with_groups, with_losses
from adam_async.run.ids import Replica
from tests.adam_async.parameter_server.timelines import Timeline, push_on, shard_of, tick_on

LIVE = {Replica(0): 1, Replica(1): 1}


class Server(Timeline):
    """Two shards, whose pushes name groups of epoch 1."""

    def __init__(self, *, frozen=(), alone=True, **options):
        shards = [shard_of(number) for number in (0, 1)]
        for number in frozen:
            shards[number].spec = replace(shards[number].spec, frozen=True)
        self.state = ServerState(store="run", generation=1, shards=shards, **options)
        self.proposed = []
        self.live(LIVE)
        self.state.alone = alone

    def tell(self, event):
        effects = super().tell(event)
        self.proposed += [effect.entry for effect in effects if isinstance(effect, Propose)]
        return [effect for effect in effects if not isinstance(effect, Propose)]

    def live(self, live):
        return self.tell(ReplicasChanged(live))

    def push(self, groups, *, shards=(0, 1), number=1, **fields):
        each = (number,) * len(shards)
        push = push_on(shards, numbers=each, groups=(1, *groups), **fields)
        return self.tell(PushArrived("push", push, PushGradients(), None))

    def ask(self, epoch=1, generation=1):
        return self.tell(SetsAsked("asked", generation, epoch))

    def apply(self):
        batch, effects = self.state.take_batch()
        self.proposed += [effect.entry for effect in effects if isinstance(effect, Propose)]
        effects = [effect for effect in effects if not isinstance(effect, Propose)]
        if isinstance(batch, ApplySum):
            return effects + self.tell(SumApplied(batch, [True] * len(batch.shards)))
        return effects + (self.tell(Applied(batch)) if batch is not None else [])

    def commit(self):
        entry = self.proposed.pop(0)
        effects = self.state.committed(entry)
        self.state.check_invariants()
        return effects


def sets_in(effects):
    """The answer among some effects."""
    (answer,) = [effect for effect in effects if isinstance(effect, SendSets)]
    assert answer.request == "asked"
    return answer.body, *(tuple(ranges.tolist()) for ranges in common_and_others(answer.several))


def test_the_answer_has_the_groups_of_all_shards_and_those_of_some():
    server = Server()
    assert sets_in(server.ask()) == (BundleSets(trainable=True, clock=0), (), ())
    server.push((0, 4, 6, 7))
    server.push((4, 6), shards=(1,), number=2)
    server.push((9, 10), shards=(0,), number=2)
    server.drain()
    assert sets_in(server.ask())[1:] == ((0, 4, 6, 7), (4, 6, 9, 10))
    assert sets_in(server.ask(epoch=2))[1:] == ((), ())


def test_the_answer_has_the_losses_that_the_part_with_the_loss_has_sent():
    server = Server()
    server.without_losses = (0,)
    server.push((5, 7), shards=(0,), loss_sum=None)
    server.push((5, 7), shards=(1,), session=2, replica=1, weight=2)
    server.drain()
    body = BundleSets(trainable=True, clock=0, images=2, loss_sum=11.0)
    assert sets_in(server.ask()) == (body, (5, 7), ())


def test_frozen_shards_restrict_nothing():
    server = Server(frozen=(1,))
    server.push((0, 4), shards=(0,))
    server.drain()
    assert sets_in(server.ask())[1:] == ((0, 4), ())
    server = Server(frozen=(0, 1))
    assert sets_in(server.ask()) == (BundleSets(trainable=False, clock=0), (), ())


def test_the_answer_waits_for_all_pushes_before_it_and_has_their_groups():
    server = Server()
    server.push((0, 2))
    assert server.ask() == []
    server.push((2, 4), number=2)
    assert [type(effect) for effect in server.apply()] == [Answer]
    assert sets_in(server.drain())[1:] == ((0, 2), ())


def test_the_answer_waits_for_entries_that_the_copies_lack():
    server = Server(alone=False)
    server.push((0, 2))
    assert server.apply() == []
    assert server.ask() == []
    assert server.apply() == [], "the entry is in flight"
    assert server.commit() == [], "the entry is committed, and not applied"
    assert sets_in(server.drain())[1:] == ((0, 2), ())


def test_in_bsp_the_answer_waits_for_contributions_that_the_copies_lack():
    server = Server(alone=False, clocked=True, summed_weight=2)
    server.push((0, 2))
    assert server.ask() == []
    assert server.apply() == []
    assert sets_in(server.commit())[1:] == ((0, 2), ())


@pytest.mark.parametrize("alone", [True, False])
def test_a_bundle_takes_no_groups_of_an_ended_generation_before_the_entry_of_its_end_is_applied(alone):
    server = Server(alone=alone)
    server.push((0, 2))
    server.state.take_batch() if alone else server.apply()
    server.live({Replica(1): 1})
    assert server.state.live == LIVE, "the entry waits behind the batch"
    (refusal,) = server.push((2, 4), number=2)
    assert (type(refusal), refusal.code) == (Refuse, "generation-over")
    (refusal,) = server.tell(TickArrived("tick", tick_on((0, 1), clock=2)))
    assert refusal.code == "generation-over"
    assert server.push((2, 4), session=2, replica=1) == [], "the other one goes on"


def test_a_generation_that_the_map_has_not_named_or_named_between_two_versions_must_wait():
    server = Server()
    (refusal,) = server.push((0, 2), incarnation=2)
    assert (refusal.code, server.shard().tables.ordered) == ("busy", {})
    assert "no generation 2 of replica 0 yet" in refusal.text
    server.live({**LIVE, Replica(0): 2})
    server.push((0, 2), incarnation=2)
    server.drain()
    assert sets_in(server.ask())[1:] == ((0, 2), ())
    assert Server(program=False).push((0, 2), incarnation=2)[0].code == "busy"


def test_pushes_that_waited_for_their_epoch_are_refused_if_their_generation_has_ended_meanwhile():
    server = Server(clocked=True)
    assert server.push((0, 2), epoch=1) == []
    server.live({Replica(1): 1})
    assert sets_in(server.ask())[1:] == ((), ())
    (refusal,) = server.tell(EpochBegan(1, 0))
    assert refusal.code == "generation-over"


def test_a_new_primary_answers_with_what_the_log_has_and_follows_its_map():
    server = Server(alone=False)
    server.push((0, 2))
    server.apply()
    server.commit()
    server.drain()
    server.push((2, 4), number=2)
    server.ask()
    assert [refusal.code for refusal in server.state.follow()] == ["not-primary"] * 2
    server.proposed.clear()
    server.state.lead()
    server.live({Replica(1): 1})
    (refusal,) = server.push((2, 4), number=2)
    assert refusal.code == "generation-over"
    assert server.ask() == [], "the entry of the live replicas is not committed"
    assert server.state.take_batch() == (None, [])
    assert sets_in(server.commit())[1:] == ((0, 2), ())


@pytest.mark.parametrize("live", [{Replica(1): 1}, {Replica(0): 2, Replica(1): 1}])
def test_in_bsp_a_contribution_of_an_ended_generation_counts_and_is_summed(live):
    server = Server(clocked=True, summed_weight=2)
    server.push((0, 1), clock=1)
    server.push((1, 2), session=2, replica=1, clock=1)
    server.push((2, 3), number=2, clock=2)
    server.live(live)
    body = BundleSets(trainable=True, clock=2, images=3, loss_sum=3.0)
    assert sets_in(server.ask()) == (body, (0, 3), ())
    for replica, generation in live.items():
        fields = {"session": 9 + replica, "incarnation": generation, "replica": replica}
        server.tell(TickArrived("tick", tick_on((0, 1), clock=2, **fields)))
    done = []
    while (work := server.state.take_batch()[0]) is not None:
        done.append((work.clock, [queued.push.groups for queued in work.pushes]))
        server.tell(SumApplied(work, [True] * len(work.shards)))
    assert done == [(1, [(1, 0, 1), (1, 1, 2)]), (2, [(1, 2, 3)])]
    assert server.shard().pending.waiting == {}


def test_in_bsp_the_begin_of_an_epoch_at_the_answered_clock_sums_what_is_pending():
    server = Server(clocked=True, summed_weight=2)
    server.push((0, 1), clock=1)
    server.live({Replica(1): 1})
    body, *_ = sets_in(server.ask())
    assert server.shard().pending.waiting, "replica 1 has not reached the clock"
    server.tell(EpochBegan(2, body.clock))
    (work, _) = server.state.take_batch()
    assert (work.clock, [queued.push.groups for queued in work.pushes]) == (1, [(1, 0, 1)])


def test_in_asp_no_clock_is_answered():
    server = Server()
    server.push((0, 1), clock=7)
    server.drain()
    assert sets_in(server.ask())[0].clock == 0


def test_a_shard_has_all_groups_of_an_epoch_whose_set_is_dropped_and_another_placement_is_refused():
    """A run without a driver may have gone on for many epochs, each of which the next driver evaluates."""
    server = Server()
    for epoch in range(1, KEPT_EPOCHS + 2):
        tables = server.shard().separate()
        tables.groups = with_groups(tables.groups, (epoch, 0, 1))
        tables.losses = with_losses(tables.losses, epoch, 1, 0.0)
    body, *sets = sets_in(server.ask(epoch=1))
    assert (sets, body.images) == ([(), (0, MOST_GROUP)], 0)
    server.shard(1).separate().groups, server.shard(1).tables.losses = tables.groups, tables.losses
    body, *sets = sets_in(server.ask(epoch=1))
    assert (sets, body.images) == ([(0, MOST_GROUP), ()], 0)
    assert sets_in(server.ask(epoch=2))[1:] == ((0, 1), ())
    (refusal,) = server.ask(generation=2)
    assert refusal.code == "wrong-run"


def test_scattered_sets_cost_a_bounded_amount_of_work(monkeypatch):
    monkeypatch.setattr("adam_async.parameter_server.state.MOST_SETS_BOUNDS", 8)
    server = Server()
    server.push((0, 1, 2, 3))
    server.push((4, 5), shards=(1,), number=2)
    server.drain()
    (refusal,) = server.ask()
    assert refusal.code == "too-large"


def test_a_set_that_many_tables_share_is_never_compared_by_its_values():
    class Ranges(tuple):
        __hash__ = None

    server = Server()
    server.without_losses = (0, 1)
    shared = {1: Ranges((0, 4))}
    for number in (0, 1):
        server.shard(number).separate().groups = shared
    (answer,) = server.ask()
    assert answer.several == ((0, 4),)


def test_the_newest_clock_goes_with_the_state_of_the_replicas():
    server, other = Server(clocked=True), Server(clocked=True)
    server.push((0, 1), clock=5)
    server.drain()
    server.live({Replica(1): 1})
    other.state.bundle.replicas.restore(server.state.bundle.replicas.state())
    assert sets_in(other.ask())[0].clock == 5
    assert np.array_equal(sets_in(server.ask())[1], (0, 1))
