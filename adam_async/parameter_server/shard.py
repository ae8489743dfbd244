"""Pure: one shard: its values, its rule state, and all other state that another server would need.

A shard has values, rule state, version, the dedup table (last push number per session), the clock table (step
of each live replica) and, in bsp, the pending contributions. Replication and storage move a shard as a whole
(I2 of the reliability rules: with dedup state apart from the values a retry would be applied twice). Shards
that are always pushed together share tables (`shard_group.py`).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import MOST_TERMS, Push, StepReport, check_tensor
from adam_async.messages.group_sets import LossSums
from adam_async.parameter_server.bsp_barrier import PendingContributions
from adam_async.run.group_ranges import GroupSets, Ranges, united, with_losses, without_groups, without_losses
from adam_async.run.ids import Replica, Version
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import VectorRecord, is_vector_key, vector_key
from transport import Region, RemoteProtocolError

Session = tuple[int, int]
"""Identity of a pushing client: (session id, incarnation)."""

StepKey = tuple[int, int, int]
"""Session id and incarnation of the client of a step, and the number of the step."""

MOST_DOTS = 512
"""Maximum number of dot products that a shard keeps: those of eight steps with 64 each, as many as a client
has open."""

T = TypeVar("T")

MOST_OWN = 64
"""Maximum number of entries of sessions that a split of tables copies."""

MOST_ROWS = 8
"""Number of rows of the staleness table from which on new replicas that the map does not name share one
row."""

EARLY_KEPT = 64
"""Maximum number of replica generations whose clocks are kept until the map names them."""

EXACT = 64
"""Number of different stalenesses in a row after which further ones are rounded down to powers of two."""

MOST_REFUSALS = 16
"""Maximum number of the newest refused pushes kept per session. A client has at most eight open pushes."""

MOST_COUNTED = (1 << 53) - 1
"""Maximum of a rule's count, such as that of Adam's steps."""

OTHERS = -1
"""Row of the replicas without a row of their own."""

SHARING = frozenset(("shards", "shared_rows"))
"""Names of the fields of `ShardTables` that say how tables share their content."""


class BySession(dict[Session, T]):
    """Entries by session: own ones, over earlier ones that several tables share.

    A split copies the own entries only, so its memory does not grow with the number of sessions.
    ``entries[session]`` finds the entry of a session, own or shared; the methods of a dict find own ones.

    Args:
        default: The entry of a session without one.
        mine: Own entries.
        shared: Earlier entries. Only `forget` changes them: it removes a session from all tables of a bundle.
    """

    __slots__ = ("_default", "_shared")

    def __init__(
        self, default: T, mine: Mapping[Session, T] | None = None, shared: dict[Session, T] | None = None
    ) -> None:
        super().__init__(mine or ())
        self._default = default
        self._shared = {} if shared is None else shared

    def __missing__(self, session: Session) -> T:
        return self._shared.get(session, self._default)

    def split(self) -> "BySession[T]":
        """Return equal entries for other tables."""
        if len(self) > MOST_OWN:
            self._shared = self.whole()
            self.clear()
        return BySession(self._default, self, self._shared)

    def whole(self) -> dict[Session, T]:
        return {**self._shared, **self}

    def forget(self, session: Session) -> None:
        """Remove the entry of a session, if there is one."""
        self.pop(session, None)
        self._shared.pop(session, None)


@dataclass(slots=True, eq=False)
class ShardTables:
    """Version, push numbers, clocks and counts of one shard, or of several that have the same ones.

    Several shards share tables while every message names all of them. A change of one shard alone first gives
    it tables of its own, see `Shard.separate`. Split tables go on sharing the entries that neither changes.
    """

    version: Version = Version(0)  # noqa: RUF009 - a NewType call is the identity
    last_number: BySession[int] = field(default_factory=partial(BySession, 0))
    """Dedup table: number of the last push applied or refused, per session."""
    ordered: BySession[int] = field(default_factory=partial(BySession, 0))
    """Number of the last push ordered, per session. Only the primary uses this table; a new primary starts
    with a copy of `last_number`."""
    clocks: dict[Replica, int] = field(default_factory=dict)
    """Clock table: the step that each live replica has finished, on this shard."""
    staleness_of: dict[int, Counter[int]] = field(default_factory=dict)
    """Number of pushes applied at each staleness (see `EXACT`), by replica. Row `OTHERS` has the rest."""
    early: dict[tuple[Replica, int], int] = field(default_factory=dict)
    """Clocks of replica generations that the map has not named yet, oldest first."""
    loaded: Version = Version(0)  # noqa: RUF009 - a NewType call is the identity
    """Version with which a resumed run began; earlier pushes are counted in its checkpoint."""
    refused: int = 0
    """Number of pushes that were not finite, or too late for their sum. Each used its number and advanced the
    clock."""
    refusals: BySession[tuple[int, ...]] = field(default_factory=lambda: BySession(()))
    """Numbers of the newest refused pushes, per session: a repetition gets the same answer."""
    duplicates: int = 0
    """Number of pushes answered again without being applied."""
    known: int = 0
    """Number of pushes whose groups the shard had already. Each used its number and advanced the clock."""
    groups: GroupSets = field(default_factory=dict)
    """Groups that pushes named, also refused ones, whichever session sent them; never changed in place."""
    ordered_groups: GroupSets = field(default_factory=dict)
    """`groups`, with those of the pushes that are ordered and not yet counted. Only the primary uses them; a
    new primary starts with `groups`."""
    losses: LossSums = field(default_factory=dict)
    """Losses of the groups in `groups` whose pushes have a loss."""
    shards: int = 1
    """Number of shards that have these tables."""
    shared_rows: set[int] = field(default_factory=set)
    """Rows of `staleness_of` that other tables have, too; the next count in a row copies it."""

    def split(self, shards: int) -> "ShardTables":
        """Return new, equal tables for some of the shards that have these tables."""
        self.shards -= shards
        self.shared_rows = {*self.staleness_of}
        return ShardTables(
            self.version,
            self.last_number.split(),
            self.ordered.split(),
            dict(self.clocks),
            dict(self.staleness_of),
            dict(self.early),
            self.loaded,
            self.refused,
            self.refusals.split(),
            self.duplicates,
            self.known,
            self.groups,
            self.ordered_groups,
            self.losses,
            shards,
            {*self.staleness_of},
        )

    def content(self) -> dict[str, Any]:
        """Return the content by the names of the fields, without those that say how tables share it."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in SHARING}
        return {name: each.whole() if isinstance(each, BySession) else each for name, each in found.items()}

    def equals(self, other: "ShardTables") -> bool:
        """Return whether both tables have the same content."""
        # The oldest early clocks leave first, so their order counts.
        return self is other or (list(self.early) == list(other.early) and self.content() == other.content())

    def name_replicas(self, replicas: Iterable[int]) -> None:
        """Give each replica that the map names a row of its own, even beyond `MOST_ROWS`."""
        for replica in replicas:
            self.staleness_of.setdefault(replica, Counter())

    def count_staleness(self, replica: int, staleness: int, pushes: int = 1) -> None:
        """Count pushes of a replica that were applied at this staleness, in pushes."""
        row = self.staleness_of.get(replica)
        if row is None:
            # A client chooses its replica number, perhaps before the map names it: bound the rows.
            replica = replica if len(self.staleness_of) < MOST_ROWS else OTHERS
            row = self.staleness_of.setdefault(replica, Counter())
        if replica in self.shared_rows:
            self.shared_rows.remove(replica)
            row = self.staleness_of[replica] = row.copy()
        # A client chooses the version that it claims to have read: bound the values.
        if staleness not in row and len(row) >= EXACT and staleness:
            staleness = 1 << staleness.bit_length() - 1
        row[staleness] += pushes

    def count_push(self, session: Session, number: int, replica: int, read: int) -> None:
        """Count an applied push.

        Args:
            read: Version that its gradients were computed from, with the client's own pushes that the values
                had in addition to this version.
        """
        # Negative if the client claims more own pushes than were applied: it counts as current.
        self.count_staleness(replica, max(self.version - read, 0))
        self.version = Version(self.version + 1)
        self.last_number[session] = number

    def count_loss(self, push: Push | StepReport) -> None:
        """Count the loss of groups that the shards did not have, if it is known."""
        if push.loss_sum is not None:
            self.losses = with_losses(self.losses, push.groups[0], push.weight, push.loss_sum)

    def note_early(self, replica: Replica, incarnation: int, clock: int) -> None:
        """Keep the clock of a generation until the map names it."""
        key = (replica, incarnation)
        if key not in self.early and len(self.early) >= EARLY_KEPT:
            del self.early[next(iter(self.early))]
        self.early[key] = max(self.early.get(key, 0), clock)

    def refuse(self, session: Session, number: int) -> None:
        """Count a refused push, and keep its number."""
        self.refused += 1
        self.refusals[session] = (*self.refusals[session][1 - MOST_REFUSALS :], number)

    def forget_session(self, session: Session) -> None:
        """Forget the pushes of a session, and the clocks of its generation before the map names it."""
        self.forget_numbers(session)
        for key in [key for key in self.early if key[1] == session[1]]:
            del self.early[key]

    def forget_numbers(self, session: Session) -> None:
        """Forget the pushes of a session."""
        for numbers in (self.last_number, self.ordered, self.refusals):
            numbers.forget(session)

    def sessions(self) -> set[Session]:
        return {*self.last_number.whole(), *self.ordered.whole()}

    def slowest_clock(self) -> int:
        """Return the clock of the slowest live replica; 0 if none is known."""
        return min(self.clocks.values(), default=0)


