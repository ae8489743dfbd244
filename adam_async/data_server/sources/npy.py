"""Four ``.npy`` files in a folder: images and labels of the training set and the test set.

The images stay on disk, mapped into memory: a data set may be larger than the memory of the machine. The
files must not change while the data set is in use.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, StoredImages, as_images, make_dataset
from adam_async.data_server.sources.file_ranges import read_piece
from adam_async.data_server.sources.files import check_kind
from adam_async.data_server.sources.kinds import Files
from adam_async.data_server.sources.samples import LoadRequest
from adam_async.errors import DataError, failing_as
from adam_async.run.cache_size import CacheLimits

MAX_FILE_BYTES = 1 << 42
"""Maximum size of a mapped file, which is read on demand, in bytes."""


async def load_npy(request: LoadRequest, files: Files) -> Dataset:
    """Load x_train.npy, y_train.npy, x_test.npy and y_test.npy. Pickled objects are never loaded.

    Training images that are larger than the cache, or that come with a cache of a given size, are read one by
    one, because pages of a mapped file count as memory of the process.

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
