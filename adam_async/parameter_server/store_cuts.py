"""The cuts of a bsp run on one server's disk: all bundles of the store at one clock.

Theory of operation
-------------------
Once per `flush_s`, the primary of the first bundle with trainable shards names the next clock in the cluster
map (`CutNaming`). Each server keeps its bundles at this clock (`kept_shards.py`) and writes each bundle into
a separate folder (`cut_folder.py`), while training goes on. The server reports its cuts in the map
(`CutReport`). A cut is *complete* once each bundle is on enough disks.

Each naming has the newest clock that the primary saw complete. A server removes old cuts only when it follows
a naming, and never the complete cut that the naming has. So all servers keep the same cut until all have a
newer one. If all servers are lost at any moment, their disks share a clock at which they have every bundle. A
disk has at most two cuts; when a server ends, the run's last values may be a third.

While the clock moves, the next cut is some steps ahead, so that no bundle has passed it when the other
servers learn of it. If a bundle has passed the cut's clock nevertheless, the next naming is twice as far
ahead in time. If the clock stands still, as between two epochs, the cut has this clock.

A server gives a cut up if a bundle had passed its clock, if training stands still and the primary names a new
clock, if the shards of a bundle are replaced, or if the disk is full or takes no piece for `PIECE_S`. The cut
before it stays.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from adam_async.errors import DeadlineExceeded
from adam_async.messages.body import Clock, Count, NodeId
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_saver import BundleSaver, DiskPorts
from adam_async.parameter_server.cut_folder import (
    REMOVED,
    UNREADABLE_CUT,
    CutFolder,
    cut_folders,
    order_of,
    read_cut,
    read_cut_piece,
    remove_cut,
    unfinished_path,
    write_cut,
)
from adam_async.parameter_server.kept_shards import ClockSnapshot
from adam_async.parameter_server.piece_states import Catalogue, kept_state
from adam_async.persistence.folder import FULL, disk_failed
from adam_async.persistence.records import State
from adam_async.persistence.rounds import BUSY_SHARE
from adam_async.persistence.usage import SegmentStatistics
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.run.store_record import StoreRecord, served_word
from adam_async.runtime.clock import Within

CUTS = "cuts"
"""Key in `NodeRecord.info` of a server. The value has one `CutReport` per store, by `served_word`."""

MOST_CUTS = 8
"""Maximum number of a bundle's cuts in a report; a disk has two, perhaps three when its server ends."""

NO_CLOCK = -1
"""Clock of a cut that does not exist."""

ClockOrNone = Annotated[int, msgspec.Meta(ge=NO_CLOCK, le=(1 << 48) - 1)]


class NamedCut(msgspec.Struct, frozen=True, array_like=True):
    """The next cut, as named by the primary of the first bundle."""

    number: Count
    """Number of this naming, from 1; the newest naming in the map counts."""
    clock: Clock
    complete: ClockOrNone
    """Newest clock at which the disks had all bundles; `NO_CLOCK` if there was no such clock. It never
    decreases. The disks keep this cut until a later naming has a later one."""


class CutReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cuts of a store on one server."""

    named: NamedCut | None = None
    """The newest naming of this server."""
    handled: Count = 0
    """Number of the last naming that this server has taken, or given up."""
    passed: Clock = 0
    """Clock of a shard that had passed this naming's clock; 0 if no shard had."""
    on_disk: dict[NodeId, Annotated[tuple[Clock, ...], msgspec.Meta(max_length=MOST_CUTS)]] = {}
    """Clocks of the cuts on the disk, by the home of the bundle."""


def report_of(node: NodeRecord, store: StoreRecord) -> CutReport | None:
    """Return a server's report on a store; None without a valid report."""
    reports = node.info.get(CUTS)
    found: Any = reports.get(served_word(store)) if isinstance(reports, dict) else None
    try:
        return msgspec.convert(found, CutReport) if found is not None else None
    except msgspec.ValidationError:
        return None


