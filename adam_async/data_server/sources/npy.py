"""Four ``.npy`` files in a folder: images and labels, to train and to test with.

The images stay on disk, mapped into memory: a data set may be larger than the memory of the machine. The
files must not be written while it is in use.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.npz import KEYS
from adam_async.data_server.sources.files import check_kind
from adam_async.data_server.sources.samples import name_of
from adam_async.errors import DataError
from adam_async.ports import Disk

MAX_FILE_BYTES = 1 << 42
"""Largest file that is mapped; its bytes are read only as they are used."""


async def load_npy(folder: Path, names: list[str], disk: Disk, *, source: str) -> Dataset:
    """Load x_train.npy, y_train.npy, x_test.npy and y_test.npy. Pickled objects are never loaded.

    Args:
        folder: The folder.
        names: The names in it.
        disk: Reads.
        source: Sentence for the report.

    Raises:
        DataError: A file is missing or damaged, or an array has a wrong dtype, shape or count.
    """
    missing = [f"{key}.npy" for key in KEYS if f"{key}.npy" not in names]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}; add what is missing")
    paths = [folder / f"{key}.npy" for key in KEYS]
    origins = (str(paths[0]), str(paths[1]), str(paths[2]), str(paths[3]))

    def read() -> Dataset:
        arrays = [_map(path) for path in paths]
        return make_dataset(
            name=name_of(folder),
            source=source,
            train=(arrays[0], arrays[1]),
            test=(arrays[2], arrays[3]),
            origins=origins,
        )

    return await disk.run(read)


def _map(path: Path) -> NDArray[Any]:
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
