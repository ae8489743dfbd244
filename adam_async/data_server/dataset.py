"""A data set, which `make_dataset` checks once.

Letters: N images, C channels, H rows, W columns. Images are uint8, labels int64, both C-contiguous.

Training images may stay in their files (`StoredImages`), and are then read and decoded on demand. A damaged
image ends the run with an error that names the image. With the policy ``skip``, the next readable image of
its class replaces it. The choice depends only on the files, so every server of a data set chooses the same
image.

A run holds images back from training for validation. This split depends only on the labels, the seed and the
count, so each data server of a run holds back the same images. The split is stratified: each class gives
images in proportion to its size.

The policy for damaged images, labels and rows: stop at the first one, or leave all of them out.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.class_names import MAX_NAME, is_name
from adam_async.errors import ConfigError, DataError
from adam_async.model.keyed_random import Dice
from adam_async.run.memory_sizes import CacheLimits

Policy = Literal["skip", "error"]

MAX_SENTENCES = 100
"""Maximum number of damaged images that the report of a data set names."""

MAX_SHARE = 0.05
"""Largest share of damaged images that may be left out of a data set."""


class Damage:
    """Collects the damage of one data set.

    Args:
        policy: ``error`` raises an error for the first damage; ``skip`` counts damage.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in ("skip", "error"):
            raise ValueError(f"damaged is {policy!r}, expected 'skip' or 'error'")
        self.policy = policy
        """Policy for damage."""
        self._sentences: list[str] = []
        self.count = 0

    def note(self, sentence: str) -> None:
        """Note damage that is left out. Raises DataError: the policy is ``error``."""
        if self.policy == "error":
            raise DataError(
                f"{sentence}; repair it, move it elsewhere, or leave it out with --damaged skip "
                "(damaged='skip' in Python)"
            )
        self.count += 1
        if len(self._sentences) < MAX_SENTENCES:
            self._sentences.append(sentence)

    def check(self, kept: int, origin: str) -> None:
        """Refuse a data set with too much damage.

        Raises:
            DataError: More than 5 % of all images are damaged; the text has the first damage, and the error
                all sentences.
        """
        if self.count > MAX_SHARE * (kept + self.count):
            raise DataError(
                f"{origin}: {self.count} of {kept + self.count} images are damaged, more than "
                f"{MAX_SHARE:.0%}; the first: {self._sentences[0]}",
                damaged=self.sentences(),
            )

    def sentences(self) -> tuple[str, ...]:
        """Return the damaged items that were left out: at most 100 sentences, then the number of the
        others."""
        more = self.count - len(self._sentences)
        return (*self._sentences, *([f"{more} more were left out"] if more else []))


logger = logging.getLogger(__name__)

Read = Callable[[int], NDArray[np.uint8]]
"""Function that reads and decodes an image by its number, shape (C, H, W). From any thread; raises
DataError."""


