"""Pure: class numbers from the labels of a source."""

from collections import Counter
from collections.abc import Iterable

from adam_async.errors import DataError

MAX_NAME = 200
"""Maximum length of a class name, in characters."""


def is_number(label: str) -> bool:
    """Whether a label is a class number."""
    return label.isascii() and label.isdigit() and len(label) < 10


def number_classes(labels: Iterable[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Number the classes of a table or a shard.

    If at least half of the labels are numbers, the labels are the class numbers and have no names; else they
    are names, numbered in their order.

    Returns:
        The number of each usable label, and the names of the classes. Other labels have no class.
    """
    counts = Counter(labels)
    numbers = [label for label in counts if is_number(label)]
    if 2 * sum(counts[label] for label in numbers) >= counts.total():
        return {label: int(label) for label in numbers}, ()
    names = tuple(sorted(label for label in counts if is_name(label)))
    return {name: number for number, name in enumerate(names)}, names


def is_name(label: str) -> bool:
    """Whether a label can be a class name: short and printable."""
    return 0 < len(label) <= MAX_NAME and label.isprintable()


def number_folders(folders: Iterable[str], origin: str) -> dict[str, int]:
    """Number class folders in their order: by value if all are numbers, else by letters.

    Raises:
        DataError: A name is not printable.
    """
    names = sorted(folders)
    for name in names:
        if not is_name(name):
            raise DataError(
                f"{origin}: {name[:MAX_NAME]!a} cannot be the name of a class; rename the folder with "
                f"at most {MAX_NAME} printable characters"
            )
    if all(is_number(name) for name in names):
        names.sort(key=int)
    return {name: number for number, name in enumerate(names)}
