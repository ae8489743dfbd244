"""Batches with columns become a data set, and wrong ones are named with their rows.

The datasets here are plain objects with `iter_batches`, all that the source uses of a `ray.data.Dataset`;
tests/processes/test_launch_ray.py reads a real one.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from adam_async.data_server.sources.ray_data import from_ray
from adam_async.errors import DataError, DeadlineExceeded


class Rows:
    """Ten rows a batch of 4 x 4 images with labels 0, 1, 2, 0, ..."""

    def __init__(self, batches: int = 3, **columns: Any) -> None:
        self.batches, self.columns = batches, columns

    def iter_batches(self, *, batch_size: int, batch_format: str) -> Iterator[dict[str, Any]]:
        assert batch_size > 0
        assert batch_format == "numpy"
        for number in range(self.batches):
            values = np.arange(10) + 10 * number
            images = np.broadcast_to(values[:, None, None], (10, 4, 4)).astype(np.uint8)
            yield {"picture": images, "digit": values % 3, **self.columns}


class Slow:
    """A dataset whose first batch waits for the end of the test."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def iter_batches(self, **options: Any) -> Iterator[dict[str, Any]]:
        self.end.wait()
        yield {}


class Broken:
    def iter_batches(self, **options: Any) -> Iterator[dict[str, Any]]:
        yield {"image": np.zeros((1, 4, 4), np.uint8), "label": np.zeros(1, np.int64)}
        raise OSError("the bucket is gone")


async def test_columns_become_images_and_labels_in_their_order() -> None:
    dataset = await from_ray(Rows(), image="picture", label="digit", test=Rows(1), limit_bytes=10_000)

    assert dataset.train_images.shape == (30, 1, 4, 4)
    assert [int(image.max()) for image in dataset.train_images] == list(range(30))
    assert dataset.train_labels.tolist() == [number % 3 for number in range(30)]
    assert dataset.test_images.shape == (10, 1, 4, 4)
    assert "RayRows" in dataset.source


async def test_a_missing_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        DataError, match="ray has no column 'image'; its columns are digit, picture: give image="
    ):
        await from_ray(Rows())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"digit": np.full(10, -1)}, "item 0 of ray: its label is -1, expected class numbers"),
        ({"digit": np.full(10, np.nan)}, "its label is 'nan', expected a class number"),
        ({"picture": np.full((10, 4, 4), np.nan)}, "values from nan to nan, expected 0 to 1"),
        ({"picture": np.full((10, 4, 4), 2.0)}, "values from 2.0 to 2.0, expected 0 to 1"),
        ({"picture": np.zeros((10, 4, 4), np.int32)}, "its image holds int32, expected uint8"),
    ],
)
async def test_wrong_values_are_refused_at_the_border(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        await from_ray(Rows(**columns), image="picture", label="digit", scale=True)


async def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(DataError, match="item 6 of ray would take the images beyond 100 bytes"):
        await from_ray(Rows(), image="picture", label="digit", limit_bytes=100)


async def test_an_error_of_the_pipeline_is_named_with_its_rows() -> None:
    with pytest.raises(DataError, match="rows 1 to 256 of ray cannot be read: OSError"):
        await from_ray(Broken())


async def test_a_slow_batch_has_a_deadline_with_a_name() -> None:
    slow = Slow()
    try:
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for Ray to read rows 0 to 255 of ray"):
            await from_ray(slow, batch_s=0.01)
    finally:
        slow.end.set()


async def test_another_object_is_refused_with_its_type() -> None:
    with pytest.raises(DataError, match=r"ray is a list, expected a ray\.data\.Dataset"):
        await from_ray([])
