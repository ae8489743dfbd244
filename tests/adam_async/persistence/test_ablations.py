"""Each safeguard of a segment store, taken out: a crash, a flipped bit or a failed sync then shows it."""

import random

import pytest

from adam_async.errors import AdamError
from tests.ablations.ablation import Ablation
from tests.ablations.disks import FILES, FOLDER, ROUNDS
from tests.ablations.every import NAMED
from tests.adam_async.crash_images import crashed
from tests.adam_async.persistence import owners, test_crash_points, test_damage, test_disk_trouble, test_store
from tests.adam_async.persistence.owners import files_of
from tests.simulation.loop import SimulationFailed


def crash_everywhere() -> None:
    """Check all crash points of a short trace."""
    dice = random.Random(1)
    images, account = test_crash_points.traced(5, operations=60)
    for image in images:
        for disk_model in crashed(image, dice):
            test_crash_points.check(files_of(disk_model), image.noted, account.owner)


def crash_repairs() -> None:
    """Check the crash points of repairs after a short trace."""
    test_crash_points.test_a_crash_at_any_point_of_a_repair_changes_no_state_and_hides_no_loss(
        test_crash_points.traced(5, operations=60)
    )


def fail_syncs() -> None:
    """Check a store whose fifth sync fails."""
    test_disk_trouble.test_no_sync_is_tried_again_and_nothing_is_acknowledged_after_a_failed_one(5, 5)


def fill_disk() -> None:
    """Check a store whose disk is full for a time."""
    test_disk_trouble.test_a_full_disk_costs_no_state_on_it_and_rounds_go_on_once_there_is_room(700, 8192)


OWN = (
    Ablation(
        "the name of a new file is synced",
        FILES,
        "await self._disk.sync_folder(self._folder)",
        "pass",
        story=crash_everywhere,
    ),
    Ablation(
        "a round lists no file that it removes",
        FILES,
        "for name, size in self._durable_sizes.items() if name not in gone}",
        "for name, size in self._durable_sizes.items()}",
        story=crash_everywhere,
    ),
    Ablation(
        "a frame belongs to one file",
        FOLDER + "frames.py",
        "crc32(salt + _POSITION.pack(position) + head)",
        "crc32(_POSITION.pack(position) + head)",
        story=test_damage.test_a_frame_in_another_place_or_file_is_not_read,
    ),
    Ablation(
        "a proof follows each round",
        ROUNDS,
        "await folder.append_states([payload_of(SyncedRecord())])",
        "pass",
        story=test_damage.test_a_killed_process_leaves_proof_that_its_last_round_was_on_disk,
    ),
    Ablation(
        "a content is checked when it is read",
        FILES,
        "if frame is None or frame.end != location.end:",
        "if False:",
        story=test_damage.test_bytes_that_rot_after_the_opening_are_not_returned,
    ),
    Ablation(
        "entries share a sync",
        FOLDER + "store.py",
        "if group and size >= self._batch_bytes:",
        "if group:",
        story=test_store.test_entries_that_wait_together_share_a_sync_and_none_is_acknowledged_before_it,
    ),
    Ablation(
        "an older state is refused",
        FILES,
        "if known is not None and key.order < known[0].order:",
        "if False:",
        story=test_store.test_a_state_older_than_the_one_on_disk_is_refused,
    ),
    Ablation(
        "the generation comes before the position",
        FOLDER + "records.py",
        "return self.generation, self.position",
        "return 0, self.position",
        story=test_store.test_a_newer_generation_is_newer_at_any_position,
    ),
)

CHECKS = {
    **{ablation: ablation.story for ablation in OWN},
    NAMED["a round is confirmed after its sync"]: crash_everywhere,
    NAMED["a torn tail is cut off, and an opened folder synced"]: crash_everywhere,
    NAMED["a damaged frame is not read"]: crash_everywhere,
    NAMED[
        "the newest state counts, in any file"
    ]: test_damage.test_states_of_a_damaged_file_hide_no_newer_ones,
    NAMED["the record of damage comes before new names"]: crash_repairs,
    NAMED["a failed sync ends the server"]: fail_syncs,
    NAMED["the part that did not fit is cut off"]: fill_disk,
    NAMED[
        "only a complete round covers entries"
    ]: test_store.test_a_complete_round_makes_applied_entries_superfluous_and_no_others,
}


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ablation", "check"), CHECKS.items(), ids=[each.name for each in CHECKS])
def test_a_store_without_a_safeguard_fails(ablation, check, monkeypatch):
    owners.known_scan.cache_clear()
    ablation.remove(monkeypatch.setattr)
    with pytest.raises((AssertionError, AdamError, SimulationFailed, pytest.fail.Exception)):
        check()
    owners.known_scan.cache_clear()
