"""A run over images that stay stored: the same values to the last bit, however few of them fit in memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.data_server.dataset import StoredImages
from adam_async.errors import RoleFailed
from adam_async.run.config import Config
from tests.adam_async.data_server.sources.small import grey
from tests.adam_async.runs import cluster_of, local_network, tcp_network, tiny_dataset

THOROUGH = pytest.mark.thorough


@pytest.mark.thorough
@pytest.mark.parametrize("network", [local_network, pytest.param(tcp_network, marks=THOROUGH)])
@pytest.mark.parametrize("augment", [pytest.param(False, marks=THOROUGH), True])
@pytest.mark.parametrize("cache", ["64", "1K", pytest.param("1G", marks=THOROUGH)])
async def test_a_synchronous_run_has_the_same_values_with_any_cache(
    network, augment: bool, cache: str, tmp_path
) -> None:
    config = Config(
        epochs=2,
        images_per_group=4,
        consistency="bsp",
        threads=1,
        augment=augment,
        cache=cache,
        spill=str(tmp_path),
    )
    whole = tiny_dataset()
    images = whole.train_images
    stored = StoredImages(
        lambda number: images[number],
        image_shape=whole.image_shape,
        labels=whole.train_labels,
        origin="shelf",
    )
    weights = []
    for dataset in (whole, replace(whole, train_images=stored)):
        async with cluster_of(config, network(), dataset=dataset) as cluster:
            result = await cluster.train()
            weights.append(result.weights)
    assert result.statistics["data-0"].cache.decoded == len(whole.train_labels)
    for name, array in weights[0].items():
        assert np.array_equal(array, weights[1][name])


async def test_a_folder_beyond_the_cache_is_read_on_demand(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("test", 2)):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.png").write_bytes(grey(16 * number + (label == "dog")))
    config = Config(data=str(tmp_path), epochs=1, threads=1, images_per_group=4, cache="64")

    async with LocalCluster(config) as cluster:
        assert cluster.dataset is not None
        assert isinstance(cluster.dataset.train_images, StoredImages)
        result = await cluster.train()
    assert [epoch.images for epoch in result.epochs] == [16]

    too_large = LocalCluster(Config(data=str(tmp_path), epochs=1, threads=1, cache="1000T"))
    with pytest.raises(RoleFailed, match="asks for a cache of"):
        async with too_large as cluster:
            await cluster.train()
