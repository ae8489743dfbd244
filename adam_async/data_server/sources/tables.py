"""CSV tables: one row per image, with its pixels or with an image file's path.

    label,pixel0,pixel1,...         values 0 to 255, row by row; the image is square and grey, unless the
                                    first line has its shape: # shape: 3,32,32 (channels, rows, columns)
    path,label                      files below the folder of the table

``train.csv`` and ``test.csv`` are the two sets. In a single table about one row in five is a test image, by a
hash of its number or path.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.class_names import class_name, number_classes
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import read_file
from adam_async.data_server.sources.kinds import Files
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import (
    LoadRequest,
    Samples,
    StoredSample,
    assemble,
    check_counts,
    describe_source,
    each,
    origins_of,
    stored_image,
)
from adam_async.data_server.sources.splits import SPLITS, Split, rank_of_image, resolve
from adam_async.errors import DataError

ROWS_AT_A_TIME = 4096
SHAPE = re.compile(rb"#\s*shape\s*[:=]\s*(\d{1,5}(?:\s*[,x]\s*\d{1,5}){1,2})\s*")
PIXELS = re.compile(rb"\d{1,3}(?:,\d{1,3})*")


@dataclass(frozen=True, slots=True)
class Table:
    """The lines and the header of a table."""

    origin: str
    lines: list[bytes]
    first_line: int
    """Number of the first of `lines` in the file, from 1."""
    columns: list[str]
    shape: tuple[int, ...]
    """(channels, rows, columns) of a row's pixels; empty if rows name files."""
    split: Split | None


async def load_tables(request: LoadRequest, files: Files) -> Dataset:
    """Load one or more tables. Without a split, rows are split by their numbers or paths.

    Raises:
        DataError: A header is unknown, the tables differ in form, or too much is damaged.
    """
    tables: list[Table] = []
    disk, left = request.disk, request.room_bytes
    for path, split in files:
        data = await read_file(path, disk, room_bytes=left)
        left -= len(data)
        tables.append(await disk.run(parse_header, data, str(path), split))
    if len({table.shape for table in tables}) > 1:
        raise DataError(
            f"{tables[0].origin} has images of {tables[0].shape or 'files'}, {tables[1].origin} of "
            f"{tables[1].shape or 'files'}; all tables must be of one kind and shape"
        )
    if tables[0].shape:
        rows = sum(len(table.lines) for table in tables)
        limits.check_total(rows * prod(tables[0].shape), request.origin, request.room_bytes)
        return await _from_pixels(tables, request)
    require_pillow()
    samples = Samples(request)
    for (path, _), table in zip(files, tables, strict=True):
        await _add_files(samples, table, path.parent)
    return await assemble(samples)


def parse_header(data: bytes, origin: str, split: Split | None) -> Table:
    """Return the lines and the header of a table.

    Raises:
        DataError: The header is missing or unknown, or the table has too many rows.
    """
    limits.check_members(max(data.count(b"\n"), data.count(b"\r")), origin)
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()
    limits.check_lines(lines, origin)
    given = None
    first = 0
    while first < len(lines) and lines[first].startswith(b"#"):
        given = SHAPE.fullmatch(lines[first]) or given
        first += 1
    header = lines[first].decode("utf-8", "replace") if first < len(lines) else ""
    columns = [column.strip().strip('"').lower() for column in header.split(",")]
    if {"path", "label"} <= set(columns):
        shape: tuple[int, ...] = ()
    elif columns[0] == "label" and len(columns) > 1:
        shape = _shape(len(columns) - 1, given[1] if given else b"", origin)
    else:
        raise DataError(
            f"{origin} begins with {header[:60]!r}, expected a header: label,pixel0,pixel1,... or path,label"
        )
    return Table(origin, lines[first + 1 :], first + 2, columns, shape, split)


def _shape(pixels: int, given: bytes, origin: str) -> tuple[int, ...]:
    """Return the shape (channels, rows, columns) of images with this many pixels: a square if none is given.

    Raises:
        DataError: The given shape has another size, or the pixels form no square.
    """
    if given:
        axes = [int(axis) for axis in re.split(rb"[,x]", given)]
        shape = (1, *axes) if len(axes) == 2 else tuple(axes)
        if prod(shape) != pixels:
            raise DataError(f"{origin} has {pixels} pixels in a row, but the shape {shape} in its first line")
        return shape
    side = isqrt(pixels)
    if side * side != pixels:
        raise DataError(
            f"{origin} has {pixels} pixels in a row, which is no square; "
            "let its first line say '# shape: channels,rows,columns'"
        )
    return 1, side, side


