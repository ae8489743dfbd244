"""Pure: the number of groups for which a worker of a pool asks at once: half a second of its measured work.

A *piece* is the groups of one answer. A worker asks for the next piece when it has begun the newest one, so a
worker asks about twice a second, however fast it trains. The dealer may grant fewer groups
(`Epoch.most_piece`). Before the rate is known, each piece may be twice as large as the one before.

The rate counts groups with acknowledged pushes, over times in which the worker has groups. A period of
measurement is at least half a piece long, because acknowledgements come in bursts.
"""

from math import modf

PIECE_S = 0.5
"""Measured work in a piece, in seconds."""


class PieceSize:
    """Rate and piece size of one worker. Times are seconds on the caller's clock.

    Args:
        first: Number of groups of the first piece, at least 1.
        most: Maximum number of groups of a piece.
    """

    def __init__(self, *, first: int, most: int) -> None:
        self._size = float(min(first, most))
        """Number of groups of a piece, with its fraction."""
        self._left = 0.0
        """Fraction of a group that rounding has left over from earlier pieces."""
        self._most = most
        self._is_known = False
        self._finished = 0
        self._since: float | None = None
        """Begin of the period of measurement; None before the first group."""
        self._waits_since: float | None = None

    def waits(self, now: float) -> None:
        """Stop the clock of the measurement: the worker has no groups."""
        if self._waits_since is None:
            self._waits_since = now

    def goes_on(self, now: float) -> None:
        """Continue the clock of the measurement: the worker has groups."""
        if self._waits_since is not None and self._since is not None:
            self._since += now - self._waits_since
        self._waits_since = None
        if self._since is None:
            self._since = now

    def finished(self) -> None:
        """Count a group with an acknowledged push."""
        self._finished += 1

    def next(self, now: float) -> int:
        """Return the number of groups to ask for now."""
        if self._since is not None and self._finished:
            ends = now if self._waits_since is None else self._waits_since
            took_s = ends - self._since
            if took_s >= PIECE_S / 2:
                self._size = min(max(self._finished * PIECE_S / took_s, 1.0), float(self._most))
                self._is_known = True
                self._finished, self._since = 0, ends
            elif not self._is_known:
                self._size = min(2 * self._size, float(self._most))
        # Without the fraction the worker would ask for smaller pieces, more often than twice a second.
        self._left, whole = modf(self._size + self._left)
        return int(whole)
