"""The messages of the role table at their largest permitted sizes, for `benchmarks.stalls`."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from adam_async import messages as m
from adam_async.controller.consensus import messages as consensus
from adam_async.controller.learned_map import StoresReport
from adam_async.data_server.staging.plan import File
from adam_async.messages import body
from adam_async.messages.saved_shards import MOST_PINS_BYTES, MOST_SAVED_BYTES
from adam_async.run.cluster_map import ClusterMap, EpochRecord, NodeRecord
from adam_async.run.map_changes import Change
from adam_async.run.store_record import ArrayRecord, ArraysPiece, StoreRecord
from adam_async.run.training_program import ProgramRecord
from adam_async.runtime.trace_events import Carried
from adam_async.runtime.trace_events import Part as ProfilePart
from tests.simulation.scenarios.valid_messages import Example, Facts, Ride, valid_messages
from transport import LinkConfig, Message, RemoteProtocolError

META_BYTES = LinkConfig().max_meta_bytes - 600
"""Size of a full meta, in bytes; the rest of a frame's meta describes tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """A message at its largest size."""

    example: Example
    most_bytes: int
    """Maximum size of the attached record, in bytes; 0 if the message has none."""

    @property
    def name(self) -> str:
        """Name of the message and of its example."""
        of = self.example.of
        return type(self.example.body).__name__ + (f" ({of})" if of else "")

    @property
    def message(self) -> Message:
        """The message in the form that a link carries."""
        return m.pack(self.example.body, self.example.tensors)


MOST_BYTES = {
    "CompareAndSet": body.MOST_VALUE_BYTES,
    "ReportStores": body.MOST_MAP_TEXT_BYTES,
    "MapState": body.MOST_MAP_TEXT_BYTES,
    "MapChanges": body.MOST_MAP_TEXT_BYTES,
    "Serving": body.MOST_INFO_BYTES,
    "Statistics": body.MOST_STATISTICS_BYTES,
    "Profile": body.MOST_PROFILE_BYTES,
    "ManifestPart": body.MOST_MANIFEST_BYTES,
    "SavedList": MOST_SAVED_BYTES,
    "PinList": MOST_PINS_BYTES,
    "Agree": body.MOST_AGREE_BYTES,
}
"""Maximum size of the record attached to a message, in bytes, by name of the message."""


def largest_messages(facts: Facts, only: str = "") -> Iterator[Largest]:
    """Yield the messages of the table at their largest permitted sizes, except those with a packed field.

    Args:
        facts: Facts that the messages name.
        only: Text in the names of the wanted messages; making the others would take minutes.
    """
    for example in valid_messages(facts):
        name = type(example.body).__name__
        if only not in Largest(example=example, most_bytes=0).name:
            continue
        ride = example.ride
        if ride is None:
            yield Largest(example=_with_full_meta(example, facts), most_bytes=0)
        elif not ride.field:
            yield Largest(
                example=_with_full_ride(example, ride, MOST_BYTES[name]), most_bytes=MOST_BYTES[name]
            )


def _with_full_meta(example: Example, facts: Facts) -> Example:
    """Repeat the elements of a message up to its bounds; `shards` has at most all shards of the server."""
    fields = {
        name: value
        for name in example.body.__struct_fields__
        if isinstance(value := getattr(example.body, name), tuple) and value and name != "rows"
    }
    if not fields:
        return example
    names_shards = "shards" in fields
    most = len(facts.shards) if names_shards or "versions" in fields else 8000
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if _is_taken(_repeated(example, facts, fields, middle)) else (low, middle - 1)
        )
    return _repeated(example, facts, fields, low)


def _is_taken(example: Example) -> bool:
    """Whether a message is within its bounds, and its fields within a meta."""
    message = m.pack(example.body)
    if len(message.meta) > META_BYTES:
        return False
    try:
        m.unpack_any(message)
    except RemoteProtocolError:
        return False
    return True


