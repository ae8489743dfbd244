"""Pure: the options of a run from their sources: a file, the environment, the command line.

Order of precedence: defaults < file (``adam.toml``) < ``ADAM_*`` environment < command line. The environment
is an argument, because libraries read no environment. An unknown key of a file is an error.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from adam_async.errors import ConfigError
from adam_async.model.toml_text import read_toml
from adam_async.option_types import bounds_of, described_bounds, described_type
from adam_async.run.config import FIELDS, OF_CUTS, Config, Waits

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
"""Variables that the commands read, but that set no option."""

TOOLS = ("ADAM_TEST_", "ADAM_BENCH_")
"""Prefixes of the variables of tests and benchmarks, which commands ignore."""

WAITS = "ADAM_WAITS"
"""Name that a variable for the option `waits` would have; `waits` is a table, so no variable sets it."""

LIKENESS = 0.75
"""Minimum similarity, from 0 to 1, at which a variable counts as a misspelt option."""


ENVIRONMENT, COMMAND_LINE = "the environment", "the command line"
"""Names of the sources with their own spelling of options, which errors of `make_config` use."""

PLAIN = tuple(name for name in FIELDS if name != "waits")
"""Options that a variable or a word of the command line can set; `waits` is a table of a file."""

LISTS = ("slow", "memory", "betas")
"""Options with several values, which a variable has with commas between them."""


def variable_of(option: str) -> str:
    """Return the name of the variable that sets an option."""
    return f"{PREFIX}{option.upper()}"


def check_variables(environment: Mapping[str, str], options: Iterable[str]) -> None:
    """Check that no unknown ``ADAM_*`` variable resembles a known one.

    Other unknown variables are allowed, because they may belong to another program.

    Raises:
        ConfigError: A variable resembles a known one (the error has both), or is `WAITS`.
    """
    if WAITS in environment:
        raise ConfigError(
            f"{WAITS} sets no option: waits are the table [waits] of a file, train --config FILE"
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

    The role gets its options on its command line and its token on stdin, so its environment has no variables
    that set them.
    """
    kept = set(OTHERS) - {"ADAM_TOKEN"}
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not name.upper().startswith(PREFIX)
    }


def known_keys() -> list[str]:
    """Return all keys that a file may have; those of the table ``waits`` have a dot."""
    return [*FIELDS, *(f"waits.{field.name}" for field in msgspec.structs.fields(Waits))]


def from_toml(text: str, *, source: str) -> dict[str, Any]:
    """Read the options that a TOML file sets.

    Raises:
        ConfigError: The text is not TOML, has an unknown key, or its ``waits`` is no table; the error has the
            file.
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
            values[name] = text if name not in LISTS else [part for part in text.split(",") if part.strip()]
    return values


def make_config(*layers: Mapping[str, Any], sources: Sequence[str] = ()) -> Config:
    """Merge layers of options, in which later layers override earlier ones, and check the result.

    Args:
        sources: Source of each layer: a file's name, `ENVIRONMENT` or `COMMAND_LINE`.

    Raises:
        ConfigError: A value has the wrong type or is out of range, or an option of the command line has no
            effect; the error has the option, and for a wrong type the source.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for number, layer in enumerate(layers):
        given = {key: value for key, value in layer.items() if value is not None}
        merged.update(given)
        origins.update(dict.fromkeys(given, sources[number] if sources else ""))
    try:
        config = msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        where = {name: _where(name, origin) for name, origin in origins.items()}
        raise ConfigError(explain_type(str(error), merged, Config, where)) from None
    _check_force(config, [name for name, origin in origins.items() if origin == COMMAND_LINE])
    return config


def _check_force(config: Config, typed: Sequence[str]) -> None:
    """Check that options of the command line that concern cut models have an effect.

    Options of other sources may be for other runs too, or from an old checkpoint, and may have no effect.
    """
    for name, plain in OF_CUTS.items():
        if name in typed and getattr(config, name) != plain and config.partitions == 1:
            raise ConfigError(
                f"--{name} {getattr(config, name)} has no effect with partitions=1, which cuts no model: "
                "give --partitions 2 or more too, or leave it out"
            )
    if "halo" in typed:
        check_halo(config.halo, config.plan)


def check_halo(halo: str, plan: str | None) -> None:
    """Check that ``--halo`` has an effect with a plan. Raises ConfigError: it has none."""
    if halo != OF_CUTS["halo"] and plan == "layers":
        raise ConfigError(
            f"--halo {halo} belongs to plan vertical, not layers, which cuts no layer: leave it out, "
            "or give --plan vertical"
        )


def _where(name: str, origin: str) -> str:
    """Name the source of an option's value, in the spelling of that source."""
    if not origin:
        return ""
    typed = {ENVIRONMENT: f"by {variable_of(name)}", COMMAND_LINE: f"by --{name.replace('_', '-')}"}
    return f" (set {typed.get(origin, f'in {origin}')})"


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, known_keys(), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known_keys())}"


def explain_type(
    message: str, values: Mapping[str, Any], kind: type[msgspec.Struct], where: Mapping[str, str]
) -> str:
    """Return a sentence that names an option with a wrong value, its origin, and the required type."""
    found = re.search(r" - at `\$\.(\w+)(?:\.(\w+)|\[[^]]*\])?`$", message)
    if found is None:
        return message
    name, inner = found.groups()
    hint = get_type_hints(kind, include_extras=True)[name]
    if inner is None and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if isinstance(values.get(name), Mapping):
            return f"{name}: {message[: found.start()]}"
    value = values[name][inner] if inner else values[name]
    key = f"{name}.{inner}" if inner else name
    if name in bounds_of(kind) and re.match(r"Expected `\w+` [<>]", message):
        wanted = described_bounds(*bounds_of(kind)[name])
        return f"{key} must be {wanted}, not {value}{where.get(name, '')}"
    wanted = described_type(get_type_hints(hint)[inner] if inner else hint)
    return f"{key} must be {wanted}, not {value!r}{where.get(name, '')}"
