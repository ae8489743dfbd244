"""Pure: the results of a run's epochs, which its driver gathers from each version of the cluster map.

The map holds the newest results only; checkpoints and reports list all.
"""

from collections.abc import Sequence
from typing import Any

from adam_async.errors import RunFailed
from adam_async.run.cluster_map import ClusterMap


class EpochResults:
    """The results of one run at a time, without a gap between epochs."""

    def __init__(self) -> None:
        self._run = ""
        self._results: list[dict[str, Any]] = []

    def begin(self, run: str, before: Sequence[dict[str, Any]]) -> None:
        """Begin a run; `before` has the results of the epochs of the runs that it continues."""
        self._run = run
        self._results = list(before)

    def look(self, cluster: ClusterMap) -> None:
        """Take the new results from a version of the map.

        Raises:
            RunFailed: More epochs have ended since the last version than the map holds results of.
        """
        if cluster.run is None or cluster.run.id != self._run or cluster.ended <= len(self._results):
            return
        lacking = cluster.ended - len(self._results)
        if lacking > len(cluster.results):
            raise RunFailed(
                f"{lacking} epochs ended while the controllers could not be heard, and the cluster map holds "
                f"the results of the last {len(cluster.results)} only: resume from the newest checkpoint"
            )
        self._results.extend(cluster.results[-lacking:])

    def before(self, epoch: int) -> tuple[dict[str, Any], ...]:
        """Return the results of all epochs before one, in order."""
        return tuple(self._results[: epoch - 1])

    def of(self, epoch: int) -> dict[str, Any]:
        """Return the result of an ended epoch, counted from 1."""
        return self._results[epoch - 1]

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return f"<EpochResults of run {self._run}: {len(self._results)} epochs>"
