"""Pure: the split of files and images into a training set and a test set."""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from adam_async.errors import DataError

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

HELD_OUT = ("test", "val", "validation")
"""Names of the test folder beside ``train``; the first existing one counts."""

ONE_IN = 5
"""Number of images of which one is a test image, in a data set without a test set."""

WORD = re.compile(r"(train|test|val)(?:ing|idation)?(?![a-z])", re.IGNORECASE)


def rank_of_image(name: str) -> int:
    """Return a hash of an image's name, by which `resolve` splits; further images do not change it."""
    digest = sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big")


def resolve(labels: Sequence[str | int], splits: Sequence[Split | int]) -> list[Split]:
    """Split the images that have no split of their own.

    About one image in `ONE_IN` is a test image, by its rank. A class with several images without a split of
    their own has at least one test image and one training image among them; so does the data set.
    """
    found: list[Split] = []
    drawn: dict[str | int, list[tuple[int, int]]] = {}
    for place, (label, split) in enumerate(zip(labels, splits, strict=True)):
        if isinstance(split, str):
            found.append(split)
        else:
            found.append("test" if split % ONE_IN == 0 else "train")
            drawn.setdefault(label, []).append((split, place))
    for ranks in drawn.values():
        _fill(found, ranks)
    if drawn:
        _fill(found, [rank for ranks in drawn.values() for rank in ranks])
    return found


def _fill(found: list[Split], ranks: Sequence[tuple[int, int]]) -> None:
    """Give each of the two sets at least one of several images."""
    sides = {found[place] for _, place in ranks}
    if len(ranks) > 1 and len(sides) == 1:
        _, place = min(ranks) if "train" in sides else max(ranks)
        found[place] = "test" if "train" in sides else "train"


def split_files(names: Sequence[str], origin: str) -> list[tuple[str, Split | None]]:
    """Assign files to the training set or the test set, by the word at the start of their names.

    Args:
        names: Names such as ``train-0001.tar``, ``test.csv`` or ``validation-00000-of-00001.parquet``.

    Returns:
        The files to read, each with its split; None if the images are split by their own names, because the
        file names do not name both sets. If both exist, ``test`` takes precedence over ``val``.

    Raises:
        DataError: The names of only some files name a set.
    """
    words = {name: found[1].lower() if (found := WORD.match(name)) else "" for name in names}
    held_out = "test" if "test" in words.values() else "val"
    if not {"train", held_out} <= set(words.values()):
        return [(name, None) for name in names]
    unclear = [name for name, word in words.items() if not word]
    if unclear:
        raise DataError(
            f"{origin}: is {unclear[0]} for training or for testing? "
            "Let all names begin with train, test or val, or none"
        )
    return [
        (name, "train" if word == "train" else "test")
        for name, word in words.items()
        if word in ("train", held_out)
    ]
