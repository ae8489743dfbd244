"""Pure: generates every message of the system with one bad field at a time.

The generator walks the type information of a message and a valid example of it in parallel. The generator
replaces each field, including fields in nested records and in attached text or packed records, by values that
its type, bounds or meaning may forbid. The generator gives the tensors a wrong count, and the first tensor a
wrong shape, dtype and content.

    for bad in bad_messages(valid_messages(facts), meant=facts.meant()):
        bad.name                                    # "Pull.wait_s=nan"
        bad.pairs                                   # frozenset({("worker", "ps"), ("driver", "ps"), ...})
        await link.call(bad.message, timeout_s=2.0)

A receiver refuses each of these messages, or answers it without harm; at most, the sender loses its link.

`is_never_right` names the messages that no receiver may accept.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from adam_async.messages import TABLE, CompareAndSet
from tests.simulation.scenarios.valid_messages import Example, Ride, fields_of, type_of
from transport import Message

Path = tuple[str | int, ...]
"""Path of names and indices from a message to one value."""

Spoilt = tuple[Path, str, Any]
"""Path of the replaced value, name of the new value, and the whole message with it."""

Meant = Mapping[str, Mapping[str, Any]]
"""Values of the right type and the wrong meaning, by field name and by name of the value."""

MISSING = "missing"
"""Name of the bad value that leaves a field out."""

LONG_TEXT, LONG_TUPLE = 9_000, 3_000
"""Number of characters, and of elements, of a long value; a frame's meta has room for either."""

LARGE_TEXT_BYTES = 72 << 10
"""Size in bytes above the limit of a map record: padding of a large JSON record, and limit of other bad
records."""

DEPTH = 5_000
"""Nesting depth of JSON or MessagePack arrays, in levels."""

NUMBERS: Mapping[str, float] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "2**40": 1 << 40,
    "2**63": 1 << 63,
}
"""Values to try in number fields. Over links integers travel as MessagePack, up to 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class BadMessage:
    """A message that differs from a valid message in one place.

    Attributes:
        name: The message's type, the field and the value, unique among all: ``Push.parts[0].count=-1``. If a
            message has several valid examples, the example follows the type:
            ``CompareAndSet(run).tensor.phase=empty``.
        message: The message in the form that a link carries.
        pairs: The (from, to) pairs of roles between which the role table allows the message.
        field: Path of the field within the message: ``parts[0].count``. ``tensors`` for tensors;
            ``tensor`` and the path within it for an attached record.
        value: Name of the bad value: ``nan``, ``missing``, ``duplicate``, ``type-text``, ...
    """

    name: str
    message: Message
    pairs: frozenset[tuple[str, str]]
    field: str
    value: str


def bad_messages(examples: Iterable[Example], *, meant: Meant | None = None) -> Iterator[BadMessage]:
    """Yield every bad message derived from valid ones, in a fixed order.

    Args:
        examples: Valid messages; see `valid_messages`.
        meant: By field name, values of the right type that are wrong for the receiver: another run's id, an
            older generation, an epoch two ahead.
    """
    for example in examples:
        kind, meta, tensors, ride = type(example.body), example.meta(), example.tensors, example.ride
        for path, value, spoilt in spoil(type_of(kind), meta, meant or {}):
            if path:
                yield _bad(example, path, value, spoilt, tensors)
        if rows := [name for name, each in meta.items() if isinstance(each, list | tuple) and each]:
            twice = {name: [*meta[name], *meta[name]] for name in rows}
            doubled = tuple(np.concatenate((each, each)) for each in tensors)
            yield _bad(example, (rows[0],), "repeated", {**meta, **twice}, doubled)
        for path, value, packed in spoil_ride(ride, meant or {}) if ride is not None else ():
            if ride is not None and ride.field:
                yield _bad(example, (ride.field, *path), value, {**meta, ride.field: packed}, tensors)
            else:
                yield _bad(example, ("tensor", *path), value, meta, (np.frombuffer(packed, np.uint8),))
        for value, spoilt_tensors in spoil_tensors(tensors):
            yield _bad(example, ("tensors",), value, meta, spoilt_tensors)


def _bad(
    example: Example, path: Path, value: str, meta: dict[str, Any], tensors: tuple[NDArray[Any], ...]
) -> BadMessage:
    kind, field = type(example.body), path_text(path)
    return BadMessage(
        name=f"{kind.__name__}{example.of and f'({example.of})'}.{field}={value}",
        message=Message(type=kind.__name__, meta=msgspec.msgpack.encode(meta), tensors=tensors),
        pairs=TABLE[kind],
        field=field,
        value=value,
    )


def path_text(path: Path) -> str:
    """Write a path as Python would: ``parts[0].count``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


