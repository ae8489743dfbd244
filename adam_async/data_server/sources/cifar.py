"""Pure: CIFAR-10 in its binary version, from the bytes of the archive to a data set.

The archive is a gzipped tar of five training batches and one test batch; a batch is records of one label
byte and 3 x 32 x 32 pixels. The other version has pickles and is not read. Nothing is unpacked to disk, and
only plain files with known names are read.
"""

import io

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.damage import Damage
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources.downloads import RemoteFile, RemoteSet
from adam_async.data_server.sources.idx import gunzip
from adam_async.data_server.sources.shards import tar_members
from adam_async.errors import DataError

ARCHIVE = "cifar-10-binary.tar.gz"

CIFAR10 = RemoteSet(
    name="CIFAR-10",
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    files=(RemoteFile(name=ARCHIVE, checksum="md5:c32a1d4ab5d03f1284b67883e8d87530", limit_bytes=256 << 20),),
)
"""The archive of 162 MiB, with the checksum from its publisher."""

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
BATCH_RECORDS = 10_000

TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
TEST = "cifar-10-batches-bin/test_batch.bin"


def parse_cifar(data: bytes, origin: str, *, source: str) -> Dataset:
    """Return the data set in the archive.

    Raises:
        DataError: The archive is damaged, or a batch is missing, duplicated, or not made of records.
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
    """Return the batches of the tar by name, as views of it. Members that are no files are left out."""
    content = gunzip(data, origin)
    found: dict[str, memoryview] = {}
    for name, (at, size) in tar_members(io.BytesIO(content), len(content), origin, Damage("skip")):
        if name in (*TRAIN, TEST):
            if name in found:
                raise DataError(f"{origin} holds {name} twice")
            found[name] = memoryview(content)[at : at + size]
    return found


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