def newest_named(cluster: ClusterMap, store: StoreRecord) -> NamedCut | None:
    """Return the newest naming of a cut, also of a server that was lost since."""
    reports = [report_of(node, store) for node in cluster.nodes.values() if node.role == "ps"]
    named = [each.named for each in reports if each is not None and each.named is not None]
    return max(named, key=lambda each: each.number, default=None)


def reports_in_sync(
    cluster: ClusterMap, store: StoreRecord, homes: Collection[str]
) -> dict[str, dict[str, CutReport]]:
    """Return the reports of the members in sync, by home and server; a missing report counts as empty."""
    found: dict[str, dict[str, CutReport]] = {home: {} for home in homes}
    for home in homes:
        record = cluster.bundle(store.id, home)
        for name, incarnation in record.in_sync if record is not None else ():
            node = cluster.nodes.get(name)
            if node is not None and node.incarnation == incarnation:
                found[home][name] = report_of(node, store) or CutReport()
    return found


def complete_clock(reports: Mapping[str, Mapping[str, CutReport]], *, disks: int) -> int:
    """Return the newest clock at which enough disks have every bundle; `NO_CLOCK` without such a clock.

    Args:
        reports: See `reports_in_sync`.
        disks: Number of disks that are enough. Fewer members in sync are enough, too.
    """
    common: set[int] | None = None
    for home, by_server in reports.items():
        clocks = [clock for each in by_server.values() for clock in each.on_disk.get(home, ())]
        enough = max(min(disks, len(by_server)), 1)
        mine = {clock for clock in clocks if clocks.count(clock) >= enough}
        common = mine if common is None else common & mine
    return max(common or (), default=NO_CLOCK)


FIRST_AHEAD_S, MOST_AHEAD_S = 0.02, 10.0
"""First and longest time between naming a cut and reaching its clock, in seconds."""

MOST_AHEAD = 1 << 20
"""Maximum number of steps between a clock and the cut that is named at it."""

LATE_S = 60.0
"""Time in seconds after which the next cut is named even if a server has not handled the last one."""


