"""One store's states on the disk of one server: written while the server serves the store, read after a loss.

The disk follows the changes of a store from its placement on the server until it leaves the server. Beside
the states of a run's shards the disk has the run's record, which is never older than the states. Then the
states are *saved*: a driver or client may read them for a new store, until the disks have the new store too.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.errors import ConfigError, DataError, DiskFailed
from adam_async.messages import SavedPiece, SavedStore, ShardStates
from adam_async.messages.saved_shards import SAVED_PIECE_BYTES
from adam_async.model.rules import Rule
from adam_async.parameter_server.bundle_saver import BundleSaver, DiskPorts
from adam_async.parameter_server.cut_folder import (
    UNREADABLE_CUT,
    CutFolder,
    cut_folders,
    order_of,
    read_cut_head,
)
from adam_async.parameter_server.entry_replay import EntryReplay
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.piece_states import (
    CATALOGUE,
    CONTENTS,
    RUN,
    Catalogue,
    catalogue_state,
    entry_parts,
    read_catalogue,
    read_entry,
    read_run,
    run_state,
    tensors_of,
)
from adam_async.parameter_server.shard_pieces import digest_of, pieces_of
from adam_async.parameter_server.shard_transfer import read_states
from adam_async.parameter_server.store_cuts import StoreCuts
from adam_async.persistence.contents import Recovery
from adam_async.persistence.folder import FULL
from adam_async.persistence.opening import LOCK, read_identity, read_newest
from adam_async.persistence.records import LEADING, EntryKey, Identity, Order, State, StateKey, StateName
from adam_async.persistence.store import SegmentStore
from adam_async.persistence.usage import SegmentStatistics
from adam_async.run.ids import ShardId
from adam_async.run.run_record import RunRecord, packed_record
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.disk import Disk

PREFIX, REMOVED = "store-", "removed-"
"""Prefixes of the names of store folders, and of folders that are being removed."""

FIRST_S = 0.02
"""Maximum pause between two checks whether a store with durable pushes was written once, in seconds."""

FLUSH_END_S = 5.0
"""Maximum time for the last write of a store that leaves its server, in seconds."""


def folder_of(folder: Path, id: str) -> Path:
    """Return the folder of the store with an id."""
    return folder / f"{PREFIX}{blake2b(id.encode(), digest_size=12).hexdigest()}"


class StoreDisk:
    """The states of one store.

    Args:
        id: Id of the store.
        folder: Folder of the store alone.
        ports: Services of the process.
    """

    def __init__(self, id: str, folder: Path, ports: DiskPorts) -> None:
        self.id = id
        self.folder = folder
        self._ports = ports
        self._stack = AsyncExitStack()
        self._segments = self._new_segments()
        self._savers: dict[str, BundleSaver] = {}
        self._left: set[BundleSaver] = set()
        """Bundles that have left the server before their last changes are written."""
        self.catalogue: Catalogue | None = None
        """The store's record; None until the disk has it."""
        self.run: RunRecord | None = None
        """The run's record; None in a client's store, and until the disk has it."""
        self._run_order: Order = 0, 0
        """Order of the run's record."""
        self._has_records = True
        """Whether the disk has the present records of store and run; only a store with durable pushes keeps
        this up to date."""
        self._served = asyncio.Event()
        """Event that is set while states and entries are being written."""
        self._complete: set[str] = set()
        """Homes of the bundles that have each of their pieces on the disk."""
        self.is_whole = False
        """Whether the primaries of all bundles have reported the store as whole on their disks."""
        self._completed = asyncio.Event()
        """Event that is set, and replaced, when `_complete` grows or when `is_whole` or `_has_records` is
        set."""
        self._joined = asyncio.Event()
        """Event that is set while the disk may lack pieces of a bundle on this server."""
        self._serving: asyncio.Task[None] | None = None
        self._appending: set[asyncio.Task[Any]] = set()
        """Tasks that append entries."""
        self._has_ended = False
        """Whether the server ends."""
        self._spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
        self._changing = asyncio.Lock()
        self._taken: set[StateName] = set()
        self._positions: dict[StateName, int] = {}
        """Position of each state that is on the disk or is being written."""
        self._catalogue_bytes = 0
        """Size of the catalogue as JSON text, in bytes."""
        self._table: tuple[ShardSpec, ...] = ()
        self._rules: Sequence[Rule] = ()
        self._pieces: dict[str, list[tuple[ShardSpec, ...]]] = {}
        self._replays: dict[str, EntryReplay] = {}
        """By home, the replays of bundles with entries that their pieces on the disk lacked."""
        self._last: tuple[tuple[StateName, int], EntryReplay] | None = None
        """The piece read last, with its cut's clock, for further requests of its shards."""
        self.cuts: StoreCuts | None = None
        """The cuts of a run in bsp (`StoreRecord.takes_cuts`); None if rounds write the pieces."""
        self.is_complete = False
        """Whether the disk has each piece of this server's bundles; with cuts, whether the disks have all
        bundles at one clock."""
        self.is_saved = False
        """Whether the states can be read: the folder was read after the last write."""
        self.on_complete: Callable[[], object] = lambda: None
        self.on_cut: Callable[[], object] = lambda: None
        """Callback that reports the cuts on the disk in the map."""
        self.still: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
        """Callback that, in place, keeps the values still for a block; it first counts all steps in them."""

    def _new_segments(self) -> SegmentStore:
        ports = self._ports
        return SegmentStore(
            ports.states,
            ports.entries,
            self.folder,
            Identity(run=self.id, contents=CONTENTS),
            take=self._take,
            clock=ports.clock,
            wall_clock=ports.wall_clock,
            notice=lambda text: ports.notice(text),
            settings=ports.settings,
        )

    @property
    def is_serving(self) -> bool:
        """Whether the disk follows the changes of the store."""
        return self._served.is_set()

    @property
    def is_followed(self) -> bool:
        """Whether the disk follows the changes of the store, or is about to."""
        return self._serving is not None

    # --- writing -----------------------------------------------------------------------------

    def begin(
        self, catalogue: Catalogue, spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    ) -> None:
        """Begin to write the store; only the first call has an effect, also with several bundles."""
        if self._serving is None:
            found = self.catalogue
            if found is None or found.record.generation != catalogue.record.generation:
                self._positions.clear()
            self.catalogue = catalogue
            self._spawn = spawn
            if catalogue.record.takes_cuts:
                self._take_cuts(catalogue)
            self._start()

    def _take_cuts(self, catalogue: Catalogue) -> None:
        if self.cuts is None:
            self.cuts = StoreCuts(self.folder, self._ports, self._savers, self._flush_records)
        self.cuts.changed, self.cuts.completed = self.on_cut, self._cut_completed
        self.cuts.begin(catalogue)

    def _cut_completed(self) -> None:
        self.is_complete = True
        self.on_complete()

    async def _flush_records(self) -> bool:
        """Write the records of store and run; return whether the disk has both. Raises DiskFailed."""
        if self._segments.is_dirty(CATALOGUE) or self._segments.is_dirty(RUN):
            await self._segments.flush()
        return not (self._segments.is_dirty(CATALOGUE) or self._segments.is_dirty(RUN))

    def note_run(self, record: RunRecord, version: int) -> None:
        """Take the record of the run, which a round writes before any later copy of a shard.

        Args:
            version: Version of the map that the record is of.
        """
        if record == self.run or self.catalogue is None:  # the folder cannot be read
            return
        _, position = self._run_order
        self.run = record
        # The order also compares records of other servers.
        self._run_order = 1 + self.catalogue.record.generation, max(version, position + 1)
        if self.is_serving:
            self._mark_run()

    def _mark_run(self) -> None:
        if self.run is None:
            return
        self._segments.mark(RUN, len(packed_record(self.run)), 0)
        assert self.catalogue is not None
        if self.catalogue.record.durable:
            self._write_records_soon()

    def record_changed(self, record: StoreRecord) -> None:
        """Take a newer record of the store, with other vectors; a round writes it before later states."""
        old = self.catalogue
        if old is None or old.record.changed >= record.changed:
            return
        self.catalogue = Catalogue(old.name, record, old.arrays, old.began)
        if self.is_serving:
            self._segments.mark(CATALOGUE, 1, 0)
            if record.durable:
                self._write_records_soon()

    def _write_records_soon(self) -> None:
        self._has_records = False
        self._spawn(f"disk-{self.id}/records", self._write_records())

    async def _write_records(self) -> None:
        """Write the records of store and run at once, again while the disk is full: entries wait for them."""
        records, segments = (self.run, self.catalogue), self._segments
        with suppress(DiskFailed):  # `_serve` reports it
            await segments.flush()
            while records == (self.run, self.catalogue) and (
                segments.is_dirty(RUN) or segments.is_dirty(CATALOGUE)
            ):
                await asyncio.sleep(self._ports.settings.flush_s)
                await segments.flush()
            if records == (self.run, self.catalogue):
                self._has_records = True
                self._announce()

    def _start(self) -> None:
        self._taken.clear()
        self._joined.set()
        self.is_complete = self.is_saved = self.is_whole = False
        self._serving = self._spawn(f"disk-{self.id}", self._serve())

    def saver(self, home: str, pieces: Sequence[Sequence[ShardSpec]]) -> BundleSaver:
        """Return the saver of a bundle. All pieces of the bundle are marked once the folder is open."""
        assert self.catalogue is not None
        saver = BundleSaver(
            home,
            pieces,
            state_arrays=self.catalogue.record.state_arrays,
            mark=partial(self._mark, home),
            disk=self,
            is_durable=self.catalogue.record.durable,
        )
        self._savers[home] = saver
        if self.cuts is not None:
            saver.moved = self.cuts.moved
        # Pieces of an earlier membership are older than the bundle's entries.
        self._taken = {name for name in self._taken if name.home != home}
        self._complete.discard(home)
        self._joined.set()
        saver.all_touched()
        return saver

    def left(self, saver: BundleSaver) -> bool:
        """Note that a bundle left the server.

        Returns whether this bundle was the last one: if so, call `retire`, otherwise `part`.
        """
        self._left.add(saver)
        if not saver.is_ready():
            saver.drop()  # otherwise a round would wait for values that never come
        return self._left.issuperset(self._savers.values())

    async def part(self, saver: BundleSaver) -> None:
        """After one more write, forget the saver and marks of a bundle that left while others stay.

        Marks that no saver can take would leave every later round incomplete, and an incomplete round frees
        no entry file. The last changes are written if the bundle still has its values.
        """
        # `_serve` reports a failure of the disk; otherwise the disk has stopped following the store.
        with suppress(DiskFailed):
            await self._flush()
        if saver not in self._left:
            return
        self._left.discard(saver)
        saver.drop()
        if self._savers.get(saver.home) is saver:  # otherwise the bundle has joined again
            del self._savers[saver.home]
            self._complete.discard(saver.home)
            if self.is_serving:  # otherwise there are no marks, and the folder may not be open
                self._segments.release(saver.home)

    async def _serve(self) -> None:
        """Write the store until cancelled. Raises DiskFailed: see `SegmentStore.run`."""
        is_waiting = False
        while not await self._take_up():
            if not is_waiting:
                self._ports.notice(
                    f"{self.folder} cannot be made: the disk is full; {self.id} is not written"
                )
            is_waiting = True
            await asyncio.sleep(self._ports.settings.flush_s)
        if is_waiting:
            self._ports.notice(f"{self.folder} is made, and {self.id} is written")
        self._served.set()
        if self.cuts is not None:
            self.cuts.opened()
        self._segments.mark(CATALOGUE, 1, 0)
        self._mark_run()
        for saver in self._savers.values():
            saver.all_touched()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._segments.run(), name=f"disk-{self.id}/rounds")
                if self.cuts is not None:
                    group.create_task(self.cuts.run(), name=f"disk-{self.id}/cuts")
                else:
                    group.create_task(self._watch(), name=f"disk-{self.id}/complete")
        finally:
            self._served.clear()
            self._complete.clear()

    async def _take_up(self) -> bool:
        """Open the folder for the placed store; returns False if the disk has no room for a new folder."""
        async with self._changing:
            try:
                found = await self._open()
            except ConfigError as error:
                full = isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL
                # A failed sync of files that are there would hide lost states from a second try.
                if full and await self._has_no_file():
                    return False
                raise
            catalogue = self.catalogue  # clients may have added vectors meanwhile
            assert catalogue is not None
            if found is not None and found.record.generation != catalogue.record.generation:
                # The controllers have placed the store again under the same id, without these values.
                for home in {name.home for name in self._positions}:
                    self._segments.forget(home)
                self._positions.clear()
            return True

    async def _has_no_file(self) -> bool:
        """Return whether the folder is absent, or has at most its lock."""
        try:
            return set(await self._ports.states.names(self.folder)) <= {LOCK}
        except FileNotFoundError:
            return True

    async def append(self, key: EntryKey, parts: Sequence[Part], *, of_primary: bool) -> None:
        """Append an entry to a bundle's log and return once it is on the disk.

        Args:
            of_primary: Whether this server orders the entries. If so, the first entry waits until the disks
                have all pieces of the store. Entries alone restore no state, and a reader prefers an earlier
                store to an incomplete one. The entries after a change of the run's record wait until it is on
                the disk.

        Raises:
            DiskFailed: See `SegmentStore.append_durably`.
        """
        task = asyncio.current_task()
        assert task is not None
        self._appending.add(task)
        try:
            if self._has_ended:
                task.cancel()
            while not self._served.is_set() or (of_primary and not self._is_restorable(key.home)):
                await (self._completed if self._served.is_set() else self._served).wait()
            await self._segments.append_durably(key, entry_parts(parts))
        finally:
            self._appending.discard(task)

    def _is_restorable(self, home: str) -> bool:
        return self.is_whole and home in self._complete and self._has_records

    def whole(self) -> None:
        """Note that the primaries of all bundles have reported the store as whole on their disks."""
        if not self.is_whole:
            self.is_whole = True
            self._announce()

    def _announce(self) -> None:
        """Wake the tasks that wait to append an entry."""
        self._completed.set()
        self._completed = asyncio.Event()

    def applied(self, home: str, position: int) -> None:
        """Note that all entries of a bundle up to a position are applied, and their pieces marked."""
        if self.is_serving:
            self._segments.applied(home, position)

    async def _watch(self) -> None:
        """Note the bundles whose pieces were all written once."""
        assert self.catalogue is not None
        is_durable = self.catalogue.record.durable
        pause_s = min(self._ports.settings.flush_s / 4, FIRST_S if is_durable else math.inf)
        rounds: dict[str, int] = {}
        """By home, the number of rounds, with the current one, when a bundle's pieces were all taken."""
        while True:
            await self._joined.wait()
            await asyncio.sleep(pause_s)
            if is_durable and any(saver.is_ready() for saver in self._savers.values()):
                await self._segments.flush()
            counts = self._segments.statistics()
            # A round in progress has taken states that the disk does not have yet, and a full disk ends it
            # early.
            is_clean = not counts.dirty and not counts.in_round
            here = {home for home, saver in self._savers.items() if saver not in self._left}
            for home in here - self._complete:
                pieces = range(len(self._savers[home].pieces))
                if not self._taken.issuperset([StateName(home, piece) for piece in pieces]):
                    rounds.pop(home, None)
                elif is_clean or counts.rounds > rounds.setdefault(home, counts.rounds + counts.in_round):
                    rounds.pop(home, None)
                    self._complete.add(home)
                    self._announce()
            if here and here <= self._complete:
                self._joined.clear()
                if not self.is_complete:
                    self.is_complete = True
                    self.on_complete()

    def _mark(self, home: str, piece: int, nbytes: int, updates: int) -> None:
        if self.cuts is not None:
            self.cuts.marked(updates)
        elif self.is_serving:
            self._segments.mark(StateName(home, piece), nbytes, updates)

    async def _take(self, name: StateName) -> State | None:
        state = await self._copy_of(name)
        if state is not None and self._ports.observe is not None:
            self._ports.observe(state, self.id)
        return state

    async def _copy_of(self, name: StateName) -> State | None:
        if name == CATALOGUE:
            return catalogue_state(self.catalogue) if self.catalogue is not None else None
        if name == RUN:
            return run_state(self.run, self._run_order) if self.run is not None else None
        saver = self._savers.get(name.home)
        async with self.still():
            state = await saver.take(name.shard) if saver is not None else None
        # A bundle that has joined again may lack entries that it had before, until it has caught up.
        if state is None or state.key.position < self._positions.get(name, 0):
            return None
        self._positions[name] = state.key.position
        self._taken.add(name)
        return state

    async def _flush(self) -> None:
        """Write all changes so far, for `FLUSH_END_S` at most."""
        if not self.is_serving:
            return
        try:
            async with asyncio.timeout(FLUSH_END_S):
                await self._segments.flush()
                if self.cuts is not None:
                    await self.cuts.flush()
        except TimeoutError:
            self._ports.notice(f"the last changes of store {self.id} were not written in {FLUSH_END_S:g} s")

    async def retire(self, *, is_over: bool) -> None:
        """Write the last changes, and make the states readable. Damage costs this store, and not the server.

        Args:
            is_over: Whether the store no longer changes. Otherwise the disk follows the store again if a
                bundle has come back to the server.

        Raises:
            DiskFailed: A write failed.
            ConfigError, DataError: The store cannot be read, and has a bundle again.
        """
        catalogue = self.catalogue
        if not await self.end():
            return
        try:
            await self.reopen()
        except (ConfigError, DataError) as error:
            if isinstance(error, DiskFailed) or (self._savers and not is_over):
                raise
            self._ports.notice(f"store {self.id} cannot be read from the disk: {error}")
        if self._savers and not is_over and self._serving is None:
            self.catalogue = self.catalogue or catalogue  # a full disk may lack the record
            self._start()

    async def end(self, *, for_good: bool = False) -> bool:
        """Write the last changes, and stop following the store. Returns whether the disk followed the store
        before.

        Args:
            for_good: Whether the server ends, too. If so, later calls of `append` are cancelled.
        """
        if for_good:
            await self._wait_opening()
        async with self._changing:
            self._has_ended = self._has_ended or for_good
            serving = self._serving
            if serving is not None:
                await self._flush()
            self._served.clear()  # so that no later call appends an entry
            self._complete.clear()
            for task in tuple(self._appending):  # their entries are not acknowledged
                task.cancel()
            if serving is None:
                return False
            serving.cancel()
            await asyncio.wait([serving])
            self._serving = None
            for saver in self._left:
                saver.drop()
            self._savers = {home: each for home, each in self._savers.items() if each not in self._left}
            self._left.clear()
            if not self._savers:
                self.still = nullcontext  # the old `still` would keep the run's memory
            return True

    async def _wait_opening(self) -> None:
        """Wait at most `FLUSH_END_S` for a folder that is being opened; then stop the opening."""
        try:
            async with asyncio.timeout(FLUSH_END_S), self._changing:
                return
        except TimeoutError:
            self._ports.notice(f"{self.folder} is not open after {FLUSH_END_S:g} s; {self.id} is not written")
        if self._serving is not None:
            self._serving.cancel()

    def statistics(self) -> SegmentStatistics:
        found = self._segments.statistics()
        return found if self.cuts is None else self.cuts.statistics(found)

    def age_s(self) -> float | None:
        """Return the age in seconds of the oldest update that the disk lacks; None if pieces are missing."""
        counts = self.statistics()
        if not self.is_complete or counts.on_disk_as_of is None:
            return None
        if not counts.in_round:
            return counts.dirty_age_s
        # The updates of a round in progress are no longer marked, but not yet on the disk.
        return max(self._ports.wall_clock() - counts.on_disk_as_of, counts.dirty_age_s)

    # --- reading -----------------------------------------------------------------------------

    @property
    def recovery(self) -> Recovery:
        """Contents of the folder when it was last opened."""
        return self._segments.recovery

    def position_of(self, name: StateName) -> int | None:
        """Return the position of a piece that the disk has or is writing; None without such a piece."""
        return self._positions.get(name)

    async def read_arrays(self, name: StateName, arrays: int) -> tuple[Part, bytes]:
        """Read the arrays of a served store's piece; see `BundleDisk`."""
        await self._served.wait()
        origin = f"piece {name.shard} of bundle {name.home} in {self.folder}"
        found = (await self._read_piece(name, origin))[1][1 : 1 + arrays]
        if len(found) != arrays:
            raise DataError(f"{origin} has {len(found)} arrays, not {arrays}")
        return found, await self._ports.states.run(digest_of, found)

    async def _read_piece(self, name: StateName, origin: str, clock: int = 0) -> tuple[Order, Part]:
        """Read a piece; return its order and tensors. Raises DataError: the piece is absent or damaged.

        Args:
            clock: Clock of the cut with the piece, in a store with cuts.
        """
        try:
            if self.cuts is not None:
                parts = await self.cuts.read(name.home, clock, name.shard)
                return order_of(clock), tensors_of(parts, origin)
            key, parts = await self._segments.read_state(name)
        except KeyError:
            at = f" at clock {clock}" if self.cuts is not None else ""
            raise DataError(f"{origin} is not on the disk{at}") from None
        return key.order, tensors_of(parts, origin)

    async def reopen(self) -> None:
        """Open the folder, and read its catalogue, unless the disk follows the store again.

        Raises:
            ConfigError, DataError: See `SegmentStore.opened`; or the catalogue cannot be read.
        """
        async with self._changing:
            if self.is_followed:
                return  # the store has come back
            self.is_saved = False
            try:
                found = await self._open()
                if self._serving is not None:
                    return  # as above: `begin` has set the catalogue
                self.catalogue = found
                for home, keys in self._segments.recovery.entries.items():
                    if found is not None and keys:
                        await self._replay(home, keys)
            except BaseException:
                if not self.is_followed:
                    self.catalogue = None  # nothing can be read
                raise
            self.is_saved = found is not None and not self.is_followed

    async def _replay(self, home: str, keys: Sequence[EntryKey]) -> None:
        """Apply the entries on the disk to the pieces of a bundle that lack them."""
        catalogue, segments = self.catalogue, self._segments
        assert catalogue is not None
        origin = f"bundle {home} in {self.folder}"
        found, recovery = {}, segments.recovery
        lost = {each.name for each in recovery.lost}
        for name in recovery.states:
            if name.home == home:
                self.specs_of(home, name.shard)  # raises for a piece that the store does not have
                (generation, position), tensors = await self._read_piece(name, origin)
                # A complete round drops entries, and has every piece that they change. After damage an older
                # piece may count.
                floor = recovery.floors.get(home, 0) if name not in lost else 0
                found[name.shard] = (generation, max(position, floor)), tensors
        if not found or keys[-1].position <= min(at for (_, at), _ in found.values()):
            return
        replay = EntryReplay(
            catalogue, self._pieces[home], self._table, self._rules, found, origin, self._ports.rules
        )
        for entry in keys:
            parts = await segments.read_entry(entry)
            if not replay.take((entry.generation, entry.position), read_entry(parts, origin)):
                self._ports.notice(f"{origin} lacks entries before {entry.position}; later ones do not count")
                break
        self._replays[home] = replay

    async def _open(self) -> Catalogue | None:
        """Open the folder again; return its catalogue, None without one."""
        await self._close()
        self._segments = self._new_segments()
        await self._stack.enter_async_context(self._segments.opened())
        self._table, self._pieces, self._replays, self._last = (), {}, {}, None
        states = self._segments.recovery.states
        self._positions = {name: key.position for name, key in states.items() if name.home != LEADING}
        if RUN in states and (self.run is None or self._run_order < states[RUN].order):
            key, parts = await self._segments.read_state(RUN)
            self.run, self._run_order = read_run(parts, str(self.folder)), key.order
        if CATALOGUE not in states:
            return None
        _, parts = await self._segments.read_state(CATALOGUE)
        catalogue = read_catalogue(parts, str(self.folder))
        self._catalogue_bytes = len(msgspec.json.encode(catalogue))
        if catalogue.record.takes_cuts:
            if self.cuts is None:
                self.cuts = StoreCuts(self.folder, self._ports, self._savers, self._flush_records)
            placed = self.catalogue or catalogue
            await self.cuts.reopen(placed.record.generation)
        return catalogue

    def wall_clock(self) -> float:
        """Return the time in seconds since 1970."""
        return self._ports.wall_clock()

    async def _close(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    async def aclose(self) -> None:
        """Close the folder."""
        async with self._changing:
            await self._close()

    async def remove(self) -> None:
        """Remove the folder: another store has taken the place of this one."""
        async with self._changing:
            await self._close()
            self.catalogue, self.is_saved = None, False
            disk, aside = self._ports.states, self.folder.with_name(REMOVED + self.folder.name)
            await disk.remove_folder(aside)
            with suppress(FileNotFoundError):  # its server ended before the first write
                # After a crash in the middle of a removal the rest would look like damage.
                await disk.rename(self.folder, aside)
            await disk.remove_folder(aside)

    @property
    def began(self) -> float:
        """Time at which the server began to keep the store, in seconds since 1970."""
        return self.catalogue.began if self.catalogue is not None else 0.0

    @property
    def saved_bytes(self) -> int:
        """Maximum size of the packed result of `saved`, in bytes."""
        run = len(packed_record(self.run)) if self.run is not None else 0
        pieces = len(self._segments.recovery.states)
        pieces += sum([len(cut.places or ()) for cut in self._saved_cuts()])
        return run + self._catalogue_bytes + SAVED_PIECE_BYTES * pieces

    def _saved_cuts(self) -> list[CutFolder]:
        return self.cuts.saved() if self.cuts is not None else []

    def saved(self) -> SavedStore:
        """Return the list of the readable states."""
        assert self.catalogue is not None
        states = self._segments.recovery.states.values()
        orders = {key: self._order_of(key) for key in states if key.home != LEADING}
        heads = [cut.head for cut in self._saved_cuts() if cut.head is not None]
        orders |= {key: key.order for head in heads for key in head.keys if key.home != LEADING}
        run = packed_record(self.run) if self.run is not None else b""
        return _saved_store(self.catalogue, orders, run, self._run_order)

    def _order_of(self, key: StateKey) -> Order:
        replay = self._replays.get(key.home)
        return key.order if replay is None else replay.orders.get(key.shard, key.order)

    def specs_of(self, home: str, piece: int) -> tuple[ShardSpec, ...]:
        """Return the shards of a piece.

        Raises:
            DataError: The store does not exist, or has no such piece.
        """
        catalogue = self.catalogue
        if catalogue is None:
            raise DataError(f"{self.folder} has no store")
        if not self._table:
            arrays = catalogue.arrays
            self._table = shard_table(arrays, shard_bytes=catalogue.record.shard_bytes).shards
            self._rules = catalogue.record.rules
        if home not in self._pieces:
            buckets = catalogue.record.buckets
            specs = [spec for spec in self._table if buckets[spec.bucket] == home]
            self._pieces[home] = pieces_of(specs, in_place=catalogue.record.in_place)
        pieces = self._pieces[home]
        if not 0 <= piece < len(pieces):
            raise DataError(f"bundle {home} of store {self.id} has no piece {piece}")
        return pieces[piece]

    def bytes_of(self, home: str, piece: int, numbers: Collection[int]) -> int:
        """Return the memory in bytes to read some shards of a piece: that of the piece or, in place, of the
        shards.

        Raises:
            DataError: See `specs_of`.
        """
        specs = self.specs_of(home, piece)
        assert self.catalogue is not None
        record = self.catalogue.record
        if record.in_place:  # its single piece has all shards, and is read once
            specs = tuple([spec for spec in specs if spec.id in numbers])
        return sum([spec.nbytes for spec in specs]) * record.arrays_per_value

    async def read(
        self, home: str, piece: int, numbers: Sequence[int], clock: int = 0
    ) -> tuple[ShardStates, list[NDArray[Any]]]:
        """Read some shards of a piece.

        Args:
            clock: Clock of the cut with the piece, in a store with cuts.

        Raises:
            DataError: The disk has no such piece or shard, or its state is damaged.
        """
        catalogue = self.catalogue
        self.specs_of(home, piece)  # raises for a piece that the store does not have
        bundle_origin = f"bundle {home} in {self.folder}"
        origin = f"piece {piece} of {bundle_origin}"
        assert catalogue is not None
        name = StateName(home, piece)
        last = self._last[1] if self._last and self._last[0] == (name, clock) else None
        replay = self._replays.get(home) or last
        if replay is None:
            found = {piece: await self._read_piece(name, origin, clock)}
            pieces, table = self._pieces[home], self._table
            replay = EntryReplay(
                catalogue, pieces, table, self._rules, found, bundle_origin, self._ports.rules
            )
            self._last = (name, clock), replay
        bundle = replay.bundle_of(piece)
        missing = [number for number in numbers if ShardId(number) not in bundle.shards]
        if missing or not numbers:
            raise DataError(f"{origin} has no shards {missing[:8]}")
        shards = [bundle.shards[ShardId(number)] for number in numbers]
        if len({shard.spec.rule for shard in shards}) > 1:
            raise DataError(f"shards {tuple(numbers[:8])} of {origin} have several rules: ask for each apart")
        return read_states(shards, self._rules[shards[0].spec.rule])

    def __repr__(self) -> str:
        return f"<StoreDisk {self.id} {'serving' if self.is_serving else 'saved'}>"


def _saved_store(catalogue: Catalogue, orders: Mapping[StateKey, Order], run: bytes, at: Order) -> SavedStore:
    """Return a store's list of pieces.

    Args:
        orders: Generation and position of each piece.
        run: Record of the run, if any.
        at: Order of this record.
    """
    return SavedStore(
        name=catalogue.name,
        id=catalogue.record.id,
        record=msgspec.json.encode(catalogue.record),
        arrays=msgspec.json.encode(catalogue.arrays),
        pieces=tuple(SavedPiece(key.home, key.shard, *order) for key, order in orders.items()),
        began_ms=int(catalogue.began * 1000),
        run=run,
        run_order=at,
    )


async def read_saved_store(folder: Path, disk: Disk) -> SavedStore | None:
    """List the pieces in a store's folder, which a server may have open; None before its first write.

    Raises:
        ConfigError, DataError: The folder is of another release, damaged, or has no readable record of its
            store.
        OSError: The folder cannot be read.
    """
    identity = await read_identity(disk, folder)
    if identity is None:
        return None
    identity = Identity(run=identity.run, contents=CONTENTS)
    keys, found = await read_newest(disk, folder, identity, (CATALOGUE, RUN))
    if CATALOGUE not in found:
        return None
    catalogue = read_catalogue(found[CATALOGUE], str(folder))
    orders = {key: key.order for key in keys if key.home != LEADING}
    for path in await cut_folders(disk, folder) if catalogue.record.takes_cuts else ():
        with suppress(*UNREADABLE_CUT):  # the server that opens the folder reports it
            head = (await read_cut_head(disk, path, catalogue.record.generation)).head
            assert head is not None
            orders |= {key: key.order for key in head.keys if key.home != LEADING}
    at = next((key.order for key in keys if key.name == RUN), (0, 0))
    run = b"".join(found.get(RUN, ()))
    return _saved_store(catalogue, orders, run, at)
