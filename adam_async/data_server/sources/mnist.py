"""MNIST and Fashion-MNIST: their four files, checksums and mirrors."""

from collections.abc import Sequence

from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.sources.downloads import RemoteFile, RemoteSet
from adam_async.data_server.sources.idx import parse_idx

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

STEMS = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
"""File names without ``.gz``, in the order in which a data set is put together."""

MNIST = RemoteSet(
    name="MNIST",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    files=tuple(
        RemoteFile(name=f"{stem}.gz", checksum=f"sha256:{sha256}", limit_bytes=16 << 20)
        for stem, sha256 in (
            (TEST_LABELS, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            (TEST_IMAGES, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (TRAIN_LABELS, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (TRAIN_IMAGES, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        )
    ),
    file_s=120.0,
)
"""Handwritten digits; both mirrors have the same files. The deadline is short: `auto` has the digits."""

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

    Raises:
        DataError: A file is damaged or of the wrong kind, or the files do not belong together.
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