def _repeated(example: Example, facts: Facts, fields: dict[str, Any], count: int) -> Example:
    new: dict[str, Any] = {name: value[:1] * count for name, value in fields.items()}
    body, tensors = example.body, example.tensors
    if "shards" in fields:
        new["shards"] = facts.shards[:count]
    if "parts" in fields:
        new["parts"] = (m.Part(factors=False, count=count),)
    if "steps" in fields:
        new |= {"steps": fields["steps"] * count, "shards": facts.shards[:1]}
    if "states" in fields:
        new["states"] = fields["states"]
        return replace(example, body=body)
    if isinstance(body, m.Push | m.Pushed | m.Values):
        tensors = (np.zeros(sum(facts.sizes[:count]), facts.dtype),)
    elif isinstance(body, m.Blocks):
        new["blocks"] = fields["blocks"] * count
        tensors = tensors * count
    elif isinstance(body, m.Groups):
        images, labels = tensors
        tensors = (np.zeros((2 * count, *images.shape[1:]), np.uint8), np.zeros(2 * count, labels.dtype))
    return replace(example, body=msgspec.structs.replace(body, **new), tensors=tensors)


def _with_full_ride(example: Example, ride: Ride, most_bytes: int) -> Example:
    """Repeat the elements of a record up to its maximum size."""
    write = msgspec.json.encode if ride.is_text else msgspec.msgpack.encode
    make = _MAKERS.get(type(ride.record), _MAKERS[dict])
    few = len(write(make(ride.record, 1000))) - len(write(make(ride.record, 1)))
    count = int(999 * most_bytes / few)
    while True:
        packed = np.frombuffer(write(make(ride.record, count)), np.uint8)
        full = replace(example, tensors=(packed,))
        if packed.nbytes <= most_bytes:
            with suppress(RemoteProtocolError):
                read_ride(full, most_bytes)
                return full
        count = int(count * 0.95)


def read_ride(example: Example, most_bytes: int) -> None:
    """Decode and validate the attached record.

    Raises:
        RemoteProtocolError: The record exceeds a limit.
    """
    message, ride = m.pack(example.body, example.tensors), example.ride
    if ride is not None and ride.field:
        m.read_packed(getattr(example.body, ride.field), ride.kind, of=message)
    elif ride is not None:
        read = m.read_text_tensor if ride.is_text else m.read_packed_tensor
        read(message, ride.kind, most_bytes)


def _many_numbers(record: dict[str, Any], count: int) -> dict[str, Any]:
    return {**record, **{f"field {number}": [number] for number in range(count)}}


def _node(number: int) -> NodeRecord:
    return NodeRecord(role="worker", address=f"tcp://10.0.0.1:{number}", incarnation=number)


def _saved_store(store: m.SavedStore, count: int) -> m.SavedStore:
    """Repeat a piece with the longest name of a home, which fills the list before the limit of pieces."""
    piece = msgspec.structs.replace(store.pieces[0], home="p" * 80)
    return msgspec.structs.replace(store, pieces=(piece,) * count)


_MAKERS: dict[type, Callable[[Any, int], Any]] = {
    dict: _many_numbers,
    ProgramRecord: lambda it, count: msgspec.structs.replace(it, terms=_many_numbers({}, count)),
    EpochRecord: lambda it, count: msgspec.structs.replace(it, result=_many_numbers({}, count)),
    NodeRecord: lambda it, count: msgspec.structs.replace(it, info=_many_numbers({}, count)),
    ArraysPiece: lambda it, count: msgspec.structs.replace(
        it, text=msgspec.json.encode([ArrayRecord(f"array {number}", (4,)) for number in range(count)])
    ),
    StoreRecord: lambda it, count: msgspec.structs.replace(it, buckets=("ps-0",) * count),
    ClusterMap: lambda it, count: msgspec.structs.replace(
        it, nodes={f"worker-{number}": _node(number) for number in range(count)}
    ),
    StoresReport: lambda it, count: msgspec.structs.replace(
        it,
        map=msgspec.structs.replace(
            it.map, nodes={f"worker-{number}": _node(number) for number in range(count)}
        ),
    ),
    list: lambda it, count: (
        [Change(version=number, nodes={f"worker-{number}": _node(number)}) for number in range(1, count + 1)]
        if isinstance(it[0], Change)
        else [File(f"images/{number}", number) for number in range(count)]
    ),
    tuple: lambda it, count: (_saved_store(it[0], count),) if isinstance(it[0], m.SavedStore) else it * count,
    ProfilePart: lambda it, count: msgspec.structs.replace(
        it, events=[Carried("worker-0", "ps-0", True, "Push", 1 << 20, 0.5)] * count
    ),
    consensus.Append: lambda it, count: msgspec.structs.replace(
        it,
        entries=tuple(
            consensus.Entry(index=it.prev_index + 1 + number, term=it.term, command=b"\x80")
            for number in range(count)
        ),
    ),
}
