"""Checks of a parameter server on questions, and on the peers that may send for a replica."""

from dataclasses import replace

import msgspec
import pytest

from adam_async.messages import GetRecord, Part, Pull, ReadShards, ReportSteps, StepReport, part_refusal
from adam_async.messages.group_sets import MOST_BOUNDS
from adam_async.parameter_server import question_checks
from adam_async.parameter_server.events import PushArrived, ReplicasChanged
from adam_async.parameter_server.gradients import PushGradients
from adam_async.parameter_server.question_checks import (
    EARLY_STEPS,
    MOST_AHEAD,
    MOST_SESSIONS,
    MOST_STEPS,
    MOST_UNNAMED,
    QuestionChecks,
    SenderChecks,
)
from adam_async.parameter_server.state import ServerState
from adam_async.run.group_ranges import LEAST_BOUNDS, MOST_WORK, with_groups
from adam_async.run.ids import Replica
from tests.adam_async.parameter_server.test_state import push_of
from tests.adam_async.parameter_server.timelines import SENDER, shard_of, tick_on
from transport import Identity

MOST_BYTES = 400


def specs_of(state):
    return [shard.spec for shard in state.shards.values()]


def checks_of(count=30, **resumed):
    state = ServerState(store="run", generation=1, shards=[shard_of(number) for number in range(count)])
    state.shards[0].version = 7
    return QuestionChecks(state, specs_of(state), most_weight=16, **resumed)


PUSH = push_of((0, 1), (3, 3))
TICK = tick_on((0, 1))
PULL = Pull(store="run", generation=1, shards=(0, 1))
RECORD = ReportSteps(shards=(0, 1), number=1, steps=(StepReport(1, 16, 0),), **SENDER)
READ = ReadShards(store="run", generation=1, shards=(0, 1))
ALL = tuple(range(30))


@pytest.mark.parametrize("body", [PUSH, TICK, PULL, RECORD, READ], ids=lambda body: type(body).__name__)
def test_a_correct_question_is_taken(body):
    checks = checks_of()
    assert checks.refusal(body, most_bytes=MOST_BYTES) is None
    twice = msgspec.structs.replace(body, shards=(1, 1))
    code, text = checks.refusal(twice, most_bytes=MOST_BYTES)
    assert (code, text) == ("malformed", f"{type(body).__name__}: 1 is named twice")
    another = msgspec.structs.replace(twice, store="another")
    assert checks.refusal(another, most_bytes=MOST_BYTES) is None


@pytest.mark.parametrize(
    ("body", "change", "text"),
    [
        (PUSH, {"numbers": (1,)}, "differ in length"),
        (PUSH, {"versions": (8, 0)}, "version 8 of shard 0 was read, and it has 7"),
        (PUSH, {"own_applied": (3, 0)}, "3 pushes on shard 0 came before push 3"),
        (PUSH, {"weight": 17}, "weight 17, and a step has at most 16"),
        (PUSH, {"epoch": 2}, "epoch 2, and 1 is the next one"),
        (PUSH, {"clock": EARLY_STEPS + 1}, "no replica can be beyond 4096"),
        (TICK, {"epoch": 1 << 31}, "epoch 2147483648"),
        (TICK, {"clock": 1 << 40}, "clock 1099511627776"),
        (PULL, {"clock": 1 << 40}, "clock 1099511627776"),
        (RECORD, {"steps": (StepReport(1 << 40, 16, 0),)}, "clock 1099511627776"),
        (RECORD, {"steps": (StepReport(1, 16, 0, (2,)),)}, "no place 2"),
        (RECORD, {"steps": (StepReport(1, 16, 0, (1, 1)),)}, "1 is named twice"),
        (RECORD, {"steps": (StepReport(1, 17, 0),)}, "weight 17"),
        (PUSH, {"groups": (1,)}, "an epoch from 1 and ranges"),
        (PUSH, {"groups": (0, 0, 1)}, "an epoch from 1 and ranges"),
        (PUSH, {"groups": (1, 0, 1, 3)}, "an epoch from 1 and ranges"),
        (PUSH, {"groups": (1, 3, 1)}, "1 follows 3"),
        (PUSH, {"groups": (1, 0, 4, 4, 5)}, "4 follows 4"),
        (PUSH, {"groups": (2, 0, 1)}, "epoch 2, and 1 is the next one"),
        (PUSH, {"epoch": 1, "groups": (2, 0, 1)}, "epoch 2, and 1 is the next one"),
        (PUSH, {"assign": True, "groups": (1, 0, 1)}, "an assignment sums no groups"),
        (RECORD, {"steps": (StepReport(1, 16, 0, (), (1, 5, 5)),)}, "5 follows 5"),
        (RECORD, {"steps": (StepReport(1, 16, 0), StepReport(2, 16, 0, (), (2, 0, 1)))}, "epoch 2"),
    ],
)
def test_a_question_of_no_correct_client_is_refused_by_name(body, change, text):
    refusal = checks_of().refusal(msgspec.structs.replace(body, **change), most_bytes=MOST_BYTES)
    assert refusal is not None
    assert refusal.code == "malformed"
    assert text in refusal.text