@dataclass(slots=True, eq=False)
class Sheet:
    """Memory for the values of all shards of a family. The values of a shard lie on one of several sheets."""

    values: NDArray[Any]
    region: Region | None = None
    """Region of the values, if processes of this host read them there."""
    shards: int = 0
    """Number of shards whose values lie here."""

    def is_lent(self, begin: int, end: int) -> bool:
        """Return whether another process reads some of these values, which may not change meanwhile."""
        region, size = self.region, self.values.itemsize
        return region is not None and bool(region.loans) and region.is_lent(begin * size, end * size)


MOST_LOST = 2
"""Number of lost sheets up to which a server allocates others in their place."""


@dataclass(slots=True, eq=False)
class FamilyMemory:
    """Memory of the shards of one rule and type of a bundle, one after the other."""

    private: Sheet
    """Values of shards that no process reads in place."""
    state: Mapping[str, NDArray[Any]]
    """The rule's arrays that are as long as the values."""
    counts: Mapping[str, NDArray[Any]]
    """The rule's arrays with one number per shard."""
    zeros: Callable[[], NDArray[Any]]
    """Allocates private memory."""
    sheets: list[Sheet] = field(default_factory=list)
    """Published sheets."""
    lacks_sheets: bool = False
    """Whether a reader of this host makes the server allocate sheets."""
    allocates: bool = False
    """Whether the server allocates sheets now."""
    waits_until: float = 0.0
    """Time before which it allocates none, because memory was lacking, in seconds of the loop's clock."""
    moves: int = 0
    """Number of times that shards came to another sheet."""
    forget: Callable[["FamilyMemory"], None] = lambda _: None
    """Called to forget all places of its values, because memory is about to be freed."""
    _preferred: Sheet | None = field(default=None, init=False)
    """Sheet to which the shards of the newest push went."""
    _leader: int | None = field(default=None, init=False)
    """Index of the first value of the shards that choose it."""
    _left: list[Sheet] = field(default_factory=list, init=False)
    """Lost sheets with values of shards."""
    _lost: list[weakref.ref[Region]] = field(default_factory=list, init=False)
    """Lost regions that shards or other readers still have."""

    def is_lent(self, begin: int, end: int) -> bool:
        """Return whether other processes may read some of these values, on any sheet of a shard."""
        return any(sheet.shards and sheet.is_lent(begin, end) for sheet in (*self.sheets, *self._left))

    def next_sheet(self, here: Sheet | None, begin: int, end: int) -> Sheet | None:
        """Return the sheet for the next values of some neighbours; None if they may change where they are.

        Args:
            here: Sheet of the values; None if they lie on several.
            begin: Index of the first value.
            end: Index after the last one.
        """
        lost = [each for each in self.sheets if each.region is not None and each.region.is_lost]
        if lost:
            self._lose(lost)
        if not self.sheets and here is self.private:
            return None
        free = [sheet for sheet in self.sheets if sheet is not here and not sheet.is_lent(begin, end)]
        # The shards of a push follow the first of them to a sheet, so that an array lies in one piece there.
        if self._leader is None or begin <= self._leader:
            self._leader = begin
            if free:
                self._preferred = free[0]
                return free[0]
        elif self._preferred in free:
            return self._preferred
        if here is not None and not here.is_lent(begin, end):
            return None
        return free[0] if free else self.private

    def _lose(self, lost: Sequence[Sheet]) -> None:
        """Use sheets no more whose loans never end, because their links have ended."""
        self.sheets = [sheet for sheet in self.sheets if sheet not in lost]
        self._lost += [weakref.ref(sheet.region) for sheet in lost if sheet.region is not None]
        self._left += [sheet for sheet in lost if sheet.shards]
        if self._preferred in lost:
            self._preferred = None
        self.lacks_sheets = True
        self.forget(self)

    def may_publish(self) -> bool:
        """Return whether a server may allocate sheets.

        Shards that no push moves keep lost sheets, and clients that come and go must not fill the memory.
        """
        self._lost = [each for each in self._lost if each() is not None]
        return len(self._lost) <= MOST_LOST

    def moved(self, before: Sheet, after: Sheet) -> None:
        """Note that a shard came to another sheet; memory that no shard uses any more is freed."""
        self.moves += 1
        before.shards -= 1
        after.shards += 1
        if before.shards or before in self.sheets:
            return
        if before is not self.private:
            self._left = [sheet for sheet in self._left if sheet is not before]
        else:
            # Pages of new memory exist once they are written. Without memory the old one stays.
            with suppress(MemoryError):
                before.values = self.zeros()
        self.forget(self)


