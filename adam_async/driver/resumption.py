"""Pure: bounds the record of earlier epochs in a run that continues another run.

A checkpoint holds the results of all epochs. The cluster map needs only the last result, and the images that
the epoch before skipped, because the resumed epoch begins with them. The results since the last epoch without
skipped groups determine these images; if there are many results, one bit for each image replaces them.
"""

import msgspec

from adam_async.checkpoint.manifest import Manifest
from adam_async.data_server.order import EpochOrders
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import RESULTS_KEPT, ResumeRecord, skipped_groups
from adam_async.run.config import Config


def bounded(manifest: Manifest, config: Config) -> tuple[ResumeRecord, bytes]:
    """Leave out results that no server needs. Takes as long as shuffling all epochs if each skipped groups.

    Args:
        manifest: Manifest of the resumed checkpoint.
        config: Configuration of the run.

    Returns:
        The manifest's `ResumeRecord` with the last results only, and the value of `RunRecord.carried`.
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
