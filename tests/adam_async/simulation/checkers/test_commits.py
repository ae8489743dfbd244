"""Controllers that apply different entries, or lead without committed ones, are reported."""

import pytest

from adam_async.controller.consensus import (
    Apply,
    Core,
    Entry,
    Restore,
    Role,
    Saved,
    Settings,
    Tick,
    bootstrapped,
)
from adam_async.controller.consensus.messages import Snapshot
from adam_async.controller.replicated_state import Open, ReplicatedState, Set, command_bytes, first_state
from adam_async.driver.training_rules import PROGRAM_KINDS
from adam_async.simulation.checkers.commits import Commits
from adam_async.simulation.scenario import Violation

OPEN = command_bytes(Open())


class Node:
    """A core, and the machine that the test applies entries to."""

    def __init__(self, commits, *, me="a", term=1, entries=()):
        saved = bootstrapped(me, "abc", first_state("g"))
        saved = Saved(me=me, term=term, snapshot=saved.snapshot, entries=entries)
        self.commits = commits
        self.core = Core(saved, Settings(), draw=lambda: 0.5, now=0.0)
        self.replicated_state = ReplicatedState(PROGRAM_KINDS)
        self.replicated_state.restore(saved.snapshot.state)
        commits.saw(self.core, self.replicated_state, None, ())

    def apply(self, *entries):
        for entry in entries:
            if entry.command is not None:
                self.replicated_state.apply(entry.index, entry.command)
        self.saw(Apply(entries))

    def saw(self, *effects):
        self.commits.saw(self.core, self.replicated_state, Tick(), effects)


def test_all_may_apply_the_same_in_pieces_of_any_size():
    commits = Commits()
    one, two = Node(commits), Node(commits, me="b")
    one.apply(Entry(2, 1, OPEN), Entry(3, 1, OPEN))
    two.apply(Entry(2, 1, OPEN))
    two.apply(Entry(3, 1, OPEN))
    assert commits.last == 3


def test_two_entries_at_one_place_are_reported():
    commits = Commits()
    one, two = Node(commits), Node(commits, me="b")
    one.apply(Entry(2, 1, OPEN))
    with pytest.raises(Violation, match="I7: b applied Entry"):
        two.apply(Entry(2, 2, OPEN))


@pytest.mark.parametrize("index", [3, 1])
def test_entries_are_applied_one_after_the_other(index):
    node = Node(Commits())
    with pytest.raises(Violation, match=f"a applied entry {index} after 1"):
        node.apply(Entry(index, 1, OPEN))


def test_states_that_differ_after_the_same_entries_are_reported():
    commits = Commits()
    one, two = Node(commits), Node(commits, me="b")
    one.apply(Entry(2, 1, OPEN))
    two.replicated_state.apply(17, OPEN)
    with pytest.raises(Violation, match="the state of b after entry 2 is not that of others"):
        two.saw(Apply((Entry(2, 1, OPEN),)))


def test_a_snapshot_of_another_state_is_reported():
    commits = Commits()
    one, two = Node(commits), Node(commits, me="b")
    one.apply(Entry(2, 1, OPEN))
    two.replicated_state.restore(first_state("another"))
    with pytest.raises(Violation, match="after entry 2 is not that of others"):
        two.saw(Restore(Snapshot(index=2, term=1, state=b"")))


def test_a_leader_without_committed_entries_is_reported():
    commits = Commits()
    entry = Entry(2, 1, command_bytes(Set(session=1, number=1, key="run", expected=0, value=b"{}")))
    one = Node(commits, entries=(entry,))
    one.apply(entry)
    two = Node(commits, me="b", term=2, entries=(entry,))
    two.core.role = Role.LEADER
    two.saw()
    three = Node(commits, me="c", term=3)
    three.core.role = Role.LEADER
    with pytest.raises(Violation, match="c leads in term 3 without the committed entry 2"):
        three.saw()
