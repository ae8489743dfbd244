"""The consensus core without one of its safeguards: the rows with a direct test, and those without one."""

from functools import partial

from tests.ablations.ablation import Ablation
from tests.ablations.controllers import CONTROLLERS, CORE, LOG
from tests.adam_async.controller.consensus.scenarios import (
    a_step_waits_for_an_entry_of_the_leaders_term,
    an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    entries_that_do_not_follow_a_snapshot_go,
)

_row = partial(Ablation, seed=0)

ABLATIONS = (
    *[ablation for ablation in CONTROLLERS if ablation.seed is not None],
    _row(
        "a leader counts its own entries once they are durable",
        CORE,
        "            self._feed(node)\n        return index",
        "            self._feed(node)\n"
        "        self._receive(\n"
        "            Appended(sender=self.me, to=self.me, term=self.term, ok=True, match=index, round=0)\n"
        "        )\n"
        "        return index",
        seed=3,
    ),
    _row(
        "an entry of an earlier term is committed with one of the leader's own",
        CORE,
        "if decided > before and self.log.term_at(decided) == self.term:",
        "if decided > before:",
        story=an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    ),
    _row(
        "a snapshot has its membership",
        LOG,
        "self.members_at(index), state)",
        "self.snapshot.members, state)",
    ),
    _row(
        "a snapshot keeps only entries that follow it",
        LOG,
        "return self.term_at(snapshot.index) == snapshot.term",
        "return True",
        story=entries_that_do_not_follow_a_snapshot_go,
    ),
    _row(
        "a snapshot is put together in order",
        LOG,
        "return chunk.offset == (len(self._state) if _which(chunk) == self._which else 0)",
        "return True",
    ),
    _row(
        "a vote compares terms before lengths",
        CORE,
        "granted = (ask.last_term, ask.last_index) >= (self.log.last_term, self.log.last_index)",
        "granted = ask.last_index >= self.log.last_index",
        seed=107,
    ),
    _row("a read waits for the next round", CORE, "leading.round + 1))", "max(1, leading.round)))", seed=125),
    _row(
        "a read waits for an entry of the leader's term",
        CORE,
        "max(self.commit, leading.first)",
        "self.commit",
        seed=3,
    ),
    _row(
        "the membership changes after an entry of the term is committed",
        CORE,
        "if self.commit < leading.first:",
        "if False:",
        story=a_step_waits_for_an_entry_of_the_leaders_term,
    ),
    _row(
        "one change of the membership is under way at a time",
        CORE,
        "return self.log.members_index > self.commit",
        "return False",
        seed=1,
    ),
    _row(
        "learners are not counted",
        "adam_async/controller/consensus/membership.py",
        "for voter in self.voters), reverse=True)",
        "for voter in self.all), reverse=True)",
        seed=3,
    ),
    _row(
        "memberships of replaced entries go",
        LOG,
        "while self._changes and self._changes[-1].index >= entries[0].index:",
        "while False:",
        seed=88,
    ),
)