def test_bounds_of_epochs_and_clocks_follow_the_run():
    checks = checks_of(resumed_epoch=40, resumed_clock=9000)
    assert checks.refusal(msgspec.structs.replace(TICK, epoch=41, clock=9001), most_bytes=1) is None
    assert checks.refusal(msgspec.structs.replace(TICK, epoch=42), most_bytes=1) is not None
    checks.epoch_began(41, first_clock=9100, groups=1000)
    far = msgspec.structs.replace(TICK, epoch=42, clock=9100 + 2 * 1000)
    assert checks.refusal(far, most_bytes=1) is None
    assert checks.refusal(msgspec.structs.replace(far, epoch=43), most_bytes=1) is not None
    assert checks.refusal(msgspec.structs.replace(far, clock=1 << 40), most_bytes=1) is not None


@pytest.mark.parametrize(
    "body",
    [PUSH, msgspec.structs.replace(RECORD, steps=(StepReport(1, 16, 0, (), (41, 0, 9)),))],
    ids=lambda body: type(body).__name__,
)
def test_groups_are_those_of_a_known_epoch_of_the_run(body):
    def refusal(*groups, **fields):
        if isinstance(body, ReportSteps):
            steps = (StepReport(1, 16, 0, (), groups),)
            return checks.refusal(msgspec.structs.replace(body, steps=steps), most_bytes=MOST_BYTES)
        return checks.refusal(msgspec.structs.replace(body, groups=groups, **fields), most_bytes=MOST_BYTES)

    checks = checks_of(resumed_epoch=40)
    assert refusal(41, 0, 1 << 32) is None, "the number of groups is not known yet"
    checks.epoch_began(41, first_clock=0, groups=1000)
    assert refusal(41, 0, 1000) is None
    assert refusal(42, 0, 1, 999, 1000) is None
    assert "group 1000, and an epoch has 1000" in refusal(41, 0, 1001).text
    assert "epoch 43, and 42 is the next one" in refusal(43, 0, 1).text
    if not isinstance(body, ReportSteps):
        text = "it is of epoch 42, and its groups of epoch 41"
        assert text in refusal(41, 0, 1, epoch=42).text
        assert refusal(42, 0, 1, epoch=42) is None


def test_a_client_names_groups_of_any_epoch_in_a_store_without_clocks_only():
    def refusal(*groups, **fields):
        state = ServerState(store="run", generation=1, shards=[shard_of(0)], program=False, **fields)
        checks = QuestionChecks(state, specs_of(state), most_weight=16)
        return checks.refusal(push_of((0,), (1,), clock=0, groups=groups), most_bytes=MOST_BYTES)

    assert refusal(7000, 3, 4) is None
    assert "ranges of groups ascend" in refusal(7000, 4, 3).text
    assert "a store with clocks has those of runs only" in refusal(1, 0, 1, clocked=True).text


