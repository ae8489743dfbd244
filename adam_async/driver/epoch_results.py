"""Pure: the results of a run's epochs, which its driver collects from each version of the cluster map.

The map has only the newest results; checkpoints and reports list all results. The resumed epoch begins with
the images that the epoch before skipped. A run that continues a checkpoint therefore submits the results
since the last epoch without skipped groups, from which its roles find these images: at most `RESULTS_KEPT`
results, because of `must_train_all`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from adam_async.errors import RunFailed
from adam_async.run.cluster_map import ClusterMap, skipped_groups
from adam_async.run.training_program import ResumeRecord


class EpochResults:
    """The results of one run at a time, without a gap between epochs."""

    def __init__(self) -> None:
        self._run = ""
        self._first = 1
        self._results: list[dict[str, Any]] = []

    def begin(self, run: str, before: Sequence[dict[str, Any]], *, first: int = 1) -> None:
        """Begin a run, or take one over.

        Args:
            before: Results of the ended epochs, including those of the runs that the run continues.
            first: Epoch of the first result in `before`.
        """
        self._run, self._first = run, first
        self._results = list(before)

    def observe(self, cluster: ClusterMap) -> None:
        """Take the new results from a version of the map.

        Raises:
            RunFailed: More epochs have ended since the last version than the map has results.
        """
        if cluster.run is None or cluster.run.id != self._run or cluster.ended <= self.ended:
            return
        lacking = cluster.ended - self.ended
        if lacking > len(cluster.results):
            raise RunFailed(
                f"{lacking} epochs ended while no controller was reachable, and the cluster map holds "
                f"the results of the last {len(cluster.results)} only: resume from the newest checkpoint"
            )
        self._results.extend(cluster.results[-lacking:])

    def before(self, epoch: int) -> tuple[dict[str, Any], ...]:
        """Return the results of all known epochs before the given epoch, in order."""
        return tuple(self._results[: epoch - self._first])

    def of(self, epoch: int) -> dict[str, Any]:
        """Return the result of an ended epoch, counted from 1."""
        return self._results[epoch - self._first]

    @property
    def ended(self) -> int:
        """Number of the last ended epoch; 0 before the first epoch has ended."""
        return self._first - 1 + len(self._results)


def without_old_results(resumed: ResumeRecord) -> ResumeRecord:
    """Leave out the results from which no data server needs to find skipped images."""
    results = resumed.results
    skipped = skipped_groups(results)
    first = max(len(results) - 1, 0)
    while first > 0 and skipped[first - 1]:
        first -= 1
    return msgspec.structs.replace(resumed, results=results[first:])
