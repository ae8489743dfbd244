"""Pure: the options of a run from their sources: a file, the environment, the command line.

Order of precedence: defaults < file (``adam.toml``) < ``ADAM_*`` environment < command line. The environment
is an argument, because libraries read no environment. An unknown key of a file is an error.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_origin

from adam_async.errors import ConfigError
from adam_async.model.toml_text import read_toml
from adam_async.option_types import check_modes, dashed, is_table, options_of, read_values
from adam_async.run.config import FIELDS, OPTIONS, Config, Waits

PREFIX = "ADAM_"

OTHERS = (
    "ADAM_CONTROLLER",
    "ADAM_DATA_DIR",
    "ADAM_NODE",
    "ADAM_ROLE",
    "ADAM_TOKEN",
    "ADAM_TRACEBACK",
    "ADAM_VECTORS",
)
"""Variables that commands read, but that set no option."""

TOOLS = ("ADAM_TEST_", "ADAM_BENCH_")
"""Prefixes of variables for tests and benchmarks, which commands ignore."""

LIKENESS = 0.75
"""Minimum similarity, from 0 to 1, at which a variable counts as a misspelt option."""


ENVIRONMENT, COMMAND_LINE = "the environment", "the command line"
"""Names of the sources that spell options differently; `make_config` uses them in errors."""

PLAIN = tuple(name for name, option in OPTIONS.items() if not is_table(option.kind))
"""Options that a variable or a command-line word can set; the others are tables in a file."""


def variable_of(option: str) -> str:
    """Return the name of the variable that sets an option."""
    return f"{PREFIX}{option.upper()}"


def check_variables(environment: Mapping[str, str], options: Iterable[str]) -> None:
    """Check that no unknown ``ADAM_*`` variable resembles a known one.

    Other unknown variables are allowed, because they may belong to another program.

    Raises:
        ConfigError: A variable resembles a known one (the error has both), or has the name of a table.
    """
    for table in FIELDS:
        if table not in PLAIN and (name := variable_of(table)) in environment:
            raise ConfigError(
                f"{name} sets no option: {table} are the table [{table}] of a file, train --config FILE"
            )
    known = [*(variable_of(option) for option in options), *OTHERS]
    bare = [name.removeprefix(PREFIX) for name in known]
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name in known or name.startswith(TOOLS):
            continue
        if near := difflib.get_close_matches(name.upper()[len(PREFIX) :], bare, 1, LIKENESS):
            raise ConfigError(f"{name} sets no option; did you mean {PREFIX}{near[0]}? Else unset {name}")


def for_children(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a role that a cluster starts.

    The role gets its options on its command line and its token on stdin, so its environment has no such
    variables.
    """
    kept = set(OTHERS) - {"ADAM_TOKEN"}
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not name.upper().startswith(PREFIX)
    }


def known_keys() -> list[str]:
    """Return all keys that a file may have; keys of the table ``waits`` contain a dot."""
    return [*FIELDS, *(f"waits.{name}" for name in options_of(Waits))]


def from_toml(text: str, *, source: str) -> dict[str, Any]:
    """Read the options that a TOML file sets.

    Raises:
        ConfigError: The text is not TOML, has an unknown key, or its ``waits`` is not a table; the error
            names the file.
    """
    values = read_toml(text, source)
    keys = [key for key in values if key != "waits"]
    waits = values.get("waits", {})
    if not isinstance(waits, dict):
        raise ConfigError(
            f"{source}: waits is a table; write [waits], then keys such as dial_s, not {waits!r}"
        )
    for key in (*keys, *(f"waits.{key}" for key in waits)):
        if key not in known_keys():
            raise ConfigError(f"{source}: unknown key {key!r}{_nearest(key)}")
    return values


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the options that ``ADAM_*`` variables set, such as ``ADAM_IMAGES_PER_GROUP=64``.

    Raises:
        ConfigError: See `check_variables`.
    """
    check_variables(environment, PLAIN)
    values: dict[str, Any] = {}
    for name in PLAIN:
        text = environment.get(variable_of(name))
        if text is not None:
            values[name] = [part for part in text.split(",") if part.strip()] if is_list(name) else text
    return values


def is_list(name: str) -> bool:
    """Return whether an option has several values, which a variable has with commas between them."""
    kinds = (OPTIONS[name].kind, *getattr(OPTIONS[name].kind, "__args__", ()))
    return any(get_origin(kind) is tuple for kind in kinds)


def role_words(config: Config, role: str, *, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Return those options of a run that a role's command has too, as words of this command.

    A list is left out, because each process has a part of it.
    """
    return tuple(
        word
        for name, option in OPTIONS.items()
        if role in option.roles and not is_list(name) and name not in without
        if (value := getattr(config, name)) != ""
        for word in (dashed(name), str(value))
    )


def make_config(*layers: Mapping[str, Any], sources: Sequence[str] = ()) -> Config:
    """Merge layers of options, in which later layers override earlier ones, and check the result.

    Args:
        sources: Source of each layer: a file's name, `ENVIRONMENT` or `COMMAND_LINE`.

    Raises:
        ConfigError: A value has the wrong type or is out of range, or an option has no effect; the error has
            the option and its source.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for number, layer in enumerate(layers):
        given = {key: value for key, value in layer.items() if value is not None}
        merged.update(given)
        origins.update(dict.fromkeys(given, sources[number] if sources else ""))
    where = {name: _where(name, origin) for name, origin in origins.items()}
    values = read_values(Config, merged, strict=False, origins=where)
    # Before Config checks the modes: its errors do not know the spelling of the source.
    typed = [name for name, origin in origins.items() if origin == COMMAND_LINE]
    check_modes(Config, values, typed, origins=where)
    return Config(**values)


def _where(name: str, origin: str) -> str:
    """Name the source of an option's value, in the spelling of that source."""
    if not origin:
        return ""
    typed = {ENVIRONMENT: f"by {variable_of(name)}", COMMAND_LINE: f"by {dashed(name)}"}
    return f" (set {typed.get(origin, f'in {origin}')})"


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, known_keys(), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known_keys())}"
