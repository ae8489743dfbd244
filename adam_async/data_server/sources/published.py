"""Data sets with known names, in the user's cache after their download.

    fashion-mnist   70,000 grey images of clothes, 28x28, in 10 classes
    cifar-10        60,000 colour images, 32x32, in 10 classes

Each data set has its own folder in the cache. `datasets.load` loads MNIST itself, from more sources.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources import cifar, mnist
from adam_async.data_server.sources.downloads import Downloader, RemoteSet
from adam_async.data_server.sources.kinds import STEMS
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk


@dataclass(frozen=True, slots=True)
class Published:
    """A data set with a known name."""

    files: RemoteSet
    names: tuple[str, ...]
    """Names of the files, in the order of the arguments of `parse`."""
    parse: Callable[[Sequence[bytes], Sequence[str], str], Dataset]
    """Function from contents and names of the files, and the sentence for the report, to the data set."""


def _fashion(contents: Sequence[bytes], origins: Sequence[str], source: str) -> Dataset:
    return mnist.parse_four(
        contents, origins, name="fashion-mnist", source=source, class_names=mnist.FASHION_CLASSES
    )


def _cifar(contents: Sequence[bytes], origins: Sequence[str], source: str) -> Dataset:
    return cifar.parse_cifar(contents[0], origins[0], source=source)


PUBLISHED: Mapping[str, Published] = {
    "fashion-mnist": Published(mnist.FASHION, tuple(f"{stem}.gz" for stem in STEMS), _fashion),
    "cifar-10": Published(cifar.CIFAR10, (cifar.ARCHIVE,), _cifar),
}


async def load_published(
    source: str,
    disk: Disk,
    *,
    downloader: Downloader | None,
    cache_dir: Path | None,
    published: Mapping[str, Published] = PUBLISHED,
) -> Dataset:
    """Load a data set from the cache, or download it there first. Cancelling leaves no half-written file.

    Args:
        downloader: Downloads missing files; None forbids downloads.
        cache_dir: Folder in which each data set has a folder; without it no data set can be loaded.

    Raises:
        DataError: The data set is not in the cache and cannot be downloaded; the error lists the attempts.
    """
    known = published[source]
    title = known.files.name
    if cache_dir is None:
        raise DataError(f"no {title}: there is no cache folder to keep it in")
    folder = cache_dir / source
    try:
        return await _read(known, folder, disk, f"{title}, from the cache in {folder}")
    except FileNotFoundError:
        why = f"{folder} does not hold it yet"
    except (DataError, OSError) as error:
        why = f"the cache is unusable ({error})"
    cure = f"put {', '.join(known.names)} into {folder}"
    if downloader is None:
        raise DataError(f"no {title}: {why}, and downloading is switched off; {cure}")
    try:
        mirror = await downloader.download(known.files, folder)
        return await _read(known, folder, disk, f"{title}, downloaded from {mirror} into {folder}")
    except (DataError, OSError) as error:
        raise DataError(f"no {title}: {why}, and the download failed ({error}); {cure}") from None


async def _read(known: Published, folder: Path, disk: Disk, source: str) -> Dataset:
    paths = [folder / name for name in known.names]
    contents = [await disk.read_bytes(path) for path in paths]
    return await disk.run(known.parse, contents, [str(path) for path in paths], source)