@pytest.mark.parametrize("shards", [(0, 1), (1, 0), (0, 1, 2)])
def test_the_ranges_that_a_shard_keeps_are_bounded(monkeypatch, shards):
    monkeypatch.setattr(question_checks, "MOST_BOUNDS", 20)
    checks = checks_of()
    scattered = (1, *range(0, 20, 1))
    checks._state.shards[0].separate().ordered_groups = with_groups({}, (*scattered[:-2],))
    fits = push_of(shards, (1,) * len(shards), groups=(1, 100, 101))
    assert "too scattered: a shard keeps 10 ranges" in checks.refusal(fits, most_bytes=MOST_BYTES).text
    others = push_of((1, 2), (1, 1), groups=(1, 100, 101))
    assert checks.refusal(others, most_bytes=MOST_BYTES) is None


def test_the_groups_of_pushes_that_wait_are_bounded_with_the_counted_ones(monkeypatch):
    monkeypatch.setattr(question_checks, "MOST_BOUNDS", 20)
    checks = checks_of()
    state = checks._state
    state.handle(ReplicasChanged({Replica(0): 1}))
    for number in range(1, 10):
        push = push_of((0,), (number,), clock=0, groups=(1, 2 * number, 2 * number + 1))
        assert checks.refusal(push, most_bytes=MOST_BYTES) is None
        state.handle(PushArrived("push", push, PushGradients(), None))
    assert state.shards[0].tables.groups == {}, "all of them wait"
    push = push_of((0,), (10,), clock=0, groups=(1, 100, 101))
    assert "too scattered" in checks.refusal(push, most_bytes=MOST_BYTES).text


def scattered_over(length, *, first=0):
    return (1, *range(first, first + 2 * length, 2))


def test_the_sets_of_split_tables_take_bounded_memory_together():
    checks = checks_of(2000)
    tables = [shard.separate() for shard in checks._state.shards.values()]
    grown, refused = 0, 0
    while not refused:
        named = scattered_over(100, first=1000 * grown)
        push = push_of((0,), (1,), clock=0, groups=named)
        refused = checks.refusal(push, most_bytes=MOST_BYTES) is not None
        tables[0].ordered_groups = with_groups(tables[0].ordered_groups, named)
        grown += 1
    kept = 2000 * 100 * (grown - 1)
    assert kept <= 2000 * LEAST_BOUNDS < 2000 * MOST_BOUNDS // 16
    tables[1].ordered_groups = {1: tuple(range(LEAST_BOUNDS))}
    push = push_of((1,), (1,), clock=0, groups=(1, 0, 1))
    assert "a shard keeps 256 ranges" in checks.refusal(push, most_bytes=MOST_BYTES).text


def test_a_set_that_many_shards_have_may_be_longer():
    checks = checks_of(2000)
    shards = tuple(range(2000))
    tables = checks._state.bundle.group(shards)[0].tables
    for shard in checks._state.shards.values():
        shard.tables = tables
    tables.shards = 2000
    tables.ordered_groups = with_groups({}, scattered_over(8 * LEAST_BOUNDS))
    push = push_of(shards, (1,) * 2000, clock=0, groups=scattered_over(200, first=1 << 20))
    assert checks.refusal(push, most_bytes=MOST_BYTES) is None


@pytest.mark.parametrize("steps", [1, 40])
def test_a_message_changes_a_bounded_number_of_different_sets(steps):
    checks = checks_of(2000)
    tables = [shard.separate() for shard in checks._state.shards.values()]
    shards = tuple(range(2000))

    def refusal(named):
        each = len(named) // steps & ~1
        reports = tuple(StepReport(1, 16, 0, (), (1, *named[1 + i * each :][:each])) for i in range(steps))
        body = msgspec.structs.replace(RECORD, shards=shards, steps=reports)
        if steps == 1:
            body = push_of(shards, (1,) * 2000, clock=0, groups=named)
        return checks.refusal(body, most_bytes=MOST_BYTES)

    named = scattered_over(160)
    assert refusal(named) is None, "all shards have the same set"
    for number, each in enumerate(tables):
        each.ordered_groups = with_groups({}, (1, 10_000 + number, 10_001 + number))
    assert 2000 * len(named) > MOST_WORK
    assert "different sets" in refusal(named).text
    if steps == 1:
        assert refusal(named[:3]) is None


