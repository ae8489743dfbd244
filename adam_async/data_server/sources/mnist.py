"""MNIST and Fashion-MNIST: their four files, what they must contain, and where they are published."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources.downloads import Patience, RemoteFile, RemoteSet, download
from adam_async.data_server.sources.idx import parse_idx
from adam_async.runtime.disk import Disk, Fetch

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

STEMS = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
"""File names without ``.gz``, in the order in which a data set is put together."""

SHA256: Mapping[str, str] = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)

FASHION = RemoteSet(
    name="Fashion-MNIST",
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    files=tuple(
        RemoteFile(name=f"{stem}.gz", checksum=f"md5:{md5}", limit_bytes=32 << 20)
        for stem, md5 in (
            (TEST_LABELS, "bb300cfdad3c16e7a12a480ee83cd310"),
            (TEST_IMAGES, "bef4ecab320f06d8554ea6380940ec79"),
            (TRAIN_LABELS, "25c81989df183df01b3e8a0aad5dffbe"),
            (TRAIN_IMAGES, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        )
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

FILE_LIMIT_BYTES = 16 << 20
"""No file of MNIST is larger than 10 MB compressed."""


def mnist(mirrors: tuple[str, ...] = MIRRORS, checksums: Mapping[str, str] | None = None) -> RemoteSet:
    """MNIST, checked by its content."""
    known = SHA256 if checksums is None else checksums
    return RemoteSet(
        name="MNIST",
        mirrors=mirrors,
        files=tuple(
            RemoteFile(
                name=f"{stem}.gz",
                checksum=f"sha256:{known[stem]}",
                of_content=True,
                limit_bytes=FILE_LIMIT_BYTES,
            )
            for stem in (TEST_LABELS, TEST_IMAGES, TRAIN_LABELS, TRAIN_IMAGES)
        ),
    )


async def download_mnist(
    folder: Path,
    *,
    disk: Disk,
    fetch: Fetch,
    mirrors: tuple[str, ...] = MIRRORS,
    checksums: Mapping[str, str] | None = None,
    connect_timeout_s: float = 5.0,
    transfer_timeout_s: float = 120.0,
) -> str:
    """Fetch what is missing of MNIST into `folder`, checked, and return the mirror that served last.

    Args:
        folder: Where the files are kept; what came of one that broke off is continued.
        disk: Reads and writes them.
        fetch: The download port.
        mirrors: Base addresses, tried in turn.
        checksums: SHA-256 of each file's content; by default those of `SHA256`.
        connect_timeout_s: How long, for all mirrors together, the first bytes may take.
        transfer_timeout_s: How long each file may take.

    Raises:
        DataError: No mirror answered in time, or each sent something else; says what each mirror did.
        OSError: The folder cannot be read or written.
    """
    patience = Patience(
        connect_s=connect_timeout_s, stall_s=min(30.0, transfer_timeout_s), file_s=transfer_timeout_s
    )
    return await download(mnist(mirrors, checksums), folder, disk=disk, fetch=fetch, patience=patience)


def parse_four(
    contents: Sequence[bytes],
    origins: Sequence[str],
    *,
    name: str,
    source: str,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Return the data set in four files of MNIST's format.

    Args:
        contents: The files, gzipped or not, in the order of `STEMS`.
        origins: What to call each in an error, usually its path.
        name: Short name of the data set.
        source: Sentence for the report.
        class_names: What each class is called, if that is known.

    Raises:
        DataError: One is damaged or of the wrong kind, or they do not belong together.
    """
    train_images, train_labels, test_images, test_labels = (
        parse_idx(content, origin, axes=axes)
        for content, origin, axes in zip(contents, origins, (3, 1, 3, 1), strict=True)
    )
    return make_dataset(
        name=name,
        source=source,
        train=(train_images, train_labels),
        test=(test_images, test_labels),
        origins=(origins[0], origins[1], origins[2], origins[3]),
        class_names=class_names,
    )
