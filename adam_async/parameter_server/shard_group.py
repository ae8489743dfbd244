"""Pure: shards that messages name together: their memory in strips, and their shared tables.

A store may have thousands of small arrays, and a client pushes and pulls them in the same few messages. A
`ShardGroup` is the tuple of the shards of such a message, made once. Small shards lie one after the other in
memory, so a rule and a copy take a *strip* of them at a time. Shards that are always pushed together have
equal tables, so they share one until a message names some of them without the others.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import OfEach, Part, Push, StepReport, each_of, joined
from adam_async.messages.group_sets import LossSums
from adam_async.parameter_server.shard import FamilyMemory, Shard, ShardTables, Sheet, leave_lent
from adam_async.run.group_ranges import with_groups_each

STRIP_VALUES = 1 << 15
"""Maximum number of values of a strip of several shards: one round of the loop applies 32 pushes to it."""


MOST_MOVED = 64
"""Maximum number of shards of a group for which a server allocates sheets: each shard moves on its own."""


class Strip:
    """Adjacent shards as one target of a rule; bits do not depend on how values are cut into targets.

    Args:
        shards: One shard, or several that follow one another in the memory of a store.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        first, memory = shards[0], shards[0].memory
        self.values, self.rule_state = first.values, first.rule_state
        self._counts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        if len(shards) == 1 or memory is None:
            return
        part = slice(first.offset, shards[-1].offset + len(shards[-1].values))
        places = slice(first.place, shards[-1].place + 1)
        self.values = (first.sheet or memory.private).values[part]
        self.rule_state = {name: array[part] for name, array in memory.state.items()}
        for name, counts in memory.counts.items():
            self.rule_state[name] = counts[places][:1].copy()
            self._counts.append((counts[places], self.rule_state[name]))

    @property
    def has_counts(self) -> bool:
        """Whether the strip copies counts of its shards before and after a rule."""
        return bool(self._counts)

    def begin(self) -> bool:
        """Copy the counts of the shards, such as steps of Adam. Returns False if they differ."""
        for counts, mine in self._counts:
            if (counts != counts[0]).any():
                return False
            mine[:] = counts[0]
        return True

    def end(self) -> None:
        """Write the counts back to the shards, after the rule."""
        for counts, mine in self._counts:
            counts[:] = mine[0]


