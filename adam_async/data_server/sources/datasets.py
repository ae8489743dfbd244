"""Sources of training data: a folder, a file, MNIST, or the digits inside this package.

    auto     `data_dir`, else MNIST from the cache, else MNIST downloaded into it, else the digits
    mnist    the same without the digits
    digits   1,797 images of 8x8 that ship with the package; needs no network
    fashion-mnist, cifar-10      from the cache, or downloaded into it
    synthetic, synthetic:N       N drawn images, by default 2,000, that a small network learns
    PATH     a folder with the four MNIST files (``.gz`` or not) or one ``.npz``, or the ``.npz`` file;
             x_train.npy, y_train.npy, x_test.npy, y_test.npy; Parquet files, tar shards or CSV tables, also
             below ``train`` and ``test``; or folders of images by class. The files of
             `adam_async/data_server/sources/` describe each source

A damaged source that the user named is an error; if the caller allows it, single damaged images are left out.
`auto` skips a damaged cache or an unreachable network, and logs the reason.

Folders of images have one folder per class, either below ``train`` and ``test`` or without these two. The
reader skips files and folders whose names begin with a dot, files outside class folders and the files of
desktops, such as ``Thumbs.db``.

    DIR/train/CLASS/*.png, DIR/test/CLASS/*.png     or other usual names of sets, such as Training and valid
    DIR/CLASS/*.png                                 one image in five is a test image, by a hash of CLASS/NAME

After their download these data sets are in the user's cache:

    fashion-mnist   70,000 grey images of clothes, 28x28, in 10 classes
    cifar-10        60,000 colour images, 32x32, in 10 classes

Each data set has a separate folder in the cache. `load_dataset` loads MNIST itself, from more sources.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from adam_async.data_server.class_names import class_name, number_folders
from adam_async.data_server.dataset import Damage, Dataset, Policy
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import is_clutter, read_file
from adam_async.data_server.sources.kinds import (
    Files,
    Kind,
    find_files,
    folders_in,
    mnist_files,
    reading_source,
)
from adam_async.data_server.sources.numpy_files import load_npy, parse_npz
from adam_async.data_server.sources.parquet import load_parquet
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.published_sets import (
    MNIST,
    PUBLISHED,
    Downloader,
    Published,
    RemoteSet,
    parse_four,
)
from adam_async.data_server.sources.samples import (
    LoadRequest,
    Samples,
    StoredSample,
    assemble,
    each,
    stored_image,
)
from adam_async.data_server.sources.shards import load_shards
from adam_async.data_server.sources.splits import Split, rank_of_image
from adam_async.data_server.sources.synthetic import parse_synthetic, synthetic
from adam_async.data_server.sources.tables import load_tables
from adam_async.errors import DataError
from adam_async.run.image_size import Size
from adam_async.run.memory_sizes import CacheLimits
from adam_async.runtime.disk import Disk


async def load_image_folder(request: LoadRequest, roots: Files) -> Dataset:
    """Load a folder of images by class.

    Args:
        roots: The folders with class folders, that of the training images first.

    Raises:
        DataError: No images, or an error of `assemble`.
    """
    require_pillow()
    classes = {root: await request.disk.run(folders_in, root) for root, _ in roots}
    numbers = number_folders(map(class_name, classes[roots[0][0]]))
    samples = Samples(request)
    for root, split in roots:
        for label in classes[root]:
            await _add_class(samples, root / label, label, split)
    return await assemble(samples, cache=request.cache, numbers=numbers, class_names=tuple(numbers))


async def _add_class(samples: Samples, folder: Path, label: str, split: Split | None) -> None:
    request, found = samples.request, list[StoredSample]()

    def look(name: str) -> None:
        """Find one image, whose file must be an ordinary one."""
        chosen = split or rank_of_image(f"{label}/{name}")
        found.append(stored_image(folder / name, class_name(label), chosen))

    names = [name for name in await request.disk.names(folder) if not is_clutter(name)]
    await each(names, look, request.damage, request.disk)
    for sample in found:
        samples.add(sample)


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
        cache_dir: Folder that has one folder per data set; without it no data set can be loaded.

    Raises:
        DataError: The data set is neither in the cache nor downloadable; the error lists the attempts.
    """
    known = published[source]
    if cache_dir is None:
        raise DataError(f"no {known.files.name}: there is no cache folder to keep it in")
    folder = cache_dir / source
    cure = f"put {', '.join(known.names)} into {folder}"
    return await _cached(known.files, folder, partial(_read, known, folder, disk), downloader, cure)


async def _cached(
    remote: RemoteSet,
    folder: Path,
    read: Callable[[str], Awaitable[Dataset]],
    downloader: Downloader | None,
    cure: str,
) -> Dataset:
    """Load a data set from its folder in the cache, or download it there first.

    Args:
        read: Reads the data set in the folder, with the sentence for the report.
        cure: Remedy in the error, if neither is possible.
    """
    title = remote.name
    try:
        return await read(f"{title}, from the cache in {folder}")
    except FileNotFoundError:
        why = f"{folder} does not hold it yet"
    except (DataError, OSError) as error:
        why = f"the cache is unusable ({error})"
    if downloader is None:
        raise DataError(f"no {title}: {why}, and downloading is switched off; {cure}")
    try:
        mirror = await downloader.download(remote, folder)
        return await read(f"{title}, downloaded from {mirror} into {folder}")
    except (DataError, OSError) as error:
        raise DataError(f"no {title}: {why}, and the download failed ({error}); {cure}") from None


async def _read(known: Published, folder: Path, disk: Disk, source: str) -> Dataset:
    paths = [folder / name for name in known.names]
    contents = [await disk.read_bytes(path) for path in paths]
    return await disk.run(known.parse, contents, [str(path) for path in paths], source)


