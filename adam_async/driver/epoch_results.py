"""Pure: the results of a run's epochs, which its driver collects from each version of the cluster map.

The map has only the newest results; checkpoints and reports list all results. The resumed epoch begins with
the images that the epoch before skipped. A run that continues a checkpoint therefore submits the results
since the last epoch without skipped groups, from which its roles find these images. If these results are more
than `RESULTS_KEPT` and longer than one bit for each image, the run submits these bits and the last result.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from adam_async.checkpoint.manifest import Manifest
from adam_async.data_server.order import EpochOrders
from adam_async.errors import RunFailed
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import RESULTS_KEPT, ClusterMap, skipped_groups
from adam_async.run.config import Config
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


def bounded_results(manifest: Manifest, config: Config) -> tuple[ResumeRecord, bytes]:
    """Leave out results that no server needs.

    If every epoch skipped groups, the call takes as long as shuffling all epochs.

    Returns:
        The manifest's `ResumeRecord` with the last results only, and the value of `TrainingProgram.carried`.
    """
    resumed = manifest.resume
    results = resumed.results
    if not results:
        return resumed, b""
    skipped = skipped_groups(results)
    first = len(results) - 1
    while first > 0 and skipped[first - 1]:
        first -= 1
    tail, carried = results[first:], b""
    if len(tail) > RESULTS_KEPT:
        orders = EpochOrders(
            Dice(config.seed),
            num_images=int(manifest.data["train_images"]) - config.validation,
            images_per_group=config.images_per_group,
        )
        last = orders.order(len(results), skipped)
        if len(msgspec.json.encode(tail)) > len(msgspec.json.encode(last.carried_images)):
            tail, carried = results[-1:], last.carried_images
    return msgspec.structs.replace(resumed, results=tail), carried
