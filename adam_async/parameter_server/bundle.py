"""Pure: the shards of a bundle as a function of its log of entries.

Theory of operation
-------------------
A primary writes everything that changes a shard as *entries* into one log: batches of pushes, contributions,
ticks, reports of steps, live replicas, epochs, forgotten sessions. `Bundle` takes committed entries in log
order, so servers that take the same entries have the same values, versions, numbers and clocks
(`docs/decisions/0030-replication.md`). The entries contain all that decides the bits of the values: the
pushes of a batch, their accepted places, and which gradients are finite. Rates that depend on staleness
follow from the versions, and the versions follow from the log.

A batch of gradients may take several rounds of the loop. So the bundle hands it to the shell as *work*
(`take_work`), and the shell reports it done (`applied` or `sum_applied`). Later entries wait for the batch: a
clock must not count a push that is not in the values. In bsp contributions, ticks and clocks do not touch
values, so they do not wait for sums in progress. Sums that contributions complete do wait.

A bundle never waits, sends answers, reads the time, or touches values or gradients.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from math import inf
from typing import Any, assert_never

from adam_async.messages import REFUSED, Problem, Push, joined, of_place
from adam_async.parameter_server.bsp_barrier import Contribution, PendingContributions
from adam_async.parameter_server.events import (
    Applied,
    Apply,
    ApplySum,
    Contribute,
    Entry,
    EpochBegan,
    ForgetSessions,
    Pin,
    QueuedPin,
    QueuedPush,
    QueuedTick,
    ReplicasChanged,
    StepsArrived,
    SumApplied,
    VectorsChanged,
)
from adam_async.parameter_server.kept_shards import ClockSnapshot, KeptShards, PinCopies
from adam_async.parameter_server.push_queue import refuse_places
from adam_async.parameter_server.replay_log import JOINED, NOT_APPLIED, SKIPPED, SUMMED, OrderLog
from adam_async.parameter_server.replica_clocks import ReplicaClocks
from adam_async.parameter_server.shard import FamilyMemory, Session, Shard, ShardTables, set_vectors
from adam_async.parameter_server.shard_group import (
    ShardGroup,
    count_groups,
    each_tables,
    numbered_tables,
    share_equal_tables,
    tables_of,
)
from adam_async.run.group_ranges import has_groups_each, with_groups, with_losses
from adam_async.run.ids import Replica, ShardId, Version
from adam_async.run.store_record import VectorRecord

MOST_KNOWN_PINS = 64
"""Number of newest pins that a bundle remembers, including removed pins. A server that was away for longer
may still have an older pin on its disk."""

MOST_GROUPS = 256
"""Maximum number of shard groups that a server caches. Without a maximum, messages with ever new sets of
shards could fill the memory."""


class Bundle:
    """The shards of a bundle, and the committed entries that wait for earlier work.

    Args:
        clocked: Whether workers wait for one another (ssp, bsp).
        summed_weight: Weight of a sum in bsp, where pushes are added up; 0 in other modes.
        scale_by_staleness: Whether a push's rate is divided by 1 + its staleness.
        log: Log of the order in which pushes are applied, for a replay.
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        *,
        clocked: bool = False,
        summed_weight: int = 0,
        scale_by_staleness: bool = False,
        log: OrderLog | None = None,
    ) -> None:
        self.shards: Mapping[ShardId, Shard] = {shard.spec.id: shard for shard in shards}
        self.replicas = ReplicaClocks(clocked=clocked)
        self.epoch = 0
        self.vectors: tuple[VectorRecord, ...] = ()
        """Vectors of the shards."""
        self.log = log
        self.entries_applied = 0
        """Number of entries applied so far."""
        self.changes = 0
        """Number of applied entries that named replicas, began an epoch or forgot sessions."""
        self.batches = 0
        self.batched_pushes = 0
        self.cut_pushes = 0
        """Number of pushes applied in part, because their senders changed the memory meanwhile."""
        self.taken: Apply | ApplySum | None = None
        """Work that the shell has in progress; None if there is none."""
        self._taken_entry: Apply | None = None
        """Entry of the batch in progress, without rates; None during a sum and between work."""
        self.absent: Set[ShardId] = frozenset()
        """On a joining member, the shards that the next entry does not change; see `log_entries.py`."""
        self.snapshot: ClockSnapshot | None = None
        """In bsp, the shards at the clock that a reader reads; None without a reader."""
        self.cut: ClockSnapshot | None = None
        """In bsp, the shards at the clock of a cut; None if the disk takes no cut now."""
        self.keeps_pins = False
        """Whether this server saves pins."""
        self.pins: dict[int, bool] = {}
        """Ids of the newest pins, each with whether it was given up: a function of the log. So a repeated
        entry has no effect, and a member that returns removes the pins that clients have removed."""
        self.pinning: PinCopies | None = None
        """Shards at a pin that this server is saving; None if it saves no pin."""
        self._behind_pin: deque[Entry] = deque()
        """In bsp, a pin that waits for earlier sums, and the entries behind the pin."""
        self.ready: deque[Entry | ApplySum] = deque()
        """Committed entries and complete sums that wait; the first one becomes the next work."""
        self._summed_weight = summed_weight
        self.scales = scale_by_staleness
        """Whether a push's rate is divided by 1 + its staleness."""
        self._groups: dict[tuple[int, ...], ShardGroup] = {}
        if summed_weight:
            for shard in self.shards.values():
                shard.pending = PendingContributions(reached=shard.tables.slowest_clock())

    @property
    def summed(self) -> bool:
        """Whether pushes are added up (bsp)."""
        return self._summed_weight > 0

    @property
    def idle(self) -> bool:
        """Whether all committed entries and complete sums are applied."""
        return self.taken is None and not self.ready and not self._behind_pin

    @property
    def has_work(self) -> bool:
        """Whether work is in progress, or can be taken.

        Work waits while a reader reads the snapshot, or for the disk.
        """
        if self.taken is not None or not self.ready:
            return self.taken is not None
        return self._room(self.ready[0]) > 0

    def _room(self, due: Entry | ApplySum) -> int:
        """Return how many leading shards of a sum may change now; for a batch 0 or 1.

        The copies for a reader or a pin have bounded memory: work may wait until some copies are taken.
        """
        if isinstance(due, ApplySum):
            return min([each.room_for(due.shards) for each in self._kept_from(due)], default=len(due.shards))
        if self.pinning is None or not isinstance(due, Apply):
            return 1
        return int(self.pinning.has_room(due.shards()))

    @property
    def writes_pin(self) -> bool:
        """Whether the disk is writing a pin; it may still remove an old pin."""
        return self.pinning is not None and not self.pinning.is_given_up

    def _kept_from(self, due: Entry | ApplySum) -> list[KeptShards]:
        """Return the kept shards that work must copy before it changes them."""
        kept: list[KeptShards] = [] if self.pinning is None else [self.pinning]
        if isinstance(due, ApplySum):
            at_clocks = [each for each in (self.snapshot, self.cut) if each is not None]
            kept += [each for each in at_clocks if due.clock > each.clock]
        return kept

    def keep(self, shards: Sequence[Shard]) -> None:
        """Copy the shards that the work in progress is about to change, for readers, cut and pin."""
        assert self.taken is not None
        for each in self._kept_from(self.taken):
            each.keep(shards)

    def group(self, numbers: tuple[int, ...]) -> ShardGroup | None:
        """Return the shards of a message; None if a shard is missing, named twice, or of another family."""
        group = self._groups.get(numbers)
        if group is None:
            found = [shard for number in numbers if (shard := self.shards.get(ShardId(number))) is not None]
            families = {(shard.spec.rule, shard.spec.dtype) for shard in found}
            if not len(found) == len(numbers) == len(set(numbers)) or len(families) != 1:
                return None
            if len(self._groups) >= MOST_GROUPS:
                self._groups.clear()
            group = self._groups[numbers] = ShardGroup(found)
        return group

    def _touched(self) -> Iterable[Shard]:
        """Return the shards that an entry for all shards touches."""
        shards = self.shards.values()
        return [shard for shard in shards if shard.spec.id not in self.absent] if self.absent else shards

    def unfinished(self) -> list[Entry]:
        """Return the committed entries that are not applied."""
        taken = [self._taken_entry] if self._taken_entry is not None else []
        ready = [entry for entry in self.ready if not isinstance(entry, ApplySum)]
        return [*taken, *ready, *self._behind_pin]

    def regroup(self) -> None:
        """Forget the groups of shards: their tables have been replaced."""
        self._groups.clear()

    def forget_places(self, memory: FamilyMemory) -> None:
        """Forget where the values of groups in some memory are."""
        for group in self._groups.values():
            group.forget(memory)

    def share_equal_tables(self) -> None:
        """Let shards with equal tables share them, after a load shard by shard or in several pieces."""
        share_equal_tables(self.shards.values())
        self.regroup()

    def tables(self) -> Iterable[ShardTables]:
        """Return the tables of all shards, each once."""
        return each_tables(self.shards.values())

    def count_tables(self) -> int:
        """Return the number of different tables among the shards; 1 for a bundle without shards."""
        return max(len({id(shard.tables) for shard in self.shards.values()}), 1)

    # --- entries -----------------------------------------------------------------------------

    def commit(self, entry: Entry) -> list[Entry]:
        """Take the next committed entry. Returns the entries that are now applied, in order."""
        is_pin = isinstance(entry, QueuedPin)
        if self._behind_pin or (is_pin and self._summed_weight and not self.idle):
            # Entries behind a pin wait with it: in bsp they would change the clocks of shards.
            self._behind_pin.append(entry)
            return []
        # Vectors change with the values: a step finds the same ones on each member.
        passes = self._summed_weight and not isinstance(entry, Apply | VectorsChanged)
        if self.idle or passes:
            return self._enter(entry)
        self.ready.append(entry)
        return []

    def _enter(self, entry: Entry) -> list[Entry]:
        """Apply the next entry, or queue it as work if it changes values."""
        match entry:
            case Apply():
                if _is_work(entry):
                    self.ready.append(entry)
                    return []
                self._count(entry)
            case Contribute():
                self._contribute(entry.queued)
            case QueuedTick():
                self._tick(entry)
            case ReplicasChanged():
                self.changes += 1
                self._forget(self.replicas.change(entry.live, self._touched()))
                if entry.live:
                    self._reach(self._touched())
            case EpochBegan():
                self.changes += 1
                self.epoch = entry.number
                self.replicas.epoch_began(entry.first_clock, self._touched())
                self._reach(self._touched())
            case StepsArrived():
                self._count_steps(entry)
            case VectorsChanged():
                self.vectors = entry.vectors
                set_vectors(self._touched(), entry.vectors)
            case ForgetSessions():
                self.changes += 1
                for shard in self._touched():
                    shard.forget_dots(lambda step: step[:2] in entry.sessions)
                for tables in each_tables(self._touched()):
                    for session in entry.sessions:
                        tables.forget_session(session)
            case QueuedPin():
                self._pin(entry.pin)
            case _:
                assert_never(entry)
        self.entries_applied += 1
        return [entry]

    def _settle(self) -> list[Entry]:
        """Apply the entries after finished work, up to the next entry that is work."""
        done: list[Entry] = []
        while self.ready and not _is_work(entry := self.ready[0]):
            self.ready.popleft()
            assert not isinstance(entry, ApplySum)
            done += self._enter(entry)
        if self.taken is None and not self.ready and self._behind_pin:
            behind, self._behind_pin = self._behind_pin, deque()
            done += [entered for entry in behind for entered in self.commit(entry)]
        return done

    def _pin(self, pin: Pin) -> None:
        """Keep the shards for a pin that is new, or give it up."""
        is_known = pin.pin in self.pins
        if pin.removes or not is_known:
            self.pins[pin.pin] = pin.removes
            for id in [*self.pins][:-MOST_KNOWN_PINS]:
                del self.pins[id]
        if pin.removes and self.pinning is not None and self.pinning.pin.pin == pin.pin:
            self.pinning.end()
        # A server that joins has some shards of another position.
        can_save = self.keeps_pins and not self.absent and not self.writes_pin
        if not (pin.removes or is_known) and can_save:
            temporary = frozenset([vector.key for vector in self.vectors if vector.temporary])
            self.pinning = PinCopies(pin, self.shards, temporary)

    # --- work --------------------------------------------------------------------------------

    def take_work(self) -> Apply | ApplySum | None:
        """Return the next batch or sum as work; None if no work can begin now.

        The shell must have reported all earlier work.
        """
        assert self.taken is None
        if not self.has_work:
            return None
        work = self.ready.popleft()
        assert isinstance(work, (Apply, ApplySum))
        if isinstance(work, ApplySum):
            work, rest = work.split(self._room(work))
            if rest is not None:
                self.ready.appendleft(rest)
        self.batches += 1
        self.batched_pushes += len(work.pushes)
        self.taken = work
        if isinstance(work, Apply):
            self._taken_entry = work
            if self.scales:
                self.taken = Apply(work.pushes, _scaled_rates(work.pushes))
        return self.taken

    def applied(self, event: Applied) -> list[Entry]:
        """Count an applied batch. Returns the entries that are now applied: the batch and later ones."""
        entry = self._taken_entry
        assert event.batch is self.taken
        assert entry is not None
        self.taken = self._taken_entry = None
        if event.outcomes:
            self._count_refusals(entry, event.outcomes)
        else:
            self._count(entry)
        self.entries_applied += 1
        return [entry, *self._settle()]

    def _count_refusals(self, batch: Apply, outcomes: Sequence[Sequence[bool]]) -> None:
        """Count the pushes that the rule refused on some of a batch's shards."""
        for queued, taken in zip(batch.pushes, zip(*outcomes, strict=True), strict=True):
            taken_at = dict(zip(queued.accepted, taken, strict=True))
            refuse_places(queued, [place for place in queued.accepted if not taken_at[place]])
            self._count(Apply((queued,)))

    def _count(self, batch: Apply) -> None:
        """Count the pushes of a batch whose gradients are in the values."""
        pushes, shards = batch.pushes, batch.shards()
        if pushes[0].push.commands is not None:
            _count_step(pushes[0], shards)
        elif not _count_together(shards, pushes):
            _count_apart(shards, pushes)
        # Clocks advance after the values: a pull for a clock must find its pushes applied.
        for queued in pushes:
            push = queued.push
            named = shards if not queued.unapplied else [*shards, *queued.unapplied_shards()]
            self.replicas.advance(named, Replica(push.replica), push.incarnation, push.clock)
        if self.log is not None:
            for queued in pushes:
                self._note_reads(queued)
            for shard in shards:
                for number, queued in enumerate(pushes):
                    self._note(shard, queued.push, JOINED if number else 0)
            for queued in pushes:
                self._note_unapplied(queued, NOT_APPLIED)

    def count_at_once(
        self, push: Push, session: Session, group: ShardGroup, tables: ShardTables, read: int
    ) -> None:
        """Count an applied push that was a whole entry; see `at_once.py`.

        Args:
            tables: Tables of exactly the shards of the group; they have ordered the push.
            read: See `ShardTables.count_push`.
        """
        self.entries_applied += 1
        self.batches += 1
        self.batched_pushes += 1
        tables.count_push(session, tables.ordered[session], push.replica, read)
        if push.groups:
            tables.groups = tables.ordered_groups = with_groups(tables.groups, push.groups)
            if push.loss_sum is not None:
                # Without the call of `count_loss`: this is the way of most pushes.
                tables.losses = with_losses(tables.losses, push.groups[0], push.weight, push.loss_sum)
        if push.clock:
            self.replicas.advance(group, Replica(push.replica), push.incarnation, push.clock, tables)

    def sum_applied(self, event: SumApplied) -> list[Entry]:
        """Count the shards of a sum that are done. Returns the entries that are now applied."""
        done = event.sum
        assert done is self.taken
        # The shards of a sum are reported as they are done, perhaps in several rounds of the loop.
        last = event.first + len(event.finite)
        over = last == len(done.shards)
        if over:
            self.taken = None
        shards = done.shards[event.first : last]
        for at, (shard, finite) in enumerate(zip(shards, event.finite, strict=True), start=event.first):
            assert shard.pending is not None
            shard.pending.applied(done.clock)
            for number, (queued, places) in enumerate(zip(done.pushes, done.places, strict=True)):
                push, place = queued.push, places[at]
                if finite:
                    since = shard.version - _read(push, place)
                    shard.separate().count_staleness(push.replica, max(since, 0))
                else:
                    shard.separate().refused += 1
                flags = SUMMED | (JOINED if number else 0) | (0 if finite else NOT_APPLIED)
                self._note(shard, push, flags)
            # The whole sum is one step of the rule, so one version.
            shard.version = Version(shard.version + finite)
        return self._settle() if over else []

    # --- contributions to sums (bsp) ---------------------------------------------------------

    def _contribute(self, queued: QueuedPush) -> None:
        push = queued.push
        session: Session = (push.session, push.incarnation)
        replica = Replica(push.replica)
        shards: list[Shard] = []
        self._note_reads(queued)
        for place in queued.accepted:
            shard = queued.shards[place]
            assert shard is not None
            assert shard.pending is not None
            shards.append(shard)
            number = of_place(push.numbers, place)
            shard.separate().last_number[session] = number
            if not shard.pending.contribute(push.clock, Contribution(replica, queued, place, session)):
                queued.problems.append(Problem(place, REFUSED))
                shard.separate().refuse(session, number)
                self._note(shard, push, SUMMED | NOT_APPLIED | SKIPPED)
        # An unapplied gradient still advances the clock, because the other replicas do not wait for it.
        _count_unapplied(queued)
        self._note_unapplied(queued, SUMMED | NOT_APPLIED)
        shards += queued.unapplied_shards()
        _count_groups(queued, queued.shards_at(queued.accepted))
        self.replicas.advance(shards, replica, push.incarnation, push.clock)
        self._reach(shards)

    def _reach(self, shards: Iterable[Shard]) -> None:
        """Queue the complete sums; shards with the same pushes share a sum."""
        # Until the map names live replicas, a sum cannot know which ones it waits for.
        if not self.replicas.live or not self._summed_weight:
            return
        due: dict[tuple[int, ...], tuple[int, list[Contribution], list[tuple[Shard, list[int]]]]] = {}
        for shard in shards:
            if shard.pending is None:
                continue
            for clock, contributions in shard.pending.reach(shard.tables.slowest_clock()):
                # Shards with the same contributions make one sum: one job instead of one per shard.
                key = (clock, *(id(each.push) for each in contributions))
                _, _, members = due.setdefault(key, (clock, contributions, []))
                members.append((shard, [each.place for each in contributions]))
        for clock, contributions, members in sorted(due.values(), key=lambda each: each[0]):
            # Go by the order of the pushes, so the bits do not depend on which shard completed first.
            members.sort(key=lambda member: member[1])
            pushes = tuple(each.push for each in contributions)
            self.ready.append(
                ApplySum(
                    clock=clock,
                    shards=tuple(shard for shard, _ in members),
                    pushes=pushes,
                    places=tuple(zip(*(places for _, places in members), strict=True)),
                    scale=self._summed_weight / sum(queued.push.weight for queued in pushes),
                )
            )

    def keep_clock(self, clock: int, link: Any, until: float) -> int:
        """Keep all shards at a clock until a link has read them; this replaces an earlier snapshot.

        Args:
            until: Time at which the snapshot ends, unless the reader takes shards and asks for more.

        Returns 0 if the bundle keeps the shards, else the clock of a shard that has passed the given clock.
        """
        snapshot = self.snapshot
        if snapshot is None or (snapshot.clock, snapshot.link) != (clock, link):
            if (fastest := self._fastest()) > clock:
                return fastest
            self.end_snapshot()
            snapshot = self.snapshot = ClockSnapshot(clock, link, self.shards)
        snapshot.asked(until)
        return 0

    def _fastest(self) -> int:
        """Return the highest clock in the values; it includes a sum in progress."""
        taken = self.taken.clock if isinstance(self.taken, ApplySum) else 0
        return max([taken, *(shard.applied_clock() for shard in self.shards.values())])

    def begin_cut(self, clock: int) -> int:
        """Keep all shards at a clock as `cut`, until the disk has taken them or `end_cut`.

        Returns 0 if the bundle keeps the shards, else the clock of a shard that has passed the given clock.
        """
        assert self.cut is None
        if (fastest := self._fastest()) > clock:
            return fastest
        self.cut = ClockSnapshot(clock, None, self.shards)
        return 0

    def end_cut(self) -> None:
        if self.cut is not None:
            self.cut.end()
            self.cut = None

    @property
    def snapshot_until(self) -> float:
        """Time at which the snapshot ends; infinite without a snapshot."""
        return self.snapshot.until if self.snapshot is not None else inf

    def end_pin(self) -> None:
        """Give up the pin that is being written. Its task removes what it has written, so it goes on."""
        if self.pinning is not None:
            self.pinning.end()

    def end_snapshot(self) -> None:
        if self.snapshot is not None:
            self.snapshot.end()
            self.snapshot = None

    # --- clocks, steps and sessions ----------------------------------------------------------

    def _tick(self, entry: QueuedTick) -> None:
        tick = entry.tick
        shards: Sequence[Shard] | None = self.group(tick.shards)
        if shards is None:
            found = [self.shards.get(ShardId(number)) for number in tick.shards]
            shards = [shard for shard in found if shard is not None]
        if self.absent:
            shards = [shard for shard in shards if shard.spec.id not in self.absent]
        self.replicas.advance(shards, Replica(tick.replica), tick.incarnation, tick.clock)
        self._reach(shards)

    def _count_steps(self, entry: StepsArrived) -> None:
        """Count steps applied in place, even of an ended generation: the values have them already."""
        report = entry.report
        session: Session = (report.session, report.incarnation)
        ours = self.group(report.shards) or [self.shards[ShardId(number)] for number in report.shards]
        last = report.number + len(report.steps) - 1
        refused = {place for step in report.steps for place in step.refused}
        # Different refusals give shards different versions; without refusals, shards go on sharing tables.
        several: Collection[ShardTables] = [each.separate() for each in ours] if refused else tables_of(ours)
        all_steps = Counter([step.staleness for step in report.steps])
        for place, tables in enumerate(several):
            tables.last_number[session] = last
            if tables.ordered[session] < last:
                tables.ordered[session] = last
            counted = all_steps
            if place in refused:
                counted = Counter([step.staleness for step in report.steps if place not in step.refused])
            total = counted.total()
            tables.version = Version(tables.version + total)
            tables.refused += len(report.steps) - total
            for staleness, steps in counted.items():
                tables.count_staleness(report.replica, staleness, steps)
        for step in report.steps:
            if step.groups:
                # A step of a lost worker may come again: its groups count, and its loss does not.
                has = has_groups_each([each.groups for each in several], step.groups)
                fresh = [each for each, has_all in zip(several, has, strict=True) if not has_all]
                count_groups(step, several, fresh)
        for tables in several:
            tables.ordered_groups = tables.groups  # no push of steps in place waits
        clock = report.steps[-1].clock
        self.replicas.advance(ours, Replica(report.replica), report.incarnation, clock)

    def _forget(self, replica_generations: Set[int]) -> None:
        """Drop the push numbers of generations. The server then refuses pushes of these generations."""
        for tables in each_tables(self._touched()) if replica_generations else ():
            for session in tables.sessions():
                if session[1] in replica_generations:
                    tables.forget_numbers(session)
        for shard in self._touched() if replica_generations else ():
            shard.forget_dots(lambda step: step[1] in replica_generations)

    def _note(self, shard: Shard, push: Push, flags: int) -> None:
        if self.log is not None:
            client = self.log.client(push.replica, push.session, push.incarnation)
            self.log.note(shard.spec.id, push.clock, client, flags)

    def _note_unapplied(self, queued: QueuedPush, flags: int) -> None:
        for shard in queued.shards_at(queued.refused):
            self._note(shard, queued.push, flags)
        for shard in queued.shards_at(queued.known):
            self._note(shard, queued.push, flags | SKIPPED)

    def _note_reads(self, queued: QueuedPush) -> None:
        """Note the reads of a step, also if no shard of this server takes its push."""
        push, reads = queued.push, queued.gradients.reads
        if self.log is not None and reads is not None:
            client = self.log.client(push.replica, push.session, push.incarnation)
            self.log.note_reads(push.clock, client, reads)

    def check_invariants(self) -> None:
        """Assert the invariants between two entries."""
        for number, shard in self.shards.items():
            assert shard.spec.id == number
            shard.check_invariants()
        assert not self.ready or self.taken is not None or _is_work(self.ready[0])

    def __repr__(self) -> str:
        return f"<Bundle {len(self.shards)} shards, {len(self.ready)} entries wait>"


