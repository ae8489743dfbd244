"""The front of a primary whose log has other copies: entries between proposal and application."""

import pytest

from adam_async.messages import DUPLICATE, REFUSED, Ticked
from adam_async.parameter_server.events import (
    Answer,
    Apply,
    EpochBegan,
    Propose,
    Refuse,
    ReplicasChanged,
    SendValues,
)
from adam_async.parameter_server.push_queue import MAX_BATCH
from adam_async.parameter_server.shard import MOST_REFUSALS, ShardTables
from adam_async.parameter_server.state import MOST_IN_FLIGHT
from adam_async.parameter_server.statistics import count_server
from tests.adam_async.parameter_server.test_state import ONE, ZERO, Server, answers, replica_generations
from tests.adam_async.parameter_server.test_statistics import counted


class Replicated(Server):
    """A primary whose entries commit on request."""

    def __init__(self, *args, **options):
        self.proposed = []
        super().__init__(*args, live=None, **options)
        self.state.alone = False

    def sort(self, effects):
        """Keep the entries; return the answers."""
        self.proposed += [effect.entry for effect in effects if isinstance(effect, Propose)]
        return [effect for effect in effects if not isinstance(effect, Propose)]

    def tell(self, event):
        return self.sort(super().tell(event))

    def commit(self):
        effects = self.sort(self.state.committed(self.proposed.pop(0)))
        self.state.check_invariants()
        return effects

    def apply(self):
        return self.sort(super().apply())


def test_a_push_is_acknowledged_when_its_entry_is_committed_and_applied():
    server = Replicated()
    server.push("a", (0, 1), (1, 1))
    assert server.apply() == []
    (entry,) = server.proposed
    assert isinstance(entry, Apply)
    assert server.shard().version == 0
    assert server.commit() == []
    (answer,) = server.apply()
    assert isinstance(answer, Answer)
    assert (answer.request, answer.body.versions) == ("a", 1)
    assert server.state.idle


def test_a_pull_behind_an_entry_in_flight_has_its_push():
    server = Replicated()
    server.push("a", (0,), (1,))
    server.apply()
    assert server.pull("p", 0) == []
    assert server.apply() == []
    server.commit()
    effects = server.apply()
    assert [type(effect) for effect in effects] == [Answer, SendValues]
    assert answers(effects) == ["a", "p"]


def test_a_pull_of_other_shards_waits_for_the_entries_before_it_too():
    server = Replicated()
    server.push("a", (0,), (1,))
    server.apply()
    assert server.pull("p", 1) + server.apply() == []
    server.commit()
    assert answers(server.apply()) == ["a", "p"]


def test_a_duplicate_of_a_push_in_flight_is_answered_behind_it():
    server = Replicated()
    server.push("a", (0,), (1,))
    server.apply()
    server.push("again", (0,), (1,))
    assert server.apply() == []
    assert len(server.proposed) == 1
    server.commit()
    first, second = server.apply()
    assert (first.request, second.request) == ("a", "again")
    assert [problem.status for problem in second.body.problems] == [DUPLICATE]
    assert server.shard().version == 1


def test_batches_form_while_entries_are_in_flight_up_to_a_bound():
    server = Replicated()
    for number in range(1, MOST_IN_FLIGHT + 4):
        server.push(number, (0,), (number,))
        server.apply()
    assert len(server.proposed) == MOST_IN_FLIGHT
    assert not server.state.has_work
    server.commit()
    server.apply()
    server.apply()
    assert len(server.proposed) == MOST_IN_FLIGHT
    assert len(server.proposed[-1].pushes) == 3 <= MAX_BATCH, "the pushes that came meanwhile are one batch"


def test_changes_of_the_map_are_entries_and_count_only_once_committed():
    server = Replicated()
    server.tell(replica_generations(ZERO, ONE))
    server.tell(EpochBegan(1, 7))
    assert server.state.live == {}
    assert server.state.bundle.epoch == 0
    server.commit()
    assert server.state.live == {ZERO: 1, ONE: 1}
    server.commit()
    assert server.state.bundle.epoch == 1
    assert server.shard().clocks == {ZERO: 7, ONE: 7}


def test_a_push_that_waits_for_its_epoch_is_ordered_once_the_epoch_is_committed():
    server = Replicated()
    server.push("a", (0,), (1,), epoch=1)
    server.tell(EpochBegan(1, 0))
    assert server.apply() == []
    server.commit()
    server.apply()
    assert isinstance(server.proposed[0], Apply)