class ShardGroup(tuple[Shard, ...]):
    """The shards of a message, all different and of one rule and type.

    Attributes:
        sizes: Number of values of each shard.
        size: Number of values.
        nbytes: Bytes of the values.
        largest: Number of values of the largest shard.
        strips: The shards in strips, in their order.
        flats: The values of each strip.
        flat: The values in a row, if the shards follow one another in memory; None otherwise.
        has_counts: Whether a strip copies counts of its shards before and after a rule.
        memory: Memory of the shards; None if each has its own.
        may_lend: Whether readers of this host may have the values where they lie; pushes move all of them.
        begin: Index of the first value on a sheet.
        end: Index after the last value there.
        sheet: Sheet of the values; None if they lie on several.
        places: Indexes of the shards, from 0.
        layouts: Sizes of the parts of its pushes, by these parts; see `gradients.py`.
    """

    sizes: tuple[int, ...]
    size: int
    nbytes: int
    largest: int
    strips: tuple[Strip, ...]
    flats: tuple[NDArray[Any], ...]
    flat: NDArray[Any] | None
    has_counts: bool
    sheet: Sheet | None
    places: tuple[int, ...]
    layouts: dict[tuple[Part, ...], tuple[Any, ...]]
    _tables: ShardTables | None
    memory: FamilyMemory | None
    may_lend: bool
    begin: int
    end: int
    _views: dict[Sheet, tuple[tuple[Strip, ...], NDArray[Any] | None]]
    _moves: int

    def __new__(cls, shards: Sequence[Shard]) -> "ShardGroup":
        """Make the group of at least one shard."""
        group = super().__new__(cls, shards)
        group.sizes = tuple([len(shard.values) for shard in shards])
        group.size, group.largest = sum(group.sizes), max(group.sizes)
        group.nbytes = group.size * shards[0].values.itemsize
        group._views = {}
        group.memory = shards[0].memory
        group.begin = min([shard.offset for shard in shards])
        group.end = max([shard.offset + len(shard.values) for shard in shards])
        group._view()
        group.may_lend = len(group) <= MOST_MOVED and all(map(_adjoins, group[1:], group))
        group.may_lend = group.may_lend and group.memory is not None
        group.places = tuple(range(len(shards)))
        group.layouts = {}
        group._tables = None
        return group

    def _view(self) -> None:
        """Find the values where they lie now."""
        memory, sheet, start = self.memory, self[0].sheet, self[0].offset
        self._moves = 0 if memory is None else memory.moves
        self.sheet = sheet if all(shard.sheet is sheet for shard in self) else None
        known = None if self.sheet is None else self._views.get(self.sheet)
        if known is None:
            strips = tuple(_strips(self))
            flat = strips[0].values if len(strips) == 1 else None
            if flat is None and self.sheet is not None and all(map(_follows, self[1:], self)):
                flat = self.sheet.values[start : start + self.size]
            known = strips, flat
            if memory is not None and self.sheet in memory.sheets:
                self._views[self.sheet] = known  # stays, because a compiled rule knows the strips
        self.strips, self.flat = known
        self.flats = tuple([strip.values for strip in self.strips])
        self.has_counts = any(strip.has_counts for strip in self.strips)

    def forget(self, memory: FamilyMemory) -> None:
        """Forget where values in some memory are, until `renew`: views keep memory that no shard uses."""
        if self.memory is not memory:
            return
        self._views.clear()
        self._moves = -1
        for name in ("strips", "flats", "flat"):
            vars(self).pop(name, None)

    def renew(self) -> None:
        """Find the values again if shards came to another sheet since."""
        if self.memory is not None and self.memory.moves != self._moves:
            self._view()

    def next_sheet(self) -> Sheet | None:
        """Return the sheet for the next values; None if they may change where they are, or one by one."""
        if self.memory is None or not self.may_lend:
            return None
        self.renew()
        sheet = self.memory.next_sheet(self.sheet, self.begin, self.end)
        self.renew()
        return sheet

    def leave_lent(self) -> None:
        """Move the values that other processes read; see `leave_lent`."""
        if self.memory is not None and self.memory.is_lent(self.begin, self.end):
            leave_lent(self)
        self.renew()

    def move(self, sheet: Sheet, *, with_values: bool) -> None:
        """Go on with all values on another sheet; see `Shard.move`."""
        for shard in self:
            shard.move(sheet, with_values=with_values)
        self._view()

    @property
    def lacks_sheets(self) -> bool:
        """Whether readers of this host could have the values where they lie if there were sheets."""
        return self.may_lend and self.memory is not None and self.memory.lacks_sheets

    def shared(self) -> ShardTables | None:
        """Return the tables that all shards of the group, and no others, share; None if there are none."""
        tables = self._tables
        # Shards only ever leave shared tables, so the number tells whether one has left since.
        if tables is not None and tables.shards == len(self):
            return tables
        tables = self[0].tables
        if tables.shards == len(self) and all(shard.tables is tables for shard in self):
            self._tables = tables
            return tables
        return None

    def own_tables(self) -> ShardTables | None:
        """Return tables of its shards alone, which may be changed; None if they have several tables."""
        tables = self.shared()
        if tables is not None:
            return tables
        tables = self[0].tables
        if any(shard.tables is not tables for shard in self):
            return None
        self._tables = tables.split(len(self))
        for shard in self:
            shard.tables = self._tables
        return self._tables


def each_tables(shards: Iterable[Shard]) -> Collection[ShardTables]:
    """Return the tables of shards, each once."""
    return dict.fromkeys([shard.tables for shard in shards])


def partly_named(shards: Iterable[Shard]) -> list[ShardTables]:
    """Return the tables of some shards that other shards have, too."""
    named = Counter([shard.tables for shard in shards])
    return [tables for tables, count in named.items() if tables.shards > count]


