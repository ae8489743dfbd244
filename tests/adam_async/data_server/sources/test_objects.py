"""Python objects as data: what they may hand over, and errors that name the item."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from adam_async import Dataset, from_object
from adam_async.errors import DataError

PIXELS = np.random.default_rng(1).integers(0, 256, (20, 6, 5), np.uint8)
LABELS = np.arange(20) % 3
PAIRS = [(image, int(label)) for image, label in zip(PIXELS, LABELS, strict=True)]


class Lazy:
    """A data set as other libraries make them: a length, and items made when they are asked for."""

    def __init__(self, make: Callable[[int], Any], items: int = 20) -> None:
        self._make = make
        self._items = items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, number: int) -> Any:
        return self._make(number)


class Tensor:
    """As much of another library's tensor as NumPy asks for."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values


async def one_by_one(items: Any, closed: list[bool] | None = None) -> AsyncIterator[Any]:
    try:
        for item in items:
            await asyncio.sleep(0)
            yield item
    finally:
        if closed is not None:
            closed.append(True)


FORMS: dict[str, Callable[[], Any]] = {
    "pairs": lambda: PAIRS,
    "lists": lambda: [list(pair) for pair in PAIRS],
    "mappings": lambda: [{"image": image, "label": label, "name": "?"} for image, label in PAIRS],
    "other mappings": lambda: [MappingProxyType({"image": image, "label": label}) for image, label in PAIRS],
    "lazy": lambda: Lazy(lambda number: PAIRS[number]),
    "Pillow": lambda: Lazy(lambda number: (Image.fromarray(PIXELS[number]), LABELS[number])),
    "tensors": lambda: Lazy(lambda number: (Tensor(PIXELS[number]), Tensor([LABELS[number]]))),
    "asynchronous": lambda: one_by_one(PAIRS),
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_items_is_read(form: str) -> None:
    dataset = await from_object(FORMS[form](), test=FORMS[form](), name="mine")

    np.testing.assert_array_equal(dataset.train_images[:, 0], PIXELS)
    np.testing.assert_array_equal(dataset.test_images[:, 0], PIXELS)
    np.testing.assert_array_equal(dataset.train_labels, LABELS)
    assert repr(dataset) == "<Dataset mine 20 train 20 test (1, 6, 5) 3 classes>"
    assert "handed over by the program, with items of its own for testing" in dataset.source


async def test_colours_may_come_first_or_last() -> None:
    colours = np.random.default_rng(2).integers(0, 256, (4, 8, 7, 3), np.uint8)
    last = await from_object([(image, 1) for image in colours])
    first = await from_object([(image.transpose(2, 0, 1), 1) for image in colours])
    pillow = await from_object([(Image.fromarray(image), 1) for image in colours])

    assert last.image_shape == (3, 8, 7)
    for other in (first, pillow):
        np.testing.assert_array_equal(last.train_images, other.train_images)


async def test_floats_are_scaled_only_when_that_is_asked_for() -> None:
    floats = [(image / np.float32(255), label) for image, label in PAIRS]
    scaled = await from_object(floats, test=PAIRS, scale=True)

    np.testing.assert_array_equal(scaled.train_images[:, 0], PIXELS)
    np.testing.assert_array_equal(scaled.test_images[:, 0], PIXELS)
    with pytest.raises(DataError, match=r"item 0 of object: its image holds float32, .* say scale=True"):
        await from_object(floats)


@given(items=st.integers(2, 40), share=st.floats(0.001, 0.999))
async def test_a_share_is_kept_back_and_every_item_is_in_one_part(items: int, share: float) -> None:
    numbered = [(np.full((2, 2), number, np.uint8), number) for number in range(items)]
    first, again = [await from_object(numbered, test=share) for _ in range(2)]
    train, test = first.train_labels.tolist(), first.test_labels.tolist()

    assert sorted(train + test) == list(range(items))
    assert len(test) == min(max(round(items * share), 1), items - 1)
    assert test == again.test_labels.tolist()
    np.testing.assert_array_equal(first.test_images[:, 0, 0, 0], first.test_labels)
    assert f"{len(test)} of its {items} items kept back for testing" in first.source


def with_item(item: Any) -> list[Any]:
    """Items of which number 7 is another."""
    return [*PAIRS[:7], item, *PAIRS[7:]]


IMAGE = PIXELS[0]


@pytest.mark.parametrize(
    ("item", "claim"),
    [
        (IMAGE, "is a ndarray, expected a pair"),
        ((IMAGE,), "is a tuple, expected a pair"),
        (None, "is a NoneType, expected a pair"),
        ({"img": IMAGE, "label": 1}, r"has no image; its keys are \['img', 'label'\]"),
        ({}, "has no image and no label"),
        ((IMAGE[:, :4], 1), r"has the shape \(6, 4\), but item 0 has \(6, 5\)"),
        ((IMAGE[0], 1), r"its image has the shape \(5,\), expected"),
        (("cat.png", 1), r"its image has the shape \(\), expected"),
        (([[1, 2], [3]], 1), "no array can be made of its list"),
        ((IMAGE.astype(np.int32), 1), "its image holds int32, expected uint8; convert it"),
        ((IMAGE.astype(object), 1), "its image holds object, expected uint8"),
        ((IMAGE > 9, 1), "its image holds bool, expected uint8"),
        ((Image.fromarray(IMAGE).convert("P"), 1), "its image has a palette; convert it to L"),
        ((np.full((6, 5), 1.5), 1), "values from 1.5 to 1.5, expected 0 to 1"),
        ((np.full((6, 5), -0.1), 1), "values from -0.1 to -0.1, expected 0 to 1"),
        ((np.full((6, 5), np.nan), 1), "values from nan to nan, expected 0 to 1"),
        ((IMAGE, "cat"), "its label is 'cat', expected a class number"),
        ((IMAGE, 1.0), "its label is '1.0', expected a class number"),
        ((IMAGE, True), "its label is 'True', expected a class number"),
        ((IMAGE, [0, 1]), "its label is .* expected a class number"),
        ((IMAGE, None), "its label is 'None', expected"),
        ((IMAGE, -1), "its label is -1, expected class numbers from 0 to 65535"),
        ((IMAGE, 65_536), "its label is 65536, expected"),
        ((IMAGE, 2**70), "its label is .* expected"),
    ],
)
async def test_a_wrong_item_is_named_by_its_number(item: Any, claim: str) -> None:
    closed: list[bool] = []
    with pytest.raises(DataError, match=f"^item 7 of mine.*{claim}"):
        await from_object(with_item(item), name="mine", scale=True)
    with pytest.raises(DataError, match=rf"^item 7 of mine \(test\).*{claim}"):
        await from_object(PAIRS, test=one_by_one(with_item(item), closed), name="mine", scale=True)
    assert closed == [True]


async def test_an_error_of_a_source_names_the_item_and_its_cause() -> None:
    def make(number: int) -> Any:
        return 1 / (number - 5) and PAIRS[number]

    async def broken() -> AsyncIterator[Any]:
        for number in range(20):
            yield make(number)

    for source in (Lazy(make), broken()):
        with pytest.raises(DataError, match="item 5 of object cannot be read: ZeroDivisionError") as caught:
            await from_object(source)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(DataError, match="item 20 of object cannot be read: IndexError"):
        await from_object(Lazy(lambda number: PAIRS[number], items=30))


@pytest.mark.parametrize(
    ("source", "options", "claim"),
    [
        (7, {}, "object is a int, expected an object with __len__ and __getitem__"),
        (iter(PAIRS), {}, "object is a list_iterator, expected"),
        ([], {}, "object has no items"),
        (PAIRS, {"test": []}, r"object \(test\) has no items"),
        (PAIRS[:1], {}, r"object has too few items to keep some back for testing \(1\)"),
        (PAIRS, {"test": 1.0}, "test must be a source or a share between 0 and 1, not 1.0"),
        (PAIRS, {"test": 0}, "between 0 and 1, not 0"),
        (PAIRS, {"limit_bytes": 599}, "item 19 of object would take the images beyond 599 bytes"),
        (PAIRS, {"test": PAIRS, "limit_bytes": 1199}, r"item 19 of object \(test\) would take"),
        (PAIRS, {"test": [(IMAGE[:3], 0)]}, r"\(1, 3, 5\); training and test images must have one shape"),
    ],
)
async def test_a_source_that_cannot_be_used_says_why(source: Any, options: Any, claim: str) -> None:
    with pytest.raises(DataError, match=claim):
        await from_object(source, **options)


async def test_an_endless_source_ends_at_the_limit_and_is_closed() -> None:
    closed: list[bool] = []

    async def endless() -> AsyncIterator[Any]:
        try:
            while True:
                yield IMAGE, 0
        finally:
            closed.append(True)

    with pytest.raises(DataError, match="item 333 of object would take the images beyond 10000 bytes"):
        await from_object(endless(), limit_bytes=10_000)
    assert closed == [True]


async def test_others_in_the_loop_get_a_turn_while_items_are_read_and_may_cancel() -> None:
    turns: list[int] = []
    read: list[int] = []

    async def count_turns() -> None:
        while True:
            turns.append(len(read))
            await asyncio.sleep(0)

    def make(number: int) -> Any:
        read.append(number)
        return PAIRS[0]

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count_turns(), name="turns")
        dataset: Dataset = await from_object(Lazy(make, items=1000))
        counting.cancel()
    assert len(dataset.train_labels) == 900
    assert len(set(turns)) > 20

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(from_object(Lazy(make, items=10**9)), name="read")
        await asyncio.sleep(0)
        reading.cancel()
    assert reading.cancelled()
