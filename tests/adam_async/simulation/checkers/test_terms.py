"""Each broken promise about terms, votes and entries is reported."""

import pytest

from adam_async.controller.consensus import Core, Entry, Received, Saved, Send, Settings, bootstrapped
from adam_async.controller.consensus.messages import Append, Appended, AskVote, Snapshot, Vote
from adam_async.simulation.checkers.terms import Terms
from adam_async.simulation.scenario import Violation


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
