"""The product without one of its safeguards: its source text is changed, and loaded under another name."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

from adam_async.controller import consensus
from tests.adam_async.controller.consensus.scenarios import (
    a_step_waits_for_an_entry_of_the_leaders_term,
    an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    entries_that_do_not_follow_a_snapshot_go,
)

FOLDER = Path(consensus.__file__).parent
MODULES = (
    "membership",
    "messages",
    "log",
    "records",
    "settings",
    "roles",
    "events",
    "outbox",
    "leading",
    "violations",
    "core",
)
"""In the order in which they import each other."""


@dataclass(frozen=True)
class Ablation:
    """A safeguard, and how the source looks with and without it."""

    name: str
    file: str
    old: str
    new: str
    seed: int = 0
    """One that found it once: it is tried first."""
    story: Callable[[SimpleNamespace], None] | None = None
    """Scenario that finds it, if random runs seldom do."""


@contextmanager
def without(ablation: Ablation):
    """Give the modules of the product with a safeguard removed."""
    package = "consensus_without_a_safeguard"
    loaded = {}
    try:
        sys.modules[package] = ModuleType(package)
        for name in MODULES:
            source = (FOLDER / f"{name}.py").read_text()
            if name == ablation.file:
                assert source.count(ablation.old) == 1, f"{ablation.name}: the source has changed"
                source = source.replace(ablation.old, ablation.new)
            module = sys.modules[f"{package}.{name}"] = loaded[name] = ModuleType(f"{package}.{name}")
            exec(
                compile(source.replace("adam_async.controller.consensus", package), f"{name}.py", "exec"),
                vars(module),
            )
        yield SimpleNamespace(**loaded)
    finally:
        for name in (package, *(f"{package}.{module}" for module in loaded)):
            sys.modules.pop(name, None)


def seeds_until_found(ablation: Ablation, run, limit: int) -> tuple[int, str]:
    """Run seeds until one fails. Returns how many it took and what was found; 0 if none was."""
    with without(ablation) as code:
        seeds = [ablation.seed, *(seed for seed in range(limit) if seed != ablation.seed)]
        for taken, seed in enumerate(seeds, 1):
            try:
                run(seed, code)
            except Exception as error:  # whatever breaks, breaks because of what was removed
                return taken, f"seed {seed}: {type(error).__name__}: {error}"
    return 0, "nothing"


ABLATIONS = (
    Ablation(
        "a vote is not durable",
        "core",
        "        self._outbox.record(Ballot(term, vote))\n",
        "",
    ),
    Ablation(
        "messages do not wait for the disk",
        "outbox",
        "if not self._held or self._held[0][0] > self._durable:\n            return None",
        "if not self._held:\n            return None",
        seed=6,
    ),
    Ablation(
        "a leader counts its own entries before they are durable",
        "core",
        "self._outbox.hold(Appended(sender=self.me, to=self.me,",
        "self._receive(Appended(sender=self.me, to=self.me,",
        seed=3,
    ),
    Ablation(
        "no pre-vote",
        "core",
        "        self._ask(pre=True)\n",
        "        self._campaign(Cause.ENCOURAGED)\n",
        seed=1,
    ),
    Ablation(
        "no check-quorum",
        "core",
        "if leading.heard(self.members) < self._now - settings.election_s:",
        "if False:",
        seed=25,
    ),
    Ablation(
        "votes although a leader is heard",
        "core",
        "if isinstance(message, AskVote) and not message.transfer and self._leader_is_near():",
        "if False:",
        seed=7,
    ),
    Ablation(
        "an entry of an earlier term is committed by counting",
        "core",
        "decided > before and self.log.term_at(decided) == self.term",
        "decided > before",
        story=an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    ),
    Ablation(
        "a snapshot without its term",
        "core",
        "Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)",
        "Snapshot(taken.index, 0, self.log.members_at(taken.index), taken.state)",
    ),
    Ablation(
        "a snapshot without its membership",
        "core",
        "Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)",
        "Snapshot(taken.index, term, self.log.snapshot.members, taken.state)",
    ),
    Ablation(
        "a snapshot keeps entries that do not follow it",
        "log",
        "agrees = self.term_at(snapshot.index) == snapshot.term",
        "agrees = True",
        story=entries_that_do_not_follow_a_snapshot_go,
    ),
    Ablation(
        "a snapshot is put together in any order",
        "log",
        "return chunk.offset == (len(self._state) if _which(chunk) == self._which else 0)",
        "return True",
    ),
    Ablation(
        "messages of old terms are taken",
        "core",
        "        elif message.term < self.term:\n            self._correct(message)\n            return\n",
        "",
        seed=65,
    ),
    Ablation(
        "entries are taken after any entry",
        "core",
        "if previous > self.commit and self.log.term_at(previous) != append.prev_term:",
        "if self.log.term_at(previous) is None and previous > self.commit:",
        seed=18,
    ),
    Ablation(
        "entries in conflict stay",
        "core",
        "if entry.index > self.commit and self.log.term_at(entry.index) != entry.term:",
        "if entry.index > self.log.last_index:",
        seed=1,
    ),
    Ablation(
        "what the leader has committed is believed to be here",
        "core",
        "self._commit_to(min(append.commit, match))",
        "self._commit_to(min(append.commit, self.log.last_index))",
        seed=67,
    ),
    Ablation(
        "a vote for any log",
        "core",
        "granted = (ask.last_term, ask.last_index) >= (self.log.last_term, self.log.last_index)",
        "granted = True",
        seed=2,
    ),
    Ablation(
        "a vote for the longer log",
        "core",
        "granted = (ask.last_term, ask.last_index) >= (self.log.last_term, self.log.last_index)",
        "granted = ask.last_index >= self.log.last_index",
        seed=107,
    ),
    Ablation(
        "a vote for everybody who asks",
        "core",
        "granted = granted and self.vote in (None, ask.sender)",
        "granted = granted and True",
        seed=10,
    ),
    Ablation(
        "a read without a round",
        "core",
        "WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1)",
        "WaitingRead(read.tag, max(self.commit, leading.first), 0)",
        seed=150,
    ),
    Ablation(
        "a read joins a round that has begun",
        "core",
        "WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1)",
        "WaitingRead(read.tag, max(self.commit, leading.first), max(1, leading.round))",
        seed=125,
    ),
    Ablation(
        "a read before an entry of the leader's term is committed",
        "core",
        "WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1)",
        "WaitingRead(read.tag, self.commit, leading.round + 1)",
        seed=3,
    ),
    Ablation(
        "the membership changes before an entry of the term is committed",
        "core",
        "if self.commit < leading.first:\n            self._refuse",
        "if False:\n            self._refuse",
        story=a_step_waits_for_an_entry_of_the_leaders_term,
    ),
    Ablation(
        "the membership changes while another change is not committed",
        "core",
        "elif self.log.members_index > self.commit:",
        "elif False:",
        seed=1,
    ),
    Ablation(
        "learners are counted",
        "membership",
        "reached = sorted((values.get(voter, 0) for voter in self.voters), reverse=True)",
        "reached = sorted((values.get(voter, 0) for voter in self.all), reverse=True)",
        seed=3,
    ),
    Ablation(
        "half is a majority",
        "membership",
        "return len(self.voters) // 2 + 1",
        "return (len(self.voters) + 1) // 2",
        seed=2,
    ),
    Ablation(
        "one that lost its disk keeps its identity",
        "membership",
        'return f"{name}/{number:x}"',
        'return f"{name}/0"',
        seed=20,
    ),
    Ablation(
        "what was for an earlier life is taken",
        "core",
        "if message.to != self.me:\n",
        "if False:\n",
        seed=102,
    ),
    Ablation(
        "the log is cut off where entries are put, but the membership stays",
        "log",
        "            self._changes.pop()\n",
        "            break\n",
        seed=88,
    ),
    Ablation(
        "a torn record is read",
        "records",
        "if len(payload) == size and crc32(payload) == crc else None",
        "",
        seed=3,
    ),
)