class CutNaming:
    """The names of a store's cuts.

    Args:
        now: Time in seconds of the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._named: NamedCut | None = None
        self._named_at = now
        self._clock, self._moved_at = NO_CLOCK, now
        self._step_s = 0.0
        self._ahead_s = FIRST_AHEAD_S

    def _observe(self, now: float, clock: int) -> bool:
        """Take the present clock; return whether it has moved since the last call."""
        if clock == self._clock:
            return False
        if NO_CLOCK < self._clock < clock:
            self._step_s = (now - self._moved_at) / (clock - self._clock)
        is_first = self._clock == NO_CLOCK
        self._clock, self._moved_at = clock, now
        return not is_first

    def next(
        self,
        now: float,
        clock: int,
        *,
        period_s: float,
        newest: NamedCut | None,
        handled: int,
        passed: int,
        complete: int,
    ) -> NamedCut | None:
        """Return the next cut; None if no cut is due.

        Args:
            now: Time in seconds of the caller's clock.
            clock: Clock of this server's bundle.
            period_s: Time between two cuts, in seconds.
            newest: Newest naming in the map, perhaps of another server.
            handled: Least number that all servers have handled.
            passed: Highest clock of a shard that had passed it when the last naming arrived; 0 if no shard
                had.
            complete: Newest clock at which the disks have all bundles.
        """
        is_moving = self._observe(now, clock)
        last = self._named
        if last is None or (newest is not None and newest.number > last.number):
            last = newest
        if last is not None and handled < last.number:
            is_stuck = not is_moving and clock < last.clock and now - self._moved_at >= period_s
            if now - self._named_at < (period_s if is_stuck else LATE_S):
                return None
        elif not passed and now - self._named_at < period_s:
            return None
        if passed:
            self._ahead_s = min(2 * self._ahead_s, MOST_AHEAD_S)
        target = max(clock, passed)
        if is_moving:
            ahead = ceil(self._ahead_s / self._step_s) if self._step_s else MOST_AHEAD
            target += min(max(ahead, 1), MOST_AHEAD)
        if target == complete:
            return None
        if last is not None:
            complete = max(complete, last.complete)
        self._named_at = now
        self._named = NamedCut(1 if last is None else last.number + 1, target, complete)
        return self._named

    def __repr__(self) -> str:
        return f"<CutNaming {self._named}>"


PIECE_S = 60.0
"""Maximum time for a piece of a cut, in seconds. After this time the cut is given up, because sums may wait
for the disk."""

SERVER_S = 0.05
"""Least time between two cuts for each bundle of the store, in seconds: a cut changes the map once for each
server."""


class _Begun(NamedTuple):
    """A bundle in a cut."""

    saver: BundleSaver
    bundle: Bundle
    cut: ClockSnapshot


class StoreCuts:
    """The cuts of one store.

    Args:
        folder: Folder of the store.
        savers: Bundles on this server by home; the caller changes the mapping.
        flush: Writes the records of store and run; returns whether the disk has both. No cut is newer than
            these records.

    Attributes:
        report: The report of this server in the map.
        changed: Called when `report` has changed.
        completed: Called when the disks have all bundles for the first time.
    """

    def __init__(
        self,
        folder: Path,
        ports: DiskPorts,
        savers: Mapping[str, BundleSaver],
        flush: Callable[[], Awaitable[bool]],
    ) -> None:
        self._folder = folder
        self._ports = ports
        self._savers = savers
        self._flush_records = flush
        self._catalogue: Catalogue | None = None
        self._leads = ""
        """Home of the first bundle with trainable shards, whose primary names the cuts."""
        self._homes: frozenset[str] = frozenset()
        self._found: dict[tuple[str, int], CutFolder] = {}
        """The cuts on the disk, by home and clock."""
        self._cluster: ClusterMap | None = None
        self._is_primary: Callable[[str], bool] = lambda _: False
        self._named: NamedCut | None = None
        """Newest naming in the map."""
        self._news = asyncio.Event()
        """Event that is set when a cut is named, a clock moves, or a bundle is replaced."""
        self._writing = asyncio.Lock()
        self._is_ending = False
        self.report = CutReport()
        self.changed: Callable[[], object] = lambda: None
        self.completed: Callable[[], object] = lambda: None
        self._complete = NO_CLOCK
        self._is_full = False
        self._counts = SegmentStatistics()
        self._reached_at = inf
        """Time at which a piece had reached the clock of the cut in progress; infinite before."""
        self._as_of: dict[int, tuple[float, int]] = {}
        """Time in seconds since 1970 at which the bundles reached a clock, and their updates until then."""

    # --- the life of the store ---------------------------------------------------------------

    def begin(self, catalogue: Catalogue) -> None:
        """Follow a placed store."""
        record = catalogue.record
        table = shard_table(catalogue.arrays, shard_bytes=record.shard_bytes).shards
        self._catalogue = catalogue
        self._homes = frozenset({record.buckets[spec.bucket] for spec in table})
        trained = {record.buckets[spec.bucket] for spec in table if not spec.frozen}
        self._leads = min(trained or self._homes, default="")
        self._is_ending = False
        self.report = CutReport(on_disk=self._on_disk())

    def opened(self) -> None:
        """Report the cuts that `reopen` has found."""
        self._set_report()

    def marked(self, updates: int) -> None:
        """Count updates of pieces."""
        self._counts.updates += updates

    def moved(self) -> None:
        """Note that a bundle has applied entries, or its shards were replaced."""
        self._news.set()

    def follow(self, cluster: ClusterMap, is_primary: Callable[[str], bool]) -> None:
        """Take a version of the map.

        Args:
            is_primary: Returns, for the home of a bundle, whether this server is the bundle's primary.
        """
        assert self._catalogue is not None
        store = cluster.store(self._catalogue.record.id)
        if store is None:
            return
        self._cluster, self._is_primary = cluster, is_primary
        named = newest_named(cluster, store)
        if named is not None and (self._named is None or named.number > self._named.number):
            self._named = named
            self._news.set()
        if self._complete == NO_CLOCK and self._complete_clock() != NO_CLOCK:
            self._complete = self._complete_clock()
            self.completed()
        self._complete = max(self._complete, self._complete_clock())

    def _complete_clock(self) -> int:
        assert self._cluster is not None
        assert self._catalogue is not None
        store = self._catalogue.record
        reports = reports_in_sync(self._cluster, store, self._homes)
        return complete_clock(reports, disks=store.min_in_sync_in_force)

    async def run(self) -> None:
        """Take the named cuts, and name them if this server leads, until cancelled. Raises DiskFailed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take_named(), name=f"cuts-{self._folder.name}/take")
            group.create_task(self._name(), name=f"cuts-{self._folder.name}/name")

    # --- naming ------------------------------------------------------------------------------

    @property
    def period_s(self) -> float:
        """Time between two cuts, in seconds."""
        flush_s = self._ports.settings.flush_s
        return max(flush_s, self._counts.round_s / BUSY_SHARE, SERVER_S * len(self._homes))

    async def _name(self) -> None:
        naming = CutNaming(self._ports.clock())
        while True:
            await asyncio.sleep(self.period_s / 4)
            saver = self._savers.get(self._leads)
            cluster, catalogue = self._cluster, self._catalogue
            if saver is None or not saver.is_ready() or cluster is None or not self._is_primary(self._leads):
                continue
            assert catalogue is not None
            reports = reports_in_sync(cluster, catalogue.record, self._homes)
            if not all(reports.values()):
                continue  # a bundle has no primary now
            each = [report for by_server in reports.values() for report in by_server.values()]
            handled = min([report.handled for report in each])
            named = naming.next(
                self._ports.clock(),
                _clock_of(saver.bundle()),
                period_s=self.period_s,
                newest=newest_named(cluster, catalogue.record),
                handled=handled,
                passed=max([report.passed for report in each if report.handled == handled]),
                complete=self._complete_clock(),
            )
            if named is not None:
                self._set_report(named=named)

    def _set_report(
        self, *, named: NamedCut | None = None, handled: int | None = None, passed: int = 0
    ) -> None:
        before = self.report
        self.report = CutReport(
            named=named or before.named,
            handled=before.handled if handled is None else handled,
            passed=before.passed if handled is None else passed,
            on_disk=self._on_disk(),
        )
        self.changed()

    def _on_disk(self) -> dict[str, tuple[int, ...]]:
        homes = sorted({home for home, _ in self._found})
        return {home: tuple(self._clocks(home)) for home in homes}

    def _clocks(self, home: str) -> list[int]:
        """Return the clocks of a bundle on the disk, in order."""
        return sorted([clock for at, clock in self._found if at == home])

    # --- taking ------------------------------------------------------------------------------

    async def _take_named(self) -> None:
        while True:
            named = self._named
            if self._is_ending or named is None or named.number <= self.report.handled:
                await self._wait()
                continue
            async with self._writing:
                passed = await self._take(named)
            self._set_report(handled=named.number, passed=passed)

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _take(self, named: NamedCut) -> int:
        """Take a cut of the bundles here. Returns the clock of a shard that has passed the cut; 0: none
        has."""
        savers = {
            home: saver
            for home, saver in self._savers.items()
            if saver.is_ready() and (home, named.clock) not in self._found and any(saver.pieces)
        }
        begun: list[_Begun] = []
        try:
            for saver in savers.values():
                bundle = saver.bundle()
                if passed := bundle.begin_cut(named.clock):
                    return passed
                assert bundle.cut is not None
                begun.append(_Begun(saver, bundle, bundle.cut))
            for home in savers:
                await self._make_room(home, named)
            await self._write_all(begun, lambda: self._named is not named or self._is_ending)
        finally:
            for each in begun:
                each.bundle.end_cut()
                each.saver.resume()
        return 0

    async def _make_room(self, home: str, named: NamedCut) -> None:
        """Remove the cuts of a bundle beside the complete one.

        A member that lacks the complete cut, because its disk was full, keeps its newest cut. Before any cut
        is complete, the first cut stays.
        """
        clocks = self._clocks(home)
        kept = [clock for clock in clocks if clock == named.complete]
        if not kept:
            kept = clocks[:1] if named.complete == NO_CLOCK else clocks[-1:]
        for clock in clocks:
            if clock not in kept:
                folder = self._found.pop((home, clock))
                await self._remove(folder.path)

    async def _remove(self, path: Path) -> None:
        try:
            await remove_cut(self._ports.states, path)
        except OSError as error:
            self._ports.notice_left(path, error)

    async def _write_all(self, begun: Sequence["_Begun"], is_given_up: Callable[[], bool]) -> None:
        self._reached_at = inf
        async with asyncio.TaskGroup() as group:
            # Together, because one bundle's copies must not wait until another bundle is written.
            tasks = [
                group.create_task(self._write(each, is_given_up), name=f"cut-{each.saver.home}")
                for each in begun
            ]
        if tasks and all(task.result() for task in tasks):
            self._counts.rounds += 1
            self._counts.round_s = self._ports.clock() - self._reached_at
            if self._is_full:
                self._is_full = False
                self._ports.notice(f"{self._folder} has room again, and takes cuts")

    async def _write(self, begun: "_Begun", is_given_up: Callable[[], bool]) -> bool:
        """Write a bundle. Returns whether the cut is on the disk. Raises DiskFailed."""
        assert self._catalogue is not None
        left = {number: specs for number, specs in enumerate(begun.saver.pieces) if specs}
        disk, home, clock = self._ports.states, begun.saver.home, begun.cut.clock
        try:
            async with (
                Within(PIECE_S, "the disk to take a piece") as limit,
                aclosing(self._states(begun, left, is_given_up, limit)) as states,
            ):
                cut = await write_cut(
                    disk, self._folder, self._catalogue, home, clock, states, lambda: not left
                )
        except (OSError, MemoryError, DeadlineExceeded) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise disk_failed(self._folder, error) from error
            if not self._is_full:
                self._is_full = True
                why = getattr(error, "strerror", None) or str(error) or "no memory is left"
                self._ports.notice(f"{self._folder} takes no cut: {why}; the cut before it stays")
            # Sums may wait for the copies, and the removal for the disk.
            begun.bundle.end_cut()
            begun.saver.resume()
            with suppress(OSError):  # the next opening removes it
                await disk.remove_folder(unfinished_path(self._folder, home, clock))
            return False
        if cut is None:
            return False
        self._found[home, clock] = cut
        self._counts.written_bytes += cut.nbytes
        return True

    async def _states(
        self,
        begun: "_Begun",
        left: dict[int, Sequence[ShardSpec]],
        is_given_up: Callable[[], bool],
        limit: asyncio.Timeout,
    ) -> AsyncGenerator[State, None]:
        """Yield the pieces of a bundle as they reach the clock, until the cut is given up.

        Args:
            left: Unwritten pieces; the generator removes a piece before yielding it.
            limit: Deadline of the disk for the next piece; none while a piece waits for its clock.
        """
        assert self._catalogue is not None
        loop, (saver, bundle, cut) = asyncio.get_running_loop(), begun
        reached: dict[int, Sequence[ShardSpec]] = {}
        while left:
            for number in left.keys() - reached:
                if _has_reached(bundle, cut.clock, left[number]):
                    reached[number] = left[number]
            if cut.lacks_memory:
                raise MemoryError
            if bundle.cut is not cut or is_given_up():
                return
            if not reached:
                limit.reschedule(None)
                await self._wait()
                continue
            self._reached_at = min(self._reached_at, self._ports.clock())
            number = cut.next_of(reached)
            specs, order = reached.pop(number), order_of(cut.clock)
            state = kept_state(cut, self._catalogue.record, saver.home, number, specs, order=order)
            saver.resume()  # a sum may have waited for room
            assert state is not None
            if len(left) == 1:
                newest = self._as_of.get(self._complete)
                self._as_of = {self._complete: newest} if newest is not None else {}
                self._as_of[cut.clock] = self._ports.wall_clock(), self._counts.updates
                # No cut has groups of an epoch that the record of the run on the disk does not know.
                limit.reschedule(loop.time() + PIECE_S)
                if not await self._flush_records():
                    return
            limit.reschedule(loop.time() + PIECE_S)
            del left[number]
            self._counts.writes += 1
            self._counts.state_bytes += sum([memoryview(part).nbytes for part in state.parts])
            yield state

    async def flush(self) -> None:
        """If all bundles here are at one clock, write the present values; end the cut in progress first."""
        self._is_ending = True
        self._news.set()
        async with self._writing:
            ready = [saver for saver in self._savers.values() if saver.is_ready() and any(saver.pieces)]
            clocks = {_clock_of(saver.bundle()) for saver in ready if _is_trained(saver.bundle())}
            if len(clocks) != 1:
                return
            (clock,) = clocks
            begun: list[_Begun] = []
            try:
                for saver in ready:
                    bundle = saver.bundle()
                    is_there = (saver.home, clock) in self._found
                    if not is_there and not bundle.begin_cut(clock) and bundle.cut is not None:
                        begun.append(_Begun(saver, bundle, bundle.cut))
                await self._write_all(begun, lambda: False)
            finally:
                for each in begun:
                    each.bundle.end_cut()

    # --- reading -----------------------------------------------------------------------------

    async def reopen(self, generation: int) -> None:
        """Read the cuts of a store's placement from the disk; damaged cuts do not count."""
        self._found.clear()
        self._complete, self._named = NO_CLOCK, None
        disk = self._ports.states
        for name in await disk.folders(self._folder):
            if name.startswith(REMOVED):
                await disk.remove_folder(self._folder / name)
        for path in await cut_folders(disk, self._folder):
            try:
                cut = await read_cut(disk, path, generation)
            except UNREADABLE_CUT as error:
                self._ports.notice(f"the cut in {path} does not count: {error}; remove the folder")
            else:
                self._found[cut.home, cut.clock] = cut

    def saved(self) -> list[CutFolder]:
        """Return the cuts that were read."""
        return [cut for cut in self._found.values() if cut.places is not None]

    async def read(self, home: str, clock: int, piece: int) -> list[memoryview]:
        """Read the parts of a piece. Raises KeyError: the cut does not exist; DataError: it is damaged."""
        return await read_cut_piece(self._ports.states, self._found[home, clock], piece)

    def statistics(self, of_records: SegmentStatistics) -> SegmentStatistics:
        """Return the counts of the cuts, and the files with the records of store and run."""
        newest = self._as_of.get(self._complete)
        found, counts = of_records, self._counts
        found.updates, found.writes, found.rounds = counts.updates, counts.writes, counts.rounds
        found.state_bytes, found.round_s, found.period_s = counts.state_bytes, counts.round_s, self.period_s
        found.written_bytes += counts.written_bytes
        found.disk_bytes += sum([cut.nbytes for cut in self._found.values()])
        found.on_disk_as_of = newest[0] if newest is not None else None
        found.dirty = int(newest is None or newest[1] < counts.updates)
        is_behind = newest is not None and found.dirty
        found.dirty_age_s = max(self._ports.wall_clock() - newest[0], 0.0) if newest and is_behind else 0.0
        found.in_round, found.is_full = False, self._is_full or found.is_full
        return found

    def __repr__(self) -> str:
        return f"<StoreCuts {self._folder.name} {sorted({clock for _, clock in self._found})}>"


def _is_trained(bundle: Bundle) -> bool:
    return any(not shard.spec.frozen for shard in bundle.shards.values())


def _clock_of(bundle: Bundle) -> int:
    """Return the clock that all trainable shards of a bundle have reached."""
    return min(
        [shard.applied_clock() for shard in bundle.shards.values() if not shard.spec.frozen], default=0
    )


def _has_reached(bundle: Bundle, clock: int, specs: Sequence[ShardSpec]) -> bool:
    """Return whether the shards of a piece have reached a clock; frozen ones are at each clock."""
    return all(spec.frozen or bundle.shards[spec.id].applied_clock() >= clock for spec in specs)
