"""The reads of a step are bytes from which the reads of each of its groups are read back."""

from typing import Any

import numpy as np
import pytest

from adam_async.messages import Lease
from adam_async.worker.puller import TensorCopy, WorkerWeights
from adam_async.worker.pusher import StepReads, reads_type
from adam_async.worker.training import Trained

SHARDS = {"a.weight": 3, "b.bias": 1}


def trained(number: int, weights: WorkerWeights) -> Trained:
    """A group that read the present copy."""
    nothing: Any = None
    return Trained(Lease(2, number, 1, 16, number / 4), 0.5, nothing, weights.snapshot(), {})


def test_each_group_has_its_versions_and_the_local_steps_in_its_copy() -> None:
    weights = WorkerWeights(recorded=True)
    # The order of arrival is not that of the shards.
    weights.install([TensorCopy("b.bias", np.zeros(1), (9,)), TensorCopy("a.weight", np.zeros(3), (4, 5, 6))])
    first = trained(7, weights)
    weights.current("b.bias").local += 1
    weights.install([TensorCopy("a.weight", np.zeros(3), (8, 5, 7))])
    second = trained(3, weights)

    data = StepReads(SHARDS).pack([first, second])

    assert (data.dtype, data.ndim) == (np.uint8, 1)
    groups = np.frombuffer(data.tobytes(), reads_type(4, 2))
    assert groups["epoch"].tolist() == [2, 2]
    assert groups["number"].tolist() == [7, 3]
    assert groups["progress"].tolist() == [1.75, 0.75]
    assert groups["versions"].tolist() == [[4, 5, 6, 9], [8, 5, 7, 9]]
    assert groups["steps"].tolist() == [[0, 0], [0, 1]]


def test_a_snapshot_that_counts_no_local_steps_is_a_defect() -> None:
    weights = WorkerWeights()
    weights.install([TensorCopy("a.weight", np.zeros(3), (4, 5, 6))])

    with pytest.raises(AssertionError, match="snapshots of a recorded run count local steps"):
        StepReads(SHARDS).pack([trained(1, weights)])
