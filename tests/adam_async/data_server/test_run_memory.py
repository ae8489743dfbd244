"""A data server refuses a run that would take more memory than there is, and names its largest part."""

from typing import Any

import numpy as np
import pytest

from adam_async.data_server.dataset import Dataset, StoredImages
from adam_async.data_server.group_producer import check_cache, check_run_memory
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.memory_sizes import CacheLimits
from adam_async.run.train_step import StepSpec

COUNT, SHAPE = 100_000, (3, 100, 100)
IMAGE_BYTES = 30_000


def unread(number: int) -> np.ndarray:
    raise AssertionError("a check reads no image")


LABELS = np.zeros(COUNT, np.int64)
DATASET = Dataset(
    name="large",
    source="nowhere",
    num_classes=1,
    train_images=StoredImages(unread, image_shape=SHAPE, labels=LABELS, origin="nowhere"),
    train_labels=LABELS,
    test_images=np.zeros((1, *SHAPE), np.uint8),
    test_labels=LABELS[:1],
)


def check(
    available_bytes: int, recipe: Recipe | None = None, step: StepSpec | None = None, **options: Any
) -> None:
    check_run_memory(Config(**options), step, recipe, DATASET, available_bytes=available_bytes)


def test_a_group_is_no_larger_than_a_message():
    most = (64 << 20) // (IMAGE_BYTES + 8)
    check(1 << 40, images_per_group=most)
    with pytest.raises(ConfigError, match=f"a group of {most + 1:,} images .* may be {most:,} at most"):
        check(1 << 40, images_per_group=most + 1)


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"validation": COUNT // 2}, "validation=50000"),
        ({"images_per_group": 65_536, "partitions": 2}, "images_per_group=65536"),
        ({"step": StepSpec(name="a:b", shape=SHAPE, classes=1, sample=20_000)}, "the sample of 20000 images"),
        ({"recipe": Recipe.of([{"kind": "pad", "pixels": 200}], SHAPE, kernels="numpy")}, "its transforms"),
    ],
    ids=["validation", "a group", "a sample", "transforms"],
)
def test_a_run_that_needs_more_memory_than_there_is_is_refused(options: dict[str, Any], largest: str):
    check(1 << 40, **options)
    with pytest.raises(ConfigError, match=f"the run needs .* bytes of memory .* for {largest}"):
        check(64 << 20, **options)


def test_a_cache_that_a_run_asks_for_fits_into_the_memory():
    check_cache(CacheLimits(1000), available_bytes=1000)
    check_cache(CacheLimits(1001, asked=False), available_bytes=1000)
    with pytest.raises(ConfigError, match="a cache of 1,001 bytes, and this data server has 1,000: give"):
        check_cache(CacheLimits(1001), available_bytes=1000)
