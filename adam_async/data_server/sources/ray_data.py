"""Data sets from a `ray.data.Dataset`: its pipeline runs on Ray, and its rows become one data set in memory.

In each epoch a run draws the images in another order and leases them to replicas, so data servers need all of
them at hand. A stream from Ray would run the pipeline again in each epoch, and would have no order by number.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.objects import LIMIT_BYTES, from_object
from adam_async.errors import DataError, DeadlineExceeded

BATCH_ROWS = 256
"""Number of rows in one batch from Ray."""

BATCH_S = 600.0
"""Deadline of one batch in seconds; the first batch also waits for the pipeline's earlier stages."""


async def from_ray(
    dataset: Any,
    *,
    image: str = "image",
    label: str = "label",
    test: Any = 0.1,
    limit_bytes: int = LIMIT_BYTES,
    name: str = "ray",
    scale: bool = False,
    batch_s: float = BATCH_S,
) -> Dataset:
    """Read all rows of a `ray.data.Dataset` into a data set for ``RayCluster(config, dataset=...)``.

    Args:
        dataset: Rows with an image and a label.
        image: Name of the column with images: (H, W), (C, H, W) or (H, W, C) of uint8.
        label: Name of the column with labels: class numbers from 0.
        test: A `ray.data.Dataset` of test images; or the share of `dataset` to reserve for testing.
        limit_bytes: Maximum size of training and test images together, in bytes.
        name: Short name of the data set, also for errors.
        scale: Whether floats from 0 to 1 become pixels from 0 to 255; by default floats raise an error.
        batch_s: Deadline of one batch in seconds.

    Raises:
        DataError: A column is missing; Ray cannot make a batch; or an item is wrong, see `from_object`.
        DeadlineExceeded: A batch took too long.
    """
    source = RayRows(dataset, image=image, label=label, name=name, batch_s=batch_s)
    if not isinstance(test, (int, float)):
        test = RayRows(test, image=image, label=label, name=f"{name} (test)", batch_s=batch_s)
    return await from_object(source, test=test, limit_bytes=limit_bytes, name=name, scale=scale)


class RayRows:
    """The rows of a `ray.data.Dataset` as pairs (image, label). See `from_ray` for the arguments."""

    def __init__(self, dataset: Any, *, image: str, label: str, name: str, batch_s: float = BATCH_S) -> None:
        if not hasattr(dataset, "iter_batches"):
            raise DataError(f"{name} is a {type(dataset).__name__}, expected a ray.data.Dataset")
        self._dataset = dataset
        self._columns = (image, label)
        self._name = name
        self._batch_s = batch_s

    async def __aiter__(self) -> AsyncIterator[tuple[Any, Any]]:
        """Yield the rows in the order of the batches."""
        batches: Iterator[Mapping[str, Any]] | None = None
        read = 0
        while True:
            batches, batch = await self._next(batches, read)
            if batch is None:
                return
            images, labels = (self._column(batch, column) for column in self._columns)
            for pair in zip(images, labels, strict=True):
                yield pair
            read += len(labels)

    async def _next(
        self, batches: Iterator[Mapping[str, Any]] | None, read: int
    ) -> tuple[Iterator[Mapping[str, Any]], Mapping[str, Any] | None]:
        """Return the batch iterator and its next batch; None at the end."""

        def work() -> tuple[Iterator[Mapping[str, Any]], Mapping[str, Any] | None]:
            begun = batches
            if begun is None:
                begun = iter(self._dataset.iter_batches(batch_size=BATCH_ROWS, batch_format="numpy"))
            return begun, next(begun, None)

        where = f"rows {read} to {read + BATCH_ROWS - 1} of {self._name}"
        try:
            async with asyncio.timeout(self._batch_s):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise DeadlineExceeded(f"Ray to read {where}", self._batch_s) from None
        except Exception as error:  # any error of the user's pipeline
            raise DataError(f"{where} cannot be read: {error!r}") from error

    def _column(self, batch: Mapping[str, Any], column: str) -> Any:
        if column not in batch:
            known = ", ".join(sorted(map(str, batch))[:10])
            raise DataError(
                f"{self._name} has no column {column!r}; its columns are {known}: give image= and label="
            )
        return batch[column]

    def __repr__(self) -> str:
        return f"<RayRows {self._name}>"