class StoredImages:
    """Images by number, all of them outside memory.

    Args:
        policy: ``error`` or ``skip`` for an image that cannot be read.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        read: Read,
        *,
        image_shape: tuple[int, int, int],
        labels: NDArray[np.int64],
        origin: str,
        policy: Policy = "error",
    ) -> None:
        self._read = read
        self._labels = labels
        self._origin = origin
        self._policy = policy
        self.shape = (len(labels), *image_shape)
        self.replaced: dict[int, str] = {}
        self._instead: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def nbytes(self) -> int:
        """Size of all images once decoded, in bytes."""
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, number: int) -> NDArray[np.uint8]:
        """Read and decode one image, shape (C, H, W). Blocks. From any thread.

        Raises:
            DataError: The image is unreadable and no other image can replace it, or too many images are
                unreadable.
        """
        known = self._instead.get(number)
        if known is not None:
            return self._read(known)
        try:
            return self._read(number)
        except DataError as error:
            if self._policy == "error":
                raise
            return self._replace(number, error)

    def take(self, chosen: NDArray[np.int64], axis: int = 0) -> NDArray[np.uint8]:
        """Read and decode images by their numbers, shape (n, C, H, W). See `read`."""
        assert axis == 0, "images are along axis 0"
        images = np.empty((len(chosen), *self.shape[1:]), np.uint8)
        for place, number in enumerate(chosen.tolist()):
            images[place] = self.read(number)
        return images

    def __getitem__(self, chosen: Any) -> NDArray[np.uint8]:
        """Index images as NumPy does: by a number, a slice, or an array of numbers or booleans."""
        numbers = np.arange(len(self))[chosen]
        return self.read(int(numbers)) if np.ndim(numbers) == 0 else self.take(numbers)

    def sentences(self) -> list[str]:
        """Return the damage of the replaced images, at most 100 sentences."""
        return list(self.replaced.values())[:MAX_SENTENCES]

    def _replace(self, number: int, error: DataError) -> NDArray[np.uint8]:
        """Read the next readable image of the same class, by number; the first image follows the last."""
        self._note(number, error)
        alike = np.flatnonzero(self._labels == self._labels[number])
        at = int(np.searchsorted(alike, number))
        for other in np.roll(alike, -at)[1:].tolist():
            try:
                image = self._read(other)
            except DataError as problem:
                self._note(other, problem)
                continue
            self._instead[number] = other
            return image
        raise DataError(
            f"{self._origin}: no image of class {self._labels[number]} can be read; the last: {error}"
        )

    def _note(self, number: int, error: DataError) -> None:
        if number not in self.replaced:
            logger.warning("%s; another image of its class replaces it", error)
        self.replaced[number] = str(error)
        if len(self.replaced) > MAX_SHARE * len(self):
            raise DataError(
                f"{self._origin}: {len(self.replaced)} of {len(self)} images are damaged, more than "
                f"{MAX_SHARE:.0%}; the first: {next(iter(self.replaced.values()))}"
            )

    def __repr__(self) -> str:
        return f"<StoredImages {self._origin} {self.shape}>"


MAX_CHANNELS = 4
"""Maximum length of a trailing channel axis (rows, columns, channels)."""

MAX_CLASSES = 65_536
"""Maximum number of classes: the model has an output for each class up to the largest label."""

SAMPLED = 64
"""Maximum number of training images from which `Dataset.squared_norm` is computed."""


ORIGINS = ("train images", "train labels", "test images", "test labels")
"""Default names of the four arrays in errors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Training and test images with their labels, ready to be cut into groups."""

    name: str
    """Short name, such as ``mnist`` or ``digits``."""
    source: str
    """Source of the data, and why it was chosen, in one sentence."""
    train_images: NDArray[np.uint8] | StoredImages
    """Images of shape (N, C, H, W), in memory or read on demand."""
    train_labels: NDArray[np.int64]
    """Labels of shape (N,), each in ``range(num_classes)``."""
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    num_classes: int
    class_names: tuple[str, ...] = ()
    """Names of class 0, 1, ...; empty if the source has numbers only."""
    damaged: tuple[str, ...] = ()
    """Damaged images that were left out: a sentence for each of the first 100, and the number of the rest."""
    squared_norm: float = 0.0
    """Mean over some images of an image's sum of squared pixels (scaled to 0 to 1); 0 if unknown."""
    cache: CacheLimits | None = None
    """Limits of a data server's image cache; None: the run's options decide."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        _, channels, rows, columns = self.train_images.shape
        return channels, rows, columns

    def info(self) -> dict[str, Any]:
        """Return the description of the data for the cluster map, a checkpoint or a record."""
        return {
            "name": self.name,
            "source": self.source,
            "shape": list(self.image_shape),
            "classes": self.num_classes,
            "train_images": len(self.train_labels),
            "test_images": len(self.test_labels),
            "squared_norm": self.squared_norm,
            **({"class_names": list(self.class_names)} if self.class_names else {}),
        }

    def __repr__(self) -> str:
        sizes = f"{len(self.train_images)} train {len(self.test_images)} test"
        return f"<Dataset {self.name} {sizes} {self.image_shape} {self.num_classes} classes>"


def make_dataset(
    *,
    name: str,
    source: str,
    train: tuple[NDArray[Any] | StoredImages, NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]],
    origins: tuple[str, str, str, str] = ORIGINS,
    class_names: tuple[str, ...] = (),
    damaged: tuple[str, ...] = (),
) -> Dataset:
    """Check four raw arrays and join them. Reads some of the training images, also of those in files.

    Args:
        name: Short name of the data set.
        source: Sentence for the report.
        train: Images (N, H, W), (N, C, H, W) or (N, H, W, C) of uint8, or images in files, and integer labels
            (N,) or (N, 1).
        test: The same for the test set.
        origins: Names of the four arrays in errors: train images, train labels, test images, test labels.
        class_names: Names of class 0, 1, ..., if the source has some.
        damaged: Damaged images that the source left out.

    Raises:
        DataError: A dtype, shape or count is wrong; the error has the array, its value and the expected
            value.
    """
    _check_arguments(train, test, origins)
    train_images = train[0] if isinstance(train[0], StoredImages) else as_images(train[0], origins[0])
    test_images = as_images(test[0], origins[2])
    train_labels, test_labels = (_labels(train[1], origins[1]), _labels(test[1], origins[3]))
    for images, labels, of_images, of_labels in (
        (train_images, train_labels, origins[0], origins[1]),
        (test_images, test_labels, origins[2], origins[3]),
    ):
        if len(images) != len(labels):
            raise DataError(
                f"{of_images} has {len(images)} images but {of_labels} has {len(labels)} labels; "
                "take both from the same data set"
            )
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{origins[0]} has images of {train_images.shape[1:]} (channels, rows, columns) but {origins[2]} "
            f"of {test_images.shape[1:]}; training and test images must have one shape"
        )
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    _check_names(class_names, source)
    if class_names and num_classes > len(class_names):
        raise DataError(
            f"{source}: the label {num_classes - 1} has no name; "
            f"there are names for {len(class_names)} classes, numbered from 0"
        )
    return Dataset(
        name=name,
        source=source,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        num_classes=len(class_names) or num_classes,
        class_names=class_names,
        damaged=damaged,
        squared_norm=_squared_norm(train_images),
    )


def _check_arguments(train: object, test: object, origins: object) -> None:
    """Refuse values that callers without a type checker pass by mistake."""
    for kind, pair in (("train", train), ("test", test)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"{kind} must be a pair of two arrays, (images, labels), not {_called(pair)}; training "
                "images and test images are both needed"
            )
    if not isinstance(origins, tuple | list) or len(origins) != len(ORIGINS):
        raise DataError(
            f"origins must name four arrays ({', '.join(ORIGINS)}), not {_called(origins)}; it may be "
            "left out"
        )


def _squared_norm(images: NDArray[np.uint8] | StoredImages) -> float:
    """Return the mean, over evenly chosen images, of an image's sum of squared pixels (scaled to 0 to 1).

    The function leaves out unreadable images: their training raises the error.
    """
    norms = []
    for number in np.unique(np.linspace(0, len(images) - 1, SAMPLED).astype(np.int64)).tolist():
        try:
            image = images.read(number) if isinstance(images, StoredImages) else images[number]
        except DataError:
            continue
        pixels = image.reshape(-1).astype(np.float64)
        norms.append(float(pixels @ pixels) / 255**2)
    return sum(norms) / max(len(norms), 1)


def _called(value: object) -> str:
    """Describe a value by its type and, if it has one, its length."""
    if value is None:
        return "None"
    length = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"{type(value).__name__}{length}"


def _check_names(class_names: tuple[str, ...], source: str) -> None:
    twice = [name for name, count in Counter(class_names).items() if count > 1]
    for name in (*twice, *(name for name in class_names if not is_name(name))):
        raise DataError(
            f"{source}: {name[:MAX_NAME]!r} cannot be the name of a class: names are different, text of "
            f"Unicode, and have 1 to {MAX_NAME} characters"
        )


def check_dataset(dataset: object) -> None:
    """Refuse a value that is neither a `Dataset` nor None.

    Raises:
        DataError: The value has another type; the error lists the functions that make data sets.
    """
    if dataset is not None and not isinstance(dataset, Dataset):
        raise DataError(
            f"dataset is a {type(dataset).__name__}, expected a Dataset: make one of arrays by make_dataset, "
            "or load one by load_dataset"
        )


def _check_array(array: object, origin: str) -> None:
    if not isinstance(array, np.ndarray):
        raise DataError(
            f"{origin} is a {type(array).__name__}, expected a NumPy array: convert it by numpy.asarray, "
            "images to uint8"
        )


def as_images(array: NDArray[Any], origin: str) -> NDArray[np.uint8]:
    """Return an array of images as (N, C, H, W), contiguous; a view if the pixels are in this order already.

    Raises:
        DataError: Not an array, or its dtype or shape is wrong; the error names the array by `origin`.
    """
    _check_array(array, origin)
    if array.dtype != np.uint8:
        raise DataError(f"{origin} holds {array.dtype}, expected uint8 pixels; scale to 0..255 and convert")
    return np.ascontiguousarray(channels_first(array, origin))


def channels_first(array: NDArray[Any], origin: str) -> NDArray[Any]:
    """View images (N, H, W), (N, C, H, W) or (N, H, W, C) as (N, C, H, W).

    Channels are last if the last of four axes has at most `MAX_CHANNELS` entries, and the second has more.

    Raises:
        DataError: The array has other axes, or no pixels; the error names its `origin`.
    """
    if array.ndim == 3:
        array = array[:, np.newaxis]
    if array.ndim != 4:
        raise DataError(
            f"{origin} has shape {array.shape}, expected (images, rows, columns), "
            "(images, channels, rows, columns) or (images, rows, columns, channels)"
        )
    if array.shape[1] > MAX_CHANNELS >= array.shape[3]:
        array = array.transpose(0, 3, 1, 2)
    if 0 in array.shape:
        raise DataError(f"{origin} has shape {array.shape}, which holds no pixels; is the file complete?")
    return array


def _labels(array: NDArray[Any], origin: str) -> NDArray[np.int64]:
    _check_array(array, origin)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{origin} has shape {array.shape}, expected one class number per image: (images,)")
    if array.dtype.kind not in "iu":
        raise DataError(f"{origin} holds {array.dtype}, expected integers (class numbers from 0)")
    if len(array) and int(array.min()) < 0:
        raise DataError(f"{origin} holds the label {int(array.min())}; class numbers start at 0")
    if len(array) and int(array.max()) >= MAX_CLASSES:
        raise DataError(
            f"{origin} holds the label {int(array.max())}, expected class numbers from 0 "
            f"to {MAX_CLASSES - 1}; number the classes from 0"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


PURPOSE = "validation-split"
SAMPLE_PURPOSE = "sample-of-a-step"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidationSplit:
    """Numbers of training images, ascending."""

    trained: NDArray[np.int64]
    held_back: NDArray[np.int64]

    @classmethod
    def of(cls, labels: NDArray[np.int64], *, count: int, seed: int) -> "ValidationSplit":
        """Hold `count` images back, in proportion from each class, rounded by the largest remainders.

        Args:
            labels: The class of each training image, shape (N,).
        """
        classes, sizes = np.unique(labels, return_counts=True)
        shares = sizes * count / len(labels)
        taken = np.floor(shares).astype(np.int64)
        # A class gives its last image only if no other class can give an image.
        largest = np.lexsort((taken - shares, taken + 1 >= sizes))
        taken[largest[: count - int(taken.sum())]] += 1
        dice = Dice(seed)
        held = np.zeros(len(labels), np.bool_)
        for label, size, number in zip(classes.tolist(), sizes.tolist(), taken.tolist(), strict=True):
            order = dice.permutation(PURPOSE, size, keys=(int(label),))
            held[np.flatnonzero(labels == label)[order[:number]]] = True
        return cls(trained=np.flatnonzero(~held), held_back=np.flatnonzero(held))


def sample_of(trained: NDArray[np.int64], count: int, *, seed: int) -> NDArray[np.int64]:
    """Return the images from which a step derives statistics (`StepSpec.sample`), ascending.

    Args:
        trained: Numbers of the images to train on.
        count: Maximum number of images.
        seed: Seed of the run.
    """
    order = Dice(seed).permutation(SAMPLE_PURPOSE, len(trained))
    return np.sort(trained[order[:count]])


def check_validation(validation: int, data: Mapping[str, Any]) -> None:
    """Refuse a split that leaves no image to train on.

    Raises:
        ConfigError: The split leaves no image.
    """
    if validation >= int(data["train_images"]):
        raise ConfigError(
            f"validation={validation:,} leaves nothing of the {data['train_images']:,} training images of "
            f"{data['name']}: lower validation"
        )
