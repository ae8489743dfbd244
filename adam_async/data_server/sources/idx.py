"""Pure: the IDX format of the MNIST files, from bytes to an array.

An IDX file is: two zero bytes, a type byte, the number of axes, each axis's length as a big-endian 32-bit
integer, then the values in C order. Files may be gzipped, under any name.
"""

import gzip
import io
import struct
import zlib
from math import prod

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.sources import limits
from adam_async.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
LIMIT_BYTES = 1 << 30
"""Maximum size of unpacked content, in bytes: a small damaged file must not take all memory."""

TYPE_NAMES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def gunzip(
    data: bytes, origin: str, room_bytes: int = limits.MAX_TOTAL_BYTES, *, limit: int | None = None
) -> bytes:
    """Return the content of a gzipped file, or `data` itself if it is not gzipped.

    Raises:
        DataError: The compressed data are damaged, cut short, or hold more than the limit (1 GiB by default)
            or the room.
    """
    limit = LIMIT_BYTES if limit is None else limit
    if not data.startswith(GZIP_MAGIC):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:  # also reads files of several members
            # Reading one byte past the limit distinguishes content at the limit from content above it.
            content = file.read(min(limit, room_bytes) + 1)
    except EOFError:
        raise DataError(
            f"{origin} ends in the middle of its gzip data ({len(data)} bytes found); "
            "it was cut short, fetch it again"
        ) from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{origin} is a damaged gzip file ({error}); delete it and fetch it again") from None
    limits.check_total(len(content), origin, room_bytes)
    if len(content) > limit:
        raise DataError(f"{origin} unpacks to more than {limit} bytes; cut it into smaller files")
    return content


def parse_idx(data: bytes, origin: str, *, axes: int, room_bytes: int = LIMIT_BYTES) -> NDArray[np.uint8]:
    """Return the array in an IDX file, gzipped or not.

    Args:
        axes: Required number of axes: 3 for images, 1 for labels.

    Raises:
        DataError: The file is not IDX, has another type or number of axes, or its number of values differs
            from its header.
    """
    content = gunzip(data, origin, room_bytes)
    kind = "images" if axes == 3 else "labels"
    expected = f"expected the magic number 0x{0x0800 + axes:08x} of uint8 {kind}"
    if len(content) < 4:
        raise DataError(f"{origin} holds {len(content)} bytes, too few for an IDX header; fetch it again")
    zero, type_code, found_axes = struct.unpack_from(">HBB", content)
    magic = f"0x{content[:4].hex()}"
    if zero != 0 or type_code not in TYPE_NAMES:
        raise DataError(f"{origin} is not an IDX file: it begins with {magic}, {expected}")
    if TYPE_NAMES[type_code] != "uint8":
        raise DataError(f"{origin} holds {TYPE_NAMES[type_code]} values (magic number {magic}), {expected}")
    if found_axes != axes:
        raise DataError(
            f"{origin} has {found_axes} axes (magic number {magic}), {expected}; "
            "have an image file and a label file been swapped?"
        )
    start = 4 + 4 * axes
    if len(content) < start:
        raise DataError(f"{origin} ends inside its header, after {len(content)} of {start} bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    size = prod(shape)
    if len(content) - start != size:
        short = "fewer" if len(content) - start < size else "more"
        raise DataError(
            f"{origin} holds {len(content) - start} values, {short} than the {size} of its header "
            f"{shape}; the file is damaged, fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
