"""Pure: the clocks of the replicas on a server's shards, and the replica generations behind these clocks.

The server refuses pushes and ticks of a *replica generation* that has ended: other replicas have its groups.
The worker of such a generation repeats the refused messages, at growing intervals, until the map gives the
worker another generation. The worker reports a group only after an acknowledgement. Earlier pushes stay
applied, and their repetitions are answered.

A run may have any number of replica generations, numbered uniquely over all replicas. The server remembers
them in bounded memory (`EndedGenerations`). The server drops a generation's push numbers when `REMEMBERED`
later generations of its replica have ended. From then on it refuses every push of that generation, even an
applied one, so it applies no push twice. The server remembers the newest `OVER_KEPT` ended generations. A
client repeats an open push for at most `patience_s`, or for `copies_s` while the server applies no push. So
no push comes from an older generation.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from adam_async.messages.body import Clock, Count, DrawnId, ReplicaNumber
from adam_async.parameter_server.shard import EARLY_KEPT, Shard, ShardTables
from adam_async.parameter_server.shard_group import ShardGroup, each_tables, tables_of
from adam_async.run.ids import Replica

REMEMBERED = 8
"""Number of ended generations of a replica whose push numbers the server keeps."""

OVER_KEPT = 1 << 14
"""Maximum number of ended generations that the server remembers, over all replicas."""


class EndedGenerations:
    """The newest ended generations; ``(replica, replica_generation) in ended`` tests one."""

    def __init__(self) -> None:
        self._over: dict[tuple[Replica, int], None] = {}
        self._newest: dict[Replica, deque[int]] = {}
        self.forgotten = 0
        """Number of generations with dropped push numbers."""

    @classmethod
    def of(
        cls, over: Iterable[tuple[int, int]], newest: Mapping[int, Iterable[int]], *, forgotten: int
    ) -> Self:
        """Return the ended generations of a `state`."""
        ended = cls()
        ended._over = {(Replica(replica), number): None for replica, number in over}
        ended._newest = {Replica(replica): deque(numbers) for replica, numbers in newest.items()}
        ended.forgotten = forgotten
        return ended

    def state(self) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Return the ended generations, and for each replica those whose push numbers the server keeps."""
        over = [(int(replica), number) for replica, number in self._over]
        return over, {int(replica): list(numbers) for replica, numbers in self._newest.items()}

    def __contains__(self, replica_generation: tuple[Replica, int]) -> bool:
        return replica_generation in self._over

    def __len__(self) -> int:
        return len(self._over)

    def end(self, replica: Replica, replica_generation: int) -> list[int]:
        """Record the end of a generation.

        Returns the generations whose push numbers the caller must drop.
        """
        self._over[replica, replica_generation] = None
        newest = self._newest.setdefault(replica, deque())
        newest.append(replica_generation)
        dropped = [newest.popleft()] if len(newest) > REMEMBERED else []
        while len(self._over) > OVER_KEPT:
            oldest, number = next(iter(self._over))
            del self._over[oldest, number]
            kept = self._newest.get(oldest, deque())
            if number in kept:  # a replica that has left, and ends no more generations
                kept.remove(number)
                dropped.append(number)
            if not kept:
                self._newest.pop(oldest, None)
        self.forgotten += len(dropped)
        return dropped

    def is_forgotten(self, replica: Replica, replica_generation: int) -> bool:
        """Return whether a generation has ended and its push numbers are dropped."""
        return (replica, replica_generation) in self._over and replica_generation not in self._newest.get(
            replica, ()
        )

    def begin(self, live: Mapping[Replica, int]) -> None:
        """Remove generations that are live again."""
        for replica, replica_generation in live.items():
            if (replica, replica_generation) in self._over:
                del self._over[replica, replica_generation]
                if replica_generation in self._newest.get(replica, ()):
                    self._newest[replica].remove(replica_generation)

    def __repr__(self) -> str:
        return f"<EndedGenerations {len(self._over)} known, {self.forgotten} forgotten>"


class ClocksState(msgspec.Struct, frozen=True, array_like=True):
    """The state of `ReplicaClocks`, as it is sent to another server."""

    live: dict[ReplicaNumber, DrawnId]
    known: dict[ReplicaNumber, DrawnId]
    first_clock: Clock
    newest_clock: Clock
    over: Annotated[list[tuple[ReplicaNumber, DrawnId]], Meta(max_length=OVER_KEPT)]
    """Ended generations, oldest first."""
    newest: dict[ReplicaNumber, Annotated[list[DrawnId], Meta(max_length=REMEMBERED)]]
    """Ended generations whose push numbers the server keeps, by replica."""
    forgotten: Count


