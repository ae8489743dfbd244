"""A run whose parameters do not fit the machine is refused before it begins."""

import numpy as np
import pytest

from adam_async import Config, LocalCluster, synthetic
from adam_async.errors import ConfigError
from adam_async.model import Network, mlp
from adam_async.run.memory_need import check_memory, parameter_bytes

PHOTOS = Network(mlp((3 * 900 * 1200, 256, 4), input_shape=(3, 900, 1200)))
IN_PLACE, COPIES = Config(weights="aliased"), Config(weights="copy", replicas=2)


def test_a_run_needs_several_times_its_parameters() -> None:
    one = PHOTOS.num_parameters * np.dtype(np.float32).itemsize

    assert parameter_bytes(PHOTOS, IN_PLACE) == 4 * one
    assert parameter_bytes(PHOTOS, COPIES) == 10 * one
    assert parameter_bytes(PHOTOS, Config(weights="aliased", rule="adam")) == 8 * one


def test_too_little_memory_is_refused_with_what_there_is_and_what_to_do() -> None:
    check_memory(PHOTOS, IN_PLACE, 14 << 30)
    with pytest.raises(ConfigError, match=r"829,441,284 parameters.* about 13\.3 GB.* 8\.6 GB.*--size"):
        check_memory(PHOTOS, IN_PLACE, 8 << 30)


async def test_a_cluster_refuses_it_before_any_parameter_is_made() -> None:
    async with LocalCluster(
        Config(data_servers=1), dataset=synthetic(50), available_bytes=lambda: 1 << 20
    ) as cluster:
        with pytest.raises(ConfigError, match=r"needs about .* GB of memory, but 0\.0 GB are available"):
            await cluster.train()
