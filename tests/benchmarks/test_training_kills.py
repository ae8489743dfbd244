"""The audit of killed trainings names images that count twice, or never, and groups that a shard lacks."""

import numpy as np
import pytest

from adam_async.messages import ShardState
from benchmarks._tally import IMAGES
from benchmarks.training_kills import GROUP_IMAGES, Audit

GROUPS = IMAGES // GROUP_IMAGES
START, STOP = 64, 128
"""Images that a shard counts."""


def audit_of(*, exact=True):
    audit = Audit("tcp://127.0.0.1:1", exact=exact)
    audit._skipped = {1: [], 2: [(GROUPS - 3, GROUPS)], 3: [], 4: []}
    return audit


def shard(audit):
    """The counts and the state of a correct shard in epoch 5, which has dropped the sets of two epochs."""
    counts = np.full(IMAGES, 4.0)
    counts[audit._order(2).indices[(GROUPS - 3) * GROUP_IMAGES :]] -= 1
    for number in (0, 1, 7):
        counts[audit._order(5).group(number)] += 1
    whole = (0, GROUPS)
    return counts[START:STOP], ShardState(1, 1, {}, {3: whole, 4: whole, 5: (0, 2, 7, 8)})


@pytest.mark.parametrize("exact", [True, False])
def test_a_correct_shard_has_no_fault(exact):
    audit = audit_of(exact=exact)
    counts, state = shard(audit)
    audit._check(START, counts if exact else counts / 2, state, 4)
    assert audit.faults == []


@pytest.mark.parametrize("change", [1, -1])
def test_an_image_that_counts_twice_or_not_at_all_is_named(change):
    audit = audit_of()
    counts, state = shard(audit)
    counts[9] += change
    audit._check(START, counts, state, 4)
    (fault,) = audit.faults
    assert fault.startswith(f"shard at {START}, epoch 5: 1 counts are wrong, such as {counts[9]:g} for ")
    assert fault.endswith(f" of image {START + 9}")


def test_groups_that_a_shard_lacks_in_an_ended_epoch_are_named():
    audit = audit_of()
    _, state = shard(audit)
    state.groups[4] = (0, 5, 6, GROUPS)
    counts = np.zeros(STOP - START)
    for epoch in range(1, 6):
        order = audit._order(epoch)
        skipped = {number for each in audit._skipped.get(epoch, ()) for number in range(*each)}
        for number in (
            {0, 1, 7} if epoch == 5 else {*range(GROUPS)} - skipped - ({5} if epoch == 4 else set())
        ):
            images = order.group(number) - START
            counts[images[(images >= 0) & (images < len(counts))]] += 1
    audit._check(START, counts, state, 4)
    assert audit.faults == [f"shard at {START}, epoch 4: lacks [5], has skipped []"]