# --- fields ----------------------------------------------------------------------------------


def spoil(kind: inspect.Type, value: Any, meant: Meant) -> Iterator[Spoilt]:
    """Yield a value, made of builtins, once with each bad value in each place.

    Args:
        kind: Type of the value, as `msgspec.inspect` describes it.
        meant: As for `bad_messages`.
    """
    match kind:
        case inspect.Metadata(type=inner):
            yield from spoil(inner, value, meant)
        case inspect.StructType():
            yield from _spoil_struct(kind, value, meant)
        case inspect.UnionType(types=types):
            takes_number = any(isinstance(each, inspect.IntType) for each in types)
            for path, name, bad in spoil(_alternative(types, value), value, meant):
                if path or name != "type-number" or not takes_number:
                    yield path, name, bad
        case inspect.DictType(value_type=inner):
            yield from _spoil_dict(inner, value, meant)
        case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner):
            yield from _spoil_sequence(inner, value, meant)
        case inspect.TupleType(item_types=inners):
            yield from _spoil_row(list(enumerate(inners)), value, meant)
        case _:
            yield from (((), name, bad) for name, bad in _spoil_leaf(kind, value))


def _spoil_struct(kind: inspect.StructType, value: Any, meant: Meant) -> Iterator[Spoilt]:
    """Yield bad values for each field of a record; an `array_like` record is a list, others are mappings."""
    yield (), "type-text", "text"
    yield (), "type-none", None
    if kind.array_like:
        offset = 0 if kind.tag is None else 1
        row = [(offset + number, field.type) for number, field in enumerate(kind.fields)]
        names = {offset + number: field.name for number, field in enumerate(kind.fields)}
        for path, name, spoilt in _spoil_row(row, value, meant):
            first = names.get(path[0], path[0]) if path and isinstance(path[0], int) else ""
            yield ((first, *path[1:]) if path else path), name, spoilt
        for number, field in names.items():
            for name, bad in meant.get(field, {}).items():
                yield (field,), name, [*value[:number], bad, *value[number + 1 :]]
        return
    if kind.tag is not None and kind.tag_field is not None:
        for name, bad in {"unknown-tag": "Unknown", "type-none": None}.items():
            yield (kind.tag_field,), name, {**value, kind.tag_field: bad}
    for each in kind.fields:
        key = each.encode_name
        if each.required:
            yield (key,), MISSING, {name: one for name, one in value.items() if name != key}
        for name, bad in meant.get(each.name, {}).items():
            yield (key,), name, {**value, key: bad}
        for path, name, bad in spoil(each.type, value.get(key), meant):
            yield (key, *path), name, {**value, key: bad}


