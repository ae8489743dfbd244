"""All images of a data set get one size: the wanted one, or one that suits them and that is said."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from adam_async.data_server.sources.datasets import load_dataset
from adam_async.errors import ConfigError
from adam_async.run.image_size import choose_size, read_image_size
from adam_async.run.memory_sizes import CacheLimits
from adam_async.runtime.disk import Disk
from tests.adam_async.data_server.sources.small import encode
from tests.adam_async.data_server.sources.test_image_folder import write


def test_a_size_is_rows_by_columns() -> None:
    assert read_image_size("48x64") == (64, 48)
    assert read_image_size("") is None
    for text in ("48", "0x5", "48x64x3", "9999x1", "ax5", "48*64"):
        with pytest.raises(ConfigError, match="size must be ROWSxCOLUMNS such as 48x64"):
            read_image_size(text)


@pytest.mark.parametrize(
    ("sizes", "wanted", "size"),
    [
        ({(8, 6): 3, (9, 9): 2}, None, (8, 6)),
        ({(8, 6): 3, (9, 9): 2}, (5, 4), (5, 4)),
        ({(10, 40): 1, (20, 30): 1, (90, 10): 1}, None, (20, 30)),
        ({(256, 200): 9}, None, (256, 200)),
        ({(1200, 900): 9}, None, (64, 48)),
        ({(1200, 900): 9}, (300, 200), (300, 200)),
        ({(9000, 10): 9}, None, (64, 1)),
    ],
)
def test_the_wanted_size_counts_then_the_most_frequent_then_the_middle_and_large_ones_shrink(
    sizes: dict, wanted: tuple[int, int] | None, size: tuple[int, int]
) -> None:
    chosen = choose_size(Counter(sizes), wanted)

    assert chosen.size == size
    assert bool(chosen.note) == (set(sizes) != {size})


@pytest.mark.parametrize("cache", [None, CacheLimits(1 << 20)])
async def test_large_photographs_become_small_images_with_a_sentence(
    tmp_path: Path, cache: CacheLimits | None
) -> None:
    photo = encode(np.full((300, 400, 3), (200, 100, 50)), "JPEG")
    write(tmp_path, **{f"{name}__{i:02}": photo for name in ("sky", "sea") for i in range(10)})

    async with Disk() as disk:
        dataset = await load_dataset(str(tmp_path), disk, cache=cache)
        other = await load_dataset(str(tmp_path), disk, cache=cache, size=(30, 20))

    assert dataset.image_shape == (3, 48, 64)
    assert "images of 300x400 were scaled and cut to 48x64" in dataset.source
    assert other.image_shape == (3, 20, 30)
    np.testing.assert_allclose(other.train_images[:].mean(axis=(0, 2, 3)), (200, 100, 50), atol=6)
