"""Data sets from Python objects that yield images with labels, one by one.

A source has ``__len__`` and ``__getitem__``, like data sets of other libraries, or is an asynchronous
iterator. An item is a pair (image, label) or a mapping with "image" and "label". An image is any object that
NumPy converts to an array: an array, an image of Pillow, a tensor of another library on the CPU.

All images are in memory, as uint8. The event loop reads the items, and runs other tasks after every few
items. A source with slow items should be an asynchronous iterator that waits for its own threads.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import MAX_CLASSES, Dataset, ValidationSplit, make_dataset
from adam_async.errors import DataError, DeadlineExceeded

ITEMS_PER_TURN = 32
"""Number of items read before other tasks of the loop run."""

LIMIT_BYTES = 4 << 30
"""Default maximum size in bytes of the images in a data set of Python objects."""


@runtime_checkable
class Items(Protocol):
    """A source with items by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


Source = Items | AsyncIterable[Any]


async def from_object(
    source: Source,
    *,
    test: Source | float = 0.1,
    limit_bytes: int = LIMIT_BYTES,
    name: str = "object",
    scale: bool = False,
) -> Dataset:
    """Read all items of an object into a data set.

    Args:
        source: Training images with labels.
        test: A source of test images; or the share of `source` to reserve for testing, always the same items.
        limit_bytes: Maximum size of training and test images together, in bytes.
        name: Short name of the data set, also for errors.
        scale: Whether floats from 0 to 1 become pixels from 0 to 255; by default floats raise an error.

    Raises:
        DataError: An item is unreadable, differs in shape from the first, is not uint8, or has no usable
            label; the error has its number. The error also reports too few items, or too many for
            `limit_bytes`.
    """
    images, labels = await _read(source, name, limit_bytes, scale)
    if isinstance(test, (int, float)):
        taken = _kept_back(labels, test, name)
        train = (images[~taken], labels[~taken])
        tested = (images[taken], labels[taken])
        how = f"{len(tested[1])} of its {len(labels)} items kept back for testing"
    else:
        train = (images, labels)
        tested = await _read(test, f"{name} (test)", limit_bytes - images.nbytes, scale)
        how = "with items of its own for testing"
    return make_dataset(
        name=name,
        source=f"a {type(source).__name__} handed over by the program, {how}",
        train=train,
        test=tested,
        origins=(f"{name}: images", f"{name}: labels", f"{name}: test images", f"{name}: test labels"),
    )


def _kept_back(labels: NDArray[np.int64], share: float, name: str) -> NDArray[np.bool_]:
    """Choose the test items, in proportion from each class: at least one, and never all."""
    items = len(labels)
    if not 0 < share < 1:
        raise DataError(f"{name}: test must be a source or a share between 0 and 1, not {share}")
    if items < 2:
        raise DataError(f"{name} has too few items to keep some back for testing ({items}); give test=...")
    taken = np.zeros(items, np.bool_)
    number = min(max(round(items * share), 1), items - 1)
    taken[ValidationSplit.of(labels, count=number, seed=0).held_back] = True
    return taken


