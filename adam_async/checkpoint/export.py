"""A store as one file in the safetensors format, for other programs; one tensor is copied at a time.

The file has the values by tensor, like a trained model's file, and the update rules' state under separate
names (`model_head.RULE_STATE`). This state has elementwise arrays in their tensor's shape, and counts with
one number per shard. Last come a store's vectors (`tensors.VECTOR`). Larger types come first, so each array
is aligned. The head has the CRC-32 of each array (`model_head.SUMS`).
"""

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.model_head import RULE_STATE, SUMS
from adam_async.checkpoint.tensors import VECTOR, ShardSource, WholeTensors
from adam_async.model.rules import Rule
from adam_async.run.store_record import ArrayRecord, VectorRecord

_TYPES = {"<f8": "F64", "<i8": "I64", "<f4": "F32"}
"""Names of types in the format, by NumPy's names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Export:
    """A file that is written from the shards of a store.

    Attributes:
        head: The file's first bytes, before the arrays.
        nbytes: Size of the file, in bytes.
    """

    head: bytes
    nbytes: int
    _source: ShardSource
    _rules: Sequence[Rule]
    _vectors: Sequence[VectorRecord]
    _tensors: tuple[ArrayRecord, ...]
    """The tensors in the order of the file."""
    _counts: Mapping[str, NDArray[Any]]

    async def parts(self) -> AsyncGenerator[bytes | memoryview, None]:
        """Yield the bytes of the file. Raises CheckpointError: a shard is missing or damaged now."""
        yield self.head
        for _, counts in sorted(self._counts.items()):
            yield counts.tobytes()
        for record in self._tensors:
            whole = await _read(self._source, record, self._rules, self._vectors)
            for _, array in _arrays(whole):
                yield array.tobytes()


def _arrays(whole: WholeTensors) -> list[tuple[str, NDArray[Any]]]:
    """Return one tensor's arrays by their names in a file, without counts."""
    ((name, values),) = whole.weights.items()
    state = [(state_name(key), array) for key, array in whole.state.items() if array.shape == values.shape]
    return [(name, values), *(each for each in state if not each[1].dtype.kind == "i")]


def state_name(key: str) -> str:
    """Return the name that an array of `WholeTensors.state` has in a file."""
    return key if key.startswith(VECTOR) else RULE_STATE + key


async def _read(
    source: ShardSource, record: ArrayRecord, rules: Sequence[Rule], vectors: Sequence[VectorRecord]
) -> WholeTensors:
    whole = WholeTensors([record], source.table, rules, vectors=vectors)
    async with aclosing(source.shards_of(source.table.by_tensor.get(record.name, ()))) as parts:
        async for shards in parts:
            for shard in shards:
                whole.take(shard)
    return whole


async def export_of(
    source: ShardSource,
    arrays: Iterable[ArrayRecord],
    rules: Sequence[Rule],
    metadata: Mapping[str, str],
    *,
    vectors: Sequence[VectorRecord] = (),
    check: Callable[[str, NDArray[Any]], None] = lambda name, values: None,
) -> Export:
    """Return the file that the shards of a store become.

    Args:
        rules: The rules of the store; none for values alone.
        metadata: Texts for the head, see `trained_model.metadata_of`.
        check: Checks each array's values, given its name.

    Raises:
        CheckpointError: A shard is missing or damaged.
    """
    counts: dict[str, NDArray[Any]] = {}
    entries: dict[str, NDArray[Any]] = {}
    sums: dict[str, int] = {}
    tensors = tuple(sorted(arrays, key=lambda each: (-np.dtype(each.dtype).itemsize, each.name)))
    for record in tensors:
        whole = await _read(source, record, rules, vectors)
        check(record.name, whole.weights[record.name])
        found = _arrays(whole)
        names = {name for name, _ in found}
        # Only the shapes are kept.
        entries |= {name: np.broadcast_to(np.zeros((), each.dtype), each.shape) for name, each in found}
        sums |= {name: _sum_of(each) for name, each in found}
        counts |= {name: v for key, v in whole.state.items() if (name := state_name(key)) not in names}
    entries = {**dict(sorted(counts.items())), **entries}
    head = _head_of(entries, metadata, sums | {name: _sum_of(each) for name, each in counts.items()})
    nbytes = len(head) + sum([each.nbytes for each in entries.values()])
    return Export(
        head=head,
        nbytes=nbytes,
        _source=source,
        _rules=rules,
        _vectors=vectors,
        _tensors=tensors,
        _counts=counts,
    )


def file_of(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file with these arrays, in the order and with the checksums of an export."""
    ordered = dict(sorted(arrays.items(), key=lambda each: (-each[1].dtype.itemsize, each[0])))
    parts = {name: each.tobytes() for name, each in ordered.items()}
    sums = {name: crc32(part) for name, part in parts.items()}
    return b"".join([_head_of(ordered, metadata, sums), *parts.values()])


def _sum_of(array: NDArray[Any]) -> int:
    return crc32(np.ascontiguousarray(array).data)  # no copy of a large array


def check_sums(arrays: Mapping[str, NDArray[Any]], sums: Mapping[str, Any]) -> None:
    """Check the arrays that were read from a file against its checksums. Raises ValueError."""
    for name, array in arrays.items():
        if name in sums and sums[name] != _sum_of(array):
            raise ValueError(f"the bytes of {name!r} are not those that were written")


def _head_of(
    entries: Mapping[str, NDArray[Any]], metadata: Mapping[str, str], sums: Mapping[str, int]
) -> bytes:
    metadata = {**metadata, SUMS: json.dumps(dict(sorted(sums.items())), separators=(",", ":"))}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, each in entries.items():
        header[name] = {
            "dtype": _TYPES[each.dtype.str],
            "shape": list(each.shape),
            "data_offsets": [at, at + each.nbytes],
        }
        at += each.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
