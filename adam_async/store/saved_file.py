"""A store in a safetensors file: its values, and on request its rules' state.

The names are those of a checkpoint's export (`checkpoint/export.py`). The head has the record of the store
and its arrays, so a new store begins with the file alone.
"""

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from adam_async.checkpoint.export import check_sums, export_of, state_name
from adam_async.checkpoint.model_head import RULE_STATE, sums_in
from adam_async.checkpoint.tensors import ShardSource, WholeTensors
from adam_async.errors import ConfigError, StoreError
from adam_async.messages.tensors import UNREADABLE
from adam_async.run.shard_table import shard_table
from adam_async.run.store_checks import check_placed_store
from adam_async.run.store_record import ArrayRecord, StoreRecord
from adam_async.runtime.disk import Disk
from adam_async.store.arrays import flat_values

STORE = "adam_async_store"
"""Name of the text in the head that has the record of the store and its arrays."""

RESERVED = "__metadata__"
"""Name that the safetensors format reserves."""


class SavedFile(NamedTuple):
    """A store in a file."""

    record: StoreRecord
    arrays: tuple[ArrayRecord, ...]
    source: ShardSource


async def write_store(path: Path, record: StoreRecord, tensors: WholeTensors) -> None:
    """Write a store into a file, all or nothing.

    Args:
        tensors: The store's values, and its rules' state or none.

    Raises:
        OSError: The file cannot be written.
        StoreError: The file would have one name twice, or one that the format reserves.
    """
    keys = {*map(state_name, tensors.state)}
    for name in tensors.weights.keys() & {RESERVED, *keys}:
        what = "is that of a rule's state or a vector" if name in keys else "safetensors reserves"
        raise StoreError(f"array {name!r} has a name that {what}: pull and write it apart")
    record = msgspec.structs.replace(record, vectors=tuple(tensors.vectors))
    about = msgspec.json.encode((record, tensors.arrays)).decode()
    about_it = {STORE: about}
    export = await export_of(tensors, tensors.arrays, tensors.rules, about_it, vectors=tensors.vectors)
    async with Disk() as disk, aclosing(export.parts()) as parts:
        await disk.write_atomic(path, parts)


async def read_store(path: Path) -> SavedFile:
    """Read a store from a file.

    Raises:
        StoreError: The file cannot be read, or `write_store` did not write it.
    """
    async with Disk() as disk:
        try:
            await disk.read_part(path, 0, 0)  # safetensors would wait for ever for the writer of a named pipe
            about, found = await disk.run(_read, path)
            record, arrays = _decoder.decode(about)
            check_placed_store(record, arrays)
        except (OSError, SafetensorError, ConfigError, ValueError, *UNREADABLE) as error:
            why = getattr(error, "strerror", None) or error
            raise StoreError(f"{path} cannot be read as a file of `ParameterStore.save`: {why}") from None
    has_state = any(name.startswith(RULE_STATE) for name in found.keys() - {each.name for each in arrays})
    table = shard_table(arrays, shard_bytes=record.shard_bytes)
    values = {
        each.name: flat_values(each, found.get(each.name), f"{path}: the value").reshape(each.shape)
        for each in arrays
    }
    rules = record.rules if has_state else ()
    tensors = WholeTensors(arrays, table, rules, values=values, vectors=record.vectors)
    for key, state in tensors.state.items():
        array = found.get(state_name(key))
        if array is None or (array.shape, array.dtype) != (state.shape, state.dtype):
            raise StoreError(f"{path} has no array {state_name(key)!r} of {state.dtype}{state.shape}")
        tensors.state[key] = array
    return SavedFile(record, arrays, tensors)


_decoder = msgspec.json.Decoder(tuple[StoreRecord, tuple[ArrayRecord, ...]])


def _read(path: Path) -> tuple[str, Mapping[str, NDArray[Any]]]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        about = metadata.get(STORE)
        if about is None:
            raise ConfigError(
                "its head has no store: give `arrays` what safetensors.numpy.load_file returns, and leave "
                "init out"
            )
        found = {name: file.get_tensor(name) for name in file.keys()}
    check_sums(found, sums_in(metadata))
    return about, found
