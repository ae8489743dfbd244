"""Pure: checks that a store applies each push once, and that its versions, clocks and values agree.

Every push adds 1 to its own column in each row of the store's values; a row belongs to one shard. An entry is
therefore the number of times that a push was applied to a shard. With bsp the servers apply the weighted mean
of a clock's pushes. So a clock's entries are its pushes' weights, divided by their sum.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.simulation.scenario import Violation

EXACT = 1e-6
"""Maximum error of a share in float32."""


@dataclass(slots=True)
class _Push:
    """One push to a store."""

    client: str
    clock: int
    """Step of the push; bsp only."""
    weight: int
    acknowledged: bool = False
    refused: frozenset[int] = field(default=frozenset())
    """Rows to which the push was not applied."""


@dataclass(frozen=True, slots=True)
class Before:
    """Pushes and versions that the values of later pulls must contain."""

    acknowledged: frozenset[int]
    """Acknowledged pushes."""
    versions: NDArray[np.int64]
    """Newest version of each row that a client has received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Values that a client pulled.

    Attributes:
        rows: (rows, columns) values.
        versions: Version of each row.
        bound: Step up to which the values must contain all pushes, as the servers answered or the consistency
            requires.
        at: Step of the client: no value may contain a later step, unless the client joined after its step's
            sum. None if the client's number is not live.
        others: Steps that the other live clients have ended.
    """

    rows: NDArray[np.float64]
    versions: Sequence[int]
    bound: int = 0
    at: int | None = None
    others: Iterable[tuple[str, int]] = ()


class StorePushes:
    """All pushes to one store.

    Args:
        store: Name of the store, for texts.
        rows: Number of rows.
        columns: Number of columns, which is the maximum number of pushes.
        summed: Whether the servers apply means (bsp).
    """

    def __init__(self, store: str, *, rows: int, columns: int, summed: bool) -> None:
        self._store = store
        self._columns = columns
        self._summed = summed
        self._pushes: list[_Push] = []
        self._versions = np.zeros(rows, np.int64)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._versions)

    @property
    def full(self) -> bool:
        """Whether all columns are taken."""
        return not self.room

    @property
    def room(self) -> int:
        """Number of further pushes that can be recorded."""
        return self._columns - len(self._pushes)

    def begin(self, client: str, *, clock: int = 0, weight: int = 1) -> int:
        """Record a push before its call; return its column."""
        self._pushes.append(_Push(client, clock, weight))
        return len(self._pushes) - 1

    def acknowledged(self, column: int, refused: Iterable[int]) -> None:
        """Record the answer to a push, with the rows that refused it. Raises Violation."""
        push = self._pushes[column]
        push.acknowledged, push.refused = True, frozenset(refused)
        if push.refused and not self._summed:
            raise Violation("I1", f"{self._store} refused push {column} of {push.client}, which is finite")

    def before(self) -> Before:
        """Return the minimum content of values that are pulled from now on."""
        done = frozenset(column for column, push in enumerate(self._pushes) if push.acknowledged)
        return Before(done, self._versions.copy())

    def pulled(self, client: str, before: Before, pulled: Pulled) -> None:
        """Check values.

        Raises:
            Violation: A push is missing (I1) or counts twice (I2), a version fell or differs from the number
                of applied pushes (I4), or a client is ahead of the others (staleness).
        """
        versions = np.array(pulled.versions, np.int64)
        if (versions < before.versions).any():
            text = f"{client} found versions {versions} after {before.versions} in {self._store}"
            raise Violation("I4", text)
        self._versions = np.maximum(self._versions, versions)
        if self._summed:
            self._check_sums(client, before, pulled)
        else:
            self._check_counts(client, before, pulled)
        for other, clock in pulled.others:
            if clock < pulled.bound:
                text = f"{client} pulled step {pulled.bound} of {self._store}, and {other} is at {clock}"
                raise Violation("staleness", text)

    def _check_counts(self, client: str, before: Before, pulled: Pulled) -> None:
        rows = pulled.rows
        for row, column in np.argwhere((rows != 0) & (rows != 1)).tolist():
            text = f"row {row} of {self._store} has push {column} {rows[row, column]:g} times"
            raise Violation("I2", text)
        self._check_new(rows)
        for column in sorted(before.acknowledged):
            if not rows[:, column].all():
                text = f"{client} pulled {self._store} without push {column}, acknowledged before"
                raise Violation("I1", text)
        self._check_versions(pulled.versions, rows.sum(axis=1))

    def _check_sums(self, client: str, before: Before, pulled: Pulled) -> None:
        rows = pulled.rows
        self._check_new(rows)
        applied = np.zeros(len(rows), np.int64)
        # A client whose push came after its step's sum joined late: the others had continued without it.
        is_late = any(push.refused for push in self._of_step(client, pulled.at))
        for clock, is_there in self._summed_steps(rows):
            applied += is_there
            if pulled.at is not None and not is_late and clock > pulled.at and is_there.any():
                text = f"{client} at step {pulled.at} of {self._store} pulled pushes of step {clock}"
                raise Violation("staleness", text)
        for column in sorted(before.acknowledged):
            push = self._pushes[column]
            lacks = [row for row in np.flatnonzero(rows[:, column] == 0) if row not in push.refused]
            if push.clock <= pulled.bound and lacks:
                text = f"{client} pulled step {pulled.bound} of {self._store} without push {column}"
                raise Violation("I1", f"{text} of step {push.clock} in rows {lacks}")
        self._check_versions(pulled.versions, applied)

    def _of_step(self, client: str, clock: int | None) -> list[_Push]:
        return [push for push in self._pushes if (push.client, push.clock) == (client, clock)]

    def _columns_here(self) -> NDArray[np.int64]:
        """Return the columns of the pushes to this store."""
        return np.arange(len(self._pushes))

    def _summed_steps(self, rows: NDArray[np.float64]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield each step, with a mask of the rows with its sum. Raises Violation if values are no sums."""
        columns = self._columns_here()
        clocks = np.array([self._pushes[column].clock for column in columns], np.int64)
        weights = np.array([self._pushes[column].weight for column in columns], np.float64)
        for clock in np.unique(clocks).tolist():
            of_clock = clocks == clock
            values = rows[:, columns[of_clock]]
            shares = np.where(values != 0, weights[of_clock], 0.0)
            sums = shares.sum(axis=1, keepdims=True)
            expected = shares / np.maximum(sums, 1.0)
            if (np.abs(values - expected) > EXACT).any():
                text = f"step {clock} of {self._store} has the shares {values}, not {expected}"
                raise Violation("I2", text)
            yield clock, sums[:, 0] > 0

    def _check_new(self, rows: NDArray[np.float64]) -> None:
        if rows[:, len(self._pushes) :].any():
            raise Violation("I2", f"{self._store} has values of pushes that no client made")

    def _check_versions(
        self, versions: Sequence[int], applied: NDArray[np.float64] | NDArray[np.int64]
    ) -> None:
        if list(versions) != applied.astype(np.int64).tolist():
            text = f"rows of {self._store} have versions {list(versions)} and {applied.tolist()} pushes"
            raise Violation("I4", text)
