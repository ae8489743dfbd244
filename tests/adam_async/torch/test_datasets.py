"""Datasets and loaders of PyTorch as data of a run."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchDataset

from adam_async.errors import DataError
from adam_async.torch import from_torch

IMAGES = torch.arange(20 * 16, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(20, 1, 4, 4)
LABELS = torch.arange(20) % 3


class Scaled(TorchDataset):
    """Items as torchvision makes them with `ToTensor`: floats from 0 to 1, and a number."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number >= len(LABELS):
            raise IndexError(number)
        return IMAGES[number].float() / 255, int(LABELS[number])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from ((image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True))


PAIRS = TensorDataset(IMAGES, LABELS)


@pytest.mark.parametrize(
    "source",
    [
        PAIRS,
        Scaled(),
        DataLoader(PAIRS, batch_size=4, shuffle=True, drop_last=True),
        DataLoader(PAIRS, batch_size=None),
        list(Stream()),
    ],
    ids=["tensors", "floats", "loader", "loader without batches", "list of a stream"],
)
async def test_items_by_number_become_uint8_images(source: Any) -> None:
    found = await from_torch(source, test=PAIRS)
    assert np.array_equal(found.train_images, IMAGES.numpy())
    assert np.array_equal(found.train_labels, LABELS.numpy())
    assert found.num_classes == 3


async def test_a_subset_has_its_items_and_a_share_is_kept_back() -> None:
    found = await from_torch(Subset(PAIRS, [3, 1, 2, 7]), test=0.25)
    assert (len(found.train_labels), len(found.test_labels)) == (3, 1)
    both = np.concatenate([found.train_images, found.test_images])
    assert {int(image[0, 0, 0]) for image in both} == {int(IMAGES[n, 0, 0, 0]) for n in (3, 1, 2, 7)}


class Broken(Scaled):
    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number == 7:
            raise OSError("no such file")
        return super().__getitem__(number)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (Stream, r"Stream, which has no items by number.*list\(source\)"),
    "loader of a stream": (lambda: DataLoader(Stream()), "Stream, which has no items by number"),
    "sampler": (
        lambda: DataLoader(PAIRS, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        r"sampler of its own \(WeightedRandomSampler\).*Subset",
    ),
    "sampler that repeats items": (
        lambda: DataLoader(PAIRS, sampler=RandomSampler(PAIRS, replacement=True)),
        r"sampler of its own \(RandomSampler\)",
    ),
    "batches": (lambda: DataLoader(PAIRS, batch_sampler=[[1, 2], [3]]), "sampler of its own"),
    "collate": (lambda: DataLoader(PAIRS, collate_fn=list), "collate_fn of its own"),
    "broken item": (Broken, "item 7 of torch cannot be read: OSError"),
    "normalised": (lambda: [(IMAGES[0].float() / 255 - 0.5, 0)] * 4, r"from -0\.5 .* expected 0 to 1"),
    "number": (lambda: 5, "int, which has no items by number"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_source_that_no_lease_can_name_is_refused(kind: str) -> None:
    make, text = REFUSED[kind]
    with pytest.raises(DataError, match=text):
        await from_torch(make())
