"""Safeguards of stores on disks and their removals: more rows of `benchmarks.ablations`.

The scenario `power` finds most of them. A row that no seed is expected to find has the reason.
"""

from functools import partial

from tests.ablations import disk_patches
from tests.ablations.safeguards import Ablation

STORE = "tests/adam_async/persistence/"
CRASHES = STORE + "test_crash_points.py::"
CRASHES += "test_a_crash_at_any_point_loses_nothing_confirmed_and_leaves_whole_states"
REPAIRS = STORE + "test_crash_points.py::"
REPAIRS += "test_a_crash_at_any_point_of_a_repair_changes_no_state_and_hides_no_loss"
APPENDS = "tests/adam_async/parameter_server/test_ordered_appends.py::"
REPLAY = "tests/adam_async/parameter_server/test_entry_replay.py::"
SERVER = "tests/adam_async/parameter_server/test_server_disk.py::"

_row = partial(Ablation, scenario="power")


DISKS = (
    _row(
        "the newest state counts, in any file",
        disk_patches.take_states_read_last,
        guard=STORE + "test_damage.py::test_states_of_a_damaged_file_hide_no_newer_ones",
        seldom="files are read as they were made, so only a repair after damage writes an older state last",
    ),
    _row(
        "a round is confirmed after its sync",
        disk_patches.confirm_without_sync,
        guard=CRASHES,
        breaks="loss bound, durable, no false damage, or older state",
    ),
    _row(
        "a failed sync ends the server",
        disk_patches.survive_failed_syncs,
        guard=STORE + "test_disk_trouble.py::"
        "test_no_sync_is_tried_again_and_nothing_is_acknowledged_after_a_failed_one",
        breaks="I11, or loss bound",
    ),
    _row(
        "a damaged frame is not read",
        disk_patches.read_damaged_frames,
        guard=STORE + "test_damage.py::"
        "test_a_flipped_bit_anywhere_is_reported_or_costs_nothing_and_no_damaged_byte_is_returned",
        breaks="recovered state, or an error of a server",
    ),
    _row(
        "a torn tail is cut off, and an opened folder synced",
        disk_patches.keep_torn_tails,
        guard=CRASHES,
        breaks="no false damage, or older state",
    ),
    _row(
        "the part that did not fit is cut off",
        disk_patches.keep_parts_that_did_not_fit,
        guard=STORE + "test_disk_trouble.py::"
        "test_a_full_disk_costs_no_state_on_it_and_rounds_go_on_once_there_is_room",
        breaks="an error of a server",
        errors=("DiskFailed",),
    ),
    _row(
        "a folder has one owner",
        disk_patches.open_folders_of_others,
        guard=STORE + "test_store.py::test_a_folder_of_another_owner_is_refused_and_left_as_it_is",
        seldom="the name of a folder has the digest of its store's id, so only an operator can mix them up",
    ),
    _row(
        "superseded files are removed after the sync of the round",
        disk_patches.remove_before_sync,
        guard=CRASHES,
        breaks="no false damage, or loss bound",
    ),
    _row(
        "a durable push is acknowledged after its append",
        disk_patches.acknowledge_before_append,
        guard=APPENDS + "test_a_step_waits_until_its_entry_is_on_the_disk",
        breaks="durable",
    ),
    _row(
        "a primary numbers its entries by its own steps",
        disk_patches.number_behind_all_steps,
        guard=APPENDS + "test_only_entries_of_this_server_count_for_their_positions",
        seldom="messages of the earlier primary wait for the disk only in the first milliseconds of a new "
        "one, and an entry with another position is appended again",
    ),
    _row(
        "the first durable push waits until the store is on all disks",
        disk_patches.append_before_all_disks,
        guard=SERVER + "test_a_primary_appends_no_entry_before_all_primaries_have_the_store_on_their_disks",
        seldom="a loss of all servers must come between the first writings of two of them",
    ),
    _row(
        "each piece comes from the server with the newest copy",
        disk_patches.take_first_copy,
        guard="tests/adam_async/checkpoint/test_saved_shards.py::"
        "test_of_two_copies_the_one_with_the_newer_last_entry_counts",
        breaks="durable, or loss bound",
    ),
    _row(
        "generations of entries come before positions",
        disk_patches.compare_positions_alone,
        guard="tests/adam_async/checkpoint/test_saved_shards.py::"
        "test_of_two_copies_the_one_with_the_newer_last_entry_counts",
        seldom="all servers must end before the others have as many entries as a primary that was cut off",
    ),
    _row(
        "an entry that was never committed is not applied to a newer piece",
        disk_patches.replay_older_generations,
        guard=REPLAY + "test_an_entry_of_an_older_generation_than_that_of_a_piece_is_not_applied_to_it",
        seldom="all servers must end before a primary that was cut off and joins again has written a round",
    ),
    _row(
        "a log that began anew does not follow earlier pieces",
        disk_patches.replay_over_new_begins,
        guard=REPLAY + "test_entries_after_a_new_begin_of_the_log_follow_only_pieces_at_or_after_it",
        seldom="all servers must end before a server that joins again has written a round",
    ),
    _row(
        "arrays from the disk of a joining server have the digest of the primary's",
        disk_patches.take_offered_arrays_unseen,
        guard="tests/adam_async/parameter_server/test_offered_pieces.py::"
        "test_a_disk_with_other_bits_at_the_same_position_is_not_used",
        seldom="all simulated servers have one arithmetic, and disks have committed states only",
    ),
    _row(
        "an earlier store stays until the new one is on the disks",
        disk_patches.remove_earlier_stores_at_once,
        guard=SERVER + "test_a_store_supersedes_another_one_once_all_primaries_have_reported_it",
        breaks="loss bound, or durable",
    ),
    _row(
        "a round in progress is not on the disk",
        disk_patches.forget_round_in_progress,
        guard=STORE + "test_disk_trouble.py::test_a_round_in_progress_is_not_on_disk_at_its_first_instant",
        breaks="all copies return, or a store comes back",
    ),
    _row(
        "only a complete round covers entries",
        disk_patches.call_rounds_complete,
        guard=STORE + "test_store.py::test_a_complete_round_makes_applied_entries_superfluous_and_no_others",
        breaks="all copies return, or durable",
    ),
    _row(
        "a folder is set aside before its removal",
        disk_patches.remove_in_place,
        guard=SERVER + "test_a_removal_that_a_crash_cuts_short_leaves_no_store",
        breaks="no false damage",
    ),
    _row(
        "after damage a floor counts only for listed states",
        disk_patches.trust_floors_after_damage,
        guard=STORE
        + "test_damage.py::test_no_two_damaged_frames_let_an_older_state_count_as_one_at_the_floor",
        seldom="a disk must lose a state together with the record of its round (one seed of 1,000)",
    ),
    _row(
        "the record of damage comes before new names",
        disk_patches.record_damage_nowhere,
        guard=REPAIRS,
        seldom="a seed damages a disk once, and seldom loses power during the few writes of its repair",
    ),
)
