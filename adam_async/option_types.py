"""Pure: options by their fields: a field's type, bounds, default and text, and the facts of its `Option`.

An option is a field of a struct such as `run.config.Config`, and the field has all facts of the option:

    flush_s: Annotated[float, Meta(ge=0.01, le=3600.0), SECONDS, CHANGES, Of("ps"), Only(ON_DISK)] = 1.0
    \"\"\"Seconds between two rounds in which a server writes its changed shards to its disk.\"\"\"

`options_of` collects these facts. The readers of files, variables, command lines and messages use them, and
so do checks, help and the page of options. `read_option` makes the error for a wrong value, and `check_modes`
the error for an option without effect.
"""

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from reprlib import Repr
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from adam_async.errors import ConfigError

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
"""A constant of an update rule, such as a rate."""

Fraction = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
"""The share of an average that each update keeps, such as a momentum."""

MOST_RULE_PATH = 256
"""Maximum length of a rule's import path, in characters."""

_Fact = TypeVar("_Fact")
_Options = TypeVar("_Options", bound=msgspec.Struct)

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "a list of texts",
}


@dataclass(frozen=True, slots=True, eq=False)
class Mode:
    """A mode of a run, in which some options have an effect and others do not.

    Attributes:
        name: Name in errors and in the page of options, such as ``consistency bsp``.
        option: Option that selects the mode; empty if no option of a run selects it. The command then knows
            whether it holds, see `check_modes`.
        values: Values of the option in the mode; empty: all except its default.
        enter: Cure of an option that needs the mode, such as ``give {augment=True}``. Errors spell an option
            in braces as the source of the wrong option does, such as ``--augment``.
        leave: Cure of an option that the mode excludes, such as ``train with {partitions=1}``.
    """

    name: str
    option: str = ""
    values: tuple[Any, ...] = ()
    enter: str = ""
    leave: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A fact of an option, given in its field's annotation, that holds or does not hold."""

    name: str


CHANGES = Mark("changes")
"""A resumed run may change the option; otherwise the run keeps it."""

DECIDED = Mark("decided")
"""The run decides the option if it has its default."""

OF_ROLES = Mark("of roles")
"""In a cluster started by hand each role has the option from its own command."""

OF_DRIVER = Mark("of driver")
"""Only the driver uses the option, or the option names a file of the driver."""

UNTYPED = Mark("untyped")
"""Only files, variables and programs set the option, not the command line of `train`."""

ONE_WAY = Mark("one way")
"""The flag has no `--no-` form."""

OBJECT = Mark("object")
"""The value is a Python object, such as an array, and its users check its type."""

SECONDS, BYTES = Mark("s"), Mark("bytes")
"""Unit of a number."""


@dataclass(frozen=True, slots=True, eq=False)
class Only:
    """An option has an effect in this mode only.

    Attributes:
        why: The reason; may be empty.
        if_typed: Whether only the command line causes an error, because a file or a variable may be for other
            runs too. In a mode that no option selects this always holds.
    """

    mode: Mode
    why: str = ""
    if_typed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Not:
    """A mode excludes an option, unless the option has its default.

    Attributes:
        values: Values that the mode excludes; None: all except the default.
    """

    mode: Mode
    why: str
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Idle:
    """An option has no effect in this mode; a warning says so."""

    mode: Mode


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Check of a value, given the name of the option for its error. Raises ConfigError for a wrong value."""

    read: Callable[[str, Any], object]


def printable(least: int, most: int) -> Check:
    """Return the check of a text of printable characters, with bounds on its length in bytes of UTF-8."""

    def check(name: str, text: str) -> None:
        if not text.isprintable() or not least <= len(text.encode(errors="surrogatepass")) <= most:
            raise ConfigError(
                f"{name} must be {least} to {most} bytes of printable characters, not {text[:80]!r}"
            )

    return Check(check)


class Of(tuple[str, ...]):
    """Roles whose commands have the option too."""

    def __new__(cls, *roles: str) -> "Of":
        return super().__new__(cls, roles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """An option, from its field."""

    name: str
    kind: Any
    """Type without bounds and facts."""
    default: Any
    facts: tuple[Any, ...] = ()
    """Other annotations of the field."""
    bounds: msgspec.Meta | None = None
    lengths: msgspec.Meta | None = None
    """Bounds on the number of entries in a list, or of characters in a text."""

    def has(self, mark: Mark) -> bool:
        """Return whether a fact holds."""
        return mark in self.facts

    def all(self, kind: type[_Fact]) -> tuple[_Fact, ...]:
        """Return the facts of a kind, in order."""
        return tuple(fact for fact in self.facts if isinstance(fact, kind))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles whose commands have the option too."""
        return tuple(role for of in self.all(Of) for role in of)

    @property
    def idle(self) -> tuple[Mode, ...]:
        """Modes in which the option has no effect."""
        return tuple(fact.mode for fact in self.all(Idle))

    @property
    def unit(self) -> str:
        """Unit of a number; empty without one."""
        return "s" if self.has(SECONDS) else "bytes" if self.has(BYTES) else ""


