"""Pure: the search for NaN and infinities in a received value, by its declared type.

`finder` reads a type once. It returns a function that checks only fields that must be finite, or None for a
type without such fields.
"""

from collections.abc import Callable, Iterator
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import inspect

Finder = Callable[[Any], str]
"""Function that returns the path of the first number in a value that is not finite, or an empty text."""


@cache
def finder(type_: Any) -> Finder | None:
    """Return a function that finds NaN or an infinity in a value of a type; None if nothing is to check."""
    return _of(inspect.type_info(type_))


def _of(type_: inspect.Type) -> Finder | None:
    match type_:
        case inspect.Metadata():
            return None if (type_.extra or {}).get("diverges") else _of(type_.type)
        case inspect.FloatType():
            return _float
        case inspect.StructType():
            return _struct(type_)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            return _each(_of(type_.item_type))
        case inspect.TupleType():
            return _tuple([_of(item) for item in type_.item_types])
        case inspect.DictType():
            return _values(_of(type_.value_type))
        case inspect.UnionType():
            return _union(type_)
    return None


def _float(value: Any) -> str:
    return "" if isfinite(value) else f" is {value}"


def _struct(type_: inspect.StructType) -> Finder | None:
    fields = [(f".{field.name}", attrgetter(field.name), _of(field.type)) for field in type_.fields]
    looked = [(name, get, look) for name, get, look in fields if look is not None]
    if len(looked) == 1 and looked[0][2] is _float:  # saves a call: most messages have one such field
        name, get, _ = looked[0]
        return lambda value: "" if isfinite(get(value)) else name + _float(get(value))

    def find(value: Any) -> str:
        """Return the path and value of the first number that is not finite, or an empty text."""
        for name, get, look in looked:
            found = look(get(value))
            if found:
                return name + found
        return ""

    return find if looked else None


def _each(look: Finder | None) -> Finder | None:
    return None if look is None else lambda values: next(_found(look, enumerate(values)), "")


def _values(look: Finder | None) -> Finder | None:
    return None if look is None else lambda values: next(_found(look, values.items()), "")


def _found(look: Finder, items: Any) -> Iterator[str]:
    return (f"[{key}]{found}" for key, value in items if (found := look(value)))


def _tuple(looks: list[Finder | None]) -> Finder | None:
    if not any(looks):
        return None
    return lambda values: next(
        (found for look, value in zip(looks, values, strict=True) if look and (found := look(value))), ""
    )


def _union(type_: inspect.UnionType) -> Finder | None:
    structs = {each.cls: _of(each) for each in type_.types if isinstance(each, inspect.StructType)}
    others = [_of(each) for each in type_.types if not isinstance(each, inspect.StructType)]
    other = next((look for look in others if look is not None), None)
    if other is None and not any(structs.values()):
        return None

    def find(value: Any) -> str:
        """Search a value by the finder of its type."""
        if value is None:
            return ""
        look = structs.get(type(value)) if isinstance(value, msgspec.Struct) else other
        return look(value) if look is not None else ""

    return find