async def _from_pixels(tables: list[Table], request: LoadRequest) -> Dataset:
    shape = tables[0].shape
    rows = sum(len(table.lines) for table in tables)
    images = np.empty((rows, prod(shape)), np.uint8)
    found: list[tuple[str, str, Split | int]] = []

    def read(table: Table, index: int) -> None:
        """Add a line's pixels to the images, with its label and split."""
        line = table.lines[index].strip()
        where = f"{table.origin}, line {table.first_line + index}"
        label, _, pixels = line.partition(b",")
        images[len(found)] = _pixels(pixels, prod(shape), where)
        text = class_name(_text(label, where).strip().strip('"'))
        found.append((where, text, table.split or rank_of_image(str(index))))

    for table in tables:
        await _each_line(table, read, request)
    numbers, class_names = number_classes(label for _, label, _ in found)
    for where, label, _ in found:
        if label not in numbers:
            request.damage.note(
                f"{where} has the label {label[:80]!r}, expected a class number from 0, or a name"
            )
    arrays = []
    known = [i for i, (_, label, _) in enumerate(found) if label in numbers]
    splits = resolve([found[i][1] for i in known], [found[i][2] for i in known])
    for split in SPLITS:
        chosen = [i for i, of in zip(known, splits, strict=True) if of == split]
        labels = np.array([numbers[found[i][1]] for i in chosen], np.int64)
        arrays.append((images[chosen].reshape(-1, *shape), labels))
    check_counts(len(arrays[0][1]), len(arrays[1][1]), request)
    return make_dataset(
        name=request.name,
        source=describe_source(request),
        train=arrays[0],
        test=arrays[1],
        origins=origins_of(request.origin),
        class_names=class_names,
        damaged=request.damage.sentences(),
    )


def _pixels(text: bytes, count: int, where: str) -> NDArray[np.int64]:
    if not PIXELS.fullmatch(text):
        raise DataError(f"{where} holds something else than pixels from 0 to 255, or is cut short")
    values = np.fromstring(text, np.int64, sep=",")
    if len(values) != count:
        raise DataError(f"{where} has {len(values)} pixels, expected {count}")
    if values.max() > 255:
        raise DataError(f"{where} has a pixel of {values.max()}, expected 0 to 255")
    return values


async def _add_files(samples: Samples, table: Table, folder: Path) -> None:
    """Add the images that the rows of a table name."""
    rows: list[tuple[str, str]] = []

    def read(table: Table, index: int) -> None:
        """Add the path and the label of one line to `rows`.

        Raises:
            DataError: The line is no row of the table, or its path leads out of the folder.
        """
        where = f"{table.origin}, line {table.first_line + index}"
        try:
            fields = next(csv.reader(io.StringIO(_text(table.lines[index], where))))
        except csv.Error as error:
            raise DataError(f"{where} cannot be read ({error})") from None
        if len(fields) != len(table.columns):
            raise DataError(f"{where} has {len(fields)} fields, expected {len(table.columns)}")
        row = dict(zip(table.columns, fields, strict=True))
        name = row["path"].strip(" \t")  # other spaces may belong to the name
        path = PurePosixPath(name.replace("\\", "/"))
        if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise DataError(f"{where} names {name!r}, expected the path of a file inside {folder}")
        rows.append((name, class_name(row["label"].strip())))

    request = samples.request
    await _each_line(table, read, request)
    found: list[StoredSample] = []

    def look(row: tuple[str, str]) -> None:
        """Find the image of one row."""
        name, label = row
        found.append(stored_image(_place(folder, name), label, table.split or rank_of_image(name)))

    await each(rows, look, request.damage, request.disk)
    for sample in found:
        samples.add(sample)


def _place(folder: Path, name: str) -> Path:
    """Return the file of a path in a table, which may have Windows' separators or other accents. Blocks."""
    slashed = name.replace("\\", "/")
    forms = (name, slashed, *(unicodedata.normalize(form, slashed) for form in ("NFC", "NFD")))
    try:
        return next((folder / form for form in forms if (folder / form).exists()), folder / name)
    except OSError:  # such as a name that is too long; reading it then reports the damage
        return folder / name


async def _each_line(table: Table, function: Callable[[Table, int], None], request: LoadRequest) -> None:
    """Call a function for each line's index on the disk's thread; a line that it refuses is damaged."""
    lines = [index for index, line in enumerate(table.lines) if line.strip()]
    await each(lines, partial(function, table), request.damage, request.disk, at_a_time=ROWS_AT_A_TIME)


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason})") from None