def tables_of(shards: Sequence[Shard]) -> Collection[ShardTables]:
    """Return tables of these shards alone, which may be changed; shards with equal ones go on sharing."""
    tables = shards.own_tables() if isinstance(shards, ShardGroup) else None
    if tables is not None:
        return (tables,)
    for tables in partly_named(shards):
        mine = [shard for shard in shards if shard.tables is tables]
        new = tables.split(len(mine))
        for shard in mine:
            shard.tables = new
    return each_tables(shards)


def numbered_tables(shards: Sequence[Shard], numbers: OfEach) -> Iterable[tuple[ShardTables, int]]:
    """Return tables of these shards alone, each with the number of its shards; see `tables_of`.

    Args:
        numbers: One number for all shards, or one for each.
    """
    each = each_of(numbers, len(shards))
    if not isinstance(numbers, int):
        first: dict[ShardTables, int] = {}
        several = {
            s.tables
            for s, number in zip(shards, each, strict=True)
            if first.setdefault(s.tables, number) != number
        }
        for shard in shards if several else ():
            if shard.tables in several:
                shard.separate()
    tables_of(shards)
    return {shard.tables: number for shard, number in zip(shards, each, strict=True)}.items()


def count_groups(
    push: Push | StepReport, several: Collection[ShardTables], fresh: Iterable[ShardTables]
) -> None:
    """Add the groups of a push to the sets of its shards' own tables; equal sets are shared from then on.

    Args:
        fresh: Those of the tables that did not have the groups: they count its loss.
    """
    sets_of = with_groups_each([each.groups for each in several], push.groups)
    for tables, sets in zip(several, sets_of, strict=True):
        tables.groups = sets
    before: LossSums | None = None
    after: LossSums = {}
    # Shards with equal tables share them: each counts once.
    for tables in dict.fromkeys(fresh):
        if tables.losses == before:
            tables.losses = after
        else:
            before = tables.losses
            tables.count_loss(push)
            after = tables.losses


def share_equal_tables(shards: Iterable[Shard]) -> None:
    """Let shards with equal tables share them. Compares tables with one candidate, not with all others."""
    shards = tuple(shards)
    candidates: dict[tuple[int, ...], ShardTables] = {}
    new: dict[ShardTables, ShardTables] = {}
    """New tables, by the tables that they replace. Old tables never gain shards, because groups cache them
    with their number of shards."""
    for tables in each_tables(shards):
        key = (tables.version, tables.refused, tables.duplicates, len(tables.last_number.whole()))
        candidate = candidates.get(key)
        if candidate is None or not candidate.equals(tables):
            candidate = candidates[key] = tables.split(0)
        new[tables] = candidate
    for shard in shards:
        shard.tables.shards -= 1
        shard.tables = new[shard.tables]
        shard.tables.shards += 1


def versions_of(shards: Sequence[Shard | None]) -> OfEach:
    """Return the versions of shards, as messages have them; 0 for a shard of another server."""
    tables = shards.shared() if isinstance(shards, ShardGroup) else None
    if tables is not None:
        return int(tables.version)
    return joined([0 if shard is None else int(shard.version) for shard in shards])


def applied_clock(shards: Sequence[Shard]) -> int:
    """Return the highest clock up to which all pushes of live replicas are in the values of the shards."""
    tables = shards.shared() if isinstance(shards, ShardGroup) else None
    if tables is not None and shards[0].pending is None:
        return tables.slowest_clock()
    return min([shard.applied_clock() for shard in shards], default=0)


def _adjoins(shard: Shard, before: Shard) -> bool:
    """Return whether the place of a shard is directly behind that of another one on a sheet."""
    return (
        shard.memory is not None
        and shard.memory is before.memory
        and shard.place == before.place + 1
        and shard.offset == before.offset + len(before.values)
    )


def _follows(shard: Shard, before: Shard) -> bool:
    """Return whether a shard comes directly behind another one in the same memory."""
    return shard.sheet is before.sheet and _adjoins(shard, before)


def _strips(shards: Sequence[Shard]) -> list[Strip]:
    found: list[list[Shard]] = []
    size = 0
    for shard in shards:
        before = found[-1][-1] if found else None
        if before is not None and _follows(shard, before) and size + len(shard.values) <= STRIP_VALUES:
            found[-1].append(shard)
            size += len(shard.values)
        else:
            found.append([shard])
            size = len(shard.values)
    return [Strip(each) for each in found]
