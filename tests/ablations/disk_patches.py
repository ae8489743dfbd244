"""Patches that remove safeguards of stores on disks, as `patches` does for the others."""

from typing import Any

import msgspec

from adam_async.checkpoint import saved_shards
from adam_async.errors import AdamError
from adam_async.parameter_server import offered_pieces, server_disk
from adam_async.parameter_server.entry_replay import EntryReplay
from adam_async.parameter_server.ordered_appends import OrderedAppends
from adam_async.parameter_server.store_disk import StoreDisk
from adam_async.persistence import contents, frames, opening
from adam_async.persistence.folder import Folder, SegmentWriter
from adam_async.persistence.rounds import Rounds
from tests.ablations.patches import replaces, replaces_property


def _confirm(writer: SegmentWriter) -> None:
    writer._durable = writer._position
    writer._durable_sizes[writer.segment] = writer._position


@replaces(contents, "_newest_states")
def take_states_read_last(_: Any, readable: Any, forgotten: Any) -> Any:
    """Take of each name the state that was read last, not the newest one."""
    return {
        found.record.key.name: (found.record.key, contents._location(found, found.record.sizes))
        for found in readable
        if isinstance(found.record, contents.StateRecord)
        and found.record.number > forgotten.get(found.record.key.home, 0)
    }


@replaces(SegmentWriter, "sync")
async def confirm_without_sync(_: Any, self: SegmentWriter) -> None:
    """Count appends as durable without a sync."""
    _confirm(self)


@replaces(SegmentWriter, "sync")
async def survive_failed_syncs(sync: Any, self: SegmentWriter) -> None:
    """Take a failed sync for a success."""
    try:
        await sync(self)
    except AdamError:
        _confirm(self)


@replaces(frames, "is_whole")
def read_damaged_frames(*_: Any) -> bool:
    """Read frames without comparing checksums."""
    return True


@replaces(opening, "_settle")
async def keep_torn_tails(*_: Any) -> None:
    """Leave torn tails where they are, and unsynced files unsynced."""


@replaces(SegmentWriter, "_cut_off")
async def keep_parts_that_did_not_fit(*_: Any) -> None:
    """Leave the part of an append that a full disk took in the file."""


@replaces(opening, "_check")
def open_folders_of_others(*_: Any) -> None:
    """Open a folder of any owner, encoding and release."""


@replaces(Rounds, "_end")
async def remove_before_sync(end: Any, self: Rounds, current: Any) -> None:
    """Remove superseded files before the round that supersedes them is synced."""
    folder = self._folder
    for segment in folder.superfluous(current.floors if current.is_complete else folder.floors):
        await folder._disk.remove_file(folder.path / segment)
    await end(self, current)


@replaces(OrderedAppends, "append")
def acknowledge_before_append(
    append: Any, self: OrderedAppends, position: int, generation: int, parts: Any, action: Any, item: Any
) -> None:
    """Go on with an entry while its append is under way."""
    append(self, position, generation, parts, action, item)
    self._steps[-1].is_done = True
    self._advance()


@replaces_property(OrderedAppends, "ordered_here")
def number_behind_all_steps(self: OrderedAppends) -> int:
    """Number an entry behind all steps, those of other messages too."""
    return len(self)


@replaces(StoreDisk, "_is_restorable")
def append_before_all_disks(_: Any, self: StoreDisk, home: str) -> bool:
    """Append entries of a bundle once its own pieces are on the disk, whatever other servers have."""
    return home in self._complete


@replaces(saved_shards, "_merge")
def take_first_copy(merge: Any, found: Any, node: str, saved: Any, name: str, **room: int) -> Any:
    """Take each piece from the first server that has it."""
    pieces = tuple(msgspec.structs.replace(piece, generation=0, position=0) for piece in saved.pieces)
    return merge(found, node, msgspec.structs.replace(saved, pieces=pieces), name, **room)


@replaces(saved_shards, "_merge")
def compare_positions_alone(merge: Any, found: Any, node: str, saved: Any, name: str, **room: int) -> Any:
    """Take each piece from the server with the highest position, of whichever generation."""
    pieces = tuple(msgspec.structs.replace(piece, generation=0) for piece in saved.pieces)
    return merge(found, node, msgspec.structs.replace(saved, pieces=pieces), name, **room)


@replaces(EntryReplay, "take")
def replay_older_generations(take: Any, self: EntryReplay, order: Any, parts: Any) -> Any:
    """Apply each entry on a disk to the pieces there, of whichever generation."""
    newest = max(generation for generation, _ in self.orders.values())
    return take(self, (max(newest, order[0]), order[1]), parts)


@replaces(EntryReplay, "take")
def replay_over_new_begins(take: Any, self: EntryReplay, order: Any, parts: Any) -> Any:
    """Apply the entries of a log that began anew to earlier pieces, too."""
    if parts:
        return take(self, order, parts)
    self.orders = {piece: max(order, known) for piece, known in self.orders.items()}
    return True


@replaces(offered_pieces, "_is_same")
def take_offered_arrays_unseen(*_: Any) -> bool:
    """Load the arrays on a disk without comparing their digest with the primary's."""
    return True


@replaces(server_disk, "is_saved")
def remove_earlier_stores_at_once(*_: Any) -> bool:
    """Take each store for whole on the disks."""
    return True


@replaces(Rounds, "_end")
async def call_rounds_complete(end: Any, self: Rounds, current: Any) -> None:
    """Let a round cover entries whose states it could not take."""
    current.is_complete = True
    await end(self, current)


@replaces_property(Rounds, "in_round")
def forget_round_in_progress(_: Rounds) -> bool:
    """Take the states of a round in progress for written."""
    return False


@replaces(StoreDisk, "remove")
async def remove_in_place(_: Any, self: StoreDisk) -> None:
    """Remove a folder under its own name."""
    async with self._changing:
        await self._close()
        self._catalogue = None
        await self._ports.states.remove_folder(self.folder)


@replaces(contents, "_listed")
def trust_floors_after_damage(*_: Any) -> Any:
    """Let the floors of the newest round count for all states, whatever rounds are damaged."""
    return {}, True


@replaces(Folder, "losses")
def record_damage_nowhere(_: Any, self: Folder, *args: Any) -> Any:
    """Rename damaged files without a record of their losses."""
    self._lost.clear()
    return self.directory()
