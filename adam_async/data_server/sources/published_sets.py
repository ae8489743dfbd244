"""Published data sets: the files of MNIST, Fashion-MNIST and CIFAR-10, their checksums, mirrors and images.

The archive of CIFAR-10 in its binary version is a gzipped tar of five training batches and one test batch; a
batch is records of one label byte and 3 x 32 x 32 pixels. The other version has pickles and is not read.
Nothing is unpacked to disk, and only plain files with known names are read.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.damage import Damage
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources.downloads import RemoteFile, RemoteSet
from adam_async.data_server.sources.idx import LIMIT_BYTES, gunzip, parse_idx
from adam_async.data_server.sources.kinds import STEMS, TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from adam_async.data_server.sources.shards import tar_members
from adam_async.errors import DataError

DOWNLOADED = (TEST_LABELS, TEST_IMAGES, TRAIN_LABELS, TRAIN_IMAGES)
"""File names without ``.gz``, in the order of their download, a small file first."""


def _files(*checksums: str) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(name=f"{stem}.gz", checksum=checksum, limit_bytes=32 << 20)
        for stem, checksum in zip(DOWNLOADED, checksums, strict=True)
    )


MNIST = RemoteSet(
    name="MNIST",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    files=_files(
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    file_s=120.0,
)
"""Handwritten digits; both mirrors have the same files. The deadline is short, because `auto` then loads the
digits of this package."""

FASHION = RemoteSet(
    name="Fashion-MNIST",
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    files=_files(
        "md5:bb300cfdad3c16e7a12a480ee83cd310",
        "md5:bef4ecab320f06d8554ea6380940ec79",
        "md5:25c81989df183df01b3e8a0aad5dffbe",
        "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    ),
)
"""Clothes in the format of MNIST, with the checksums of the files that their publisher gives."""

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def parse_four(
    contents: Sequence[bytes],
    origins: Sequence[str],
    *,
    name: str,
    source: str,
    class_names: tuple[str, ...] = (),
    room_bytes: int = LIMIT_BYTES,
) -> Dataset:
    """Return the data set in four files of MNIST's format.

    Args:
        contents: The files, gzipped or not, in the order of `STEMS`.
        room_bytes: Memory for all images.

    Raises:
        DataError: A file is damaged or of the wrong kind, or the files do not belong together.
    """
    arrays: list[NDArray[np.uint8]] = []
    for content, origin, axes in zip(contents, origins, (3, 1, 3, 1), strict=True):
        arrays.append(parse_idx(content, origin, axes=axes, room_bytes=room_bytes))
        room_bytes -= arrays[-1].nbytes
    return make_dataset(
        name=name,
        source=source,
        train=(arrays[0], arrays[1]),
        test=(arrays[2], arrays[3]),
        origins=(origins[0], origins[1], origins[2], origins[3]),
        class_names=class_names,
    )


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


@dataclass(frozen=True, slots=True)
class Published:
    """A data set with a known name."""

    files: RemoteSet
    names: tuple[str, ...]
    """Names of the files, in the order of the arguments of `parse`."""
    parse: Callable[[Sequence[bytes], Sequence[str], str], Dataset]
    """Function from contents and names of the files, and the sentence for the report, to the data set."""


def _fashion(contents: Sequence[bytes], origins: Sequence[str], source: str) -> Dataset:
    return parse_four(contents, origins, name="fashion-mnist", source=source, class_names=FASHION_CLASSES)


def _cifar(contents: Sequence[bytes], origins: Sequence[str], source: str) -> Dataset:
    return parse_cifar(contents[0], origins[0], source=source)


PUBLISHED: Mapping[str, Published] = {
    "fashion-mnist": Published(FASHION, tuple(f"{stem}.gz" for stem in STEMS), _fashion),
    "cifar-10": Published(CIFAR10, (ARCHIVE,), _cifar),
}
