"""Safeguards of the controllers and their removals: rows of `benchmarks.ablations`.

A patch of a named function removes a safeguard. Type annotations are read when a class is made, before any
patch, so the row of such a safeguard replaces source text instead, in `file`.
"""

from dataclasses import KW_ONLY, dataclass

from tests.ablations import patches


@dataclass(frozen=True)
class Ablation:
    """A safeguard and its removal: a `patch`, or a replacement of source text."""

    name: str
    patch: patches.Patch | None = None
    """A function of `patches`; None if the row replaces source text."""
    _: KW_ONLY
    file: str = ""
    old: str = ""
    new: str = ""
    guard: str
    """The direct test of the safeguard: it passes, and fails after the removal."""
    breaks: str = ""
    """The invariant or error that a seed shows after the removal; empty if no seed is expected to."""
    seldom: str = ""
    """Why no seed is expected to."""
    errors: tuple[str, ...] = ()
    """Types of exceptions that end a run for this removal alone; other exceptions are no find."""
    scenario: str = "controllers"

    def __post_init__(self) -> None:
        if (self.patch is None) != bool(self.file):
            raise ValueError(f"{self.name}: give a patch, or a file with source text")


CORE_TESTS, CONTROLLER_TESTS = "tests/adam_async/controller/consensus/", "tests/adam_async/controller/"

CRASH_POINTS = (
    CONTROLLER_TESTS + "test_crash_points.py::"
    "test_after_a_crash_at_any_point_all_that_was_promised_is_there_and_a_controller_goes_on_with_it"
)

CALM = "the cost is a change of leader, not a wrong answer, and similar safeguards cover for it"

