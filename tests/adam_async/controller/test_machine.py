"""The replicated state machine: the same commands give the same bytes, and each question is done once."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.cluster_map import NodeRecord
from adam_async.controller import machine as machine_module
from adam_async.controller.changes import changed
from adam_async.controller.machine import Lost, Machine, Open, Outcome, Set, command_bytes, first_state
from adam_async.messages import SESSION_OVER
from tests.adam_async.controller.test_state import run_record

GROUP = "a-group"


def node(incarnation=1, **fields):
    """A node's record as it comes over a link."""
    return msgspec.json.encode(NodeRecord(role="worker", address="a", incarnation=incarnation, **fields))


class Log:
    """A machine and the log that it applies, command by command."""

    def __init__(self, **options):
        self.machine = Machine(**options)
        self.machine.restore(first_state(GROUP))
        self.commands = []

    def apply(self, command):
        self.commands.append(command_bytes(command))
        return self.machine.apply(len(self.commands), self.commands[-1])

    def open(self):
        return self.apply(Open()).at

    def set(self, session, number, key="nodes/a", expected=0, value=None):
        value = node() if value is None else value
        return self.apply(Set(session=session, number=number, key=key, expected=expected, value=value))


sessions = st.integers(1, 12)  # those that are open, others' places in the log, and none
sets = st.builds(
    Set,
    session=sessions,
    number=st.integers(0, 4),
    key=st.sampled_from(["nodes/a", "nodes/b", "run", "lending", "no/key"]),
    expected=st.integers(0, 3),
    value=st.sampled_from(
        [node(), node(2, ready="x"), msgspec.json.encode(run_record(epochs=1)), b"{}", b"{", b"[]"]
    ),
)
commands = st.lists(
    st.one_of(st.just(Open()), sets, sets, sets, st.builds(Lost, st.sampled_from("ab"), st.integers(1, 2))),
    max_size=40,
)


@settings(max_examples=150)
@given(commands, st.integers(0, 40))
def test_who_takes_the_same_commands_or_a_snapshot_and_the_rest_has_the_same_bytes_and_answers(commands, cut):
    one, other, late = Log().machine, Log().machine, Machine()
    late.restore(one.snapshot())
    for index, command in enumerate(commands, 1):
        answer = one.apply(index, command_bytes(command))
        assert other.apply(index, command_bytes(command)) == answer
        if index == cut:
            late.restore(one.snapshot())
        elif index > cut:
            late.apply(index, command_bytes(command))
    if cut <= len(commands):
        assert late.snapshot() == one.snapshot()
        assert late.map == one.map
    assert other.snapshot() == one.snapshot()
    one.state.check_invariants()


@settings(max_examples=100)
@given(commands)
def test_the_changes_since_any_version_make_the_newest_map(commands):
    machine = Log().machine
    maps = [machine.map]
    for index, command in enumerate(commands, 1):
        machine.apply(index, command_bytes(command))
        if machine.map is not maps[-1]:
            maps.append(machine.map)
    for known in maps:
        newest = known
        for change in machine.since(known.version, GROUP):
            newest = changed(newest, change)
        assert newest == machine.map


def test_a_question_that_comes_again_is_not_done_again_and_gets_the_same_answer():
    log = Log()
    session = log.open()
    first = log.set(session, 1)
    assert first == Outcome(done=True, at=1)
    before = log.machine.map
    log.set(log.open(), 1, "nodes/b")
    assert log.set(session, 1) == first
    assert log.machine.map.nodes["a"] == before.nodes["a"]
    assert log.machine.map.version == 2


@pytest.mark.parametrize(
    ("again", "outcome"),
    [
        ({"expected": 7}, Outcome(done=False, at=0)),
        ({"key": "colour"}, "no key 'colour'"),
    ],
)
def test_a_refusal_is_an_answer_that_stays_too(again, outcome):
    log = Log()
    session = log.open()
    first = log.set(session, 1, **again)
    log.set(log.open(), 1)  # what was refused would now be done, or refused in another way
    assert log.set(session, 1, **again) == first
    assert first == outcome or (first.problem == "invalid" and outcome in first.text)


def test_a_conflict_says_which_version_the_record_has():
    log = Log()
    session = log.open()
    log.set(session, 1)
    log.set(session, 2, "nodes/b")
    assert log.set(session, 3, expected=0) == Outcome(done=False, at=1)
    assert log.set(session, 4, expected=1, value=node(ready="x")) == Outcome(done=True, at=3)


def test_a_question_that_comes_late_is_not_done():
    log = Log()
    session = log.open()
    log.set(session, 2)
    late = log.set(session, 1, "nodes/b")
    assert (late.done, late.problem) == (False, "late")
    assert "b" not in log.machine.map.nodes
    assert log.set(session, 2) == Outcome(done=True, at=1)