@dataclass(slots=True, kw_only=True, eq=False)
class Shard:
    """One shard on one server. Only the server's one writer changes it."""

    spec: ShardSpec
    values: NDArray[Any]
    """The values, flat: a view of the memory of several shards, or of a tensor."""
    rule_state: dict[str, NDArray[Any]]
    """The rule's arrays, as long as `values`, or of length 1 for per-shard counts; and vectors of the store,
    see `vector_key`."""
    tables: ShardTables = field(default_factory=ShardTables)
    pending: PendingContributions | None = None
    """Contributions to sums that are not complete, in bsp."""
    memory: FamilyMemory | None = None
    """Memory that the shard shares with its neighbours; None if it has its own."""
    sheet: Sheet | None = None
    """Sheet of `memory` with the values."""
    offset: int = 0
    """Index of the shard's first value in `memory`."""
    place: int = 0
    """Index of the shard's counts in `memory`."""
    dots: dict[StepKey, tuple[float, ...]] = field(default_factory=dict)
    """Dot products of the newest steps, oldest first: a repetition gets the same answer. NaN for those that
    overflow."""

    def move(self, sheet: Sheet, *, with_values: bool = True) -> None:
        """Go on with the values on another sheet.

        Args:
            with_values: Whether they are copied; otherwise the sheet has the next values.
        """
        assert self.memory is not None
        assert self.sheet is not None
        if sheet is not self.sheet:
            place = sheet.values[self.offset : self.offset + len(self.values)]
            if with_values:
                place[:] = self.values
            before, self.values, self.sheet = self.sheet, place, sheet
            self.memory.moved(before, sheet)

    def separate(self) -> ShardTables:
        """Return tables of this shard alone, which may be changed; other shards keep theirs."""
        if self.tables.shards > 1:
            self.tables = self.tables.split(1)
        return self.tables

    @property
    def version(self) -> Version:
        """Number of pushes, or in bsp of sums, applied to the shard."""
        return self.tables.version

    @version.setter
    def version(self, version: Version) -> None:
        self.separate().version = version

    @property
    def last_number(self) -> Mapping[Session, int]:
        """Number of the last push applied or refused, per session."""
        return self.tables.last_number.whole()

    @property
    def clocks(self) -> Mapping[Replica, int]:
        """Step that each live replica has finished."""
        return self.tables.clocks

    @clocks.setter
    def clocks(self, clocks: dict[Replica, int]) -> None:
        self.separate().clocks = clocks

    def vector(self, number: int) -> NDArray[Any] | None:
        """Return the values for number 0, else the vector of this number; None if the shard lacks it."""
        return self.rule_state.get(vector_key(number)) if number else self.values

    def keep_dots(self, step: StepKey, dots: tuple[float, ...]) -> None:
        """Keep the dot products of a step; forget the answered ones of its client, and the oldest."""
        answered = step[2] - MOST_DOTS // MOST_TERMS
        for other in [other for other in self.dots if other[2] <= answered and other[:2] == step[:2]]:
            del self.dots[other]
        self.dots[step] = dots
        total = sum(map(len, self.dots.values()))
        while total > MOST_DOTS and len(self.dots) > 1:
            total -= len(self.dots.pop(next(iter(self.dots))))

    def forget_dots(self, is_over: Callable[[StepKey], bool]) -> None:
        """Forget the dot products of the steps of some sessions."""
        for step in [step for step in self.dots if is_over(step)]:
            del self.dots[step]

    def count_duplicate(self) -> None:
        """Count a repeated push; tables of several shards stay shared, without the count."""
        if self.tables.shards == 1:
            self.tables.duplicates += 1

    @property
    def staleness(self) -> Counter[int]:
        """Number of pushes applied at each staleness, of all replicas together."""
        total: Counter[int] = Counter()
        for counts in self.tables.staleness_of.values():
            total.update(counts)
        return total

    def applied_clock(self) -> int:
        """Return the highest clock up to which all pushes of live replicas are in the values."""
        return self.tables.slowest_clock() if self.pending is None else self.pending.clock

    def applied_groups(self) -> tuple[GroupSets, LossSums]:
        """Return the groups of the values and their losses: in bsp without those of pending contributions."""
        sets, losses = self.tables.groups, self.tables.losses
        pending: dict[int, Ranges] = {}
        for push in self.pending.pushes_of_groups() if self.pending is not None else ():
            epoch, *ranges = push.groups
            pending[epoch] = united(pending.get(epoch, ()), tuple(ranges))
            if push.loss_sum is not None:
                losses = without_losses(losses, epoch, push.weight, push.loss_sum)
        for epoch, named in pending.items():
            sets = without_groups(sets, (epoch, *named))
        return sets, losses

    def check_invariants(self) -> None:
        """Assert the invariants between two events."""
        pushes, versions = self.staleness.total(), self.version - self.tables.loaded
        if self.pending is None:
            assert pushes == versions, (self.staleness, self.version)
        else:
            assert pushes >= versions, (self.staleness, self.version)  # a sum of several is one version
            self.pending.check_invariants()
        assert len(self.values) == self.spec.size
        assert self.version >= 0
        assert self.tables.refused >= 0

    def __repr__(self) -> str:
        return (
            f"<Shard {self.spec.id} {self.spec.tensor}[{self.spec.start}:{self.spec.stop}] v{self.version}>"
        )


