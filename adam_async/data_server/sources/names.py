"""The values of `--data`: names of data sets, functions to import, files and folders."""

import difflib
from pathlib import Path

from adam_async.errors import DataError

NAMES = ("auto", "mnist", "digits", "synthetic", "fashion-mnist", "cifar-10")
"""Names of data sets; `synthetic:N` is a name too."""


def is_import_path(source: str) -> bool:
    """Return whether a source is a function to import, ``package.module:function``, and not a file."""
    module, _, name = source.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name)) and not Path(source).exists()


def missing(source: str) -> DataError:
    """Return the error of a source that is no name, file or folder."""
    near = difflib.get_close_matches(source, NAMES, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return DataError(
        f"{source} does not exist{meant}; name a folder with a data set, an .npz, .parquet, .tar or .csv "
        f"file, or one of {', '.join(NAMES)}"
    )


def address_error(source: str) -> DataError:
    """Return the error of a source that is an address."""
    return DataError(
        f"{source} is an address, not a name, a folder or a file; only train takes addresses of data "
        "servers, tcp://HOST:PORT"
    )
