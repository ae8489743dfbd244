"""Pure: checks that options have values of their types, and the errors for other values."""

import functools
import re
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from adam_async.errors import ConfigError

_SAID = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "a list of texts",
}


def check_types(options: msgspec.Struct, prefix: str = "") -> None:
    """Check each field against its annotation, and turn whole numbers into floats and lists into tuples.

    msgspec checks values that it decodes, but not those that Python code passes to a constructor.

    Args:
        options: A struct under construction, possibly frozen.
        prefix: Text before the options' names in errors, such as ``waits.``.

    Raises:
        ConfigError: A value has another type, or is none of the choices; names the option, the value and the
            type or choices.
    """
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        plain = value.item() if isinstance(value, np.generic) else value
        try:
            checked = msgspec.convert(plain, field.type)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise ConfigError(f"{prefix}{field.name} must be {said_of(field.type)}, not {value!r}") from None
        if checked is not value:
            msgspec.structs.force_setattr(options, field.name, checked)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def said_of(kind: Any) -> str:
    """Return the values that an option of a type may have, in words."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "a table of seconds"
    return _SAID.get(kind) or f"one of {', '.join(get_args(kind))}"


def explain_type(
    said: str, values: Mapping[str, Any], kind: type[msgspec.Struct], where: Mapping[str, str]
) -> str:
    """Return a sentence that names an option with a wrong value, the type it needs, and the value's origin.

    Args:
        said: Message of msgspec about the wrong value.
        values: All values, by option.
        kind: Struct of the options.
        where: Option to the origin of its value, in brackets; may lack options.
    """
    found = re.search(r" - at `\$\.(\w+)(?:\.(\w+)|\[[^]]*\])?`$", said)
    if found is None:
        return said
    name, inner = found.groups()
    hint = get_type_hints(kind)[name]
    if inner is None and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if isinstance(values.get(name), Mapping):
            return f"{name}: {said[: found.start()]}"
    value = values[name][inner] if inner else values[name]
    wanted = said_of(get_type_hints(hint)[inner] if inner else hint)
    key = f"{name}.{inner}" if inner else name
    return f"{key} must be {wanted}, not {value!r}{where.get(name, '')}"