def _spoil_dict(inner: inspect.Type, value: Any, meant: Meant) -> Iterator[Spoilt]:
    yield (), "type-text", "text"
    yield (), "empty", {}
    some = next(iter(value.values()), 1) if value else 1
    yield (), "long", {f"{number}": some for number in range(LONG_TUPLE // 10)}
    for key, one in (value or {}).items():
        for path, name, bad in spoil(inner, one, meant):
            yield (key, *path), name, {**value, key: bad}
        return  # the first represents all


def _spoil_sequence(inner: inspect.Type, value: Any, meant: Meant) -> Iterator[Spoilt]:
    yield (), "type-text", "text"
    yield (), "type-number", 7
    if not value:
        return
    some = list(value)
    yield (), "empty", []
    yield (), "shorter", some[:-1]
    yield (), "duplicate", [*some, some[0]]
    if len(msgspec.msgpack.encode(some[0])) < 5:  # a meta has no room for as many larger ones
        yield (), "long", [some[0]] * LONG_TUPLE
    for path, name, bad in spoil(inner, some[0], meant):
        yield (0, *path), name, [bad, *some[1:]]


def _spoil_row(row: list[tuple[int, inspect.Type]], value: Any, meant: Meant) -> Iterator[Spoilt]:
    """Yield bad values for each position of a list of fixed length."""
    some = list(value)
    yield (), "shorter", some[:-1]
    yield (), "empty", []
    for place, kind in row:
        if place < len(some):
            for path, name, bad in spoil(kind, some[place], meant):
                yield (place, *path), name, [*some[:place], bad, *some[place + 1 :]]


def _spoil_leaf(kind: inspect.Type, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield bad values for a value without inner values, each with its name."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield from ((name, bad) for name, bad in NUMBERS.items() if bad != value)
            yield from _beyond(kind)
            yield "type-text", "7"
            yield "type-none", None
        case inspect.BoolType():
            yield "type-number", 2
            yield "type-text", "yes"
        case inspect.BytesType():
            yield "empty", b""
            yield "garbage", b"\xc1" * 9
            yield "type-number", 7
        case inspect.StrType() | inspect.LiteralType():
            yield "empty", ""
            yield "long", "x" * LONG_TEXT
            yield "control", "\x1b[2J\x07\r\n\x00"
            yield "type-number", 7
            yield "type-none", None
        case _:  # every value is valid in this place
            yield "type-none", None


def _beyond(kind: inspect.IntType | inspect.FloatType) -> Iterator[tuple[str, Any]]:
    """Yield values just beyond the declared bounds of a number."""
    if kind.ge is not None:
        yield "below", kind.ge - 1
    if kind.gt is not None:
        yield "below", kind.gt
    if kind.le is not None:
        yield "above", kind.le + 1
    if kind.lt is not None:
        yield "above", kind.lt


def _alternative(types: tuple[inspect.Type, ...], value: Any) -> inspect.Type:
    """Return the type among alternatives that a value belongs to."""
    tagged = [kind for kind in types if isinstance(kind, inspect.StructType) and kind.tag is not None]
    for kind in tagged:
        if kind.tag == (value[0] if kind.array_like else (value or {}).get(kind.tag_field)):
            return kind
    if value is None:
        return inspect.NoneType()
    kinds = [kind for kind in types if not isinstance(kind, inspect.NoneType)]
    several = [kind for kind in kinds if isinstance(kind, inspect.VarTupleType)]
    return several[0] if several and isinstance(value, list) else kinds[0]


# --- attached records ------------------------------------------------------------------------


def spoil_ride(ride: Ride, meant: Meant) -> Iterator[tuple[Path, str, bytes]]:
    """Yield bad bytes of an attached record: with each bad value in each place, cut off, too deep or too
    large, and noise."""
    write = json_bytes if ride.is_text else msgspec.msgpack.encode
    builtins = msgspec.to_builtins(ride.record, builtin_types=() if ride.is_text else (bytes,))
    whole = write(builtins)
    for path, name, spoilt in spoil(type_of(ride.kind), builtins, meant):
        if len(packed := write(spoilt)) < LARGE_TEXT_BYTES:
            yield path, name, packed
    yield (), "torn", whole[: len(whole) // 2]
    yield (), "noise", b"\xc1\xff\x00" * 9
    yield (), "deep", (b"[" if ride.is_text else b"\x91") * DEPTH
    if ride.is_text and not ride.field:
        yield (), "large", whole + b" " * LARGE_TEXT_BYTES


def json_bytes(value: Any) -> bytes:
    """Write JSON with each infinity as a number too large for a float, and NaN as ``NaN``, which is not
    JSON."""
    return json.dumps(value, default=msgspec.to_builtins).replace("Infinity", "1e999").encode()


def spoil_tensors(tensors: tuple[NDArray[Any], ...]) -> Iterator[tuple[str, tuple[NDArray[Any], ...]]]:
    """Yield tensors with each kind of fault, and its name; if a message has no tensors, only `surplus`."""
    yield "surplus", (*tensors, np.zeros(3, np.float32))
    if not tensors:
        return
    first, rest = tensors[0], tensors[1:]
    yield "none", ()
    yield "dtype", (first.astype(np.int16), *rest)
    yield "longer", (np.concatenate((first.reshape(-1), first.reshape(-1))), *rest)
    yield "empty", (first.reshape(-1)[:0], *rest)
    yield "dims", (first.reshape(1, 1, 1, *first.shape), *rest)
    if first.size > 1:
        yield "shorter", (first.reshape(-1)[:-1], *rest)
    if first.dtype.kind == "f":
        yield "nan", (np.full_like(first, np.nan), *rest)
        yield "inf", (np.full_like(first, np.inf), *rest)
        yield "largest", (np.full_like(first, np.finfo(first.dtype).max), *rest)


DIVERGED = ("nan", "inf", "-inf", "2**63")
"""Names of bad values that the loss of a diverged model may have."""

NEVER_RIGHT = (
    "nan",
    "inf",
    "-inf",
    "2**63",
    "below",
    "above",
    "missing",
    "type-text",
    "type-number",
    "repeated",
    "torn",
    "noise",
    "deep",
    "large",
    "unknown-tag",
    "wrong-run",
)
"""Names of bad values that no receiver may accept."""

CLOCKED = ("Push", "Tick", "ReportSteps", "Pull")
"""Types of questions whose clocks a server compares with the possible clocks of a replica."""

GIVEN = tuple(f"tensor.{name}" for name in ("before", "replica", "partition", "placed", "changed"))
"""Fields of a node's record that the controllers set themselves."""


def numbered(bad: BadMessage, number: int) -> BadMessage:
    """Give a numbered question the next number of its session, unless the number is the bad field."""
    if bad.message.type != CompareAndSet.__name__ or bad.field == "number":
        return bad
    message = bad.message
    meta = msgspec.msgpack.encode({**fields_of(message), "number": number})
    return replace(bad, message=Message(type=message.type, meta=meta, tensors=message.tensors))


def is_poison(bad: BadMessage) -> bool:
    """Return whether a permitted message harms the model: a worker may push large gradients."""
    return bad.message.type == "Push" and bad.value == "largest"


def must_be_refused(bad: BadMessage) -> bool:
    """Return whether a receiver must not let a question wait, because the awaited event can never come."""
    return bad.field == "epoch" and bad.value == "far" and bad.message.type in ("Push", "Tick")


def is_never_right(bad: BadMessage) -> bool:
    """Return whether no receiver may accept a message."""
    if bad.message.type == "GetStatistics" and bad.value == "wrong-run":
        return False  # a role answers a driver of any run, which may be the next one
    if bad.name == "CompareAndSet(node).tensor.store=wrong-run":
        return False  # a client names the store that it opens, whose record may be gone
    if bad.field.endswith("loss") and bad.value in DIVERGED:
        return False  # a diverging run reports such losses
    if bad.field == "tensor.role" and bad.value == "anothers":
        return True
    if bad.field in GIVEN:
        return False
    if bad.value == "2**40" and bad.field.endswith("clock"):
        return bad.message.type in CLOCKED
    if bad.value == "repeated":
        return not {"shards", "states"}.isdisjoint(fields_of(bad.message))
    if bad.field == "tensors" and bad.value in DIVERGED:
        return False  # a server answers and counts the push, but refuses its values
    return bad.value in NEVER_RIGHT
