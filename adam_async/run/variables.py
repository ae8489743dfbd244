"""Pure: the ``ADAM_*`` variables of the environment; each option of a run has one."""

import difflib
from collections.abc import Iterable, Mapping

from adam_async.errors import ConfigError

PREFIX = "ADAM_"

OTHERS = ("ADAM_DATA_DIR", "ADAM_TOKEN", "ADAM_TRACEBACK", "ADAM_VECTORS")
"""Variables that the commands read, but that set no option."""

TOOLS = ("ADAM_TEST_", "ADAM_BENCH_")
"""Prefixes of the variables of tests and benchmarks, which commands ignore."""

WAITS = "ADAM_WAITS"
"""Name of the variable that the option `waits` would have; it is a table, so no variable sets it."""

LIKENESS = 0.75
"""Similarity, from 0 to 1, from which on a variable counts as a misspelt option."""


def variable_of(option: str) -> str:
    """Return the name of the variable that sets an option."""
    return f"{PREFIX}{option.upper()}"


def check_variables(environment: Mapping[str, str], options: Iterable[str]) -> None:
    """Refuse variables whose name resembles that of an option's variable.

    Other unknown variables are accepted: they may belong to another program.

    Raises:
        ConfigError: A variable resembles one; names both.
    """
    if WAITS in environment:
        raise ConfigError(
            f"{WAITS} sets no option: waits are the table [waits] of a file, train --config FILE"
        )
    known = [*(variable_of(option) for option in options), *OTHERS]
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or name in known or name.startswith(TOOLS):
            continue
        if near := difflib.get_close_matches(name.upper()[len(PREFIX) :], _bare(known), 1, LIKENESS):
            raise ConfigError(f"{name} sets no option; did you mean {PREFIX}{near[0]}? Else unset {name}")


def for_children(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a role that a cluster starts.

    The role gets its options on its command line and its token on stdin, so variables that set them are left
    out.
    """
    kept = set(OTHERS) - {"ADAM_TOKEN"}
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not name.upper().startswith(PREFIX)
    }


def _bare(names: Iterable[str]) -> list[str]:
    return [name.removeprefix(PREFIX) for name in names]
