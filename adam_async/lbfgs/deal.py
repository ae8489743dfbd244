"""Pure: the pieces of one evaluation: which worker computes each piece, and which may push now.

A free worker gets the next piece. When no piece is left, or a worker keeps as many gradients as it may, it
gets the oldest piece that another worker still computes (a *backup*, "Large Scale Distributed Deep Networks",
4.2); the first result counts.

Workers keep gradients until their turn, and push them in the order of the pieces. So the sum has the same
bits whatever the number of workers and their speeds. A turn covers consecutive pieces that one worker has. If
the worker is lost in its turn, another one pushes the pieces again; servers count a piece once.
"""

from collections.abc import Hashable
from math import fsum, nan

MOST_KEPT = 8
"""Maximum number of gradients that wait for their turn on a worker. Waiting gradients hide a worker that is
up to this many times slower than the others."""

MOST_COMPUTING = 2
"""Maximum number of workers that compute the same piece."""

Worker = Hashable
"""Name of a worker."""


class Deal:
    """One evaluation, until all pieces are counted; with `backups` a piece may go to two workers."""

    def __init__(self, number: int, pieces: int, *, backups: bool = True) -> None:
        self.number = number
        self.pieces = pieces
        self.counted = 0
        """Number of pieces that the servers have: the first ones."""
        self.computations = 0
        """Number of pieces that were dealt, with repetitions."""
        self._backups = backups
        self._dealt = 0
        """Number of pieces that were dealt at least once."""
        self._computing: dict[int, list[Worker]] = {}
        """Workers that compute each piece that is dealt but not counted."""
        self._gradients: dict[int, list[Worker]] = {}
        """Workers that keep the gradient of each such piece, the first one first."""
        self._losses: dict[int, float] = {}
        self._turn: tuple[Worker, int] | None = None
        """Worker that pushes now, and one past its last piece."""
        self._given: dict[Worker, int] = {}
        """One past the last piece of each worker's turn, even a lost one's, until the worker has pushed."""

    @property
    def is_over(self) -> bool:
        """Whether the servers have all pieces."""
        return self.counted == self.pieces

    @property
    def computed_pieces(self) -> int:
        """Number of pieces whose gradient some worker had."""
        return len(self._losses)

    @property
    def value(self) -> float:
        """Sum of all pieces' losses, rounded once; NaN or an infinity if a loss is not finite."""
        losses = self._losses.values()
        try:
            return fsum(losses)
        except (OverflowError, ValueError):  # the sum is beyond all numbers, or inf - inf
            return nan

    @property
    def in_turn(self) -> Worker | None:
        """Worker that pushes now, if there is one."""
        return None if self._turn is None else self._turn[0]

    def take(self, worker: Worker) -> range:
        """Deal a piece to a free worker; none if it has to wait."""
        piece = self._next_for(worker)
        if piece is None:
            return range(0)
        self._computing.setdefault(piece, []).append(worker)
        self._dealt = max(self._dealt, piece + 1)
        self.computations += 1
        return range(piece, piece + 1)

    def _next_for(self, worker: Worker) -> int | None:
        kept = sum(worker in workers for workers in self._gradients.values())
        outstanding = [
            piece
            for piece in range(self.counted, self._dealt)
            if not self._gradients.get(piece) and worker not in self._computing.get(piece, ())
        ]
        # A full worker takes only the piece that all others wait for.
        may_have = outstanding if kept < MOST_KEPT else [each for each in outstanding if each == self.counted]
        for piece in may_have:
            if not self._computing.get(piece):
                return piece
        if kept < MOST_KEPT and self._dealt < self.pieces:
            return self._dealt
        if self._backups:
            for piece in may_have:
                if len(self._computing[piece]) < MOST_COMPUTING:
                    return piece
        return None

    def computed(self, worker: Worker, piece: int, loss: float) -> None:
        """Take note that a worker has the gradient of a piece; the loss of the first result counts."""
        computing = self._computing.get(piece, [])
        if worker not in computing:
            return  # the piece is counted by now, or was never dealt
        computing.remove(worker)
        self._gradients.setdefault(piece, []).append(worker)
        self._losses.setdefault(piece, loss)

    def turn(self, worker: Worker) -> range:
        """Return the pieces that a worker must push now, in this order; usually none."""
        stop = self.counted
        if self._turn is None:
            while worker in self._gradients.get(stop, ()):
                stop += 1
        if stop > self.counted:
            self._turn = worker, stop
            self._given[worker] = stop
        return range(self.counted, stop)

    def pushed(self, worker: Worker, stop: int) -> None:
        """Take note that the servers have the pieces of a turn, up to `stop`."""
        if self._given.pop(worker, None) != stop:
            return
        if self._turn == (worker, stop):
            self._turn = None
        # A worker that lost its turn may be late: the servers have its pieces all the same.
        for piece in range(self.counted, stop):
            self._computing.pop(piece, None)
            self._gradients.pop(piece, None)
        self.counted = max(self.counted, stop)

    def lost(self, worker: Worker) -> None:
        """Forget a worker: others compute and push its pieces."""
        for workers in (*self._computing.values(), *self._gradients.values()):
            if worker in workers:
                workers.remove(worker)
        if self._turn is not None and self._turn[0] == worker:
            self._turn = None
