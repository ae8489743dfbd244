"""Pure: the split of files and images into a training set and a test set."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Literal

from adam_async.errors import DataError

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

ONE_IN = 5
"""In a data set without a test set, one in this many images is a test image."""

WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
}
"""Words for a set in names of files and folders, and the set of each word; ``val`` is a second test set."""

BETWEEN = re.compile(r"[\W\d_]+|(?<=[a-z])(?=[A-Z])")
"""Place between two words: ``mnist_train``, ``X-Train`` and ``mnistTrain`` have the word "train"."""

FILLERS = frozenset(
    {"set", "data", "dataset", "images", "image", "imgs", "img", "pictures", "photos", "split"}
)
"""Words beside the word for a set in the name of a folder, such as ``training_set`` and ``Test Images``."""


def rank_of_image(name: str) -> int:
    """Return a hash of an image's name, by which `resolve` orders the images of a class."""
    composed = unicodedata.normalize("NFC", name)  # macOS and Linux write accents in two forms
    digest = sha256(composed.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big")


def resolve(labels: Sequence[str | int], splits: Sequence[Split | int]) -> list[Split]:
    """Split the images that have no split yet.

    In each class one image in `ONE_IN`, rounded, is a test image: those with the lowest ranks. Among the
    images without a split, a class with several has at least one test image and one training image; so does
    the data set. A single image of a class is a training image.
    """
    found: list[Split] = []
    drawn: dict[str | int, list[tuple[int, int]]] = {}
    for place, (label, split) in enumerate(zip(labels, splits, strict=True)):
        found.append(split if isinstance(split, str) else "train")
        if not isinstance(split, str):
            drawn.setdefault(label, []).append((split, place))
    for ranks in drawn.values():
        tests = max(round(len(ranks) / ONE_IN), 1) if len(ranks) > 1 else 0
        for _, place in sorted(ranks)[:tests]:
            found[place] = "test"
    alone = sorted(rank for ranks in drawn.values() for rank in ranks)
    if len(alone) > 1 and all(len(ranks) == 1 for ranks in drawn.values()):
        found[alone[0][1]] = "test"  # without a class of several images no test image has been chosen yet
    return found


def set_in_name(name: str) -> str:
    """Return the set that a name has a word for: train, test or val; empty for none or several."""
    found = {WORDS[word] for word in _words(name) if word in WORDS}
    return found.pop() if len(found) == 1 else ""


def sets_of_folders(folders: Sequence[str]) -> dict[str, str]:
    """Return each set's folder: of ``train``, and of ``test``, ``val`` or both; empty for other folders.

    The rest of the sets' names is equal, as in ``seg_train`` and ``seg_test``; a training folder without a
    test folder stands alone.
    """
    sets: dict[tuple[str, ...], dict[str, str]] = {}
    for name in folders:
        if word := set_in_name(name):
            others = tuple(other for other in _words(name) if other not in WORDS.keys() | FILLERS)
            sets.setdefault(others, {}).setdefault(word, name)
    alone = len(folders) == 1
    return next((found for found in sets.values() if "train" in found and (alone or len(found) > 1)), {})


def _words(name: str) -> Iterable[str]:
    """Yield the words of a name in small letters, of ``trainset`` and ``testdata`` the first part."""
    for word in filter(None, BETWEEN.split(name)):
        small = word.lower()
        yield next((part for end in ("set", "data") if (part := small.removesuffix(end)) in WORDS), small)


def split_files(names: Sequence[str], origin: str) -> list[tuple[str, Split | None]]:
    """Assign files to the training set or the test set by a word in their names.

    Args:
        names: Names such as ``train-0001.tar``, ``mnist_test.csv`` or ``validation-00000-of-00001.parquet``.

    Returns:
        The files to read, each with its split; None if the file names do not name both sets, so that the
            images' own names decide. If both exist, ``test`` takes precedence over ``val``.

    Raises:
        DataError: The names of only some files name a set.
    """
    sets = {name: set_in_name(name) for name in names}
    held_out = "test" if "test" in sets.values() else "val"
    if not {"train", held_out} <= set(sets.values()):
        return [(name, None) for name in names]
    unclear = [name for name, word in sets.items() if not word]
    if unclear:
        raise DataError(
            f"{origin}: is {unclear[0]} for training or for testing? "
            "Let all names have the word train, test or val, or none"
        )
    return [
        (name, "train" if word == "train" else "test")
        for name, word in sets.items()
        if word in ("train", held_out)
    ]
