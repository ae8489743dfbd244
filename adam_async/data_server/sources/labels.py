"""Pure: from what a source calls its classes to class numbers."""

from collections import Counter
from collections.abc import Iterable

from adam_async.errors import DataError

MAX_NAME = 200
"""Characters of a label; what is longer is no name of a class."""


def is_number(label: str) -> bool:
    """Whether a label is a class number as it stands."""
    return label.isascii() and label.isdigit() and len(label) < 10


def number_classes(labels: Iterable[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Number the classes of a table or a shard.

    Where at least half of the labels are numbers, the labels are the class numbers and have no names; else
    they are names, numbered in their order.

    Returns:
        The number of each usable label, and the names of the classes. A label that is missing has no class.
    """
    counts = Counter(labels)
    numbers = [label for label in counts if is_number(label)]
    if 2 * sum(counts[label] for label in numbers) >= counts.total():
        return {label: int(label) for label in numbers}, ()
    names = tuple(sorted(label for label in counts if is_name(label)))
    return {name: number for number, name in enumerate(names)}, names


def is_name(label: str) -> bool:
    """Whether a label can be the name of a class: short, and characters that can be shown."""
    return 0 < len(label) <= MAX_NAME and label.isprintable()


def number_folders(folders: Iterable[str], origin: str) -> dict[str, int]:
    """Number class folders in their order: numbers by their value where all are numbers, else by letters.

    Raises:
        DataError: A name cannot be shown.
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
