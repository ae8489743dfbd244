"""Pure: the history of the last changes of the cluster map."""

from collections import deque
from collections.abc import Sequence

from adam_async.run.map_changes import Change

KEPT = 1024
"""Number of changes that a controller keeps; a watcher with an older version gets the whole map."""


class History:
    """The last changes of a map, without a gap.

    Args:
        limit: Maximum number of changes.
    """

    def __init__(self, version: int = 0, *, limit: int = KEPT) -> None:
        self._version = version
        self._changes: deque[Change] = deque(maxlen=limit)

    def add(self, change: Change) -> None:
        """Append the change after the last one."""
        assert change.version == self._version + 1, (change.version, self._version)
        self._changes.append(change)
        self._version = change.version

    def since(self, version: int) -> Sequence[Change] | None:
        """Return all changes after a version, in order; None if one was dropped, or the map is older."""
        lacking = self._version - version
        if not 0 <= lacking <= len(self._changes):
            return None
        kept = len(self._changes)
        return [self._changes[position] for position in range(kept - lacking, kept)]
