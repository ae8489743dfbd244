"""PyTorch datasets as data of a run.

A run leases images by number, in another order in each epoch, so a source needs ``__len__`` and
``__getitem__``. `from_torch` reads each item once, and keeps all images in memory as uint8.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.objects import LIMIT_BYTES, Items, from_object
from adam_async.errors import DataError

ITEMS_PER_READ = 256
"""Number of items that a thread reads in one call."""


async def from_torch(
    source: Any, *, test: Any = 0.1, limit_bytes: int = LIMIT_BYTES, name: str = "torch"
) -> Dataset:
    """Make a data set for a cluster from a PyTorch dataset; a thread reads all items.

    Each item is read once, so random transforms of the source would give the same image in all epochs. Give a
    source without random transforms, and use ``--transforms`` or the step's `forward` for random transforms.
    Normalise in `forward`, too.

    Args:
        source: A dataset with items by number, such as a `TensorDataset`, a `Subset` or those of torchvision;
            or a `DataLoader` of such a dataset, whose order and batch size a run does not use. Items are
            pairs (image, label). Images are (H, W), (C, H, W) or (H, W, C) of uint8, or of floats from 0 to
            1, which become uint8.
        test: A source of test images; or the share of `source` to reserve for testing.
        limit_bytes: Maximum size of training and test images together, in bytes.
        name: Short name of the data set, also for errors.

    Raises:
        DataError: The source has no items by number, its loader has a custom sampler or `collate_fn`, or an
            item is invalid (see `from_object`).
    """
    rows = _Rows(source, name)
    if not isinstance(test, (int, float)):
        test = _Rows(test, f"{name} (test)")
    return await from_object(rows, test=test, limit_bytes=limit_bytes, name=name, scale=True)


class _Rows:
    """The items of a source in order; a thread reads them."""

    def __init__(self, source: Any, name: str) -> None:
        if isinstance(source, DataLoader):
            source = _of_loader(source, name)
        if isinstance(source, IterableDataset) or not isinstance(source, Items):
            raise DataError(
                f"{name} is a {type(source).__name__}, which has no items by number, as a run leases "
                "them: give a dataset with __len__ and __getitem__, such as list(source) if it fits into "
                "memory"
            )
        self._source = source
        self._name = name

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the items.

        Raises:
            DataError: An item cannot be read; the error has the item's number.
        """
        for start in range(0, len(self._source), ITEMS_PER_READ):
            for item in await asyncio.to_thread(self._read, start):
                yield item

    def _read(self, start: int) -> list[Any]:
        items = []
        for number in range(start, min(start + ITEMS_PER_READ, len(self._source))):
            try:
                items.append(self._source[number])
            except Exception as error:  # any error of the user's dataset
                raise DataError(f"item {number} of {self._name} cannot be read: {error!r}") from error
        return items

    def __repr__(self) -> str:
        return f"<{type(self._source).__name__} {self._name}>"


def _of_loader(loader: "DataLoader[Any]", name: str) -> Any:
    """Return the dataset of a loader, and refuse a loader that chooses or changes items.

    Raises:
        DataError: The loader has a custom sampler or `collate_fn`; the error has the remedy.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    sampler = (
        loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    )
    chooses = type(sampler) not in (SequentialSampler, RandomSampler) or getattr(
        sampler, "replacement", False
    )
    if chooses or (loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler):
        raise DataError(
            f"{name}: the DataLoader has a sampler of its own ({type(sampler).__name__}), but a run leases "
            "each item once an epoch: give a torch.utils.data.Subset with the chosen items"
        )
    if loader.batch_size is not None and loader.collate_fn is not default_collate:
        raise DataError(
            f"{name}: the DataLoader has a collate_fn of its own, which a run does not call: do its work in "
            "the dataset, or in the step's `forward`"
        )
    return loader.dataset