@pytest.mark.parametrize(("sets", "bounds", "taken"), [(15, 1022, True), (20, 1022, False), (20, 2, True)])
def test_scattered_groups_change_few_different_sets_in_one_message(sets, bounds, taken):
    checks = checks_of(sets)
    for number, shard in enumerate(checks._state.shards.values()):
        shard.separate().ordered_groups = with_groups({}, (1, 10_000 + number, 10_001 + number))
    body = push_of(tuple(range(sets)), (1,) * sets, clock=0, groups=scattered_over(bounds))
    assert (checks.refusal(body, most_bytes=MOST_BYTES) is None) is taken


def test_the_steps_of_a_report_are_scattered_together():
    checks = checks_of(2000)
    checks._state.shards[0].separate()
    steps = tuple(StepReport(1, 16, 0, (), scattered_over(100, first=1000 * i)) for i in range(6))
    report = msgspec.structs.replace(RECORD, shards=(0,), steps=steps)
    assert "too scattered" in checks.refusal(report, most_bytes=MOST_BYTES).text
    report = msgspec.structs.replace(report, steps=steps[:4])
    assert checks.refusal(report, most_bytes=MOST_BYTES) is None


def test_an_answer_that_fits_into_no_message_is_refused_before_it_is_made():
    checks = checks_of()
    push = msgspec.structs.replace(PUSH, shards=ALL, pull=True)
    pull, read = (msgspec.structs.replace(body, shards=ALL) for body in (PULL, READ))
    for large in (push, pull, read):
        refusal = checks.refusal(large, most_bytes=MOST_BYTES)
        assert refusal is not None
        assert refusal.code == "too-large"
        assert checks.refusal(large, most_bytes=1 << 20) is None
    assert checks.refusal(msgspec.structs.replace(push, pull=False), most_bytes=1) is None


def test_in_bsp_a_push_far_ahead_is_refused_until_the_others_have_caught_up():
    state = ServerState(store="run", generation=1, shards=[shard_of(0), shard_of(1)], summed_weight=16)
    checks = QuestionChecks(state, specs_of(state), most_weight=16)
    state.shards[0].pending.reached = state.shards[1].pending.reached = 7
    for clock in range(8, 8 + MOST_AHEAD):
        assert checks.refusal(msgspec.structs.replace(PUSH, clock=clock), most_bytes=1) is None
    far = msgspec.structs.replace(PUSH, clock=8 + MOST_AHEAD)
    state.shards[0].pending.reached = 8
    code, text = checks.refusal(far, most_bytes=1)
    assert (code, text) == ("busy", "clock 12 of shard 1, and all replicas have reached 7: wait")
    state.shards[1].pending.reached = 8
    assert checks.refusal(far, most_bytes=1) is None


def test_a_part_of_a_record_has_an_order_and_a_size():
    assert part_refusal(GetRecord(run="run", home="ps-0", start=0, stop=1 << 40), 100, most_bytes=200) is None
    assert (
        part_refusal(GetRecord(run="run", home="ps-0", start=0, stop=1 << 40), 300, most_bytes=200)[0]
        == "too-large"
    )
    assert (
        part_refusal(GetRecord(run="run", home="ps-0", start=5, stop=4), 100, most_bytes=200)[0]
        == "malformed"
    )


# --- speakers ----------------------------------------------------------------------------------


def peer(node, incarnation=1):
    return Identity(role="worker", node=node, incarnation=incarnation)


def members(replica, replica_generation, *peers):
    return {
        (Replica(replica), replica_generation): frozenset((each.node, each.incarnation) for each in peers)
    }


