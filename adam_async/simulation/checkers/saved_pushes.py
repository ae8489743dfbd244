"""Pure: checks of a store that comes back from the disks of its servers, again and again.

Each return has an id of its own and begins with the values on the disks: every push is in them once or not at
all. A push that was acknowledged and is not there must be recent: acknowledged at most the permitted time
before the loss of its store (`loss bound`), and never if pushes are durable (`durable`). From then on the old
pushes stay as they are, because their clients have new sessions.

    losses = Losses(permitted_s=2.0, now=clock)
    array = SavedPushes("store-1/a", rows=4, columns=64, losses=losses)
    again = SavedPushes("store-2/a", rows=4, columns=64, losses=losses, before=array)
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from adam_async.simulation.checkers.store_pushes import Before, Pulled, StorePushes
from adam_async.simulation.scenario import Violation


class Losses:
    """The losses of all servers of a store, and the pushes that they may cost.

    Args:
        permitted_s: Maximum age of an acknowledged push that is lost, in seconds; None: none may be lost.
        now: Time of the simulation, in seconds.

    Attributes:
        recovered: Number of arrays that came back with pushes.
        lost: Number of acknowledged pushes that did not come back, each with a row of its array.
    """

    def __init__(self, *, permitted_s: float | None, now: Callable[[], float]) -> None:
        self.permitted_s = permitted_s
        self.now = now
        self.recovered = self.lost = 0
        self._ends: dict[str, float] = {}
        self._troubled_s: float | None = None
        """Begin of the time in which disks do not keep up; None if they do."""

    def ended(self, store: str) -> None:
        """Note the loss of a store's servers; the first one counts."""
        self._ends.setdefault(store, self._troubled_s if self._troubled_s is not None else self.now())

    def has_ended(self, store: str) -> bool:
        """Whether the servers of a store were lost."""
        return store in self._ends

    def troubled(self) -> None:
        """Note that disks do not keep up from now on: the permitted time ends here."""
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
    """All pushes to one array, to one return of its store.

    Args:
        store: Id of the store.
        array: Name of the array.
        before: The pushes to the return before this one; None for the first store.
    """

    def __init__(
        self,
        store: str,
        array: str,
        *,
        rows: int,
        columns: int,
        losses: Losses,
        before: "SavedPushes | None" = None,
    ) -> None:
        super().__init__(f"{store}/{array}", rows=rows, columns=columns, summed=False)
        self._id = store
        self._losses = losses
        self._earlier: list[SavedPushes] = []
        self._acknowledged_s: dict[int, float] = {}
        """Time of the acknowledgement of each push to this store, in seconds."""
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
        self._acknowledged_s[column] = self._losses.now()

    def before(self) -> Before:
        found = super().before()
        return replace(found, acknowledged=found.acknowledged & self._mine)

    def pulled(self, client: str, before: Before, pulled: Pulled) -> None:
        """Check values; for errors see `StorePushes.pulled`.

        Raises:
            Violation: The values that came back lack a push that may not be lost, have one twice, or have
                changed since.
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

    def _check_recovered(self, rows: NDArray[np.float64]) -> None:
        """Check the values with which the store came back. Raises Violation."""
        for row, column in np.argwhere((rows != 0) & (rows != 1)).tolist():
            text = f"row {row} of {self._store} came back with push {column}"
            raise Violation("I2", f"{text} {rows[row, column]:g} times")
        self._losses.recovered += bool(rows.any())
        for number, earlier in enumerate(self._earlier):
            since = [each._recovered for each in self._earlier[number + 1 :] if each._recovered is not None]
            for column, acknowledged_s in earlier._acknowledged_s.items():
                missing = rows[:, column] == 0
                for values in since:  # a loss before is judged
                    missing &= values[:, column] != 0
                if not missing.any():
                    continue
                self._losses.lost += int(missing.sum())
                if problem := self._losses.problem(earlier._id, acknowledged_s):
                    kind = "durable" if self._losses.permitted_s is None else "loss bound"
                    text = f"{self._store} came back without push {column} of {earlier._id}"
                    lacks = (
                        f"in rows {np.flatnonzero(missing).tolist()}, acknowledged at {acknowledged_s:.3f} s"
                    )
                    raise Violation(kind, f"{text} {lacks}, {problem}")