@functools.cache
def options_of(kind: type[msgspec.Struct]) -> Mapping[str, Option]:
    """Return the options of a struct by name, in order."""
    return {
        each.name: option_of(each.name, each.type, default=each.default)
        for each in msgspec.structs.fields(kind)
    }


def option_of(name: str, kind: Any, *, default: Any = None) -> Option:
    """Return an option with a type such as that of a field."""
    facts = kind.__metadata__ if get_origin(kind) is Annotated else ()
    base = get_args(kind)[0] if facts else kind
    bounded = facts
    if get_origin(base) in (Union, UnionType) and get_origin(get_args(base)[0]) is Annotated:
        # The bounds of a number that may be None are at the number.
        number = get_args(base)[0]
        base, bounded = get_args(number)[0] | None, number.__metadata__
    limits = [fact for fact in bounded if isinstance(fact, msgspec.Meta)]
    lengths = next((each for each in limits if {each.min_length, each.max_length} != {None}), None)
    bounds = next((each for each in limits if {each.ge, each.gt, each.le, each.lt} != {None}), None)
    return Option(name=name, kind=base, default=default, facts=facts, bounds=bounds, lengths=lengths)


# --- values ----------------------------------------------------------------------------------


def check_types(options: msgspec.Struct, prefix: str = "") -> None:
    """Check each field against its annotation, and turn whole numbers into floats and lists into tuples.

    msgspec checks values that it decodes, but not values that Python code passes to a constructor.

    Args:
        options: A struct under construction, possibly frozen.

    Raises:
        ConfigError: See `read_option`.
    """
    for option in options_of(type(options)).values():
        if option.has(OBJECT):
            continue
        value = getattr(options, option.name)
        checked = read_option(option, value, f"{prefix}{option.name}")
        if checked is not value:
            msgspec.structs.force_setattr(options, option.name, checked)


def read_option(option: Option, value: Any, name: str, *, strict: bool = True, origin: str = "") -> Any:
    """Return a value, converted to the type of its option.

    Args:
        name: The option in the spelling of its source.
        strict: Whether to refuse a text in place of a number.
        origin: Source of the value, for the error; empty if the name has it.

    Raises:
        ConfigError: The value has another type, is not among the choices, is out of bounds, or is a text that
            the option's own reader refuses; the error has the option, the value and what is permitted.
    """
    # `item` converts a NumPy scalar without importing NumPy: that import would delay the error.
    plain = value.item() if getattr(value, "shape", None) == () else value
    if is_table(option.kind) and isinstance(plain, Mapping):
        return read_table(option.kind, plain, f"{name}.", strict=strict, origins=dict.fromkeys(plain, origin))
    try:
        checked = msgspec.convert(plain, option.kind, strict=strict)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{name} must be {described_type(option.kind)}, not {brief(value)}{origin}"
        ) from None
    if isinstance(checked, str) and not _is_unicode(checked):
        raise ConfigError(
            f"{name} must be text in UTF-8, not {brief(value)}; rename the file or folder, or name a link to "
            "it"
        )
    if isinstance(checked, int) and not -(1 << 63) <= checked < 1 << 64:  # no message can have it
        raise ConfigError(
            f"{name} must be a whole number of at most 64 bits, not one of {checked.bit_length()} bits"
        )
    if option.bounds is not None and checked is not None and not is_within(checked, option.bounds):
        permitted = described_bounds(option.bounds, option.unit)
        raise ConfigError(f"{name} must be {permitted}, not {checked}{origin}")
    if option.lengths is not None:
        least, most = option.lengths.min_length or 0, option.lengths.max_length
        if len(checked) < least or (most is not None and len(checked) > most):
            unit = "characters" if isinstance(checked, str) else "entries"
            raise ConfigError(f"{name} must have {least} to {most} {unit}, not {len(checked)}{origin}")
    try:
        for check in option.all(Check):
            check.read(name, checked)
    except ConfigError as error:
        raise ConfigError(f"{error}{origin}") from None
    return checked


def fault_of(record: msgspec.Struct, kind: type[msgspec.Struct] | None = None) -> str:
    """Return what is wrong with a record's first field that its type does not permit; empty if none is wrong.

    msgspec checks the types of records that it decodes, but not of those that Python code makes.

    Args:
        kind: Base of the record that has the fields to check; None: its own type.
    """
    for option in options_of(kind or type(record)).values():
        is_bounded = option.bounds is not None or option.lengths is not None or option.all(Check)
        if is_bounded or get_origin(option.kind) is Literal:
            try:
                read_option(option, getattr(record, option.name), option.name)
            except ConfigError as error:
                return str(error)
    return ""