class ReplicaClocks:
    """The live replica generations of a run, and the rule by which their clocks count.

    Args:
        clocked: Whether workers wait for one another (ssp, bsp).

    Attributes:
        live: Live generation of each replica; empty before the map names any.
        ended: Generations that have ended.
        newest_clock: Highest clock of all generations that the map has named, in pushes, ticks and beginnings
            of epochs.
    """

    def __init__(self, *, clocked: bool) -> None:
        self.live: Mapping[Replica, int] = {}
        self.ended = EndedGenerations()
        self.newest_clock = 0
        self._clocked = clocked
        self._known: Mapping[Replica, int] = {}
        """Last live generations, kept while `live` is empty."""
        self._first_clock = 0

    def advance(
        self,
        shards: Sequence[Shard],
        replica: Replica,
        incarnation: int,
        clock: int,
        tables: ShardTables | None = None,
    ) -> None:
        """Raise the clocks of a replica on these shards, if the clock of its generation counts.

        Args:
            tables: Tables of exactly these shards, if the caller has them.
        """
        if tables is None and isinstance(shards, ShardGroup):
            tables = shards.own_tables()
        if self._counts(replica, incarnation):
            if clock > self.newest_clock:
                self.newest_clock = clock
            if tables is not None:
                if tables.clocks.get(replica, 0) < clock and (self._known or _has_room(tables, replica)):
                    tables.clocks[replica] = clock
                return
            for each in tables_of([shard for shard in shards if shard.clocks.get(replica, 0) < clock]):
                if self._known or _has_room(each, replica):
                    each.clocks[replica] = clock
        # The map may name the replica later. Without its clock the replica would then seem to be behind.
        elif self._clocked and (replica, incarnation) not in self.ended:
            for each in [tables] if tables is not None else tables_of(shards):
                each.note_early(replica, incarnation, clock)

    def _counts(self, replica: Replica, incarnation: int) -> bool:
        """Return whether a generation is live or, if none is, was the last live one; True at the start."""
        live = self.live or self._known
        return live.get(replica) == incarnation or not live

    @property
    def has_named(self) -> bool:
        """Whether the map has named a replica so far."""
        return bool(self._known)

    def change(self, live: Mapping[Replica, int], shards: Iterable[Shard]) -> set[int]:
        """Take the live replica generations that the map names, and adapt the clocks of the shards.

        Returns the generations whose push numbers the caller must drop.
        """
        ended = [pair for pair in self.live.items() if live.get(pair[0]) != pair[1]]
        self.live = live = dict(live)
        self.ended.begin(live)
        forgotten = {number for pair in ended for number in self.ended.end(*pair)} - {*live.values()}
        if not live:
            # The tables stay: the next replica to join starts at the slowest clock of the last ones.
            return forgotten
        # A new generation starts at the slowest clock of the other replicas; its predecessor's clock is void.
        reborn = {replica for replica, number in live.items() if self._known.get(replica, number) != number}
        self._known = live
        for tables in each_tables(shards):
            tables.name_replicas(live)
            # If no replica stays, the newcomers start at the slowest clock that the last ones had.
            staying = {r: c for r, c in tables.clocks.items() if r in live and r not in reborn}
            slowest = min((staying or tables.clocks).values(), default=self._first_clock)
            tables.clocks = {
                r: max(staying.get(r, slowest), tables.early.get((r, number), 0))
                for r, number in live.items()
            }
            # Clocks of these replicas' other generations are void.
            tables.early = {key: clock for key, clock in tables.early.items() if key[0] not in live}
        return forgotten

    def epoch_began(self, first_clock: int, shards: Iterable[Shard]) -> None:
        """Raise all clocks to the first clock of an epoch: all groups before the epoch are acknowledged."""
        self._first_clock = first_clock
        self.newest_clock = max(self.newest_clock, first_clock)
        for tables in each_tables(shards):
            for replica, clock in tables.clocks.items():
                tables.clocks[replica] = max(clock, first_clock)

    def state(self) -> ClocksState:
        """Return a copy of the state."""
        over, newest = self.ended.state()
        return ClocksState(
            live={int(replica): number for replica, number in self.live.items()},
            known={int(replica): number for replica, number in self._known.items()},
            first_clock=self._first_clock,
            newest_clock=self.newest_clock,
            over=over,
            newest=newest,
            forgotten=self.ended.forgotten,
        )

    def restore(self, state: ClocksState) -> None:
        """Take over the state of another server."""
        self.live = {Replica(replica): number for replica, number in state.live.items()}
        self._known = {Replica(replica): number for replica, number in state.known.items()}
        self._first_clock, self.newest_clock = state.first_clock, state.newest_clock
        self.ended = EndedGenerations.of(state.over, state.newest, forgotten=state.forgotten)


def _has_room(tables: ShardTables, replica: Replica) -> bool:
    """Return whether tables may have the clock of a replica before the map has named any."""
    return replica in tables.clocks or len(tables.clocks) < EARLY_KEPT
