"""Conversion of command-line words and environment variables into values of their types."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter, Token, convert

_WHOLE = re.compile(r"[+-]?\d+(_\d+)*")

_Options = TypeVar("_Options")


def value_of(kind: Any, words: Sequence[Token]) -> Any:
    """Convert words as cyclopts does, but refuse fractions for whole numbers, and empty paths.

    Args:
        kind: The option's type.
        words: The words that the user typed.

    Raises:
        ValueError: A word is no value of the type; cyclopts names the option.
    """
    for word in words:
        if kind is int and not _WHOLE.fullmatch(word.value):
            raise ValueError(f"must be a whole number, not {word.value!r}")
        if kind is Path and not word.value:
            # Path("") is the working folder; an unset variable of a shell must not select it.
            raise ValueError("the path is empty: name a file or folder")
    return convert(kind, words)


def strict(options: type[_Options]) -> type[_Options]:
    """Let `value_of` convert the words for each field of a class of options.

    The application's own converter serves the arguments of commands; fields do not inherit it.
    """
    parameter = Parameter(converter=value_of)
    options.__annotations__ = {
        name: Annotated[kind, parameter] for name, kind in options.__annotations__.items()
    }
    return options