def test_a_session_belongs_to_its_first_sender_and_to_one_replica():
    known = SenderChecks()
    assert known.refusal(peer("w0"), TICK) == ""
    assert known.refusal(peer("w0"), PUSH) == ""
    assert known.refusal(peer("w1"), TICK) == "this session is w0's, for replica 0"
    assert known.refusal(peer("w0", 2), TICK) == "this session is w0's, for replica 0"
    other = msgspec.structs.replace(TICK, replica=1)
    assert known.refusal(peer("w0"), other) == "this session is w0's, for replica 0"
    assert known.refusal(peer("w1"), msgspec.structs.replace(TICK, session=2)) == ""


def test_only_its_workers_send_for_a_live_generation_and_any_peer_for_an_unknown_one():
    known = SenderChecks()
    w0, w1, stranger = peer("w0"), peer("w1"), peer("stranger")
    assert known.refusal(stranger, msgspec.structs.replace(TICK, session=3)) == ""
    known.replica_generations_changed(members(0, 1, w0, w1))
    text = "stranger is no worker of replica 0 in generation 1"
    assert known.refusal(stranger, msgspec.structs.replace(TICK, session=3)) == text
    assert known.refusal(stranger, msgspec.structs.replace(TICK, session=4)) == text
    for session, worker in ((1, w0), (2, w1)):
        assert known.refusal(worker, msgspec.structs.replace(TICK, session=session)) == ""
    assert known.refusal(peer("w0", 9), msgspec.structs.replace(TICK, session=5)) != ""
    assert known.refusal(stranger, msgspec.structs.replace(TICK, replica=99, session=6)) == ""


def test_sessions_of_a_peer_and_of_all_are_bounded(monkeypatch):
    known = SenderChecks()
    for session in range(8):
        assert known.refusal(peer("w0"), msgspec.structs.replace(TICK, session=session)) == ""
    more = msgspec.structs.replace(TICK, session=8)
    assert known.refusal(peer("w0"), more) == "w0 has 8 sessions, and no more at a time"
    known.replica_generations_changed(members(0, 2, peer("w0")))
    for session in range(MOST_SESSIONS):
        mine = msgspec.structs.replace(TICK, session=session, incarnation=2)
        assert known.refusal(peer("w0"), mine) == ""
    assert "no more at a time" in known.refusal(peer("w0"), msgspec.structs.replace(mine, session=99))
    for session in range(10, 10 + MOST_UNNAMED):
        early = msgspec.structs.replace(TICK, session=session, replica=99)
        assert known.refusal(peer(f"v{session // 8}"), early) == ""
    early = msgspec.structs.replace(early, session=9)
    assert known.refusal(peer("w"), early).startswith("32 sessions wait for a map that names them")
    assert (
        known.surplus(lambda: 1 << 30) == []
    )  # those of a live generation, and those not named so far, stay
    known.replica_generations_changed(members(99, 1, *(peer(f"v{number}") for number in range(6))))
    assert known.refusal(peer("w"), msgspec.structs.replace(early, replica=98)) == ""
    known.replica_generations_changed({})
    monkeypatch.setattr(question_checks, "MOST_SENDERS", MOST_SESSIONS + MOST_UNNAMED - 1)
    assert known.surplus(lambda: 1) == [(0, 2), (1, 2)]
    assert known.refusal(peer("x"), msgspec.structs.replace(TICK, session=5, replica=97)) == ""
    monkeypatch.setattr(question_checks, "TABLES_BYTES", 512 * 100 * 10)
    assert len(known.surplus(lambda: 100)) == MOST_SESSIONS + MOST_UNNAMED - 2 - 10
    assert known.surplus(lambda: 100) == []


