"""Safeguards of shards with several copies and their removals: more rows of `benchmarks.ablations`.

The scenario `pushes` finds most of them. A row that no seed is expected to find has the reason.
"""

from functools import partial

from tests.ablations import copy_patches
from tests.ablations.safeguards import Ablation
from tests.adam_async.parameter_server.replication import ablations as core

CORE = "tests/adam_async/parameter_server/replication/test_member.py::"
SESSION = (
    "tests/adam_async/client/test_session.py::"
    "test_open_pushes_are_sent_again_in_order_and_under_their_numbers"
)
SERVER = "tests/adam_async/parameter_server/"
PIECES = SERVER + "test_shard_pieces.py::test_a_copy_made_of_pieces_is_equal_to_the_last_bit"
ENDED = SERVER + "test_bundle.py::test_a_copy_that_joins_by_pieces_amid_entries_"
ENDED += "ends_with_the_same_bits"
STATE = SERVER + "test_state.py::"
RULES = "tests/adam_async/controller/test_bundle_rules.py::"
SCENARIO = "tests/adam_async/simulation/scenarios/test_pushes.py::"
KILLED = SCENARIO + "test_a_killed_server_costs_no_push_and_returns_with_all_copies"
RETURNS = SCENARIO + "test_two_of_three_copies_may_be_lost_one_after_the_other"

_row = partial(Ablation, scenario="pushes", guard=KILLED)