def test_a_primary_that_is_replaced_refuses_every_request_once():
    server = Replicated()
    server.push("in-flight", (0,), (1,))
    server.apply()
    server.pull("behind", 0)
    server.apply()
    server.push("committed", (1,), (1,))
    server.apply()
    server.tick("tick", (0,), 1)
    server.push("queued", (0,), (2,))
    server.push("epoch", (0,), (1,), session=9, epoch=5)
    refused = server.state.follow()
    assert {type(effect) for effect in refused} == {Refuse}
    assert {effect.code for effect in refused} == {"not-primary"}
    assert sorted(answers(refused)) == ["behind", "committed", "epoch", "in-flight", "queued", "tick"]
    assert server.state.follow() == []
    # Its entries may commit all the same: they are applied, and answered by no request.
    while server.proposed:
        assert server.commit() == []
        assert server.apply() == []
    assert server.state.idle
    assert server.shard().version == 1


def test_a_new_primary_orders_from_the_numbers_that_are_applied():
    server = Replicated()
    server.push("applied", (0,), (1,))
    server.apply()
    server.commit()
    server.apply()
    server.push("lost", (0,), (2,))
    server.apply()
    server.state.follow()
    server.proposed.clear()
    server.state.lead()
    (again,) = server.push("again", (0,), (1,))
    assert [problem.status for problem in again.body.problems] == [DUPLICATE]
    assert server.push("lost", (0,), (2,)) == []
    server.apply()
    server.commit()
    (answer,) = server.apply()
    assert (answer.request, answer.body.problems, server.shard().version) == ("lost", (), 2)


@pytest.mark.parametrize(
    "entry", [ReplicasChanged({ZERO: 1}), EpochBegan(2, 3)], ids=lambda e: type(e).__name__
)
def test_an_entry_of_another_primary_is_applied_without_an_answer(entry):
    server = Replicated()
    assert server.sort(server.state.committed(entry)) == []
    assert server.state.bundle.entries_applied == 1


def test_a_tick_is_acknowledged_once_its_clock_counts():
    server = Replicated()
    server.tell(replica_generations(ZERO))
    server.commit()
    assert server.tick("t", (0, 1), 1) == []
    (answer,) = server.commit()
    assert isinstance(answer.body, Ticked)
    assert server.shard().clocks == {ZERO: 1}


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_repeated_tick_in_flight_is_no_further_entry_and_is_answered_with_the_first(synchronous):
    server = Replicated(clocked=True, summed_weight=1 if synchronous else 0)
    server.tell(replica_generations(ZERO))
    server.commit()
    for number in range(5):
        assert server.tick(f"t{number}", (0, 1), 1) == []
        assert server.apply() == []
    server.tick("next", (0, 1), 2)
    server.apply()
    assert len(server.proposed) == 2
    effects = server.commit()
    assert {type(effect.body) for effect in effects} == {Ticked}
    assert answers(effects) == ["t0", "t1", "t2", "t3", "t4"]
    assert answers(server.commit()) == ["next"]
    assert server.shard().clocks == {ZERO: 2}


def test_a_repetition_of_a_refused_push_is_refused_again_also_by_a_new_primary():
    server = Replicated()
    server.push("bad", (0, 1), (1, 1), finite=(False, True))
    server.push("good", (0, 1), (2, 2))
    server.apply()
    server.push("in flight", (0, 1), (1, 1))
    server.apply()
    effects = []
    while server.proposed:
        effects += server.commit() + server.apply()
    statuses = {
        effect.request: [(problem.index, problem.status) for problem in effect.body.problems]
        for effect in effects
    }
    refused = [(0, REFUSED), (1, DUPLICATE)]
    assert sorted(statuses["in flight"]) == refused
    server.state.follow()
    server.state.lead()
    (again,) = server.push("again", (0, 1), (1, 1))
    assert [(problem.index, problem.status) for problem in again.body.problems] == refused
    (plain,) = server.push("good again", (0, 1), (2, 2))
    assert [problem.status for problem in plain.body.problems] == [DUPLICATE, DUPLICATE]
    assert server.shard().tables.refused == 1


def test_the_newest_refused_pushes_of_a_session_are_kept():
    tables = ShardTables()
    for number in range(1, 40):
        tables.refuse((1, 1), number)
    assert tables.refusals == {(1, 1): tuple(range(40 - MOST_REFUSALS, 40))}
    tables.forget_session((1, 1))
    assert tables.refusals == {}


def test_the_counts_of_several_bundles_of_a_server_add_up():
    first, second = Server(shards=(0, 1)), Server(shards=(2,))
    first.push("a", (0, 1), (1, 1))
    second.push("b", (2,), (1,))
    first.drain()
    second.drain()
    together = count_server([first.state, second.state])
    assert together.shards == 3
    assert together.versions == {"0": 1, "1": 1, "2": 1}
    assert together.batches == 2
    counts = counted([first.state, second.state])
    assert (counts.shards, counts.batched_pushes, counts.versions) == (3, 2, together.versions)
