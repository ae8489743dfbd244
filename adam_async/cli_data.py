"""Loading data on behalf of a user: where their cache is, and what ADAM_DATA_DIR says."""

from collections.abc import Mapping
from pathlib import Path

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.datasets import load
from adam_async.ports import Disk, fetch_url


async def load_data(source: str, disk: Disk, environment: Mapping[str, str]) -> Dataset:
    """Load a data set as `data_server.datasets.load` does, with downloads kept in the user's cache.

    Raises:
        DataError: The source is missing or damaged.
    """
    return await load(
        source,
        disk,
        fetch=fetch_url,
        data_dir=data_folder(environment),
        cache_dir=cache_folder(environment),
    )


def data_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder that ADAM_DATA_DIR names, if it does."""
    folder = environment.get("ADAM_DATA_DIR")
    return Path(folder) if folder else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where downloaded data are kept: the user's cache, by the usual rules."""
    root = environment.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path(environment.get("HOME", ".")) / ".cache") / "adam-async" / "mnist"