def read_record(kind: type[_Options], value: Any) -> _Options:
    """Return a record from a value of a message.

    Raises:
        ConfigError: The value is not such a record; a field's error has its value and its bounds.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = re.search(r" - at `\$\.(\w+)`$", str(error))
        if found is not None and isinstance(value, Mapping) and found[1] in value:
            read_option(options_of(kind)[found[1]], value[found[1]], found[1])
        raise ConfigError(str(error)) from None


def read_table(
    kind: type[_Options],
    values: Mapping[str, Any],
    prefix: str = "",
    *,
    strict: bool = True,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> _Options:
    """Return options with these values, see `read_values`, and defaults for the others."""
    return kind(**read_values(kind, values, prefix, strict=strict, origins=origins))


def read_values(
    kind: type[msgspec.Struct],
    values: Mapping[str, Any],
    prefix: str = "",
    *,
    strict: bool = True,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return values, each converted to the type of its option.

    Args:
        prefix: Text before the name of each option, in errors.
        origins: Source of each value, see `read_option`.

    Raises:
        ConfigError: An option is unknown, or see `read_option`.
    """
    options, read = options_of(kind), {}
    for name, value in values.items():
        if name not in options:
            raise ConfigError(f"there is no option {prefix}{str(name)[:80]}; known: {', '.join(options)}")
        origin = origins.get(name, "")
        read[name] = read_option(options[name], value, f"{prefix}{name}", strict=strict, origin=origin)
    return read


def fault_of_path(path: str) -> str:
    """Return why a text is not a rule's import path; empty if it is."""
    module, _, name = path.partition(":")
    if len(path) <= MOST_RULE_PATH and all(part.isidentifier() for part in (*module.split("."), name)):
        return ""
    return f"give package.module:Class, with at most {MOST_RULE_PATH} characters"


def is_table(kind: Any) -> bool:
    """Return whether an option is a table of options."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_unicode(text: str) -> bool:
    """Return whether a text is UTF-8; Python keeps other bytes of a command line as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_brief = Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother, _brief.maxlong = 3, 200, 200, 80


def brief(value: Any) -> str:
    """Return a value for an error: a peer may have sent a megabyte, or lists nested too deep for `repr`."""
    return _brief.repr(value)


# --- bounds ----------------------------------------------------------------------------------


def is_within(value: Any, bounds: msgspec.Meta) -> bool:
    """Return whether a number is finite and within bounds."""
    above = -math.inf if bounds.gt is None else bounds.gt
    least = -math.inf if bounds.ge is None else bounds.ge
    most = math.inf if bounds.le is None else bounds.le
    below = math.inf if bounds.lt is None else bounds.lt
    # A number that is not finite is within no bounds, and comparing a NaN is always false.
    return bool(math.isfinite(value) and above < value < below and least <= value <= most)


def check_bounds(option: str, value: float, least: float, most: float | None = None) -> None:
    """Check a number whose bounds depend on the machine. Raises ConfigError: it is outside."""
    bounds = msgspec.Meta(ge=least, le=most)
    if not is_within(value, bounds):
        raise ConfigError(f"{option} must be {described_bounds(bounds)}, not {value}")


def described_bounds(bounds: msgspec.Meta, unit: str = "") -> str:
    """Describe the numbers within bounds, for errors and the page of options."""
    number = "a number of seconds" if unit == "s" else "a number"
    low = f"at least {_shown(bounds.ge)}" if bounds.gt is None else f"above {_shown(bounds.gt)}"
    if bounds.lt is not None:
        return f"{low} and below {_shown(bounds.lt)}"
    if bounds.le is None:
        return f"{number} {'of ' if bounds.gt is None else ''}{low}"
    if bounds.gt is not None:
        return f"{low} and at most {_shown(bounds.le)}"
    return f"within {_shown(bounds.ge)} and {_shown(bounds.le)}"


def _shown(number: float | None) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def described_type(kind: Any) -> str:
    """For errors, describe the values that a type permits, without its bounds."""
    if is_table(kind):
        return "a table of seconds"
    if get_origin(kind) in (Union, UnionType):  # a value, or None
        return described_type(get_args(kind)[0])
    if get_origin(kind) is tuple and len(set(get_args(kind))) == 1:
        each = option_of("", get_args(kind)[0])
        return "two numbers" + (f", each {described_bounds(each.bounds)}" if each.bounds else "")
    return _WORDS.get(kind) or f"one of {', '.join(map(str, get_args(kind)))}"


# --- modes -----------------------------------------------------------------------------------