ABLATIONS = (
    Ablation(
        name="a vote is durable",
        patch=patches.forget_ballots,
        guard=CORE_TESTS + "test_core.py::test_a_vote_is_given_once_in_a_term_also_over_a_restart",
        breaks="I7",
    ),
    Ablation(
        name="a vote is given once in a term",
        patch=patches.vote_again,
        guard=CORE_TESTS + "test_core.py::test_a_vote_is_given_once_in_a_term_also_over_a_restart",
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
        guard=CORE_TESTS + "test_core.py::test_a_leader_of_an_older_term_learns_of_the_newer_one_and_follows",
        breaks="I4, or two leaders in a term",
    ),
    Ablation(
        name="a snapshot has its term",
        patch=patches.snapshot_without_term,
        guard=CORE_TESTS + "test_core.py::"
        "test_one_whose_entries_are_gone_is_sent_the_snapshot_in_pieces_and_then_the_rest",
        breaks="I7",
    ),
    Ablation(
        name="a vote needs an up-to-date log",
        patch=patches.vote_for_any_log,
        guard=CORE_TESTS + "test_core.py::test_a_vote_is_for_a_log_that_ends_as_late_as_ones_own",
        breaks="I7",
    ),
    Ablation(
        name="entries follow a common entry",
        patch=patches.take_entries_after_other_entries,
        guard=CORE_TESTS + "test_core.py::test_entries_are_taken_only_after_an_entry_that_both_have",
        breaks="I7",
    ),
    Ablation(
        name="conflicting entries are replaced",
        patch=patches.keep_conflicting_entries,
        guard=CORE_TESTS + "test_core.py::test_entries_in_conflict_with_the_leaders_are_replaced",
        breaks="I7",
    ),
    Ablation(
        name="a follower commits only entries equal to the leader's",
        patch=patches.commit_unknown_entries,
        guard=CORE_TESTS + "test_core.py::test_a_follower_commits_only_what_it_knows_to_be_the_same",
        seldom="an isolated node must have common entries that it does not know to be common, and one more",
    ),
    Ablation(
        name="a majority is more than half",
        patch=patches.count_half_as_majority,
        guard=CORE_TESTS + "test_membership.py::test_majorities_of_groups_one_step_apart_share_a_node",
        breaks="I7",
    ),
    Ablation(
        name="an empty disk has another identity",
        patch=patches.keep_identity_without_disk,
        guard=CONTROLLER_TESTS
        + "test_consensus_node.py::test_a_controller_that_lost_its_disk_is_added_again_and_counts",
        breaks="I7",
    ),
    Ablation(
        name="an identity with a lost disk leaves the group",
        patch=patches.keep_lost_identities,
        guard=CONTROLLER_TESTS
        + "test_consensus_node.py::test_a_controller_that_lost_its_disk_is_added_again_and_counts",
        breaks="I15",
    ),
    Ablation(
        name="messages for an earlier identity are dropped",
        patch=patches.take_messages_for_earlier_identities,
        guard=CORE_TESTS + "test_core.py::test_a_message_for_an_earlier_identity_is_ignored",
        seldom="a message must be in flight during the loss of a disk, and its link ends with the loss",
    ),
    Ablation(
        name="only a confirmed leader answers a read",
        patch=patches.answer_reads_at_once,
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_"
        "is_old",
        breaks="I6",
    ),
    Ablation(
        name="a read waits for a round to a majority",
        patch=patches.read_without_round,
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_"
        "is_old",
        seldom="a deposed leader must get a request in the moment before it resigns",
    ),
    Ablation(
        name="a new leader answers watches after it has applied earlier answers",
        patch=patches.answer_watches_early,
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_new_leader_shows_nobody_a_map_that_is_older_than_what_was_answered_before_it",
        seldom="no checker compares the order of answers to different watchers",
    ),
    Ablation(
        name="a lagging controller keeps a watcher waiting",
        patch=patches.answer_watches_with_older_maps,
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_a_deposed_leader_that_does_not_know_it_takes_nobody_back_to_an_older_map",
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
        guard=CONTROLLER_TESTS
        + "test_consensus_node.py::test_a_session_goes_on_in_those_who_begin_with_a_snapshot",
        breaks="I7",
    ),
    Ablation(
        name="a compare-and-set compares",
        patch=patches.set_newer_records,
        guard=CONTROLLER_TESTS + "test_state.py::test_a_compare_and_set_that_comes_too_late_changes_nothing",
        breaks="I6",
    ),
    Ablation(
        name="a replaced incarnation cannot join",
        patch=patches.join_after_later_incarnations,
        guard=CONTROLLER_TESTS + "test_state.py::"
        "test_an_incarnation_that_another_one_followed_never_joins_again",
        seldom="a client has one incarnation at a time; requests of an earlier one expect an older version",
    ),
    Ablation(
        name="the death of an earlier incarnation has no effect",
        patch=patches.lose_later_incarnations,
        guard="tests/adam_async/driver/test_training_rules.py::test_the_death_of_an_earlier_incarnation_changes_nothing",
        seldom="a member lost by mistake joins again, and no checker asks for the reason of the loss",
    ),
    Ablation(
        name="a loss takes effect after agreement",
        patch=patches.lose_without_agreement,
        guard=CONTROLLER_TESTS + "test_service.py::test_a_loss_takes_effect_only_once_it_is_committed",
        breaks="I6",
    ),
    Ablation(
        name="a new leader suspects all members without a link",
        patch=patches.suspect_nobody_after_election,
        guard=CONTROLLER_TESTS + "test_service.py::"
        "test_members_that_come_to_the_next_leader_in_time_are_not_lost_and_the_others_are",
        seldom="all clients return, so no missing one has to be lost",
    ),
    Ablation(
        name="a recovered log is synced before its use",
        patch=patches.use_unsynced_log,
        guard=CONTROLLER_TESTS + "test_log_file.py::"
        "test_a_torn_end_is_cut_off_and_the_file_goes_on_before_it",
        breaks="ConfigError",
        errors=("ConfigError",),
    ),
    Ablation(
        name="a torn record is not read",
        patch=patches.read_torn_records,
        guard=CORE_TESTS + "test_records.py::"
        "test_a_file_that_ends_anywhere_holds_all_whole_frames_and_ends_after_them",
        seldom="most records are smaller than a sector, which is durable as a whole or not at all",
    ),
    Ablation(
        name="a new log file is written beside the old one",
        patch=patches.write_log_in_place,
        guard=CONTROLLER_TESTS + "test_log_file.py::"
        "test_whenever_the_power_goes_the_old_file_is_there_or_the_new_one_and_no_part_of_either",
        seldom="a crash must hit the moment of a snapshot",
    ),
    Ablation(
        name="a controller ends after a failed write",
        patch=patches.ignore_failed_disk,
        guard=CONTROLLER_TESTS + "test_consensus_node.py::"
        "test_a_controller_whose_disk_fails_ends_and_the_others_go_on",
        breaks="I11, or I7 of a controller that goes on without its promises",
    ),
    Ablation(
        name="only an electable candidate raises the term (pre-vote)",
        patch=patches.elect_without_pre_vote,
        guard=CORE_TESTS + "test_core.py::test_a_minority_elects_nobody_and_raises_no_term",
        seldom=CALM,
    ),
    Ablation(
        name="a leader without a majority resigns (check-quorum)",
        patch=patches.lead_without_majority,
        guard=CORE_TESTS + "test_core.py::test_a_leader_that_hears_no_majority_gives_up",
        seldom=CALM,
    ),
    Ablation(
        name="a node with a leader ignores candidates",
        patch=patches.answer_candidates,
        guard=CORE_TESTS + "test_core.py::test_a_node_that_hears_a_leader_does_not_answer_a_candidate",
        seldom=CALM,
    ),
)
