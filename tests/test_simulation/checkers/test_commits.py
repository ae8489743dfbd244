"""Controllers that apply different entries, or lead without committed ones, are reported."""

import pytest

from adam_async.controller.consensus import (
    Apply,
    Core,
    Entry,
    Received,
    Restore,
    Role,
    Saved,
    Send,
    Settings,
    Tick,
    bootstrapped,
)
from adam_async.controller.consensus.messages import Append, Appended, AskVote, Snapshot, Vote
from adam_async.controller.replicated_state import Open, ReplicatedState, Set, command_bytes, first_state
from tests.simulation.checkers.commits import Commits, Progress, Terms
from tests.simulation.scenario import Violation

OPEN = command_bytes(Open())


class Node:
    """A core, and the machine that the test applies entries to."""

    def __init__(self, commits, *, me="a", term=1, entries=()):
        saved = bootstrapped(me, "abc", first_state("g"))
        saved = Saved(me=me, term=term, snapshot=saved.snapshot, entries=entries)
        self.commits = commits
        self.core = Core(saved, Settings(), draw=lambda: 0.5, now=0.0)
        self.replicated_state = ReplicatedState()
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


def core_of(*, term=1, vote=None, entries=(), me="a"):
    snapshot = bootstrapped("a", "abc").snapshot
    saved = Saved(me=me, term=term, vote=vote, snapshot=snapshot, entries=entries)
    return Core(saved, Settings(), draw=lambda: 0.5, now=0.0)


def says(message):
    return [Send(message)]


def vote_for(candidate, *, term, pre=False):
    return says(Vote(sender="a", to=candidate, term=term, pre=pre, granted=True))


def has(match, *, term=1):
    return says(Appended(sender="a", to="b", term=term, ok=True, match=match, round=0))


def test_a_term_has_one_leader():
    terms = Terms()
    terms.led(2, "a")
    terms.led(2, "a")
    terms.led(3, "b")
    with pytest.raises(Violation, match="I7: c and b both lead in term 3"):
        terms.led(3, "c")


@pytest.mark.parametrize("said", [vote_for("b", term=5), has(2, term=5)])
def test_a_restarted_node_knows_the_term_of_its_messages(said):
    terms = Terms()
    first = core_of(term=5, vote="b", entries=(Entry(2, 1),))
    terms.saw(first, None, said)
    terms.saw(core_of(term=5, vote="b", entries=(Entry(2, 1),)), None, ())
    with pytest.raises(Violation, match="a restarts in term 4 after messages of term 5"):
        terms.saw(core_of(term=4, entries=(Entry(2, 1),)), None, ())


def test_a_restarted_node_knows_its_vote():
    terms = Terms()
    terms.saw(core_of(term=5, vote="b"), None, vote_for("b", term=5))
    with pytest.raises(Violation, match="a voted for b in term 5, and restarts with None"):
        terms.saw(core_of(term=5), None, ())


def test_a_candidate_has_voted_for_itself():
    terms = Terms()
    ask = AskVote(sender="a", to="b", term=5, last_index=1, last_term=1, pre=False)
    terms.saw(core_of(term=5, vote="a"), None, says(ask))
    with pytest.raises(Violation, match="a voted for a in term 5, and restarts with c"):
        terms.saw(core_of(term=5, vote="c"), None, ())


def test_a_vote_is_given_once_in_a_term():
    terms, core = Terms(), core_of(term=5, vote="b")
    terms.saw(core, None, vote_for("b", term=5))
    terms.saw(core, None, vote_for("b", term=5))
    with pytest.raises(Violation, match="a voted for b and c in term 5"):
        terms.saw(core, None, vote_for("c", term=5))


def test_promises_before_an_election_are_none():
    terms, core = Terms(), core_of(term=5)
    terms.saw(core, None, vote_for("b", term=5, pre=True))
    terms.saw(core, None, vote_for("c", term=5, pre=True))


def test_a_restarted_node_has_its_acknowledged_entries():
    terms = Terms()
    terms.saw(core_of(entries=(Entry(2, 1), Entry(3, 1))), None, has(3))
    terms.saw(core_of(entries=(Entry(2, 1), Entry(3, 1))), None, ())
    with pytest.raises(Violation, match="a acknowledged entry 3 of term 1, and restarts without it"):
        terms.saw(core_of(entries=(Entry(2, 1),)), None, ())


def test_a_disk_that_is_empty_is_another_node():
    terms = Terms()
    terms.saw(core_of(term=5, vote="b"), None, vote_for("b", term=5))
    terms.saw(core_of(term=1, me="a-with-another-disk"), None, ())


def append(*, term, entries=()):
    return Received(
        Append(sender="b", to="a", term=term, prev_index=1, prev_term=1, entries=entries, commit=1, round=0)
    )


def test_entries_of_an_earlier_term_are_not_taken():
    terms, core = Terms(), core_of(term=5)
    terms.saw(core, None, ())
    core.log.put([Entry(2, 4)])
    with pytest.raises(Violation, match="I4: a in term 5 took entries of Append"):
        terms.saw(core, append(term=4), ())


def test_acknowledged_entries_give_way_to_a_newer_leader_only():
    terms, core = Terms(), core_of(term=1, entries=(Entry(2, 1),))
    terms.saw(core, None, has(2))
    core.handle(append(term=2, entries=(Entry(2, 2),)), now=1.0)
    terms.saw(core, append(term=2), ())

    terms, core = Terms(), core_of(term=1, entries=(Entry(2, 1), Entry(3, 1)))
    terms.saw(core, None, has(3))
    core.log.install(Snapshot(index=1, term=9))
    with pytest.raises(Violation, match="dropped entry"):
        terms.saw(core, append(term=1), ())


@pytest.mark.parametrize(
    ("field", "name"), [("term", "went back from term 5"), ("commit", "went back from 1")]
)
def test_neither_term_nor_commit_goes_back_within_an_incarnation(field, name):
    terms, core = Terms(), core_of(term=5)
    terms.saw(core, None, ())
    setattr(core, field, 0)
    with pytest.raises(Violation, match=name):
        terms.saw(core, append(term=5), ())


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_time_limit_of_an_answer_begins_with_the_healing(clock):
    progress = Progress(clock, 10.0)
    progress.begin("a")
    clock.now = 100.0
    progress.check()
    progress.heal(["a"])
    clock.now = 110.0
    progress.check()
    progress.end("a", answered=True)
    assert progress.answered == 1


@pytest.mark.parametrize("pays", [True, False])
def test_a_late_or_missing_answer_is_reported(clock, pays):
    progress = Progress(clock, 10.0)
    progress.begin("a")
    progress.heal(["a"])
    clock.now = 10.5
    with pytest.raises(Violation, match=r"I15: a has waited for 10\.500 s"):
        progress.end("a", answered=True) if pays else progress.check()


def test_clients_outside_the_core_may_wait_for_ever(clock):
    progress = Progress(clock, 10.0)
    progress.begin("a")
    progress.begin("b")
    progress.heal(["a"])
    progress.end("a", answered=True)
    clock.now = 100.0
    progress.check()


def test_giving_up_is_no_answer(clock):
    progress = Progress(clock, 10.0)
    progress.heal(["a"])
    progress.begin("a")
    progress.end("a", answered=False)
    assert progress.answered == 0


def test_another_leader_is_reported(clock):
    progress = Progress(clock, 10.0)
    progress.leads(("controller-1", 3))
    progress.leads(("controller-1", 3))
    with pytest.raises(Violation, match="I15: the leader of a healed core changed from"):
        progress.leads(("controller-1", 4))
