"""Pure: checks that options have values of their types, and the errors for other values."""

import functools
import math
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import msgspec

from adam_async.errors import ConfigError

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
"""A constant of an update rule, such as a rate."""

Fraction = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
"""The share of an average that stays at each update, such as a momentum."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "a list of texts",
}


def check_types(options: msgspec.Struct, prefix: str = "") -> None:
    """Check each field against its annotation, and turn whole numbers into floats and lists into tuples.

    msgspec checks values that it decodes, but not values that Python code passes to a constructor.

    Args:
        options: A struct under construction, possibly frozen.

    Raises:
        ConfigError: A value has another type, is not one of the choices, or lies outside its bounds; the
            error has the option, the value and the type, the choices or the bound.
    """
    bounds = bounds_of(type(options))
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        # A number of NumPy, which this file does not import: a wrong option is refused without it.
        plain = value.item() if getattr(value, "shape", None) == () else value
        try:
            checked = msgspec.convert(plain, _without_bounds(field.type))
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise ConfigError(
                f"{prefix}{field.name} must be {described_type(field.type)}, not {value!r}"
            ) from None
        if isinstance(checked, str) and not _is_unicode(checked):
            raise ConfigError(
                f"{prefix}{field.name} must be text in UTF-8, not {value!r}; rename the file or folder, or "
                "name a link to it"
            )
        if isinstance(checked, int) and not -(1 << 63) <= checked < 1 << 64:  # no message can have it
            raise ConfigError(
                f"{prefix}{field.name} must be a whole number of at most 64 bits, not one of "
                f"{checked.bit_length()} bits"
            )
        if field.name in bounds:
            check_bounds(f"{prefix}{field.name}", checked, *bounds[field.name])
        if checked is not value:
            msgspec.structs.force_setattr(options, field.name, checked)


def _is_unicode(text: str) -> bool:
    """Return whether a text is UTF-8; Python keeps other bytes of a command line as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


@functools.cache
def bounds_of(kind: type[msgspec.Struct]) -> dict[str, tuple[float, float | None, float | None]]:
    """Return the minimum, the maximum, and the first too large number, of each field whose type has bounds.

    None: the type has no such bound.
    """
    found = {}
    for field in _fields(kind):
        if get_origin(field.type) is Annotated:
            (meta,) = field.type.__metadata__
            found[field.name] = (meta.ge, meta.le, meta.lt)
    return found


def check_bounds(
    option: str, value: float, least: float, most: float | None, below: float | None = None
) -> None:
    """Check that a number is finite and within its bounds. Raises ConfigError: it is not."""
    limit = math.inf if below is None else below
    if not least <= value < limit or (most is not None and value > most):
        raise ConfigError(f"{option} must be {described_bounds(least, most, below)}, not {value}")


def described_bounds(least: float, most: float | None, below: float | None = None) -> str:
    """Describe the numbers between two bounds, for errors."""
    if below is not None:
        return f"at least {_shown(least)} and below {_shown(below)}"
    if most is None:
        return f"a number of at least {_shown(least)}"
    return f"within {_shown(least)} and {_shown(most)}"


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _without_bounds(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def described_type(kind: Any) -> str:
    """Describe the values that a type permits, without its bounds, for errors."""
    kind = _without_bounds(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "a table of seconds"
    if get_origin(kind) is UnionType:  # a value, or None
        return described_type(get_args(kind)[0])
    if get_origin(kind) is tuple and len(set(get_args(kind))) == 1:
        (of,) = set(get_args(kind))
        meta = of.__metadata__[0] if get_origin(of) is Annotated else None
        return "two numbers" + (f", each {described_bounds(meta.ge, meta.le, meta.lt)}" if meta else "")
    return _WORDS.get(kind) or f"one of {', '.join(get_args(kind))}"
