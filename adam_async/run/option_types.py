"""Pure: checks that options have values of their types, and the errors for other values."""

import functools
import math
from typing import Annotated, Any, get_args, get_origin

import msgspec

from adam_async.errors import ConfigError

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
def bounds_of(kind: type[msgspec.Struct]) -> dict[str, tuple[float, float | None]]:
    """Return minimum and maximum of each field whose type has bounds, by name; None: no maximum."""
    found = {}
    for field in _fields(kind):
        if get_origin(field.type) is Annotated:
            (meta,) = field.type.__metadata__
            found[field.name] = (meta.ge, meta.le)
    return found


def check_bounds(option: str, value: float, least: float, most: float | None) -> None:
    """Check that a number is finite and within its bounds. Raises ConfigError: it is not."""
    if not least <= value < math.inf or (most is not None and value > most):
        raise ConfigError(f"{option} must be {described_bounds(least, most)}, not {value}")


def described_bounds(least: float, most: float | None) -> str:
    """Describe the numbers between two bounds, for errors."""
    return f"a number of at least {least}" if most is None else f"within {least} and {most}"


def _without_bounds(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def described_type(kind: Any) -> str:
    """Describe the values that a type permits, without its bounds, for errors."""
    kind = _without_bounds(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "a table of seconds"
    return _WORDS.get(kind) or f"one of {', '.join(get_args(kind))}"