def leave_lent(shards: Iterable[Shard]) -> None:
    """Move the values that other processes read before they change; copies only these."""
    for shard in shards:
        if shard.memory is None or shard.sheet is None or shard.sheet is shard.memory.private:
            continue
        begin, end = shard.offset, shard.offset + len(shard.values)
        if shard.sheet.is_lent(begin, end):
            sheet = shard.memory.next_sheet(shard.sheet, begin, end)
            assert sheet is not None, "lent values lie where they may not change"
            shard.move(sheet)


def set_vectors(shards: Iterable[Shard], vectors: Sequence[VectorRecord]) -> None:
    """Add the vectors that shards lack, with zeros, and drop those that are not named."""
    wanted: dict[str, tuple[str, ...]] = {}
    for shard in shards:
        spec, state = shard.spec, shard.rule_state
        keys = wanted.get(spec.tensor)
        if keys is None:  # an array may have many shards
            keys = tuple([each.key for each in vectors if each.covers(spec.tensor, frozen=spec.frozen)])
            wanted[spec.tensor] = keys
        for key in [key for key in state if is_vector_key(key) and key not in keys]:
            del state[key]
        for key in keys:
            if key not in state:
                state[key] = np.zeros(spec.size, shard.values.dtype)


def check_array(array: NDArray[Any], what: str, target: NDArray[Any]) -> None:
    """Check that an array of a peer or a file may take the place of an array of a shard.

    Raises:
        RemoteProtocolError: Its shape or type differs, or it has counts that no rule can calculate with.
    """
    check_tensor(array, what, target.shape, target.dtype)
    # The values of a rule may be anything, but a negative count of steps would make the rule raise.
    if target.dtype.kind == "i" and not ((array >= 0) & (array <= MOST_COUNTED)).all():
        raise RemoteProtocolError("tensors", f"{what}: counts are within 0 and {MOST_COUNTED}")