def test_numbers_of_one_session_mean_nothing_in_another():
    log = Log()
    one, other = log.open(), log.open()
    assert one != other
    log.set(one, 5)
    assert log.set(other, 1, "nodes/b").done
    assert log.set(one, 6, "nodes/c").done


def test_a_session_that_nobody_opened_is_over_and_does_nothing():
    log = Log()
    outcome = log.set(77, 1)
    assert (outcome.done, outcome.problem) == (False, SESSION_OVER)
    assert outcome.text == "there is no session 77"
    assert not log.machine.map.nodes


def test_sessions_that_were_not_used_for_longest_are_forgotten_and_never_come_again():
    log = Log(most_sessions=3)
    first, second, third = log.open(), log.open(), log.open()
    log.set(first, 1)
    log.set(third, 1, "nodes/c")
    fourth = log.open()
    assert fourth not in (first, second, third)
    assert log.set(second, 1, "nodes/b").problem == SESSION_OVER
    assert log.set(first, 2, "nodes/d").done
    assert log.open() not in (first, second, third, fourth)
    assert log.set(third, 1, "nodes/c").problem == SESSION_OVER
    assert log.set(first, 2, "nodes/d").done


def test_asking_the_same_again_keeps_a_session_from_being_forgotten():
    log = Log(most_sessions=2)
    one, other = log.open(), log.open()
    log.set(one, 1)
    log.set(other, 1, "nodes/b")
    log.set(one, 1)
    log.open()
    assert log.set(one, 1).done
    assert log.set(other, 1, "nodes/b").problem == SESSION_OVER


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"{", "nodes/a: Input data was truncated"),
        (b"[]", "nodes/a: Expected `object`, got `array`"),
        (b"\xff", "nodes/a: "),
        (b'{"role":"worker"}', "missing required field `address`"),
        (
            b'{"role":"worker","address":"a","incarnation":1,"info":{"x":123456789012345678901234567890}}',
            "can't serialize ints",
        ),
        (b'{"role":"worker","address":"a","incarnation":18446744073709551616}', "can't serialize ints"),
    ],
)
def test_a_value_that_cannot_be_read_or_written_down_is_refused_and_uses_its_number(value, said):
    log = Log()
    session = log.open()
    outcome = log.set(session, 1, value=value)
    assert (outcome.done, outcome.problem) == (False, "invalid")
    assert said in outcome.text
    assert log.machine.map.version == 0
    assert log.set(session, 1) == outcome
    log.machine.snapshot()


def test_the_loss_of_a_node_is_a_change_like_any_other_and_that_of_an_earlier_life_is_none():
    log = Log()
    log.set(log.open(), 1, value=node(incarnation=5))
    assert log.apply(Lost("a", 4)) == Outcome()
    assert log.machine.map.nodes["a"].live
    log.apply(Lost("a", 5))
    assert not log.machine.map.nodes["a"].live
    (change,) = log.machine.since(1, GROUP)
    assert list(change.nodes) == ["a"]


def test_changes_of_another_group_or_from_the_beginning_are_the_whole_map():
    log = Log()
    log.set(log.open(), 1)
    assert log.machine.since(1, GROUP) == []
    assert log.machine.since(1, "another") is None
    assert log.machine.since(-1, GROUP) is None
    assert log.machine.since(2, GROUP) is None


def test_who_took_a_whole_state_has_no_history_from_before():
    log = Log()
    session = log.open()
    log.set(session, 1)
    log.set(session, 2, "nodes/b")
    other = Machine()
    other.restore(log.machine.snapshot())
    assert other.group == GROUP
    assert other.since(2, GROUP) == []
    assert other.since(1, GROUP) is None


def test_a_machine_that_was_given_no_state_belongs_to_no_group():
    assert Machine().group == ""
    assert Machine().map.version == 0


def test_a_record_that_the_rules_cannot_work_with_is_refused_and_leaves_the_map_as_it_was(monkeypatch):
    """It is in the log for good: what it raised it would raise again at every restart."""
    log = Log()
    session = log.open()
    log.set(session, 1)
    before, changes_before = log.machine.map, log.machine.since(0, GROUP)

    def fails(self):
        self._set(generation=99)
        raise KeyError("servers")

    monkeypatch.setattr(machine_module.ControllerState, "_run_rules", fails)
    answer = log.set(session, 2, key="nodes/b")
    assert answer == Outcome(
        done=False, problem="invalid", text="the map's rules cannot work with it: KeyError"
    )
    assert log.apply(Lost("a", 1)) == Outcome()
    assert log.machine.map is before
    assert log.machine.since(0, GROUP) == changes_before
