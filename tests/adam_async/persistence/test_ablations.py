"""Each safeguard of a segment store, taken out: a crash, a flipped bit or a failed sync then shows it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import pytest

from adam_async.errors import AdamError
from adam_async.persistence import contents, frames, opening, rounds
from adam_async.persistence.entry_log import EntryLog
from adam_async.persistence.folder import Folder, SegmentWriter
from adam_async.persistence.keys import StateKey
from adam_async.persistence.rounds import Rounds
from adam_async.simulation.loop import SimulationFailed
from tests.adam_async.crash_images import crashed
from tests.adam_async.persistence import owners, test_crash_points, test_damage, test_disk_trouble, test_store
from tests.adam_async.persistence.owners import files_of


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


async def confirm_without_sync(self: SegmentWriter) -> None:
    """Count appends as durable without a sync."""
    self._durable = self._position
    self._durable_sizes[self.segment] = self._position


async def begin_without_sync(self: SegmentWriter) -> None:
    """Begin a file whose name is not synced."""
    sync_folder = self._disk.sync_folder

    async def forget(_) -> None:
        pass

    self._disk.sync_folder = forget
    try:
        await begin_file(self)
    finally:
        self._disk.sync_folder = sync_folder


begin_file = SegmentWriter._begin_file
sync = SegmentWriter.sync
end_round = Rounds._end


async def survive_failed_syncs(self: SegmentWriter) -> None:
    """Take a failed sync for a success."""
    try:
        await sync(self)
    except AdamError:
        await confirm_without_sync(self)


async def call_rounds_complete(self: Rounds, current) -> None:
    """Let a round cover entries whose states it could not take."""
    current.is_complete = True
    await end_round(self, current)


async def nothing(*_) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Ablation:
    """A safeguard, its removal, and the check that fails without it."""

    safeguard: str
    owner: object
    name: str
    replacement: object
    check: Callable[[], object]


def newest_by_file(readable, forgotten):
    """Take the state that was read last."""
    return {
        found.record.key.name: (found.record.key, contents._location(found, found.record.sizes))
        for found in readable
        if isinstance(found.record, contents.StateRecord)
        and found.record.number > forgotten.get(found.record.key.home, 0)
    }


def prove_nothing(*_, **__):
    """Append nothing that proves a sync."""
    raise rounds.DiskFull


async def read_unchecked(self: Folder, location) -> bytes:
    """Read a content without its checksum."""
    return await self._disk.read_part(self._path / location.segment, location.content, location.end)


def list_without_losses(self, *_):
    """Make the list of a repair without the lost states."""
    self._lost.clear()
    return self.directory()


ABLATIONS = (
    Ablation(
        "a round is synced before its end", SegmentWriter, "sync", confirm_without_sync, crash_everywhere
    ),
    Ablation(
        "the name of a new file is synced", SegmentWriter, "_begin_file", begin_without_sync, crash_everywhere
    ),
    Ablation("an opened folder is synced", opening, "_settle", nothing, crash_everywhere),
    Ablation(
        "a round lists no file that it removes",
        Folder,
        "_files_without",
        lambda self, superfluous: dict(self._durable_sizes),
        crash_everywhere,
    ),
    Ablation("a torn frame is not read", frames, "is_whole", lambda *_: True, crash_everywhere),
    Ablation(
        "the newest state counts, in any file",
        contents,
        "_newest_states",
        newest_by_file,
        test_damage.test_states_of_a_damaged_file_hide_no_newer_ones,
    ),
    Ablation(
        "the record of damage comes before new names",
        Folder,
        "losses",
        list_without_losses,
        crash_repairs,
    ),
    Ablation(
        "a frame belongs to one file",
        frames,
        "_head_crc",
        lambda head, position, salt: crc32(position.to_bytes(8, "little") + head),
        test_damage.test_a_frame_in_another_place_or_file_is_not_read,
    ),
    Ablation(
        "a proof follows each round",
        rounds,
        "SyncedRecord",
        prove_nothing,
        test_damage.test_a_killed_process_leaves_proof_that_its_last_round_was_on_disk,
    ),
    Ablation(
        "a content is checked when it is read",
        Folder,
        "read_content",
        read_unchecked,
        test_damage.test_bytes_that_rot_after_the_opening_are_not_returned,
    ),
    Ablation(
        "a failed sync ends the store",
        SegmentWriter,
        "sync",
        survive_failed_syncs,
        lambda: test_disk_trouble.test_no_sync_is_tried_again_and_nothing_is_acknowledged_after_a_failed_one(
            5, 5
        ),
    ),
    Ablation(
        "the part that did not fit is cut off",
        SegmentWriter,
        "_cut_off",
        nothing,
        lambda: test_disk_trouble.test_a_full_disk_costs_no_state_on_it_and_rounds_go_on_once_there_is_room(
            700, 8192
        ),
    ),
    Ablation(
        "only a complete round covers entries",
        Rounds,
        "_end",
        call_rounds_complete,
        test_store.test_a_complete_round_makes_applied_entries_superfluous_and_no_others,
    ),
    Ablation(
        "entries share a sync",
        EntryLog,
        "_group",
        lambda self: [self._waiting[0]],
        test_store.test_entries_that_wait_together_share_a_sync_and_none_is_acknowledged_before_it,
    ),
    Ablation(
        "an older state is refused",
        Folder,
        "check_order",
        lambda self, key: None,
        test_store.test_a_state_older_than_the_one_on_disk_is_refused,
    ),
    Ablation(
        "the generation comes before the position",
        StateKey,
        "order",
        property(lambda self: (0, self.position)),
        test_store.test_a_newer_generation_is_newer_at_any_position,
    ),
)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda ablation: ablation.safeguard)
def test_a_store_without_a_safeguard_fails(ablation, monkeypatch):
    owners.known_scan.cache_clear()
    monkeypatch.setattr(ablation.owner, ablation.name, ablation.replacement)
    with pytest.raises((AssertionError, AdamError, SimulationFailed, pytest.fail.Exception)):
        ablation.check()
    owners.known_scan.cache_clear()
