"""Pure: a curve of a bounded number of points, with the newest one."""

Point = tuple[float | None, ...]
"""Coordinates of a point; None for an unknown value."""

MOST_POINTS = 1000
"""Maximum number of points of a curve."""


class Curve:
    """Points in the order in which they came. At the limit, the curve keeps every second point from then on.

    The kept points are evenly spaced, so a long run looks like a short one.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._kept: list[Point] = []
        self._every = 1
        self._seen = 0
        self._newest: Point | None = None

    def add(self, *point: float | None) -> None:
        """Add a point."""
        if self._seen % self._every == 0:
            if len(self._kept) >= self._most - 1:  # room for the newest one
                self._kept = self._kept[::2]
                self._every *= 2
            if self._seen % self._every == 0:
                self._kept.append(point)
        self._seen += 1
        self._newest = point

    @property
    def points(self) -> list[Point]:
        """The kept points, and the newest one."""
        is_kept = self._newest is None or (self._seen - 1) % self._every == 0
        return [*self._kept] if is_kept or self._newest is None else [*self._kept, self._newest]
