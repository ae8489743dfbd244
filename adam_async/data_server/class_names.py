"""Pure: names and numbers of classes, from labels and from the names of folders."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

MAX_NAME = 1536
"""Maximum length of a class name, in characters: a folder name of 255 bytes, with a six-character escape for
each byte that is not text."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Character that is not text, and that UTF-8 cannot encode."""


def is_number(label: str) -> bool:
    """Return whether a label is a class number."""
    return label.isascii() and label.isdigit() and len(label) < 10


def number_classes(labels: Iterable[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Number the classes of a table or a shard.

    If at least half of the labels are numbers, these are the class numbers, and the classes have no names.
    Otherwise the labels are names, numbered in sorted order.

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
    """Return whether a label can be a class name: short, and text that every file and message can hold."""
    return 0 < len(label) <= MAX_NAME and not SURROGATE.search(label)


def class_name(label: str) -> str:
    r"""Return the class name of a label or a folder: composed accents, and escapes such as ``\udcff``.

    macOS and Linux write the accents of one name in two forms of Unicode. Surrogates represent those bytes of
    a folder's name that are not text; no file or message can contain them.
    """
    if len(label) > MAX_NAME:  # a label of many megabytes is not copied, and is no name either
        return label
    return unicodedata.normalize("NFC", label).encode("utf-8", "backslashreplace").decode()


def number_folders(folders: Iterable[str]) -> dict[str, int]:
    """Number the names of classes in their order: by value if all are numbers, otherwise by letters."""
    names = sorted(set(folders))
    if all(is_number(name) for name in names):
        names.sort(key=int)
    return {name: number for number, name in enumerate(names)}
