"""Safeguards of stores on disks and their removals.

The scenario `power` finds most of them. A row that no seed is expected to find has the reason.
"""

from functools import partial

from tests.ablations.ablation import Ablation

FOLDER, SERVER = "adam_async/persistence/", "adam_async/parameter_server/"
CONTENTS, OPENING, ROUNDS = FOLDER + "contents.py", FOLDER + "opening.py", FOLDER + "rounds.py"
FILES = FOLDER + "folder.py"
TESTS, SERVER_TESTS = "tests/adam_async/persistence/test_", "tests/adam_async/parameter_server/test_"
DAMAGE, TROUBLE, STORE = (
    TESTS + "damage.py::test_",
    TESTS + "disk_trouble.py::test_",
    TESTS + "store.py::test_",
)
CRASH = TESTS + "crash_points.py::test_a_crash_at_any_point_"
CRASHES = CRASH + "loses_nothing_confirmed_and_leaves_whole_states"
APPENDS, DISK = SERVER_TESTS + "ordered_appends.py::test_", SERVER_TESTS + "server_disk.py::test_"
CUTS = SERVER_TESTS + "store_cuts.py::test_"
NAMING, SAVED = (
    SERVER_TESTS + "cut_naming.py::test_",
    "tests/adam_async/checkpoint/test_saved_shards.py::test_",
)
PINS, PIN_COPIES = "tests/adam_async/store/test_pins.py::test_", SERVER_TESTS + "kept_shards.py::test_"
REPLAY = SERVER_TESTS + "entry_replay.py::test_"
NEWER = "tests/adam_async/checkpoint/test_saved_shards.py::"
NEWER += "test_of_two_copies_the_one_with_the_newer_last_entry_counts"

_row = partial(Ablation, scenario="power")

