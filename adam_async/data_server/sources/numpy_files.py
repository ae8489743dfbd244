"""Data sets in NumPy's files: ``.npz`` archives with the keys of Keras, or four ``.npy`` files in a folder.

The images of ``.npy`` files stay on disk, mapped into memory: a data set may be larger than the memory of the
machine. The files must not change while the data set is in use.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, StoredImages, as_images, make_dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import check_kind, read_piece
from adam_async.data_server.sources.kinds import KEYS, Files
from adam_async.data_server.sources.samples import LoadRequest
from adam_async.data_server.sources.splits import rank_of_image, resolve
from adam_async.errors import DataError, failing_as
from adam_async.run.memory_sizes import CacheLimits

ZIP, ARRAY = (b"PK\x03\x04", b"PK\x05\x06"), b"\x93NUMPY"
"""First bytes of archives, and of single arrays."""

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Header readers by version of the format; later versions have named fields, which images lack."""


def parse_npz(
    data: bytes, origin: str, *, name: str, source: str, room_bytes: int = limits.MAX_TOTAL_BYTES
) -> Dataset:
    """Return the data set in an archive with arrays x_train, y_train, x_test and y_test.

    Without the last two arrays, about one image in five of each class is a test image. Pickled objects are
    never loaded.

    Args:
        room_bytes: Memory for all four arrays, compared with their headers before unpacking.

    Raises:
        DataError: This is no such archive, an array is missing, an array has a wrong dtype, shape or count,
            or the arrays are too large.
    """
    if data.startswith(ARRAY):
        raise DataError(f"{origin} holds one array, expected an .npz archive with {', '.join(KEYS)}")
    if not data.startswith(ZIP):
        raise DataError(
            f"{origin} is not an .npz archive: it begins with {data[:8]!r}; "
            f"write one with numpy.savez, with {', '.join(KEYS)}"
        )
    try:
        archive = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{origin} is not an .npz archive, or damaged ({error})") from None
    with archive:
        keys = KEYS if set(KEYS[2:]) & set(archive.files) else KEYS[:2]
        missing = [key for key in keys if key not in archive.files]
        if missing:
            raise DataError(
                f"{origin} has no array {', '.join(missing)}; it has {', '.join(archive.files) or 'none'}"
            )
        total = sum(_size(archive, key, origin) for key in keys)
        limits.check_total(total, origin, room_bytes)
        arrays = [_array(archive, key, origin) for key in keys]
    if keys is not KEYS:
        arrays, source = _with_test_part(arrays, source)
    return make_dataset(
        name=name,
        source=source,
        train=(arrays[0], arrays[1]),
        test=(arrays[2], arrays[3]),
        origins=(f"{origin}:x_train", f"{origin}:y_train", f"{origin}:x_test", f"{origin}:y_test"),
    )


def _with_test_part(arrays: list[NDArray[Any]], source: str) -> tuple[list[NDArray[Any]], str]:
    """Split images and labels by image number; do nothing if their counts differ."""
    images, labels = arrays
    if labels.ndim not in (1, 2) or not images.ndim or len(images) != len(labels):
        return [images, labels, images, labels], source
    of_class = [str(label) for label in labels.reshape(len(labels), -1)[:, 0].tolist()]
    splits = resolve(of_class, [rank_of_image(str(number)) for number in range(len(labels))])
    tests = np.array([split == "test" for split in splits], np.bool_)
    source += f"; {np.count_nonzero(tests)} of its {len(labels)} images test, because it has no test part"
    return [images[~tests], labels[~tests], images[tests], labels[tests]], source


def _array(archive: Any, key: str, origin: str) -> NDArray[Any]:
    with _refusing(key, origin):
        array: NDArray[Any] = archive[key]
    return array


@contextmanager
def _refusing(key: str, origin: str) -> Iterator[None]:
    """Name the array that numpy or zipfile cannot read."""
    try:
        yield
    except ValueError as error:
        raise DataError(
            f"{origin}:{key} cannot be read ({error}); save plain arrays of uint8 images and integer labels"
        ) from None
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{origin}:{key} is damaged ({error}); fetch the file again") from None


def _size(archive: Any, key: str, origin: str) -> int:
    """Return the size of an array in bytes, from its header, before allocating memory for it."""
    with _refusing(key, origin):
        members: zipfile.ZipFile = archive.zip
        name = f"{key}.npy" if f"{key}.npy" in members.namelist() else key
        with members.open(name) as file:
            version = np.lib.format.read_magic(file)
            if version not in _READ_HEADER:
                raise ValueError(f"version {version[0]}.{version[1]} of the format")
            shape, _, dtype = _READ_HEADER[version](file)
    size, there = prod(shape) * dtype.itemsize, members.getinfo(name).file_size
    if size > there:
        raise DataError(
            f"{origin}:{key} has a header of {dtype} {shape}, which are {size} bytes, but it has {there}; "
            "it was cut short or is damaged, fetch it again"
        )
    return size


MAX_FILE_BYTES = 1 << 42
"""Maximum size of a mapped file, which is read on demand, in bytes."""


async def load_npy(request: LoadRequest, files: Files) -> Dataset:
    """Load x_train.npy, y_train.npy, x_test.npy and y_test.npy. Pickled objects are never loaded.

    Training images are read one by one if they exceed the cache, or if the cache has a given size: pages of a
    mapped file count as memory of the process.

    Raises:
        DataError: A file is damaged, or an array has a wrong dtype, shape or count.
    """
    cache = request.cache
    paths = [path for path, _ in files]
    origins = (str(paths[0]), str(paths[1]), str(paths[2]), str(paths[3]))

    def read() -> Dataset:
        arrays = [_map(path) for path in paths]
        return make_dataset(
            name=request.name,
            source=request.source,
            train=(_train(arrays[0], np.asarray(arrays[1]), paths[0], cache), arrays[1]),
            test=(arrays[2], arrays[3]),
            origins=origins,
        )

    return await request.disk.run(read)


def _train(
    mapped: np.memmap[Any, Any], labels: NDArray[Any], path: Path, cache: CacheLimits | None
) -> NDArray[Any] | StoredImages:
    """Return the training images: mapped, or read one by one."""
    if cache is None or not (cache.asked or mapped.nbytes > cache.size_bytes):
        return mapped
    plain = mapped.dtype == np.uint8 and mapped.flags.c_contiguous and mapped.size
    if not plain or len(mapped) != len(labels):
        return mapped
    size, shape, offset = mapped[0].nbytes, mapped.shape[1:], mapped.offset
    _, channels, rows, columns = as_images(mapped[:1], str(path)).shape

    def read(number: int) -> NDArray[np.uint8]:
        """Read one image, shape (C, H, W), from the file."""
        with failing_as(DataError, f"{path}: image {number} cannot be read"):
            data = read_piece(path, offset + number * size, size)
        if len(data) < size:
            raise DataError(f"{path} has become shorter: files must not change in use")
        image: NDArray[np.uint8] = as_images(np.frombuffer(data, np.uint8).reshape(1, *shape), str(path))[0]
        return image

    return StoredImages(
        read, image_shape=(channels, rows, columns), labels=labels.reshape(-1), origin=str(path)
    )


def _map(path: Path) -> np.memmap[Any, Any]:
    check_kind(path, MAX_FILE_BYTES)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:
        raise DataError(
            f"{path} is not a .npy file, or damaged ({error}); save plain arrays of uint8 images and "
            "integer labels with numpy.save"
        ) from None
