"""Pure: the TOML text of a user's file, with bounds on its size, depth and numbers.

The parser takes numbers too large for any message. Deep text ends in the interpreter's own error, and a
dotted key takes time quadratic in its length.
"""

import re
import tomllib
from typing import Any

from adam_async.errors import ConfigError

MOST_TEXT_BYTES = 1 << 20
"""Maximum size of a text file that an option names, in bytes."""

MOST_LINE = 1 << 14
"""Maximum length of a line, in characters."""

MOST_DEPTH = 32
"""Maximum depth of nested tables and lists, and maximum number of parts of a dotted key."""

DEEP_KEY = re.compile(rf"(?:[\w\"'-]+\s*\.\s*){{{MOST_DEPTH}}}")
"""Pattern of a dotted key with too many parts."""


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Parse the text of a TOML file.

    Args:
        source: Name of the file, for errors.

    Raises:
        ConfigError: The text is not TOML, or is beyond a bound; names the file, the place and the bound.
    """
    if len(text) > MOST_TEXT_BYTES:
        raise ConfigError(f"{source} has {len(text)} characters, expected at most {MOST_TEXT_BYTES}")
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MOST_LINE:
            raise ConfigError(
                f"{source}, line {number} has {len(line)} characters, expected at most {MOST_LINE}"
            )
        if line.count(".") >= MOST_DEPTH and DEEP_KEY.search(line):
            raise ConfigError(f"{source}, line {number} has a key of more than {MOST_DEPTH} parts")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}") from None
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError:  # of `int`, beside the parser's own error
        raise ConfigError(f"{source} has a number of thousands of digits; give a smaller one") from None
    _check_values(table, source)
    return table


def _check_values(table: dict[str, Any], source: str) -> None:
    left: list[tuple[str, object, int]] = [("", table, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > MOST_DEPTH:
            raise _too_deep(source)
        if isinstance(value, dict):
            left += [(name, each, depth + 1) for name, each in value.items()]
        elif isinstance(value, list):
            left += [(key, each, depth + 1) for each in value]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise ConfigError(f"{source}: {key[:80]!r} has a number beyond 64 bits; give a smaller one")


def _too_deep(source: str) -> ConfigError:
    return ConfigError(f"{source} has more than {MOST_DEPTH} tables or lists within each other")
