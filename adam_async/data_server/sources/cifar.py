"""Pure: CIFAR-10 in its binary version, from the bytes of the archive to a data set.

The archive is a gzipped tar of five training batches and one test batch; a batch is records of one label
byte and 3 x 32 x 32 pixels. Its other version holds pickles and is not read. Nothing is unpacked to disk:
this reader goes through the tar header by header, and takes plain files with known names only.
"""

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources.downloads import RemoteFile, RemoteSet
from adam_async.data_server.sources.idx import gunzip
from adam_async.errors import DataError

ARCHIVE = "cifar-10-binary.tar.gz"

CIFAR10 = RemoteSet(
    name="CIFAR-10",
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    files=(RemoteFile(name=ARCHIVE, checksum="md5:c32a1d4ab5d03f1284b67883e8d87530", limit_bytes=256 << 20),),
)
"""The archive of 162 MiB, with the checksum that its publisher gives."""

CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
BATCH_RECORDS = 10_000

TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
TEST = "cifar-10-batches-bin/test_batch.bin"

BLOCK = 512
"""Size of a tar's blocks, in bytes: a header before each member, whose data fill whole blocks."""

MAX_MEMBERS = 64
"""Maximum number of members of the archive, which has nine."""


def parse_cifar(data: bytes, origin: str, *, source: str) -> Dataset:
    """Return the data set in the archive.

    Raises:
        DataError: The archive is damaged, or a batch is missing, twice there, or not made of records.
    """
    batches = {name: _batch(member, f"{origin}:{name}") for name, member in _members(data, origin).items()}
    missing = [name for name in (*TRAIN, TEST) if name not in batches]
    if missing:
        raise DataError(f"{origin} lacks {', '.join(missing)}; is it {ARCHIVE}?")
    train = np.concatenate([batches[name] for name in TRAIN])
    test = batches[TEST]
    return make_dataset(
        name="cifar-10",
        source=source,
        train=(train[:, 1:].reshape(-1, *SHAPE), train[:, 0]),
        test=(test[:, 1:].reshape(-1, *SHAPE), test[:, 0]),
        origins=(f"{origin}:images", f"{origin}:labels", f"{origin}:test images", f"{origin}:test labels"),
        class_names=CLASS_NAMES,
    )


def _members(data: bytes, origin: str) -> dict[str, memoryview]:
    """Return the batches of the tar by name, as views of it."""
    content = memoryview(gunzip(data, origin))
    found: dict[str, memoryview] = {}
    at = 0
    for _ in range(MAX_MEMBERS):
        header = bytes(content[at : at + BLOCK])
        if header == bytes(BLOCK):
            return found
        name, size = _header(header, f"{origin}, at byte {at} of the tar")
        at += BLOCK
        if size > len(content) - at:
            raise DataError(f"{origin} ends inside {name!r}, after {len(content) - at} of {size} bytes")
        # Type 0 or a zero byte is a plain file; links and folders have no data that could be read.
        if name in (*TRAIN, TEST) and header[156:157] in (b"0", b"\0"):
            if name in found:
                raise DataError(f"{origin} holds {name} twice")
            found[name] = content[at : at + size]
        at += -(-size // BLOCK) * BLOCK
    raise DataError(f"{origin} has more than {MAX_MEMBERS} members, expected the nine of {ARCHIVE}")


def _header(header: bytes, where: str) -> tuple[str, int]:
    """Return the name and size of the member behind a header."""
    if len(header) < BLOCK:
        raise DataError(f"{where}: {len(header)} bytes where a header or the end should be; it was cut short")
    # The checksum counts its own eight bytes as blanks.
    expected = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    if _octal(header[148:156]) != expected:
        raise DataError(f"{where}: no tar header; the file is damaged or is no tar")
    size = _octal(header[124:136])
    if size is None:
        raise DataError(f"{where}: the member's size is {header[124:136]!r}, expected octal digits")
    return header[:100].rstrip(b"\0").decode("ascii", "replace"), size


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else None


def _batch(member: memoryview, origin: str) -> NDArray[np.uint8]:
    """Return the records of a batch: (records, 1 + pixels)."""
    records, rest = divmod(len(member), RECORD_BYTES)
    if rest or not 0 < records <= BATCH_RECORDS:
        raise DataError(
            f"{origin} holds {len(member)} bytes, expected 1 to {BATCH_RECORDS} records of {RECORD_BYTES}"
        )
    batch = np.frombuffer(member, np.uint8).reshape(records, RECORD_BYTES)
    wrong = np.flatnonzero(batch[:, 0] >= len(CLASS_NAMES))
    if len(wrong):
        raise DataError(
            f"{origin}: record {int(wrong[0])} has the label {int(batch[wrong[0], 0])}, "
            f"expected 0 to {len(CLASS_NAMES) - 1}"
        )
    return batch
