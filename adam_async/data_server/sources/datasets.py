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

A damaged source that the user named is an error; single damaged images are left out if the caller allows it.
`auto` skips a damaged cache or an unreachable network, and logs the reason.
"""

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

from adam_async.data_server.damage import Damage, Policy
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.downloads import Downloader
from adam_async.data_server.sources.files import cure_of_archive, folders_in, is_image_name, read_file
from adam_async.data_server.sources.image_folder import SORT, load_image_folder
from adam_async.data_server.sources.mnist import MNIST, STEMS, parse_four
from adam_async.data_server.sources.names import missing
from adam_async.data_server.sources.npy import load_npy
from adam_async.data_server.sources.npz import KEYS, parse_npz
from adam_async.data_server.sources.parquet import load_parquet
from adam_async.data_server.sources.published import PUBLISHED, load_published
from adam_async.data_server.sources.samples import LoadRequest
from adam_async.data_server.sources.shards import COMPRESSED, load_shards
from adam_async.data_server.sources.splits import Split, sets_of_folders, split_files
from adam_async.data_server.sources.synthetic import parse_synthetic, synthetic
from adam_async.data_server.sources.tables import load_tables
from adam_async.errors import DataError
from adam_async.run.cache_size import CacheLimits
from adam_async.run.image_size import Size
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)

DIGITS_FILE = Path(__file__).with_name("digits.npz")

NO_MNIST = (
    "the digits inside the package, because there is no MNIST here (ADAM_DATA_DIR may name a folder with its "
    "four files; --verbose tells the places that were tried)"
)

LOADERS = {".parquet": load_parquet, ".tar": load_shards, ".csv": load_tables}
"""Loaders of one or more files, by kind."""

ENDINGS = {
    ".npz": (".npz",),
    ".npy": (".npy",),
    ".parquet": (".parquet",),
    ".tar": (".tar", *COMPRESSED),
    ".csv": (".csv",),
}
"""Endings of the names of files, by kind."""


async def load(
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
        cache_dir: Folder of downloaded data sets; None forbids downloads, and earlier ones are not read.
        damaged: Policy for damaged images: ``error``, or ``skip`` to leave out up to 5 % of all, which
            `Dataset.damaged` then lists.
        cache: Memory for training images: images of folders, shards and .npy files that do not fit are read
            on demand. Without a cache all images are loaded.
        room_bytes: Memory for a source that decodes as a whole; see `cache_size.room_for_whole`. The loader
            refuses a larger source before decoding.
        size: Columns and rows to which encoded images are scaled and cropped; None lets the images decide.
            Arrays keep their size.

    Raises:
        DataError: The source is missing or damaged; the error has the file, its content, the expected content
            and the remedy.
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
    passed_over: list[str] = []
    cached = await _from_cache(cache_dir, disk, passed_over)
    if cached is not None:
        return cached
    if downloader is None or cache_dir is None:
        passed_over.append("downloading is switched off")
    else:
        try:
            mirror = await downloader.download(MNIST, cache_dir)
            return await _from_mnist_folder(cache_dir, disk, f"downloaded from {mirror} into {cache_dir}")
        except (DataError, OSError) as error:
            passed_over.append(f"the download failed ({error})")
    why = ", and ".join(passed_over)
    if source == "mnist":
        raise DataError(f"no MNIST: {why}. Set ADAM_DATA_DIR to a folder with its four files, or use digits")
    logger.info("no MNIST: %s", why)
    return await _digits(disk, NO_MNIST)


def _is_absent(path: Path) -> bool:
    """Return whether a path is that of no file; False if the system refuses the answer."""
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


async def _from_cache(cache_dir: Path | None, disk: Disk, passed_over: list[str]) -> Dataset | None:
    """Return MNIST from the cache; if that fails, add the reason and return None."""
    if cache_dir is None:
        passed_over.append("there is no cache folder")
        return None
    try:
        if await disk.names(cache_dir):
            return await _from_mnist_folder(cache_dir, disk, f"from the cache in {cache_dir}")
        passed_over.append(f"{cache_dir} has no MNIST yet")  # a download that failed has made the folder
    except FileNotFoundError:
        passed_over.append(f"{cache_dir} has no MNIST yet")
    except (DataError, OSError) as error:
        passed_over.append(f"the cache is unusable ({error})")
    return None


async def _from_mnist_folder(folder: Path, disk: Disk, place: str) -> Dataset:
    """Load MNIST from the folder of the cache."""
    request = LoadRequest(path=folder, disk=disk, source=f"MNIST, {place}", damage=Damage("error"))
    return await _from_mnist(request, await disk.names(folder))


async def _from_path(request: LoadRequest) -> Dataset:
    """Load from a folder or a file that the user named; every failure is a DataError."""
    path = request.path
    try:
        kind = kind_of_name(path.name)
        if kind in ("", ".npy") or await request.disk.run(path.is_dir):
            return await _from_folder(request)
        if kind == ".npz":
            return await _from_archive(path, request)
        return await LOADERS[kind](request, [(path, None)])
    except FileNotFoundError as error:
        if error.filename is not None and str(error.filename) != str(path):
            raise DataError(f"{error.filename} has gone while {path} was read; load it again") from None
        raise missing(str(path)) from None
    except NotADirectoryError:
        raise DataError(
            f"{path} is neither a folder nor an .npz ({', '.join(KEYS)}), .parquet, .tar or .csv file"
            f"{cure_of_archive([path.name])}"
        ) from None
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None


async def _from_archive(path: Path, request: LoadRequest) -> Dataset:
    room_bytes = request.room_bytes
    data = await read_file(path, request.disk, room_bytes=room_bytes)

    def decode() -> Dataset:
        try:
            return parse_npz(data, str(path), name=path.stem, source=request.source, room_bytes=room_bytes)
        except DataError:
            raise
        except Exception as error:  # a damaged archive can make zipfile and numpy raise almost anything
            raise DataError(f"{path} is damaged ({error!r}); fetch it again") from None

    return await request.disk.run(decode)


async def _from_folder(request: LoadRequest) -> Dataset:
    """Load the only data set in a folder."""
    folder, disk = request.path, request.disk
    folders = await folders_in(folder, disk)
    visible = [name for name in await disk.names(folder) if not name.startswith(".")]
    names = sorted(set(visible) - set(folders))
    in_folders = [f"{name}/{name}" for name in folders if name in STEMS]
    if any(_file_of(stem, [*names, *in_folders]) for stem in STEMS):
        return await _from_mnist(request, [*names, *in_folders])
    found = {kind: [name for name in names if kind_of_name(name) == kind] for kind in ENDINGS}
    present = [kind for kind in ENDINGS if found[kind]]
    if len(present) > 1:
        raise DataError(
            f"{folder} holds {' and '.join(found[kind][0] for kind in present)}, which are several data "
            "sets; name one of them, or move the others away"
        )
    if not present:
        kind, files = await split_folders(folder, disk)
        if files:
            return await LOADERS[kind](request, files)
        if folders:
            return await load_image_folder(request, folders)
        raise DataError(
            f"{folder} holds no data set: expected {', '.join(STEMS)} (with or without .gz), one .npz, "
            f"{', '.join(f'{key}.npy' for key in KEYS)}, .parquet, .tar or .csv files, or folders of images "
            f"by class; found {', '.join(names[:5]) or 'nothing'}"
            f"{cure_of_archive(names)}{await _around(folder, names, disk)}"
        )
    (kind,) = present
    if folders:
        # Class folders may be beside a table that names some of their images only.
        source = f"{request.source}; labels from {found[kind][0]}, not from the names of folders"
        request = replace(request, source=source)
    if kind == ".npy":
        return await load_npy(request, names)
    if kind != ".npz":
        files = [(folder / name, split) for name, split in split_files(found[kind], str(folder))]
        return await LOADERS[kind](request, files)
    if len(found[kind]) > 1:
        raise DataError(
            f"{folder} holds {len(found[kind])} archives ({', '.join(found[kind])}); name one of them"
        )
    return await _from_archive(folder / found[kind][0], request)


async def _around(folder: Path, names: list[str], disk: Disk) -> str:
    """Return the question whether the user means the folder around a folder of images; empty for others."""
    if not any(map(is_image_name, names)):
        return ""
    with suppress(OSError):  # the error on the folder itself matters more
        around = await folders_in(folder.parent, disk)
        if len(around) > 1 and folder.name not in sets_of_folders(around).values():
            return f"; did you mean --data {quote(str(folder.parent))}?"
    return f"; {SORT}"


def kind_of_name(name: str) -> str:
    """Return the kind of a file by the end of its name; empty for an end that `ENDINGS` lacks."""
    return next((kind for kind, endings in ENDINGS.items() if name.lower().endswith(endings)), "")


async def split_folders(folder: Path, disk: Disk) -> tuple[str, list[tuple[Path, Split | None]]]:
    """Return the kind and the files of shards or tables in folders that are named after the two sets.

    Returns:
        The kind, and each file with its split; the split is None if the folder of the training set has files
        and no folders, and no folder of another set has files. No kind and no files otherwise.

    Raises:
        DataError: The files are of several kinds.
    """
    sets = sets_of_folders(await folders_in(folder, disk))
    found: dict[str, dict[str, list[Path]]] = {kind: {} for kind in LOADERS}
    for name, inner in sets.items():
        for file in await disk.names(folder / inner):
            kind = kind_of_name(file)
            if kind in found and not file.startswith("."):
                found[kind].setdefault(name, []).append(folder / inner / file)
    whole = [kind for kind, files in found.items() if "train" in files and len(files) > 1]
    if not whole and sets and not await folders_in(folder / sets["train"], disk):
        whole = [kind for kind, files in found.items() if "train" in files]
    if len(whole) > 1:
        several = " and ".join(str(found[kind]["train"][0]) for kind in whole)
        raise DataError(f"{folder} holds {several}, which are several data sets; move one of them away")
    if not whole:
        return "", []
    files = found[whole[0]]
    held_out = files.get("test", files.get("val", []))
    of_train: Split | None = "train" if held_out else None
    return whole[0], [*((file, of_train) for file in files["train"]), *((file, "test") for file in held_out)]


async def _from_mnist(request: LoadRequest, names: list[str]) -> Dataset:
    """Load the four MNIST files of a folder."""
    found = {stem: _file_of(stem, names) for stem in STEMS}
    missing = [stem for stem, name in found.items() if name is None]
    if missing:
        raise DataError(
            f"{request.path} lacks {', '.join(missing)} (with or without .gz); add what is missing"
        )
    paths = [request.path / name for name in found.values() if name is not None]
    contents = [await read_file(path, request.disk, room_bytes=request.room_bytes) for path in paths]
    parse = partial(parse_four, name="mnist", source=request.source, room_bytes=request.room_bytes)
    return await request.disk.run(parse, contents, [str(path) for path in paths])


def _file_of(stem: str, names: list[str]) -> str | None:
    """Return the name of a file of MNIST: the plain file first, in both usual spellings.

    Some archives have each file also, or only, in a folder of its name.
    """
    dotted = stem.replace("-idx", ".idx")
    for name in (stem, dotted, f"{stem}.gz", f"{dotted}.gz", f"{stem}/{stem}"):
        if name in names:
            return name
    return None