COPIES = (
    _row(
        "an entry is committed once all members in sync hold it",
        core.commit_alone,
        guard=CORE + "test_an_entry_is_committed_once_all_members_in_sync_hold_it",
        breaks="committed",
    ),
    _row(
        "a member applies committed entries only",
        core.apply_uncommitted,
        breaks="all copies return, or one log",
    ),
    _row(
        "a message of an older generation is refused",
        core.acknowledge_old_generations,
        guard=CORE + "test_a_primary_that_was_replaced_commits_nothing_and_stops_when_it_learns_that",
        seldom="the map reaches a replaced primary within milliseconds; seeds of the core find it at once",
    ),
    _row(
        "the new primary's entry takes the place of an uncommitted one",
        core.keep_conflicting_entries,
        guard=CORE + "test_another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it",
        breaks="committed, or one log",
    ),
    _row(
        "a member keeps its tail when a new primary begins",
        core.drop_tail,
        guard=CORE + "test_after_two_successive_losses_an_acknowledged_entry_is_there",
        breaks="one log",
    ),
    _row(
        "only a member in sync becomes the primary",
        copy_patches.permit_all_primaries,
        guard=RULES + "test_a_joining_member_does_not_become_the_primary",
        seldom="a member that joins does not propose itself; the rule is for servers with a defect",
    ),
    _row(
        "a member is a node with its incarnation",
        core.start_without_incarnation,
        guard=CORE + "test_a_process_that_was_started_again_is_no_member",
        seldom="the map, the links and the copy compare incarnations, and each makes up for the others",
    ),
    _row(
        "a joining member counts once it is proposed",
        core.count_members_of_the_map_alone,
        guard=CORE + "test_a_joining_member_counts_from_the_moment_of_its_proposal",
        breaks="committed",
    ),
    _row(
        "a struck-out member counts until the map has the change",
        core.count_proposed_members_alone,
        guard=CORE + "test_a_struck_out_member_counts_until_the_map_confirms_it",
        breaks="committed",
    ),
    _row(
        "a joining member is added once it has all pieces",
        core.add_without_pieces,
        guard=CORE + "test_a_joining_member_without_pieces_is_not_added",
        breaks="an IndexError of a copy that lacks pieces, or I1",
        errors=("IndexError",),
    ),
    _row(
        "a joining member is added once it has all entries",
        core.add_without_entries,
        guard=CORE + "test_a_joining_member_needs_the_tail_of_earlier_primaries",
        seldom="a piece waits for the entries in it; seeds of the core find it in a few runs",
    ),
    _row(
        "an entry is committed by min_in_sync members at least",
        core.commit_below_min_in_sync,
        guard=CORE + "test_below_min_in_sync_an_entry_waits_and_the_reason_is_named",
        breaks="min_in_sync",
    ),
    _row(
        "a joining member applies no more than the primary",
        core.let_joining_members_apply_all,
        guard=CORE + "test_a_joining_member_applies_no_entry_that_its_primary_has_not_applied",
        seldom="a primary applies an entry in the round of its commit; seeds of the core find it soon",
    ),
    _row(
        "a piece has the numbers of applied pushes",
        copy_patches.copy_without_numbers,
        guard=PIECES,
        breaks="equal copies",
    ),
    _row(
        "a piece has the clocks of replicas",
        copy_patches.copy_without_clocks,
        guard=PIECES,
        breaks="equal copies",
    ),
    _row(
        "pieces have the groups that shards have counted",
        copy_patches.copy_without_groups,
        guard=PIECES,
        breaks="equal copies, or every group on every shard",
        scenario="training",
    ),
    _row(
        "a push names each group of its step",
        copy_patches.name_the_first_group,
        guard="tests/adam_async/exactness/test_groups.py::"
        "test_every_shard_has_every_group_once_and_frozen_shards_have_none",
        breaks="every group on every shard",
        scenario="training",
    ),
    _row(
        "a shard takes each group once",
        copy_patches.take_known_groups,
        guard=STATE + "test_a_shard_takes_each_group_once_whichever_session_sends_it",
        breaks="each group once",
        scenario="training",
    ),
    _row(
        "the groups of queued pushes count",
        copy_patches.compare_with_counted_groups,
        guard=STATE + "test_a_group_that_waits_in_the_queue_is_taken_once",
        breaks="each group once",
        scenario="training",
    ),
    _row(
        "a push with some known groups waits",
        copy_patches.take_mixed_groups,
        guard=STATE + "test_a_push_with_some_known_groups_must_wait_and_uses_no_number",
        scenario="training",
        seldom="a late push of a lost replica must have a step of several groups, one of them trained again",
    ),
    _row(
        "a returned group is a step of its own",
        copy_patches.join_returned_groups,
        guard="tests/adam_async/worker/test_stepper.py::test_a_returned_group_is_a_step_of_its_own",
        scenario="training",
        seldom="a step must have a group that some shards have, and another one that they lack",
    ),
    _row(
        "a piece has the ended replica generations",
        copy_patches.copy_without_ended_generations,
        guard=ENDED,
        breaks="equal copies",
    ),
    _row(
        "an entry is not applied again to a piece that has it",
        core.apply_again,
        guard=CORE + "test_an_entry_in_a_piece_is_not_applied_to_it_again_and_none_to_a_lacking_piece",
        seldom="a small store is one piece, which is there before the entries that it has are committed",
    ),
    _row(
        "an entry has the verdict of each gradient",
        copy_patches.ship_no_verdict,
        guard=SERVER
        + "test_log_entries.py::test_a_push_arrives_with_its_places_and_the_bits_of_its_gradients",
        breaks="equal copies",
    ),
    _row(
        "members take replicas and epochs from entries",
        copy_patches.follow_own_map,
        breaks="equal copies",
    ),
    _row("members take the batches of the primary", copy_patches.form_own_batches, breaks="equal copies"),
    _row(
        "a handover waits until the successor has applied all entries",
        core.hand_over_without_flush,
        guard=CORE + "test_a_handover_waits_for_the_entries_that_are_not_applied",
        seldom="the successor has all committed entries; the cost is the answers to others",
    ),
    _row(
        "pushes are sent again under their numbers",
        copy_patches.send_again_under_new_numbers,
        guard=SESSION,
        breaks="pending pushes end, or I2",
    ),
    _row(
        "a new primary begins with the applied numbers",
        copy_patches.lead_without_numbers,
        guard=SERVER
        + "test_replicated_state.py::test_a_new_primary_orders_from_the_numbers_that_are_applied",
        breaks="pending pushes end, or I2",
    ),
    _row(
        "open requests are sent again in their order",
        copy_patches.send_again_in_reverse,
        guard=SESSION,
        seldom="each attempt applies the earliest push at least, so the cost is time only",
    ),
    _row(
        "a copy knows the links that its server has",
        copy_patches.forget_links_of_later_members,
        guard=RETURNS,
        breaks="all copies return, or pending pushes end",
    ),
    _row(
        "a repetition of a refused push is refused",
        copy_patches.answer_refused_pushes_as_duplicates,
        guard=SERVER + "test_replicated_state.py::"
        "test_a_repetition_of_a_refused_push_is_refused_again_also_by_a_new_primary",
        seldom="the gradients of the scenario are finite",
    ),
    _row(
        "a repeated tick finds its entry in flight",
        copy_patches.enter_each_tick,
        guard=SERVER + "test_replicated_state.py::"
        "test_a_repeated_tick_in_flight_is_no_further_entry_and_is_answered_with_the_first",
        seldom="a further entry of the same tick changes nothing, and the cost is the length of the log",
    ),
    _row(
        "a joining member without progress is struck out",
        copy_patches.let_members_join_for_ever,
        guard=SERVER + "test_joining_members.py::"
        "test_a_member_without_a_new_piece_is_stalled_also_if_it_begins_again_and_again",
        seldom="each server of the scenario can take up its copies",
    ),
    _row(
        "a session that came before the map begins again with the next copy",
        copy_patches.keep_early_sessions,
        guard=SERVER + "test_joining_copies.py::"
        "test_a_session_that_came_before_the_map_begins_again_with_the_next_copy",
        breaks="all copies return",
    ),
)
