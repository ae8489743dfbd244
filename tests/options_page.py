"""The page of all options of a run, from the fields of `Config`, and the table of arguments of a store.

python -m tests.options_page > docs/reference/options.md
python -m tests.options_page store    # the table of docs/reference/store.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from docstring_parser import parse_from_object

from adam_async.model.rules import AnyRule
from adam_async.option_types import (
    CHANGES,
    OBJECT,
    OF_DRIVER,
    OF_ROLES,
    UNTYPED,
    Idle,
    Mode,
    Not,
    Only,
    Option,
    described_bounds,
    described_type,
    is_table,
    options_of,
)
from adam_async.run.config import MODES, OPTIONS, Config, Waits
from adam_async.store.arguments import BY_CREATOR, OpenArguments

STORE_PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "store.md"

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"

HEAD = """\
# The options of a run

    adam-async train --config adam.toml --epochs 5        # a file, and one option of the command line
    ADAM_EPOCHS=5 adam-async train                        # a variable

| source | spelling | example |
|---|---|---|
| file that `--config` names | `name` | `keep_best = true` |
| environment | `ADAM_NAME`; commas between the values of a list | `ADAM_KEEP_BEST=true` |
| command line | `--name-with-dashes` | `--keep-best` |
| Python | field of `Config` | `Config(keep_best=True)` |

A later source wins: defaults, the file, the environment, the command line. No file is read unless `--config`,
or an argument of `launch`, names it. A wrong value is an error with the option, the value and the permitted
values. The command line has no {untyped}.

| column | meaning |
|---|---|
| resumed | "yes": a resumed run may change the option; it keeps all others |
| by hand | if roles are started by hand: the commands of the *roles* set the option, or `train` sets it for \
the *driver* alone; empty: `train` sets it for the whole run |
| commands | commands of roles that have the option too |

`python -m tests.options_page > docs/reference/options.md` makes this page from the fields of `Config` in
`adam_async/run/config.py`, and a test compares both.
"""

MODES_HEAD = """\
## Modes

*only*: the option has an effect in this mode only. *not*: the mode excludes the option, or the values named.
*idle*: the option has no effect there, and a warning reports it. An option in the wrong mode is an error with
the option, its value, the mode and the cure. *typed*: an error on the command line alone, because a file or a
variable may be for other runs too; elsewhere the option has no effect.
"""


def text_of(kind: type) -> dict[str, str]:
    """Return the text at each field of a class, on one line."""
    return {
        each.arg_name: " ".join((each.description or "").split()) for each in parse_from_object(kind).params
    }


def values_of(option: Option) -> str:
    """Return the permitted values of an option, in words."""
    if is_table(option.kind):
        return "a table"
    words = described_type(option.kind)
    if option.bounds is None:
        return words
    return f"{words}, {described_bounds(option.bounds).removeprefix('a number ').removeprefix('of ')}"


def default_of(option: Option) -> str:
    """Return the default of an option as a file has it; empty for none."""
    default = option.default
    if default in ("", (), None, msgspec.NODEFAULT) or is_table(option.kind):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def cell(option: Option, mode: Mode) -> str:
    """Return the effect of an option in a mode: `only` there, `not` there, or `idle`."""
    for word, kind in (("only", Only), ("not", Not), ("idle", Idle)):
        for fact in option.all(kind):
            if fact.mode is mode:
                if getattr(fact, "values", None) is not None:
                    return f"not {', '.join(map(str, fact.values))}"
                is_typed = isinstance(fact, Only) and (fact.if_typed or not mode.option)
                return f"{word}, typed" if is_typed else word
    return ""


def rows(head: tuple[str, ...], body: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in body:
        yield f"| {' | '.join(row)} |"


def option_rows(kind: type, prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield a row of the main table for each option of a struct."""
    texts = text_of(kind)
    for name, option in options_of(kind).items():
        changes = "yes" if option.has(CHANGES) or prefix else ""
        roles = ", ".join(f"`{role}`" for role in option.roles)
        text = texts[name].replace("``", "`").replace("|", "\\|")
        owner = "roles" if option.has(OF_ROLES) else "driver" if option.has(OF_DRIVER) else ""
        row = (values_of(option), default_of(option), option.unit, changes, owner, roles, text)
        yield (f"`{prefix}{name}`", *row)


def mode_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row of the table of modes for each option that not all modes have."""
    for name, option in OPTIONS.items():
        cells = tuple(cell(option, mode) for mode in MODES)
        if any(cells):
            yield (f"`{name}`", *cells)


def argument_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each argument of `ParameterStore.open`."""
    texts = text_of(OpenArguments)
    for name, option in options_of(OpenArguments).items():
        plain = not option.has(OBJECT) and not is_table(option.kind)
        is_rule = isinstance(option.default, AnyRule)
        default = f"`{option.default.text}`" if is_rule else default_of(option)
        by_creator = "creator" if option.has(BY_CREATOR) or (option.all(Only) and name != "dir") else ""
        text = texts[name].replace("``", "`")
        yield (f"`{name}`", values_of(option) if plain else "", default, by_creator, text)


def argument_table() -> str:
    """Return the table of the arguments of `ParameterStore.open`."""
    return "\n".join(rows(("argument", "values", "default", "decides", ""), argument_rows()))


def page() -> str:
    """Return the page."""
    head = ("option", "values", "default", "unit", "resumed", "by hand", "commands", "")
    *most, last = (f"`{name}`" for name, option in OPTIONS.items() if option.has(UNTYPED))
    lines = [
        HEAD.format(untyped=f"{', '.join(most)} and {last}"),
        *rows(head, option_rows(Config)),
        "",
        "## Deadlines",
        "",
        "Keys of the table `[waits]` of a file, and fields of `Waits`.",
        "",
        *rows(head, option_rows(Waits, "waits.")),
        "",
        MODES_HEAD,
        *rows(("option", *(mode.name for mode in MODES)), mode_rows()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(argument_table() + "\n" if sys.argv[1:] == ["store"] else page())