def _is_work(entry: Entry | ApplySum) -> bool:
    """Return whether an entry changes values; a batch of refused gradients does not."""
    return isinstance(entry, ApplySum) or (isinstance(entry, Apply) and bool(entry.pushes[0].accepted))


def _count_together(shards: Sequence[Shard], pushes: Sequence[QueuedPush]) -> bool:
    """Count applied pushes of a group with shared tables. Returns False if tables or numbers differ."""
    of_shards = [(each.push.numbers, each.push.versions, each.push.own_applied) for each in pushes]
    are_one = all(isinstance(numbers, int) for each in of_shards for numbers in each)
    tables = shards.own_tables() if are_one and isinstance(shards, ShardGroup) else None
    if tables is None:
        return False
    for queued in pushes:
        _count_push(tables, queued.push, 0)
        if queued.push.groups:
            tables.groups = with_groups(tables.groups, queued.push.groups)
            tables.count_loss(queued.push)
    return True


def _count_step(queued: QueuedPush, shards: Sequence[Shard]) -> None:
    """Count an applied step, also as a version if it changes values; shards with equal tables share them."""
    push = queued.push
    assert push.commands is not None
    changed = {command.array for command in push.commands.combine if not command.into}
    by_change: dict[bool, list[tuple[Shard, int]]] = {}
    for place, shard in zip(queued.accepted, shards, strict=True):
        changes = not changed.isdisjoint(("", shard.spec.tensor))
        by_change.setdefault(changes, []).append((shard, of_place(push.numbers, place)))
    for changes, numbered in by_change.items():
        mine, numbers = [shard for shard, _ in numbered], joined([number for _, number in numbered])
        for tables, number in numbered_tables(mine, numbers):
            session: Session = (push.session, push.incarnation)
            if changes:
                tables.count_push(session, number, push.replica, int(tables.version))
            else:
                tables.last_number[session] = number
    _count_unapplied(queued)