@pytest.mark.parametrize("body", [PUSH, PULL, READ], ids=lambda body: type(body).__name__)
@pytest.mark.parametrize("mixed", [{"rule": 1}, {"dtype": "float64"}], ids=["rule", "type"])
def test_a_message_with_shards_of_two_rules_or_types_is_malformed(body, mixed):
    shards = [shard_of(0), shard_of(1), shard_of(2)]
    shards[1].spec = replace(shards[1].spec, **mixed)
    state = ServerState(store="run", generation=1, shards=shards)
    checks = QuestionChecks(state, specs_of(state), most_weight=16)
    code, text = checks.refusal(body, most_bytes=1 << 20)
    assert code == "malformed"
    assert "shards 0 and 1 differ in rule or type" in text
    alike = msgspec.structs.replace(body, shards=(2, 0))
    assert checks.refusal(alike, most_bytes=1 << 20) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clock": 1}, "an assignment has no clock"),
        ({"clock": 0, "epoch": 1}, "an assignment has no clock"),
        ({"clock": 0, "parts": (Part(True, 2),)}, "an assignment has values, not factors"),
    ],
)
def test_an_assignment_has_values_and_no_clock(change, text):
    body = msgspec.structs.replace(PUSH, assign=True, **change)
    assert text in checks_of().refusal(body, most_bytes=MOST_BYTES).text
    assert checks_of().refusal(msgspec.structs.replace(PUSH, assign=True, clock=0), most_bytes=400) is None


def test_clocks_of_a_store_without_a_program_have_a_bound_that_messages_can_name():
    checks = checks_of()
    checks.epoch_began(1, first_clock=5, groups=None)
    most = 5 + MOST_STEPS
    assert most < 1 << 48
    assert checks.refusal(msgspec.structs.replace(PUSH, clock=most, epoch=1), most_bytes=400) is None
    assert checks.refusal(msgspec.structs.replace(PUSH, clock=most + 1), most_bytes=400) is not None


def test_only_users_of_a_store_push_to_it_and_load_it():
    client, driver = (Identity(role=role, node=role, incarnation=1) for role in ("client", "driver"))
    of_clients, of_run = SenderChecks(program=False, creator="client"), SenderChecks(program=True)
    assert not of_clients.refusal(client, PUSH)
    assert not of_clients.refusal(client, msgspec.structs.replace(PUSH, assign=True))
    assert not of_run.refusal(peer("w"), PUSH)
    assert "has no part in a store of a run" in of_run.refusal(client, PUSH)
    assert "has no part in a store of clients" in of_clients.refusal(peer("w"), PUSH)
    assert "takes none" in of_run.refusal(peer("w"), msgspec.structs.replace(PUSH, assign=True))
    assert not of_run.load_refusal(driver)
    assert not of_clients.load_refusal(client)
    other = Identity(role="client", node="other", incarnation=1)
    assert of_clients.load_refusal(other) == "other loads values, and client created the store"
    assert "client client has no part" in of_run.load_refusal(client)
    assert "driver driver has no part" in of_clients.load_refusal(driver)


def test_a_client_moves_no_clock_far_beyond_the_newest_one():
    shards = [shard_of(0), shard_of(1)]
    state = ServerState(store="run", generation=1, shards=shards, clocked=True, program=False)
    checks = QuestionChecks(state, specs_of(state), most_weight=16)
    checks.epoch_began(1, first_clock=0, groups=None)
    for body in (PUSH, TICK):
        far = msgspec.structs.replace(body, clock=1 << 39, epoch=1)
        assert "the newest of these shards is 0" in checks.refusal(far, most_bytes=1 << 20).text
    shards[0].clocks[Replica(0)] = 100
    near = msgspec.structs.replace(TICK, clock=100 + EARLY_STEPS, epoch=1)
    assert checks.refusal(near, most_bytes=1) is None
    assert checks.refusal(msgspec.structs.replace(near, clock=near.clock + 1), most_bytes=1) is not None


def test_a_store_of_clients_without_clocks_has_no_epochs():
    state = ServerState(store="run", generation=1, shards=[shard_of(0), shard_of(1)], program=False)
    checks = QuestionChecks(state, specs_of(state), most_weight=16)
    for body in (PUSH, TICK):
        refusal = checks.refusal(msgspec.structs.replace(body, epoch=1), most_bytes=1 << 20)
        assert (refusal.code, "store without clocks" in refusal.text) == ("malformed", True)
