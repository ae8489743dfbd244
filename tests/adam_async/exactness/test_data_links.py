"""Links to the data server fail; steps are made of the same groups, so their sums have the same bits."""

import msgspec
import pytest

from adam_async.run.config import Config
from tests.adam_async.exactness.serial import assert_equal_bits
from tests.adam_async.runs import IMPATIENT, NETWORKS, Rough, train
from tests.transport.testing import Faults

HASTY = msgspec.structs.replace(IMPATIENT, call_s=0.5, answer_s=20.0)
"""Answers of the data server that are lost are soon asked for again."""


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"push_every": 2, "warm_start": 5}, {"lag": 1}], ids=["1", "2", "lag"])
async def test_lockstep_has_the_same_bits_when_answers_with_groups_are_lost(more):
    config = Config(
        consistency="bsp",
        images_per_group=2,
        replicas=2,
        epochs=2,
        threads=1,
        rate=0.05,
        read_ahead=4,
        waits=HASTY,
        **more,
    )
    smooth = await train(config, NETWORKS["local"]())
    lost = 0
    for seed in range(9):  # which answers are lost depends on the order in which both workers ask
        rough = Rough(NETWORKS["local"](), Faults(drop_reply=0.15), seed=seed, towards="data")
        result = await train(config, rough)
        assert [epoch.images for epoch in result.epochs] == [60, 60]
        assert_equal_bits(result.weights, smooth.weights)
        lost += len(rough.links) - config.replicas  # who lost an answer asks again on another link
        if lost:
            break
    assert lost > 0