async def _read(
    source: Source, name: str, limit_bytes: int, scale: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read a source to its end: images (N, ...) and labels (N,)."""
    pixels = bytearray()
    labels: list[int] = []
    shape: tuple[int, ...] | None = None
    async with _items(source, name) as items:
        async for item in items:
            where = f"item {len(labels)} of {name}"
            image, label = _pair(item, where)
            array = _pixels(image, where, scale)
            if shape is None:
                shape = array.shape
            if array.shape != shape:
                raise DataError(
                    f"{where} has the shape {array.shape}, but item 0 has {shape}; "
                    "make all images of one shape"
                )
            if len(pixels) + array.nbytes > limit_bytes:
                raise DataError(
                    f"{where} would take the images beyond {limit_bytes} bytes; "
                    "take fewer or smaller ones, or raise limit_bytes"
                )
            labels.append(_label(label, where))
            pixels += array.tobytes()
            if len(labels) % ITEMS_PER_TURN == 0:
                await asyncio.sleep(0)
    if shape is None:
        raise DataError(f"{name} has no items, expected images with labels")
    return np.frombuffer(pixels, np.uint8).reshape(-1, *shape), np.array(labels, np.int64)


@asynccontextmanager
async def _items(source: Source, name: str) -> AsyncIterator[AsyncIterator[Any]]:
    """Iterate over a source, and add the item's number to its errors."""
    inner: Any
    if isinstance(source, AsyncIterable):
        inner = aiter(source)
    elif isinstance(source, Items):
        inner = _by_number(source)
    else:
        raise DataError(
            f"{name} is a {type(source).__name__}, expected an object with __len__ and __getitem__ or an "
            "asynchronous iterator, of pairs (image, label)"
        )
    outer = _naming(inner, name)
    try:
        yield outer
    finally:
        await outer.aclose()
        if hasattr(inner, "aclose"):
            await inner.aclose()


async def _by_number(source: Items) -> AsyncIterator[Any]:
    for number in range(len(source)):
        yield source[number]


async def _naming(items: AsyncIterator[Any], name: str) -> Any:
    for number in count():
        try:
            item = await anext(items)
        except StopAsyncIteration:
            return
        except (DataError, DeadlineExceeded):
            raise
        except Exception as error:
            raise DataError(f"item {number} of {name} cannot be read: {error!r}") from error
        yield item


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        missing = [key for key in ("image", "label") if key not in item]
        if missing:
            raise DataError(
                f"{where} has no {' and no '.join(missing)}; its keys are {sorted(map(str, item))[:10]}"
            )
        return item["image"], item["label"]
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise DataError(
        f"{where} is a {type(item).__name__}, expected a pair (image, label) or a mapping with both"
    )


def _pixels(image: Any, where: str, scale: bool) -> NDArray[np.uint8]:
    """Convert an image of a user's data set, such as Pillow's, to uint8 pixels of 2 or 3 axes.

    Args:
        scale: Whether floats from 0 to 1 are scaled to 0 to 255.

    Raises:
        DataError: The image is no array of pixels; the error has the remedy.
    """
    if getattr(image, "mode", None) in ("P", "PA"):  # Pillow's: pixels are indices of colours
        raise DataError(f"{where}: its image has a palette; convert it to L (grey) or RGB")
    try:
        array = np.asarray(image)
    except Exception as error:
        raise DataError(f"{where}: no array can be made of its {type(image).__name__} ({error!r})") from error
    if array.ndim not in (2, 3):
        raise DataError(
            f"{where}: its image has the shape {array.shape}, expected (rows, columns), "
            "(channels, rows, columns) or (rows, columns, channels)"
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise DataError(f"{where}: its image holds {array.dtype}, expected uint8; convert it")
    if not scale:
        raise DataError(
            f"{where}: its image holds {array.dtype}, expected uint8; "
            "say scale=True if its values are from 0 to 1, or convert it"
        )
    # Written so, the comparison also fails for NaN.
    if not bool(((array >= 0) & (array <= 1)).all()):
        raise DataError(
            f"{where}: its image holds values from {array.min()} to {array.max()}, expected 0 to 1 to scale"
        )
    return np.rint(array.astype(np.float64) * 255).astype(np.uint8)


def _label(label: Any, where: str) -> int:
    try:
        array = np.asarray(label)
    except Exception as error:
        raise DataError(f"{where}: its label is a {type(label).__name__} ({error!r})") from error
    if array.size != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{where}: its label is {str(label)[:40]!r}, expected a class number from 0")
    value = int(array.reshape(()))
    if not 0 <= value < MAX_CLASSES:
        raise DataError(f"{where}: its label is {value}, expected class numbers from 0 to {MAX_CLASSES - 1}")
    return value
