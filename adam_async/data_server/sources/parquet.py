"""Parquet files with columns ``image`` and ``label``, read with pyarrow (of the extra ``parquet``).

An image is the bytes of an encoded image, or a structure with ``bytes``. Hugging Face's data sets have such
structures, and class names in the file's metadata. Labels are integers or text.

A file may have one value for all its rows, and so be a million times smaller than the rows in memory. So
bytes and text are read as a dictionary of values, with an index per row: equal rows share their memory. The
size of a batch's rows is known, and limited, before arrow converts a row.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from adam_async.data_server.class_names import class_name, is_name
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import read_file
from adam_async.data_server.sources.kinds import Files
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import LoadRequest, Sample, Samples, assemble
from adam_async.data_server.sources.splits import Split, rank_of_image
from adam_async.errors import DataError, install_command

ROWS_AT_A_TIME = 1024


async def load_parquet(request: LoadRequest, files: Files) -> Dataset:
    """Load all images of some Parquet files. Without a split, rows are split by their numbers.

    Raises:
        DataError: A file is no Parquet file, or `assemble` raises an error.
    """
    require_pillow()
    samples = Samples(request)
    class_names: tuple[str, ...] = ()
    for path, split in files:
        data = await read_file(path, request.disk, room_bytes=request.room_bytes)
        names = await request.disk.run(add_rows, data, str(path), path.name, split, samples)
        class_names = names or class_names
        del data
    return await assemble(samples, class_names=class_names)


def add_rows(data: bytes, origin: str, name: str, split: Split | None, samples: Samples) -> tuple[str, ...]:
    """Add the images of one file; return the file's class names, if any.

    Raises:
        DataError: pyarrow is not installed, the file is not Parquet or has other columns, or damage is not
            skipped.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"reading {origin} needs pyarrow, of the extra `parquet`: {install_command('parquet')}"
        ) from None
    room_bytes = samples.request.room_bytes
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
        columns = [_check(file, origin, room_bytes), "label"]
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data), read_dictionary=columns)
        for index, (image, label) in enumerate(_rows(file, columns, origin, room_bytes)):
            where = f"{origin}, row {index}"
            if not isinstance(image, bytes) or not isinstance(label, int | str):
                samples.request.damage.note(f"{where} lacks its image or its label")
            else:
                chosen = split or rank_of_image(f"{name}/{index}")
                samples.add(Sample(where, class_name(str(label)), chosen, image))
        return _class_names(file.schema_arrow.metadata or {})
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{origin} is not a Parquet file, or damaged ({error})") from None


def _check(file: Any, origin: str, room_bytes: int) -> str:
    """Check columns and sizes by the metadata, before unpacking; return the column of encoded images."""
    from pyarrow import types

    schema = file.schema_arrow
    missing = [column for column in ("image", "label") if column not in schema.names]
    if missing:
        raise DataError(
            f"{origin} has no column {', '.join(missing)}; it has {', '.join(schema.names) or 'none'}"
        )
    kind, label, column = schema.field("image").type, schema.field("label").type, "image"
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, column = kind.field("bytes").type, "image.bytes"
    kind, label = (each.value_type if types.is_dictionary(each) else each for each in (kind, label))
    if not (types.is_binary(kind) or types.is_large_binary(kind)):
        raise DataError(f"{origin} has images of {kind}, expected encoded bytes, or a structure with bytes")
    if not (types.is_integer(label) or types.is_string(label) or types.is_large_string(label)):
        raise DataError(f"{origin} has labels of {label}, expected integers or text")
    limits.check_members(file.metadata.num_rows, origin)
    groups = range(file.metadata.num_row_groups)
    total = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    limits.check_total(total, origin, room_bytes)
    return column


def _rows(file: Any, columns: list[str], origin: str, room_bytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield image and label of each row."""
    from pyarrow import types

    total, known = 0, dict[Any, Any]()
    for batch in _batches(file, columns):
        images, labels = batch.column("image"), batch.column("label")
        if types.is_struct(images.type):
            images = images.flatten()[0]
        total += _written_out(images)
        limits.check_total(total, origin, room_bytes)
        yield from zip(_values(images, known), _values(labels, known), strict=True)


def _batches(file: Any, columns: list[str]) -> Iterator[Any]:
    # One group at a time: a batch of two groups has two lists of values, which arrow refuses in structures.
    for group in range(file.num_row_groups):
        yield from file.iter_batches(ROWS_AT_A_TIME, row_groups=[group], columns=columns, use_threads=False)


def _written_out(column: Any) -> int:
    """Return the size in bytes of all rows in a dictionary-encoded column."""
    from pyarrow import compute

    sizes = compute.binary_length(column.dictionary).to_numpy(zero_copy_only=False)
    return int(sizes[column.indices.drop_null().to_numpy()].sum(dtype=np.int64))


def _values(column: Any, known: dict[Any, Any]) -> list[Any]:
    """Return a column's values; equal values that are not numbers share their memory."""
    from pyarrow import types

    if not types.is_dictionary(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    codes = column.indices.to_pylist()
    values: dict[int | None, Any] = {None: None}
    for code in codes:
        if code not in values:
            value = column.dictionary[code].as_py()
            values[code] = known.setdefault(value, value)
    return [values[code] for code in codes]


def _class_names(metadata: dict[bytes, bytes]) -> tuple[str, ...]:
    """Return the class names in Hugging Face's description of the columns, if any."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    whole = isinstance(names, list) and all(isinstance(name, str) and is_name(name) for name in names)
    return tuple(names) if whole and len(set(names)) == len(names) else ()
