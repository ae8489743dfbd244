"""Pure: what a run that continues another one says of the epochs before, in a bounded number of bytes.

A checkpoint holds the results of all epochs. Of these the cluster map needs the last one, and which images
come first in the epoch that is taken up, because the epoch before it has skipped them. Those follow from the
results since the last epoch that skipped nothing; where these are many, from one bit for each image.
"""

import msgspec

from adam_async.checkpoint import Manifest
from adam_async.cluster_map import RESULTS_KEPT, ResumeRecord, skipped_groups
from adam_async.config import Config
from adam_async.data_server.order import EpochOrders
from adam_async.dice import Dice


def bounded(manifest: Manifest, config: Config) -> tuple[ResumeRecord, bytes]:
    """Leave out results that no server needs. It takes as long as shuffling all epochs, where each of them
    skipped something.

    Args:
        manifest: Of the checkpoint that is resumed.
        config: The run.

    Returns:
        The manifest's record with the last results, and `RunRecord.carried`.
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
            num_images=int(manifest.data["train_images"]),
            images_per_group=config.images_per_group,
        )
        last = orders.order(len(results), skipped)
        if len(msgspec.json.encode(tail)) > len(msgspec.json.encode(last.carried_images)):
            tail, carried = results[-1:], last.carried_images
    return msgspec.structs.replace(resumed, results=tail), carried
