"""The groups that shards have counted, compared with the result of an epoch: each difference is named."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from adam_async.parameter_server.shard import Shard, ShardTables
from adam_async.run.cluster_map import EpochRecord
from adam_async.run.counts import EpochCounts
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec
from tests.simulation.checkers.group_sets import COMPARED, check_groups, check_steps, epoch_groups
from tests.simulation.scenario import Violation

EPOCH = EpochRecord(run="run", number=1, groups=12, shares={"0": (0, 12)})
RESULT = EpochCounts(skipped_groups=((6, 8), (10, 12)))
WHOLE = (0, 6, 8, 10)


def check(*sets):
    counts = Counter()
    found = {f"shard {number}": groups for number, groups in enumerate(sets)}
    check_groups("run/1", epoch_groups(EPOCH, RESULT), found, counts)
    return counts


def test_the_trained_groups_are_not_skipped():
    assert epoch_groups(EPOCH, RESULT).trained == WHOLE


def test_a_skipped_group_with_images_that_the_epoch_before_has_skipped_is_found():
    assert epoch_groups(msgspec.structs.replace(EPOCH, carried=6), RESULT).trained == WHOLE
    with pytest.raises(Violation, match=r"groups \(6, 7\), and the first 7 are carried") as raised:
        epoch_groups(msgspec.structs.replace(EPOCH, carried=7), RESULT)
    assert raised.value.invariant == "no image is skipped twice"


def test_equal_sets_pass():
    assert check(WHOLE, WHOLE, WHOLE) == {COMPARED: 1}


@pytest.mark.parametrize(
    ("found", "invariant", "groups"),
    [
        ((), "every group on every shard", "(0, 6, 8, 10)"),
        ((0, 5, 8, 10), "every group on every shard", "(5, 6)"),
        ((0, 6, 8, 12), "no other group", "(10, 12)"),
        ((0, 7, 8, 10), "no other group", "(6, 7)"),
    ],
)
def test_a_difference_is_found_by_its_groups(found, invariant, groups):
    with pytest.raises(Violation, match="shard 1 differs from the result of run/1") as raised:
        check(WHOLE, found)
    assert raised.value.invariant == invariant
    assert raised.value.text.endswith(groups)


@pytest.mark.parametrize(
    ("taken", "groups", "single"), [(5, (0, 5), True), (4, (0, 5), False), (6, (0, 2, 4, 7, 9, 10), True)]
)
def test_as_many_gradients_as_groups_pass(taken, groups, single):
    check_steps("shard 1", shard_with(taken, groups), loaded={}, single=single)


def test_groups_that_a_shard_began_with_have_no_gradients():
    check_steps("shard 1", shard_with(2, (0, 5)), loaded={1: (1, 4)}, single=True)
    with pytest.raises(Violation, match="shard 1 has taken 3 gradients of 2 groups"):
        check_steps("shard 1", shard_with(3, (0, 5)), loaded={1: (1, 4)}, single=False)


@pytest.mark.parametrize(
    ("taken", "groups", "single"), [(6, (0, 5), True), (4, (0, 5), True), (6, (0, 5), False), (1, (), False)]
)
def test_a_gradient_of_known_groups_is_found(taken, groups, single):
    with pytest.raises(Violation, match=f"shard 1 has taken {taken} gradients of") as raised:
        check_steps("shard 1", shard_with(taken, groups), loaded={}, single=single)
    assert raised.value.invariant == "each group once"


def shard_with(taken, groups):
    tables = ShardTables(refused=1, groups={1: groups} if groups else {})
    tables.count_staleness(0, 0, taken - 1)
    spec = ShardSpec(id=ShardId(0), tensor="a", start=0, stop=1, row_size=1, bucket=BucketId(0))
    return Shard(spec=spec, values=np.zeros(1, "f4"), rule_state={}, tables=tables)