def dashed(name: str) -> str:
    """Return an option in the spelling of the command line."""
    return f"--{name.replace('_', '-')}"


def check_modes(
    kind: type[msgspec.Struct],
    values: Mapping[str, Any],
    typed: Collection[str] = (),
    outside: Mapping[Mode, str] = MappingProxyType({}),
    origins: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that each option has an effect in the modes of its run.

    Args:
        values: Values of options by name; the other options have their defaults.
        typed: Names of the options that the command line sets.
        outside: Modes that no option selects, with their texts; an empty text means that the mode does not
            hold.
        origins: Source of each value, for the error.

    Raises:
        ConfigError: An option needs a mode that does not hold, or a mode that holds excludes it; the error
            has the option, its value, the mode and the cure.
    """
    found = {name: values.get(name, option.default) for name, option in options_of(kind).items()}
    for option, needed, excluding in _mode_facts(kind):
        value, is_typed = found[option.name], option.name in typed
        for only in needed:
            is_given = value != option.default and (is_typed or not only.if_typed)
            counts = is_given if only.mode.option else is_typed
            if counts and _holds(kind, only.mode, found, outside) is False:
                spelled, out = _given(option.name, value, is_typed, origins)
                raise ConfigError(f"{spelled} {_lack(only, found, is_typed)}, or leave {out} out")
        for excluded in excluding:
            if _is_meant(excluded, value, option) and _holds(kind, excluded.mode, found, outside):
                mode = excluded.mode
                held = (
                    _with_value(mode.option, found[mode.option], is_typed) if mode.option else outside[mode]
                )
                why, leave = (_in_spelling(text, is_typed) for text in (excluded.why, excluded.mode.leave))
                spelled, out = _given(option.name, value, is_typed, origins)
                raise ConfigError(f"{spelled} excludes {held}: {why}; leave {out} out, or {leave}")


@functools.cache
def _mode_facts(kind: type[msgspec.Struct]) -> Sequence[tuple[Option, tuple[Only, ...], tuple[Not, ...]]]:
    """Return the options that need or exclude a mode."""
    facts = [(option, option.all(Only), option.all(Not)) for option in options_of(kind).values()]
    return [each for each in facts if each[1] or each[2]]


def _given(name: str, value: Any, is_typed: bool, origins: Mapping[str, str]) -> tuple[str, str]:
    """Return an option with its value and source, and the option alone."""
    source = "" if is_typed else origins.get(name, "")
    return _with_value(name, value, is_typed) + source, _spelled(name, is_typed)


def excluded_options(options: msgspec.Struct, mode: Mode) -> list[str]:
    """Return the options whose values a mode would exclude if it held."""
    return [
        name
        for name, option in options_of(type(options)).items()
        for excluded in option.all(Not)
        if excluded.mode is mode and _is_meant(excluded, getattr(options, name), option)
    ]


def _is_meant(excluded: Not, value: Any, option: Option) -> bool:
    return value in excluded.values if excluded.values is not None else value != option.default


def _holds(
    kind: type[msgspec.Struct], mode: Mode, values: Mapping[str, Any], outside: Mapping[Mode, str]
) -> bool | None:
    """Return whether a mode holds; None if that is unknown."""
    if not mode.option:
        return bool(outside[mode]) if mode in outside else None
    value = values[mode.option]
    return value in mode.values if mode.values else bool(value != options_of(kind)[mode.option].default)


def _lack(only: Only, values: Mapping[str, Any], is_typed: bool) -> str:
    """Return the text on an option without its mode, with the cure."""
    mode = only.mode
    # False, 0 and an empty text mean that the mode is off.
    is_on = mode.option and values[mode.option]
    found = (
        f"with {_with_value(mode.option, values[mode.option], is_typed)}, only with" if is_on else "without"
    )
    why = only.why and f", because {_in_spelling(only.why, is_typed)}"
    return f"has no effect {found} {mode.name}{why}: {_in_spelling(mode.enter, is_typed)}"


def _in_spelling(text: str, is_typed: bool) -> str:
    """Return a text whose options in braces have the spelling of the command line, or of files."""

    def spelled(found: re.Match[str]) -> str:
        name, equals, value = found[1].partition("=")
        if is_typed and value != "True" and equals:
            return f"{_spelled(name, is_typed)} {value}"
        return _spelled(name, is_typed) + ("" if is_typed else equals + value)

    return re.sub(r"\{(.+?)\}", spelled, text)


def _with_value(name: str, value: Any, is_typed: bool) -> str:
    return _in_spelling(f"{{{name}={_text(value)}}}", is_typed)


def _spelled(name: str, is_typed: bool) -> str:
    return dashed(name) if is_typed else name


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, str | int | float) else brief(value)
