"""Safeguards of the controllers and their removals: rows of `benchmarks.ablations`.

A patch of a named function removes a safeguard. If a safeguard is part of a longer function or is read when a
class is made, such as a type annotation, the row replaces source text instead, in `file`.
"""

from dataclasses import dataclass

from tests.ablations import patches


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A safeguard and its removal: a `patch`, or a replacement of source text."""

    name: str
    patch: patches.Patch | None = None
    """A function of `patches`; None if the row replaces source text."""
    file: str = ""
    old: str = ""
    new: str = ""
    guard: str
    """The direct test of the safeguard: it passes, and fails after the removal."""
    breaks: str = ""
    """The invariant or error that a seed shows after the removal; empty if no seed is expected to."""
    seldom: str = ""
    """Why no seed is expected to."""
    scenario: str = "controllers"

    def __post_init__(self) -> None:
        if (self.patch is None) != bool(self.file):
            raise ValueError(f"{self.name}: give a patch, or a file with source text")


CONSENSUS, CONTROLLER = "adam_async/controller/consensus/", "adam_async/controller/"
CORE_TESTS, CONTROLLER_TESTS = "tests/adam_async/controller/consensus/", "tests/adam_async/controller/"
CORE, SERVICE = CORE_TESTS + "test_core.py::", CONTROLLER_TESTS + "test_service.py::"
NODE, STATE = CONTROLLER_TESTS + "test_consensus_node.py::", CONTROLLER_TESTS + "test_state.py::"
LOG_FILE = CONTROLLER_TESTS + "test_log_file.py::"

CRASH_POINTS = (
    CONTROLLER_TESTS + "test_crash_points.py::"
    "test_after_a_crash_at_any_point_all_that_was_promised_is_there_and_a_controller_goes_on_with_it"
)

CALM = "the cost is a change of leader, not a wrong answer, and similar safeguards cover for it"


def _core(
    name: str, file: str, old: str, new: str, *, guard: str, breaks: str = "", seldom: str = ""
) -> Ablation:
    """Make the row of a safeguard of consensus whose removal replaces source text."""
    return Ablation(
        name=name,
        file=CONSENSUS + file,
        old=old,
        new=new,
        guard=CORE + guard,
        breaks=breaks,
        seldom=seldom,
    )


ABLATIONS = (
    Ablation(
        name="a vote is durable",
        patch=patches.forget_ballots,
        guard=CORE + "test_a_vote_is_given_once_in_a_term_also_over_a_restart",
        breaks="I7",
    ),
    Ablation(
        name="a vote is given once in a term",
        patch=patches.vote_again,
        guard=CORE + "test_a_vote_is_given_once_in_a_term_also_over_a_restart",
        breaks="I7",
    ),
    Ablation(
        name="a promise is sent after its sync",
        patch=patches.send_before_sync,
        guard=CRASH_POINTS,
        breaks="I7",
    ),
    Ablation(
        name="messages of old terms are refused (fence)",
        patch=patches.handle_old_terms,
        guard=CORE + "test_a_leader_of_an_older_term_learns_of_the_newer_one_and_follows",
        breaks="I4, or two leaders in a term",
    ),
    _core(
        "a snapshot has its term",
        "core.py",
        "Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)",
        "Snapshot(taken.index, 0, self.log.members_at(taken.index), taken.state)",
        guard="test_one_whose_entries_are_gone_is_sent_the_snapshot_in_pieces_and_then_the_rest",
        breaks="I7",
    ),
    Ablation(
        name="a vote needs an up-to-date log",
        patch=patches.vote_for_any_log,
        guard=CORE + "test_a_vote_is_for_a_log_that_ends_as_late_as_ones_own",
        breaks="I7",
    ),
    _core(
        "entries follow a common entry",
        "core.py",
        "if previous > self.commit and self.log.term_at(previous) != append.prev_term:",
        "if self.log.term_at(previous) is None and previous > self.commit:",
        guard="test_entries_are_taken_only_after_an_entry_that_both_have",
        breaks="I7",
    ),
    _core(
        "conflicting entries are replaced",
        "core.py",
        "if entry.index > self.commit and self.log.term_at(entry.index) != entry.term:",
        "if entry.index > self.log.last_index:",
        guard="test_entries_in_conflict_with_the_leaders_are_replaced",
        breaks="I7",
    ),
    _core(
        "a follower commits only entries equal to the leader's",
        "core.py",
        "self._commit_to(min(append.commit, match))",
        "self._commit_to(min(append.commit, self.log.last_index))",
        guard="test_a_follower_commits_only_what_it_knows_to_be_the_same",
        seldom="an isolated node must have common entries that it does not know to be common, and one more",
    ),
    Ablation(
        name="a majority is more than half",
        patch=patches.count_half_as_majority,
        guard=CORE_TESTS + "test_membership.py::test_majorities_of_groups_one_step_apart_share_a_node",
        breaks="I7",
    ),
    _core(
        "a leader counts its own entries after their sync",
        "core.py",
        "self._outbox.hold(Appended(sender=self.me, to=self.me,",
        "self._receive(Appended(sender=self.me, to=self.me,",
        guard="test_a_leader_sends_before_its_own_disk_is_ready_and_counts_the_others",
        seldom="a leader must crash after an answer and before its own sync; 1 of 105 seeds found it",
    ),
    _core(
        "an entry of an earlier term is committed with one of the leader's term",
        "core.py",
        "decided > before and self.log.term_at(decided) == self.term",
        "decided > before",
        guard="test_an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own",
        seldom="a node with a later entry must be elected after a commit by counting",
    ),
    _core(
        "a snapshot has its membership",
        "core.py",
        "Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)",
        "Snapshot(taken.index, term, self.log.snapshot.members, taken.state)",
        guard="test_a_snapshot_has_the_membership_at_its_index",
        breaks="AssertionError",
    ),
    _core(
        "a snapshot removes entries that do not follow it",
        "log.py",
        "agrees = self.term_at(snapshot.index) == snapshot.term",
        "agrees = True",
        guard="test_a_snapshot_removes_entries_that_do_not_follow_it",
        seldom="a follower must have entries behind a snapshot that they do not follow",
    ),
    _core(
        "pieces of a snapshot are joined in order",
        "log.py",
        "return chunk.offset == (len(self._state) if _which(chunk) == self._which else 0)",
        "return True",
        guard="test_a_piece_that_comes_twice_or_out_of_order_does_no_harm",
        seldom="a link delivers pieces in order, and a new link begins with the first",
    ),
    _core(
        "a later term comes before a longer log",
        "core.py",
        "granted = (ask.last_term, ask.last_index) >= (self.log.last_term, self.log.last_index)",
        "granted = ask.last_index >= self.log.last_index",
        guard="test_a_vote_is_for_a_log_that_ends_as_late_as_ones_own",
        seldom="a longer log must end in an earlier term; 1 of 284 seeds found it",
    ),
    _core(
        "a read waits for a round that begins after it",
        "core.py",
        "WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1)",
        "WaitingRead(read.tag, max(self.commit, leading.first), max(1, leading.round))",
        guard="test_a_read_is_answered_after_a_majority_has_answered_its_round",
        seldom="a deposed leader must get a request during a round; 1 of 225 seeds found it",
    ),
    _core(
        "a read waits for an entry of the leader's term",
        "core.py",
        "WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1)",
        "WaitingRead(read.tag, self.commit, leading.round + 1)",
        guard="test_a_new_leader_answers_no_read_before_its_first_entry_is_committed",
        seldom="a new leader must get a request before its first commit, and know an older one",
    ),
    _core(
        "a step waits for an entry of the leader's term",
        "core.py",
        "if self.commit < leading.first:\n            self._refuse",
        "if False:\n            self._refuse",
        guard="test_a_step_waits_for_an_entry_of_the_leaders_term",
        seldom="two leaders must each begin a step that the other does not know",
    ),
    _core(
        "a step waits for the step before it",
        "core.py",
        "elif self.log.members_index > self.commit:",
        "elif False:",
        guard="test_one_step_is_committed_before_the_next_begins",
        breaks="AssertionError",
    ),
    _core(
        "learners do not count",
        "membership.py",
        "reached = sorted((values.get(voter, 0) for voter in self.voters), reverse=True)",
        "reached = sorted((values.get(voter, 0) for voter in self.all), reverse=True)",
        guard="test_a_learner_is_not_counted_and_does_not_stand",
        seldom="a learner must complete a majority and then be lost",
    ),
    _core(
        "a removed entry takes its membership with it",
        "log.py",
        "            self._changes.pop()\n",
        "            break\n",
        guard="test_a_membership_that_is_cut_off_is_no_longer_in_force",
        seldom="a follower must have an uncommitted step that the next leader lacks",
    ),
    Ablation(
        name="an empty disk has another identity",
        patch=patches.keep_identity_without_disk,
        guard=NODE + "test_a_controller_that_lost_its_disk_is_added_again_and_counts",
        breaks="I7",
    ),
    Ablation(
        name="an identity with a lost disk leaves the group",
        patch=patches.keep_lost_identities,
        guard=NODE + "test_a_controller_that_lost_its_disk_is_added_again_and_counts",
        breaks="I15",
    ),
    Ablation(
        name="messages for an earlier identity are dropped",
        patch=patches.take_messages_for_earlier_identities,
        guard=CORE + "test_a_message_for_an_earlier_identity_is_ignored",
        seldom="a message must be in flight during the loss of a disk, and its link ends with the loss",
    ),
    Ablation(
        name="only a confirmed leader answers a read",
        patch=patches.answer_reads_at_once,
        guard=SERVICE
        + "test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_is_old",
        breaks="I6",
    ),
    Ablation(
        name="a read waits for a round to a majority",
        patch=patches.read_without_round,
        guard=SERVICE
        + "test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_is_old",
        seldom="a deposed leader must get a request in the moment before it resigns",
    ),
    Ablation(
        name="a new leader answers watches after it has applied earlier answers",
        patch=patches.answer_watches_early,
        guard=SERVICE + "test_a_new_leader_shows_nobody_a_map_that_is_older_than_what_was_answered_before_it",
        seldom="no checker compares the order of answers to different watchers",
    ),
    Ablation(
        name="a lagging controller keeps a watcher waiting",
        patch=patches.answer_watches_with_older_maps,
        guard=SERVICE + "test_a_deposed_leader_that_does_not_know_it_takes_nobody_back_to_an_older_map",
        seldom="a deposed leader must get a request in the moment before it resigns",
    ),
    Ablation(
        name="a repeated request is applied once",
        patch=patches.repeat_requests,
        guard=CONTROLLER_TESTS + "test_replicated_state.py::"
        "test_a_repeated_request_is_not_applied_again_and_gets_the_same_answer",
        breaks="I6",
    ),
    Ablation(
        name="sessions are part of a snapshot",
        patch=patches.snapshot_without_sessions,
        guard=NODE + "test_a_session_goes_on_in_those_who_begin_with_a_snapshot",
        breaks="I7",
    ),
    Ablation(
        name="a compare-and-set compares",
        file=CONTROLLER + "state.py",
        old="        if version != command.expected:\n",
        new="        if version < command.expected:\n",
        guard=STATE + "test_a_compare_and_set_that_comes_too_late_changes_nothing",
        breaks="I6",
    ),
    Ablation(
        name="a replaced incarnation cannot join",
        file=CONTROLLER + "state.py",
        old="if new.incarnation in before:",
        new="if False:",
        guard=STATE + "test_an_incarnation_that_another_one_followed_never_joins_again",
        seldom="a client has one incarnation at a time; requests of an earlier one expect an older version",
    ),
    Ablation(
        name="the death of an earlier incarnation has no effect",
        patch=patches.lose_later_incarnations,
        guard=STATE + "test_the_death_of_an_earlier_incarnation_changes_nothing",
        seldom="a member lost by mistake joins again, and no checker asks for the reason of the loss",
    ),
    Ablation(
        name="a loss takes effect after agreement",
        patch=patches.lose_without_agreement,
        guard=SERVICE + "test_a_loss_takes_effect_only_once_it_is_committed",
        breaks="I6",
    ),
    Ablation(
        name="a new leader suspects all members without a link",
        patch=patches.suspect_nobody_after_election,
        guard=SERVICE + "test_members_that_come_to_the_next_leader_in_time_are_not_lost_and_the_others_are",
        seldom="all clients return, so no missing one has to be lost",
    ),
    Ablation(
        name="a recovered log is synced before its use",
        file=CONTROLLER + "log_file.py",
        old="            await self._disk.truncate_durably(self._path, end)\n",
        new="            pass\n",
        guard=LOG_FILE + "test_a_torn_end_is_cut_off_and_the_file_goes_on_before_it",
        breaks="ConfigError",
    ),
    Ablation(
        name="a torn record is not read",
        file=CONSENSUS + "records.py",
        old="if len(payload) == size and crc32(payload) == crc else None",
        new="",
        guard=CORE_TESTS + "test_records.py::"
        "test_a_file_that_ends_anywhere_holds_all_whole_frames_and_ends_after_them",
        seldom="most records are smaller than a sector, which is durable as a whole or not at all",
    ),
    Ablation(
        name="a new log file is written beside the old one",
        file=CONTROLLER + "log_file.py",
        old="        await self._disk.write_atomic(self._path, [writer.frame(records)])\n",
        new="        await self._disk.append_durably(self._path, 0, writer.frame(records))\n",
        guard=LOG_FILE
        + "test_whenever_the_power_goes_the_old_file_is_there_or_the_new_one_and_no_part_of_either",
        seldom="a crash must hit the moment of a snapshot",
    ),
    Ablation(
        name="a controller ends after a failed write",
        patch=patches.ignore_failed_disk,
        guard=NODE + "test_a_controller_whose_disk_fails_ends_and_the_others_go_on",
        breaks="I11, or I7 of a controller that goes on without its promises",
    ),
    Ablation(
        name="only an electable candidate raises the term (pre-vote)",
        patch=patches.elect_without_pre_vote,
        guard=CORE + "test_a_minority_elects_nobody_and_raises_no_term",
        seldom=CALM,
    ),
    Ablation(
        name="a leader without a majority resigns (check-quorum)",
        patch=patches.lead_without_majority,
        guard=CORE + "test_a_leader_that_hears_no_majority_gives_up",
        seldom=CALM,
    ),
    Ablation(
        name="a node with a leader ignores candidates",
        patch=patches.answer_candidates,
        guard=CORE + "test_a_node_that_hears_a_leader_does_not_answer_a_candidate",
        seldom=CALM,
    ),
)