DISKS = (
    _row(
        "the newest state counts, in any file",
        CONTENTS,
        "if known is None or known[0].order < record.key.order:",
        "if True:",
        DAMAGE + "states_of_a_damaged_file_hide_no_newer_ones",
        seldom="files are read as they were made, so only a repair after damage writes an older state last",
    ),
    _row(
        "a round is confirmed after its sync",
        FILES,
        "self.position\n        try:\n            await self._disk.sync_file(path)\n",
        "self.position\n        try:\n            pass\n",
        CRASHES,
        breaks="loss bound, durable, no false damage, or older state",
    ),
    _row(
        "a failed sync ends the server",
        FILES,
        "        except OSError as error:\n            raise disk_failed(path, error) from error\n"
        "        self.syncs += 1\n        self._durable = max(",
        "        except OSError:\n            pass\n        self.syncs += 1\n        self._durable = max(",
        TROUBLE + "no_sync_is_tried_again_and_nothing_is_acknowledged_after_a_failed_one",
        breaks="I11, or loss bound",
    ),
    _row(
        "a damaged frame is not read",
        FOLDER + "frames.py",
        "return len(payload) == size and crc32(payload) == crc",
        "return True",
        DAMAGE + "a_flipped_bit_anywhere_is_reported_or_costs_nothing_and_no_damaged_byte_is_returned",
        breaks="recovered state, or an error of a server",
    ),
    _row(
        "a torn tail is cut off, and an opened folder synced",
        OPENING,
        "    torn = {each.segment for each in contents.torn}\n    for",
        "    return\n    for",
        CRASHES,
        breaks="no false damage, or older state",
    ),
    _row(
        "the part that did not fit is cut off",
        FILES,
        "await self._cut_off(path, begin)",
        "pass",
        TROUBLE + "a_full_disk_costs_no_state_on_it_and_rounds_go_on_once_there_is_room",
        breaks="an error of a server",
        errors=("DiskFailed",),
    ),
    _row(
        "a folder has one owner",
        OPENING,
        "    start = found.start\n",
        "    return\n",
        STORE + "a_folder_of_another_owner_is_refused_and_left_as_it_is",
        seldom="the name of a folder has the digest of its store's id, so only an operator can mix them up",
    ),
    _row(
        "superseded files are removed after the sync of the round",
        ROUNDS,
        "        superfluous = folder.superfluous(floors)\n",
        "        superfluous = folder.superfluous(floors)\n"
        "        for segment in superfluous:\n"
        "            await folder._disk.remove_file(folder.path / segment)\n",
        CRASHES,
        breaks="no false damage, or loss bound",
    ),
    _row(
        "a durable push is acknowledged after its append",
        SERVER + "bundle_saver.py",
        "self._append(step, position, generation, parts))\n",
        "self._append(step, position, generation, parts))\n"
        "        step.is_done = True\n        self._advance()\n",
        APPENDS + "a_step_waits_until_its_entry_is_on_the_disk",
        breaks="durable",
    ),
    _row(
        "a primary numbers its entries by its own steps",
        SERVER + "bundle_saver.py",
        "return sum([step.item is not None for step in self._steps])",
        "return len(self)",
        APPENDS + "only_entries_of_this_server_count_for_their_positions",
        seldom="messages of the earlier primary wait for the disk only in the first milliseconds of a new "
        "one, and an entry with another position is appended again",
    ),
    _row(
        "the first durable push waits until the store is on all disks",
        SERVER + "store_disk.py",
        "return self.is_whole and home in self._complete and self._has_records",
        "return home in self._complete",
        DISK + "a_primary_appends_no_entry_before_all_primaries_have_the_store_on_their_disks",
        seldom="a loss of all servers must come between the first writings of two of them",
    ),
    _row(
        "each piece comes from the server with the newest copy",
        "adam_async/checkpoint/saved_shards.py",
        "return {key: (order := max(copies), copies",
        "return {key: (order := next(iter(copies)), copies",
        NEWER,
        breaks="durable, or loss bound",
    ),
    _row(
        "generations of entries come before positions",
        "adam_async/checkpoint/saved_shards.py",
        "(piece.generation, piece.position)",
        "(0, piece.position)",
        NEWER,
        seldom="all servers must end before the others have as many entries as a primary that was cut off",
    ),
    _row(
        "an entry that was never committed is not applied to a newer piece",
        SERVER + "entry_replay.py",
        "if at < position and newest <= generation and",
        "if at < position and",
        REPLAY + "an_entry_of_an_older_generation_than_that_of_a_piece_is_not_applied_to_it",
        seldom="all servers must end before a primary that was cut off and joins again has written a round",
    ),
    _row(
        "a log that began anew does not follow earlier pieces",
        SERVER + "entry_replay.py",
        "self._ended |= behind",
        "self.orders.update(dict.fromkeys(behind, order))",
        REPLAY + "entries_after_a_new_begin_of_the_log_follow_only_pieces_at_or_after_it",
        seldom="all servers must end before a server that joins again has written a round",
    ),
    _row(
        "arrays from the disk of a joining server have the digest of the primary's",
        SERVER + "offered_pieces.py",
        "return mine == theirs",
        "return True",
        SERVER_TESTS + "offered_pieces.py::test_a_disk_with_other_bits_at_the_same_position_is_not_used",
        seldom="all simulated servers have one arithmetic, and disks have committed states only",
    ),
    _row(
        "an earlier store stays until the new one is on the disks",
        SERVER + "server_disk.py",
        "if not isinstance(words, list) or word not in words:",
        "if False:",
        DISK + "a_store_supersedes_another_one_once_all_primaries_have_reported_it",
        breaks="loss bound, or durable",
    ),
    _row(
        "a round in progress is not on the disk",
        ROUNDS,
        "return self._current is not None",
        "return False",
        TROUBLE + "a_round_in_progress_is_not_on_disk_at_its_first_instant",
        breaks="all copies return, or a store comes back",
    ),
    _row(
        "only a complete round covers entries",
        ROUNDS,
        "        # A copy, because a release",
        "        current.is_complete = True\n        # A copy, because a release",
        STORE + "a_complete_round_makes_applied_entries_superfluous_and_no_others",
        breaks="all copies return, or durable",
    ),
    _row(
        "a folder is set aside before its removal",
        SERVER + "store_disk.py",
        "self._ports.states, self.folder.with_name(REMOVED + self.folder.name)",
        "self._ports.states, self.folder",
        DISK + "a_removal_that_a_crash_cuts_short_leaves_no_store",
        breaks="no false damage",
    ),
    _row(
        "after damage a floor counts only for listed states",
        CONTENTS,
        "    rounds = _rounds(scans)\n    by_number",
        "    return {}, True\n    by_number",
        DAMAGE + "no_two_damaged_frames_let_an_older_state_count_as_one_at_the_floor",
        seldom="a disk must lose a state together with the record of its round (one seed of 1,000)",
    ),
    _row(
        "the record of damage comes before new names",
        FILES,
        "        record = self._list_of_states()\n        self._previous",
        "        self._lost.clear()\n        return self.directory()\n        self._previous",
        CRASH + "of_a_repair_changes_no_state_and_hides_no_loss",
        seldom="a seed damages a disk once, and seldom loses power during the few writes of its repair",
    ),
    _row(
        "a shard is copied for a pin before work changes it",
        SERVER + "bundle.py",
        "each.keep(shards)",
        "pass",
        PINS + "pushes_wait_for_a_slow_disk_once_the_copies_fill_their_memory",
        breaks="pinned state, or pin",
    ),
    _row(
        "in bsp a pin waits for the sums before it",
        SERVER + "bundle.py",
        "(is_pin and self._summed_weight and not self.idle)",
        "False",
        PIN_COPIES + "in_bsp_a_pin_waits_for_the_sums_before_it_and_entries_wait_behind_it",
        seldom="clients of a simulated store seldom push while a sum is in work",
    ),
    _row(
        "a member with shards of another position keeps no pin",
        SERVER + "bundle.py",
        "self.keeps_pins and not self.absent and",
        "self.keeps_pins and",
        PIN_COPIES + "a_member_with_shards_of_another_position_keeps_no_pin",
        seldom="a server must join amid entries, and one of these must be a pin",
    ),
    _row(
        "a member that returns removes the pins that were given up",
        SERVER + "bundle_copy.py",
        "if not effect.piece:",
        "if False:",
        PINS + "a_server_that_was_away_removes_what_was_given_up",
        seldom="a seed does not look for pins that were given up",
    ),
    _row(
        "a run in bsp comes back at one clock",
        "adam_async/checkpoint/saved_shards.py",
        "if not self.record.takes_cuts:",
        "if True:",
        SAVED + "of_the_cuts_of_a_run_the_newest_clock_counts_that_all_pieces_have",
        scenario="cuts",
        seldom="the power must fail when one server has written a cut and another one has not",
    ),
    _row(
        "the complete cut stays on the disk",
        SERVER + "store_cuts.py",
        "kept = [clock for clock in clocks if clock == named.complete]",
        "kept: list[int] = []",
        CUTS + "the_complete_cut_stays_until_a_naming_has_a_later_one_and_a_disk_has_at_most_two",
        scenario="cuts",
        seldom="a server usually has no newer cut than the complete one when it takes the next",
    ),
    _row(
        "a cut that a bundle has passed is given up",
        SERVER + "bundle.py",
        "assert self.cut is None\n        if (fastest := self._fastest()) > clock:",
        "assert self.cut is None\n        if (fastest := self._fastest()) < 0:",
        CUTS + "a_clock_that_a_bundle_has_passed_is_reported_and_costs_no_cut",
        scenario="cuts",
        seldom="a naming is usually far enough ahead on a simulated network",
    ),
    _row(
        "no cut is newer than the record of its run",
        SERVER + "store_cuts.py",
        "if not await self._flush_records():",
        "if False:",
        CUTS + "the_record_of_the_run_on_the_disk_is_never_older_than_a_cut",
        scenario="cuts",
        seldom="the power must fail between a cut and the next round, at the begin of an epoch",
    ),
    _row(
        "a cut is complete on enough disks",
        "adam_async/parameter_server/store_cuts.py",
        "if clocks.count(clock) >= enough}",
        "}",
        CUTS + "a_clock_is_complete_once_enough_disks_have_each_bundle_at_it",
        scenario="cuts",
        seldom="no seed loses the disk of a server",
    ),
    _row(
        "the complete cut of a naming never goes back",
        SERVER + "store_cuts.py",
        "complete = max(complete, last.complete)",
        "pass",
        NAMING + "a_new_primary_goes_on_from_the_naming_in_the_map_and_keeps_its_complete_cut",
        scenario="cuts",
        seldom="no seed loses a server while others go on",
    ),
    _row(
        "a copy keeps the set of an epoch whose groups all wait",
        "adam_async/run/group_ranges.py",
        "return {**sets, epoch: without(sets.get(epoch, ()), named[1:])}",
        "left = without(sets.get(epoch, ()), named[1:])\n"
        "    return {**sets, epoch: left} if left else {k: v for k, v in sets.items() if k != epoch}",
        SERVER_TESTS + "kept_shards.py::test_the_set_of_an_epoch_whose_groups_all_wait_stays",
        scenario="cuts",
        seldom="a cut must come in the first step of an epoch, and the runs of seeds have few epochs",
    ),
)