def _count_apart(shards: Sequence[Shard], pushes: Sequence[QueuedPush]) -> None:
    """Count applied and refused pushes shard by shard."""
    for place, shard in zip(pushes[0].accepted, shards, strict=True):
        tables = shard.separate()
        for queued in pushes:
            _count_push(tables, queued.push, place)
    for queued in pushes:
        _count_unapplied(queued)
        _count_groups(queued, shards)


def _count_groups(queued: QueuedPush, accepted: Sequence[Shard]) -> None:
    """Count a push's groups on its shards, and its loss on the shards to which the groups are new."""
    if queued.push.groups:
        fresh = [shard.tables for shard in (*accepted, *queued.shards_at(queued.refused))]
        known = [shard.tables for shard in queued.shards_at(queued.known)]
        count_groups(queued.push, [*fresh, *known], fresh)


def _count_push(tables: ShardTables, push: Push, place: int) -> None:
    session: Session = (push.session, push.incarnation)
    if push.vector:  # a version counts a change of the values
        tables.last_number[session] = of_place(push.numbers, place)
    else:
        tables.count_push(session, of_place(push.numbers, place), push.replica, _read(push, place))


def _read(push: Push, place: int) -> int:
    """Return the version of a shard that a push read; it includes the client's own pushes in its copy."""
    return of_place(push.versions, place) + of_place(push.own_applied, place)


def _count_unapplied(queued: QueuedPush) -> None:
    """Use up the numbers of a push whose gradients are not applied; shards go on sharing equal tables."""
    push = queued.push
    session: Session = (push.session, push.incarnation)
    for places in (queued.refused, queued.known):
        place_of = {shard: place for place in places if (shard := queued.shards[place]) is not None}
        tables_of([*place_of])  # from here on, shards with the same tables have the same number
        for tables, place in {shard.tables: place for shard, place in place_of.items()}.items():
            number = tables.last_number[session] = of_place(push.numbers, place)
            if places is queued.refused:
                tables.refuse(session, number)
            else:
                tables.known += 1


def _scaled_rates(pushes: Sequence[QueuedPush]) -> tuple[tuple[float, ...], ...]:
    """Return the rates of each push on its accepted places, each divided by 1 + the staleness there."""
    rates = []
    for before, queued in enumerate(pushes):
        push, mine = queued.push, []
        for place in queued.accepted:
            shard = queued.shards[place]
            assert shard is not None
            # Each earlier push of the batch will be one version.
            since = shard.version + before - _read(push, place)
            mine.append(push.rate / (1 + max(since, 0)))
        rates.append(tuple(mine))
    return tuple(rates)
