"""Pure: the reads of the groups of a step as bytes, which its pushes carry in a recorded run, for a replay.

The bytes are an array of one element per group, in the order in which the worker's one thread trained them.
The log of each bundle keeps them (`parameter_server/replay_log.py`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.worker.training import Trained


def reads_type(shards: int, tensors: int) -> np.dtype[Any]:
    """Return the type of the reads of one group.

    Its fields: epoch and number of the group; `Lease.progress`, which schedules depend on; the version of
    each shard of the model that it read; the number of local steps in the copy of each tensor at its read.
    """
    return np.dtype(
        [
            ("epoch", "<u4"),
            ("number", "<u4"),
            ("progress", "<f8"),
            ("versions", "<u4", (shards,)),
            ("steps", "<u4", (tensors,)),
        ]
    )


class StepReads:
    """Packs the reads of the steps of one worker.

    Args:
        shards: Number of shards of each tensor of the model, in the order of the shards.
    """

    def __init__(self, shards: dict[str, int]) -> None:
        self._names = tuple(shards)
        self._dtype = reads_type(sum(shards.values()), len(shards))

    def pack(self, groups: Sequence[Trained]) -> NDArray[np.uint8]:
        """Return the reads of the groups of a step as bytes."""
        rows = []
        for group in groups:
            lease, read, steps = group.lease, group.read, group.read.local
            assert steps is not None, "snapshots of a recorded run count local steps"
            versions = [version for name in self._names for version in read.copies[name].versions]
            rows.append(
                (lease.epoch, lease.number, lease.progress, versions, [steps[name] for name in self._names])
            )
        return np.array(rows, self._dtype).view(np.uint8)
