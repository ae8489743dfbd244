"""The consensus core without one of its safeguards: each row patches one named function of it."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from adam_async.controller.consensus import core, membership
from adam_async.controller.consensus.core import Core
from adam_async.controller.consensus.events import Change, Read
from adam_async.controller.consensus.log import IncomingSnapshot, Log
from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Appended, AskVote
from adam_async.controller.consensus.outbox import Outbox
from tests.ablations import patches
from tests.ablations.patches import Patch, replaces, replaces_handler, replaces_property
from tests.adam_async.controller.consensus.scenarios import (
    a_step_waits_for_an_entry_of_the_leaders_term,
    an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    entries_that_do_not_follow_a_snapshot_go,
)


@dataclass(frozen=True)
class Ablation:
    """A safeguard and the patch that removes it."""

    name: str
    patch: Patch
    seed: int = 0
    """A seed that found it once: it is tried first."""
    story: Callable[[], None] | None = None
    """Scenario that finds it, if random runs seldom do."""


@contextmanager
def without(ablation):
    """Remove a safeguard for the duration of the block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ablation.patch(monkeypatch.setattr)
        yield


def seeds_until_found(ablation: Ablation, run, limit: int) -> tuple[int, str]:
    """Run seeds until one fails. Returns how many it took and what was found; 0 if none was."""
    with without(ablation):
        seeds = [ablation.seed, *(seed for seed in range(limit) if seed != ablation.seed)]
        for taken, seed in enumerate(seeds, 1):
            try:
                run(seed)
            except Exception as error:  # whatever breaks, breaks because of what was removed
                return taken, f"seed {seed}: {type(error).__name__}: {error}"
    return 0, "nothing"


@replaces(Outbox, "next")
def send_before_sync(_, self):
    """Send each message at once."""
    return self._held.popleft()[1] if self._held else None


@replaces(Core, "_add")
def count_own_entries_at_once(add, self, *args, **options):
    """Count an entry of the leader before it is durable."""
    index = add(self, *args, **options)
    self._receive(Appended(sender=self.me, to=self.me, term=self.term, ok=True, match=index, round=0))
    return index


@replaces(Core, "_advance_commit")
def commit_earlier_terms(advance, self):
    """Commit entries of earlier terms once a majority has them."""
    decided = self._led.matched(self.members)
    if decided > self.commit and self.log.term_at(decided) != self.term:
        self._commit_to(decided)
    advance(self)


@replaces(Log, "snapshot_at")
def snapshot_without_membership(snapshot_at, self, index, state):
    """Take snapshots with the membership of the last one."""
    snapshot = snapshot_at(self, index, state)
    return snapshot and msgspec.structs.replace(snapshot, members=self.snapshot.members)


@replaces(Log, "_has_end_of")
def keep_entries_of_other_histories(*_):
    """Keep the entries after any snapshot."""
    return True


@replaces(IncomingSnapshot, "_follows")
def take_chunks_in_any_order(*_):
    """Take a chunk wherever it begins."""
    return True


@replaces_handler(AskVote)
def vote_for_longer_log(consider, self, ask):
    """Compare the lengths of logs alone."""
    longer = ask.last_index >= self.log.last_index
    consider(self, msgspec.structs.replace(ask, last_term=self.log.last_term if longer else -1))


@replaces(core, "WaitingRead")
def join_round_under_way(waiting_read, tag, index, round_):
    """Let a read join a round that has begun."""
    return waiting_read(tag, index, max(1, round_ - 1))


@contextmanager
def first_entry_unknown(leading):
    first, leading.first = leading.first, 0
    try:
        yield
    finally:
        leading.first = first


@replaces_handler(Read)
def read_before_own_entry(read, self, question):
    """Let reads wait for the present commit index alone."""
    if self._leading is None:
        read(self, question)
        return
    with first_entry_unknown(self._leading):
        read(self, question)


@replaces_handler(Change)
def change_before_own_entry(change, self, question):
    """Change the membership before an entry of the leader's term is committed."""
    if self._leading is None:
        change(self, question)
        return
    with first_entry_unknown(self._leading):
        change(self, question)


@replaces_property(Core, "_is_changing")
def change_during_change(_):
    """Change the membership while another change is not committed."""
    return False


@replaces(Members, "decided")
def count_learners(_, self, values):
    """Count learners like voters."""
    return sorted((values.get(node, 0) for node in self.all), reverse=True)[self.quorum - 1]


@replaces(membership, "identity")
def keep_identity_without_disk(identity, name, number):
    """Give a node with an empty disk the identity that it had."""
    return identity(name, 0)


@replaces(Log, "put")
def keep_memberships_of_removed_entries(put, self, entries):
    """Keep the memberships of the entries that new ones replace."""
    kept = list(self._changes)
    put(self, entries)
    self._changes = kept + [entry for entry in entries if entry.members is not None]
    self._update()


ABLATIONS = (
    Ablation("a vote is not durable", patches.forget_ballots),
    Ablation("messages do not wait for the disk", send_before_sync, seed=6),
    Ablation("a leader counts its own entries before they are durable", count_own_entries_at_once, seed=3),
    Ablation("no pre-vote", patches.elect_without_pre_vote, seed=1),
    Ablation("no check-quorum", patches.lead_without_majority, seed=25),
    Ablation("votes although a leader is heard", patches.answer_candidates, seed=7),
    Ablation(
        "an entry of an earlier term is committed by counting",
        commit_earlier_terms,
        story=an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    ),
    Ablation("a snapshot without its term", patches.snapshot_without_term),
    Ablation("a snapshot without its membership", snapshot_without_membership),
    Ablation(
        "a snapshot keeps entries that do not follow it",
        keep_entries_of_other_histories,
        story=entries_that_do_not_follow_a_snapshot_go,
    ),
    Ablation("a snapshot is put together in any order", take_chunks_in_any_order),
    Ablation("messages of old terms are taken", patches.handle_old_terms, seed=65),
    Ablation("entries are taken after any entry", patches.take_entries_after_other_entries, seed=18),
    Ablation("entries in conflict stay", patches.keep_conflicting_entries, seed=1),
    Ablation(
        "entries that may differ from the leader's are committed", patches.commit_unknown_entries, seed=67
    ),
    Ablation("a vote for any log", patches.vote_for_any_log, seed=2),
    Ablation("a vote for the longer log", vote_for_longer_log, seed=107),
    Ablation("a vote for every candidate that asks", patches.vote_again, seed=10),
    Ablation("a read without a round", patches.read_without_round, seed=150),
    Ablation("a read joins a round that has begun", join_round_under_way, seed=125),
    Ablation("a read before an entry of the leader's term is committed", read_before_own_entry, seed=3),
    Ablation(
        "the membership changes before an entry of the term is committed",
        change_before_own_entry,
        story=a_step_waits_for_an_entry_of_the_leaders_term,
    ),
    Ablation("the membership changes while another change is not committed", change_during_change, seed=1),
    Ablation("learners are counted", count_learners, seed=3),
    Ablation("half is a majority", patches.count_half_as_majority, seed=2),
    Ablation("a node that lost its disk keeps its identity", keep_identity_without_disk, seed=20),
    Ablation(
        "a message for an earlier identity is taken", patches.take_messages_for_earlier_identities, seed=102
    ),
    Ablation(
        "memberships of replaced entries stay",
        keep_memberships_of_removed_entries,
        seed=88,
    ),
    Ablation("a torn record is read", patches.read_torn_records, seed=3),
)
