"""Pure: checks of a store that comes back from the disks of its servers, again and again.

Each return has its own id and begins with the values on the disks: every push is in them once or not at all.
An acknowledged push may be missing only if its acknowledgement is at most the permitted time older than the
loss of its store (`loss bound`). If pushes are durable, no acknowledged push may be missing (`durable`).
After a return the pushes of earlier stores stay unchanged, because their clients have new sessions. While a
shard lacks its primary, its last pushes are only in other copies' memory; these copies write the pushes after
one of them takes over. If all servers are lost before this takeover, the permitted time ends at the loss of
the primary.

In bsp the loss of a store also loses the pushes of the step in progress, even if they were acknowledged long
before. So a push counts as acknowledged from the first pull of its step's sum. A row of the values that came
back contains each step as a whole or not at all. A row with a step has all earlier steps.

    losses = Losses(permitted_s=2.0, now=clock)
    array = SavedPushes("store-1/a", rows=4, columns=64, losses=losses)
    again = SavedPushes("store-2/a", rows=4, columns=64, losses=losses, before=array)

Checks that disks return only states that servers gave to them, and no state older than before.

states = SavedStates()
states.taken(state, "store-1")               # each state that goes to a disk
states.opened("ps-1", "store-1", found)      # the states on a disk, whenever a server opens it
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from adam_async.persistence.frames import Part
from adam_async.persistence.records import State, StateKey, StateName
from tests.simulation.checkers.store_pushes import Before, Pulled, StorePushes
from tests.simulation.scenario import Violation


class Losses:
    """The losses of all servers of a store, and the pushes that they may cost.

    Args:
        permitted_s: Maximum age in seconds of a lost acknowledged push; None: none may be lost.
        now: Time of the simulation, in seconds.

    Attributes:
        recovered: Number of arrays that came back with pushes.
        lost: Number of rows in which an acknowledged push did not come back, over all pushes.
    """

    def __init__(self, *, permitted_s: float | None, now: Callable[[], float]) -> None:
        self.permitted_s = permitted_s
        self.now = now
        self.recovered = self.lost = 0
        self._ends: dict[str, float] = {}
        self._troubled_s: float | None = None
        """Time in seconds since which disks do not keep up with the pushes; None if they do."""
        self._led_s = now()
        """Newest time in seconds at which all shards had their primaries."""
        self._unled_s: float | None = None
        """Last time in seconds before a shard lost its primary; None once all shards have had their primaries
        for the permitted time again."""
        self._again_s: float | None = None
        """Time in seconds since which all shards have had their primaries; None if one is missing."""

    def ended(self, store: str) -> None:
        """Record that a store has lost its servers; further losses of the same store have no effect."""
        begins = [self.now(), self._troubled_s, self._unled_s]
        self._ends.setdefault(store, min([begin for begin in begins if begin is not None]))

    def has_ended(self, store: str) -> bool:
        """Return whether the servers of a store were lost."""
        return store in self._ends

    def looked(self, *, all_led: bool) -> None:
        """Note, at intervals, whether all shards have their primaries."""
        now = self.now()
        if not all_led:
            self._unled_s = self._led_s if self._unled_s is None else self._unled_s
            self._again_s = None
            return
        self._led_s = now
        self._again_s = now if self._again_s is None else self._again_s
        if self.permitted_s is not None and now - self._again_s > self.permitted_s:
            self._unled_s = None

    def troubled(self) -> None:
        """Note that disks do not keep up from now on; a later loss counts as a loss at this time."""
        if self._troubled_s is None:
            self._troubled_s = self.now()

    def healed(self) -> None:
        """Note that disks have kept up for the permitted time again."""
        self._troubled_s = None

    def problem(self, store: str, acknowledged_s: float) -> str:
        """Return why a push may not be lost; empty if it may."""
        if self.permitted_s is None:
            return "and pushes are durable"
        end_s = self._ends.get(store)
        if end_s is None:
            return "and its servers were not lost"
        if acknowledged_s < end_s - self.permitted_s:
            early_s = end_s - acknowledged_s
            return f"{early_s:.3f} s before the loss; {self.permitted_s:g} s are permitted"
        return ""


class SavedPushes(StorePushes):
    """Pushes to one array, from one return of its store to the next.

    Args:
        store: Id of the store.
        array: Name of the array.
        summed: Whether the servers apply means (bsp).
        before: The pushes to the array before this return; None for the first store.
    """

    def __init__(
        self,
        store: str,
        array: str,
        *,
        rows: int,
        columns: int,
        losses: Losses,
        summed: bool = False,
        before: "SavedPushes | None" = None,
    ) -> None:
        super().__init__(f"{store}/{array}", rows=rows, columns=columns, summed=summed)
        self._id = store
        self._losses = losses
        self._earlier: list[SavedPushes] = []
        self._since_s: dict[int, float | None] = {}
        """By column, time in seconds from which an acknowledged push to this store counts; None while the
        push's step is in progress."""
        self._mine: set[int] = set()
        """Columns of the pushes to this store."""
        self._recovered: NDArray[np.float64] | None = None
        """Values with which the store came back; unknown before the first pull."""
        if before is not None:
            self._earlier = [*before._earlier, before]
            self._pushes = before._pushes  # all returns share the columns

    def begin(self, client: str, *, clock: int = 0, weight: int = 1) -> int:
        column = super().begin(client, clock=clock, weight=weight)
        self._mine.add(column)
        return column

    def acknowledged(self, column: int, refused: Iterable[int]) -> None:
        super().acknowledged(column, refused)
        self._since_s[column] = None if self._summed else self._losses.now()

    def _columns_here(self) -> NDArray[np.int64]:
        return np.array(sorted(self._mine), np.int64)

    def before(self) -> Before:
        found = super().before()
        return replace(found, acknowledged=found.acknowledged & self._mine)

    def pulled(self, client: str, before: Before, pulled: Pulled) -> None:
        """Check values; for errors see `StorePushes.pulled`.

        Raises:
            Violation: The returned values lack a push that may not be lost, contain a push twice, or have
                changed since the return.
        """
        old = pulled.rows.copy()
        old[:, sorted(self._mine)] = 0
        if self._recovered is None:
            self._check_recovered(old)
            self._recovered = old
        for row, column in np.argwhere(old != self._recovered).tolist():
            text = f"row {row} of {self._store} has push {column} of an earlier store"
            values = f"{old[row, column]:g} times after {self._recovered[row, column]:g}"
            raise Violation("I2", f"{text} {values}")
        super().pulled(client, before, replace(pulled, rows=pulled.rows - old))
        if self._summed:
            self._count_steps(before, pulled.bound)

    def _count_steps(self, before: Before, bound: int) -> None:
        """Let the pushes of all steps up to `bound` count from now on, after a pull of their sums."""
        for column in before.acknowledged:
            if self._since_s[column] is None and self._pushes[column].clock <= bound:
                self._since_s[column] = self._losses.now()

    # --- the values that came back -------------------------------------------------------------

    def _check_recovered(self, rows: NDArray[np.float64]) -> None:
        """Check the values with which the store came back. Raises Violation."""
        self._check_new(rows)
        self._losses.recovered += bool(rows.any())
        for number, earlier in enumerate(self._earlier):
            since = [each._recovered for each in self._earlier[number + 1 :] if each._recovered is not None]
            newest = earlier._newest_steps(rows)
            for column, since_s in earlier._since_s.items():
                push = self._pushes[column]
                missing = rows[:, column] == 0
                for values in since:  # an earlier return without the push was checked then
                    missing &= values[:, column] != 0
                missing[list(push.refused)] = False
                if not missing.any():
                    continue
                self._losses.lost += int(missing.sum())
                problem = "" if since_s is None else self._losses.problem(earlier._id, since_s)
                if self._summed and (missing & (newest >= push.clock)).any():
                    problem = "and with its step, or a later one"
                if problem:
                    kind = "durable" if self._losses.permitted_s is None else "loss bound"
                    text = f"{self._store} came back without push {column} of {earlier._id}"
                    at = "in a step in progress" if since_s is None else f"acknowledged at {since_s:.3f} s"
                    lacks = f"in rows {np.flatnonzero(missing).tolist()}, {at}"
                    raise Violation(kind, f"{text} {lacks}, {problem}")

    def _newest_steps(self, rows: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return, with bsp, the newest step of this store in each row of values that came back; else zeros.

        Raises:
            Violation: A row contains a push several times, or only a part of it.
        """
        newest = np.zeros(len(rows), np.int64)
        if self._summed:
            for clock, is_there in self._summed_steps(rows):
                newest[is_there] = clock
            return newest
        mine = self._columns_here()
        for row, place in np.argwhere((rows[:, mine] != 0) & (rows[:, mine] != 1)).tolist():
            text = f"row {row} of {self._store} came back with push {mine[place]}"
            raise Violation("I2", f"{text} {rows[row, mine[place]]:g} times")
        return newest


class SavedStates:
    """The states of all stores and disks in a run.

    Attributes:
        compared: Number of states that came back and were compared.
    """

    def __init__(self) -> None:
        self.compared = 0
        self._taken: dict[tuple[str, StateKey], set[bytes]] = {}
        """Digests of the states by store and key. A key may have several: counts that are not in the log may
        differ between servers."""
        self._orders: dict[tuple[str, str, StateName], tuple[int, int]] = {}
        """Generation and position of each state at the last opening, by server and store."""

    def taken(self, state: State, store: str) -> None:
        """Note a state of a store that goes to a disk."""
        self._taken.setdefault((store, state.key), set()).add(digest_of(state.parts))

    def opened(self, server: str, store: str, found: Iterable[tuple[StateKey, Sequence[Part]]]) -> None:
        """Check the states of a store on a disk that a server opens.

        Raises:
            Violation: No server had one of the states, or a state is older than at the last opening.
        """
        for key, parts in found:
            self.compared += 1
            text = f"the state {key} of {store} on the disk of {server}"
            if digest_of(parts) not in self._taken.get((store, key), ()):
                raise Violation("recovered state", f"{text} is none that a server had")
            at = (server, store, key.name)
            before = self._orders.get(at, (0, 0))
            if key.order < before:
                raise Violation("older state", f"{text} is older than {before}, which was there before")
            self._orders[at] = key.order

    def forget(self, server: str) -> None:
        """Forget the states on a disk that has lost bytes."""
        for at in [at for at in self._orders if at[0] == server]:
            del self._orders[at]


def digest_of(parts: Iterable[Part]) -> bytes:
    """Return a digest of a state's bytes and of each part's size."""
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