logger = logging.getLogger(__name__)

DIGITS_FILE = Path(__file__).with_name("digits.npz")

NO_MNIST = (
    "the digits inside the package, because there is no MNIST here (ADAM_DATA_DIR may name a folder with its "
    "four files; --verbose tells the places that were tried)"
)


async def load_dataset(
    source: str,
    disk: Disk,
    *,
    downloader: Downloader | None = None,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    damaged: Policy = "error",
    cache: CacheLimits | None = None,
    room_bytes: int = limits.MAX_TOTAL_BYTES,
    size: Size | None = None,
) -> Dataset:
    """Load a data set. Cancelling leaves no half-written file.

    Args:
        source: A name as above, a folder or a file.
        downloader: Downloads missing files; None forbids downloads.
        data_dir: Folder of ``ADAM_DATA_DIR``, for ``auto`` and ``mnist``.
        cache_dir: Folder of downloaded data sets; None forbids downloads and ignores earlier ones.
        damaged: Policy for damaged images: ``error``, or ``skip`` to leave out up to 5 % of all, which
            `Dataset.damaged` then lists.
        cache: Memory for training images: images of folders, shards and .npy files that do not fit are read
            on demand. Without a cache all images are loaded.
        room_bytes: Memory for a source that decodes as a whole; see `memory_sizes.room_for_whole`. The loader
            refuses a larger source before decoding.
        size: Columns and rows to which encoded images are scaled and cropped; None lets the images decide.
            Arrays keep their size.

    Raises:
        DataError: The source is missing or damaged; the error has the file, its content, the expected content
            and a remedy.
    """
    if source == "digits":
        return await _digits(disk, "the digits inside the package, as asked for")
    if (images := parse_synthetic(source)) is not None:
        return await disk.run(synthetic, images)
    if source in PUBLISHED:
        return await load_published(source, disk, downloader=downloader, cache_dir=cache_dir)
    known = source in {"auto", "mnist"}
    path = data_dir if known else Path(source)
    if path is not None:
        reason = f"{path}, because ADAM_DATA_DIR names it" if known else f"{source}, as asked for"
        if known and await disk.run(_is_absent, path):
            raise DataError(
                f"ADAM_DATA_DIR names {path}, which does not exist; name a folder or file with a data set, "
                "or unset the variable"
            )
        request = LoadRequest(
            path=path,
            disk=disk,
            source=reason,
            damage=Damage(damaged),
            cache=cache,
            room_bytes=room_bytes,
            size=size,
        )
        return replace(await _from_path(request), cache=cache)
    try:
        return await _mnist(disk, downloader, cache_dir)
    except DataError as error:
        if source == "mnist":
            raise
        logger.info("%s", error)
    return await _digits(disk, NO_MNIST)


async def _mnist(disk: Disk, downloader: Downloader | None, cache_dir: Path | None) -> Dataset:
    """Load MNIST from the cache, or download it there first. Raises DataError: both failed."""
    cure = "set ADAM_DATA_DIR to a folder with its four files, or use digits"
    if cache_dir is None:
        raise DataError(f"no MNIST: there is no cache folder to keep it in; {cure}")
    return await _cached(MNIST, cache_dir, partial(_from_cache, cache_dir, disk), downloader, cure)


def _is_absent(path: Path) -> bool:
    """Return whether a path leads to no file; False if the system refuses the answer."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


async def _digits(disk: Disk, source: str) -> Dataset:
    data = await disk.read_bytes(DIGITS_FILE)
    return parse_npz(data, str(DIGITS_FILE), name="digits", source=source)


async def _from_cache(folder: Path, disk: Disk, source: str) -> Dataset:
    """Load MNIST from the folder of the cache."""
    names = await disk.names(folder)
    if not names:  # a download that failed has made the folder
        raise FileNotFoundError(folder)
    request = LoadRequest(path=folder, disk=disk, source=source, damage=Damage("error"))
    return await _from_mnist(request, mnist_files(folder, names))


async def _from_path(request: LoadRequest) -> Dataset:
    """Load from a folder or a file that the user named; every failure is a DataError."""
    with reading_source(request.path):
        found = await request.disk.run(find_files, request.path)
        request = replace(request, source=f"{request.source}{found.notes}")
        return await LOADERS[found.kind](request, found.files)


async def _from_archive(request: LoadRequest, files: Files) -> Dataset:
    room_bytes, ((path, _),) = request.room_bytes, files
    data = await read_file(path, request.disk, room_bytes=room_bytes)

    def decode() -> Dataset:
        try:
            return parse_npz(data, str(path), name=path.stem, source=request.source, room_bytes=room_bytes)
        except DataError:
            raise
        except Exception as error:  # a damaged archive can make zipfile and numpy raise almost anything
            raise DataError(f"{path} is damaged ({error!r}); fetch it again") from None

    return await request.disk.run(decode)


async def _from_mnist(request: LoadRequest, files: Files) -> Dataset:
    """Load the four MNIST files of a folder."""
    paths = [path for path, _ in files]
    contents = [await read_file(path, request.disk, room_bytes=request.room_bytes) for path in paths]
    parse = partial(parse_four, name="mnist", source=request.source, room_bytes=request.room_bytes)
    return await request.disk.run(parse, contents, [str(path) for path in paths])


LOADERS: dict[Kind, Callable[[LoadRequest, Files], Awaitable[Dataset]]] = {
    "idx": _from_mnist,
    "folders": load_image_folder,
    ".npz": _from_archive,
    ".npy": load_npy,
    ".parquet": load_parquet,
    ".tar": load_shards,
    ".csv": load_tables,
}
"""Loaders of a source's files, by kind."""
