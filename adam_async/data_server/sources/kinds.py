"""Names of sources, and each source's kind and files by the names in a folder; reads no file, needs no NumPy.

`--data` takes the name of a data set, a function to import, a file or a folder.

A command finds the source's files before it imports the loaders, and a loader finds them again.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from adam_async.data_server.class_names import class_name, number_folders
from adam_async.data_server.sources.files import cure_of_archive, is_clutter, is_image_name
from adam_async.data_server.sources.splits import Split, sets_of_folders, split_files
from adam_async.errors import DataError, counted

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


Kind = Literal["idx", "folders", ".npz", ".npy", ".parquet", ".tar", ".csv"]

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

STEMS = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
"""Names of MNIST's files without ``.gz``, in the order of a data set's parts."""

KEYS = ("x_train", "y_train", "x_test", "y_test")
"""Names of the arrays in NumPy archives, and of NumPy files, in the order of a data set's parts."""

COMPRESSED = (".tar.gz", ".tgz")
"""Name endings of compressed tar files."""

ENDINGS: dict[Kind, tuple[str, ...]] = {
    ".npz": (".npz",),
    ".npy": (".npy",),
    ".parquet": (".parquet",),
    ".tar": (".tar", *COMPRESSED),
    ".csv": (".csv",),
}
"""Name endings of files, by kind."""

IN_SETS: tuple[Kind, ...] = (".parquet", ".tar", ".csv")
"""Kinds whose files may lie in a folder for each set."""

MAX_DEPTH = 3
"""How many levels below a class folder are searched for the folder that the user means."""

SORT = "put the images of each class into a folder of its own, or list them in a .csv file of path,label"
"""Remedy for images without classes."""

Files = tuple[tuple[Path, Split | None], ...]
"""Files, or folders with class folders, each with its split; None if the images decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files of a source."""

    kind: Kind
    files: Files
    """For kind ``folders`` the folders with the class folders, that of the training images first."""
    notes: str = ""
    """Clauses on the labels, and on files that are not read."""


@contextmanager
def reading_source(path: Path) -> Iterator[None]:
    """Raise each error of the system in the block as a DataError that names the cause and the remedy."""
    try:
        yield
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


def check_source(source: str) -> None:
    """Check that a source is a name, a function to import, or the path of a data set.

    Raises:
        DataError: The file or folder does not exist, or holds no data set.
    """
    if source in NAMES or source.startswith(("synthetic:", "tcp://")) or is_import_path(source):
        return
    if "://" in source:
        raise address_error(source)
    path = Path(source)
    with reading_source(path):
        path.stat()
        find_files(path)


def find_files(path: Path) -> FoundFiles:
    """Find the files of the only data set at a path. Blocks.

    Raises:
        DataError: A folder has no data set, several, or only a part of one.
        OSError: A folder cannot be read.
    """
    kind = kind_of_name(path.name)
    if kind in (None, ".npy") or path.is_dir():
        return _in_folder(path)
    return FoundFiles(kind=kind, files=((path, None),))


def kind_of_name(name: str) -> Kind | None:
    """Return a file's kind by its name ending; None for an ending that `ENDINGS` lacks."""
    return next((kind for kind, endings in ENDINGS.items() if name.lower().endswith(endings)), None)


def folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without names that begin with ``.`` or ``__``.

    Blocks. Raises OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        visible = [each for each in entries if not each.name.startswith((".", "__"))]
    # Links may form a circle; only `isdir` raises no error for it.
    is_dir = {each.name: os.path.isdir(each) if each.is_symlink() else each.is_dir() for each in visible}
    return sorted(name for name, found in is_dir.items() if found)


def _in_folder(folder: Path) -> FoundFiles:
    folders = folders_in(folder)
    visible = {name for name in os.listdir(folder) if not name.startswith(".")}
    names = sorted(visible - set(folders))
    in_folders = [f"{name}/{name}" for name in folders if name in STEMS]
    if any(_file_of(stem, [*names, *in_folders]) for stem in STEMS):
        return FoundFiles(kind="idx", files=mnist_files(folder, [*names, *in_folders]))
    found = {kind: [name for name in names if kind_of_name(name) == kind] for kind in ENDINGS}
    present = [kind for kind in ENDINGS if found[kind]]
    if len(present) > 1:
        raise DataError(
            f"{folder} holds {' and '.join(found[kind][0] for kind in present)}, which are several data "
            "sets; name one of them, or move the others away"
        )
    if not present:
        return _without_files(folder, folders, names)
    (kind,) = present
    # Class folders may be beside a table that names some of their images only.
    notes = f"; labels from {found[kind][0]}, not from the names of folders" if folders else ""
    if kind == ".npy":
        absent = [f"{key}.npy" for key in KEYS if f"{key}.npy" not in names]
        if absent:
            raise DataError(f"{folder} lacks {', '.join(absent)}; add what is missing")
        files: Files = tuple((folder / f"{key}.npy", None) for key in KEYS)
    elif kind == ".npz" and len(found[kind]) > 1:
        raise DataError(
            f"{folder} holds {len(found[kind])} archives ({', '.join(found[kind])}); name one of them"
        )
    else:
        files = tuple((folder / name, split) for name, split in split_files(found[kind], str(folder)))
    return FoundFiles(kind=kind, files=files, notes=notes)


def _without_files(folder: Path, folders: list[str], names: list[str]) -> FoundFiles:
    """Find the files in the folders of a folder that has no files itself."""
    if in_sets := _files_in_sets(folder, folders):
        return in_sets
    if folders:
        return _class_folders(folder, folders)
    raise DataError(
        f"{folder} holds no data set: expected {', '.join(STEMS)} (with or without .gz), one .npz, "
        f"{', '.join(f'{key}.npy' for key in KEYS)}, .parquet, .tar or .csv files, or folders of images "
        f"by class; found {', '.join(names[:5]) or 'nothing'}"
        f"{cure_of_archive(names)}{_around(folder, names)}"
    )


def _around(folder: Path, names: list[str]) -> str:
    """Return the question whether the user means the folder around a folder of images; otherwise empty."""
    if not any(map(is_image_name, names)):
        return ""
    with suppress(OSError):  # the error on the folder itself matters more
        around = folders_in(folder.parent)
        if len(around) > 1 and folder.name not in sets_of_folders(around).values():
            return f"; did you mean --data {quote(str(folder.parent))}?"
    return f"; {SORT}"


def _files_in_sets(folder: Path, folders: list[str]) -> FoundFiles | None:
    """Return shards or tables in folders that are named after the two sets.

    Returns:
        Each file with its split. The split is None if the training set's folder has files and no folders, and
            no other set's folder has files. None without such files.

    Raises:
        DataError: The files are of several kinds.
    """
    sets = sets_of_folders(folders)
    found: dict[Kind, dict[str, list[Path]]] = {kind: {} for kind in IN_SETS}
    for name, inner in sets.items():
        for file in sorted(os.listdir(folder / inner)):
            kind = kind_of_name(file)
            if kind in found and not file.startswith("."):
                found[kind].setdefault(name, []).append(folder / inner / file)
    whole = [kind for kind, files in found.items() if "train" in files and len(files) > 1]
    if not whole and sets and not folders_in(folder / sets["train"]):
        whole = [kind for kind, files in found.items() if "train" in files]
    if len(whole) > 1:
        several = " and ".join(str(found[kind]["train"][0]) for kind in whole)
        raise DataError(f"{folder} holds {several}, which are several data sets; move one of them away")
    if not whole:
        return None
    files = found[whole[0]]
    held_out = files.get("test", files.get("val", []))
    of_train: Split | None = "train" if held_out else None
    return FoundFiles(
        kind=whole[0],
        files=(*((file, of_train) for file in files["train"]), *((file, "test") for file in held_out)),
    )


def mnist_files(folder: Path, names: list[str]) -> Files:
    """Return the four MNIST files of a folder. Raises DataError: a file is missing."""
    found = {stem: _file_of(stem, names) for stem in STEMS}
    if absent := [stem for stem, name in found.items() if name is None]:
        raise DataError(f"{folder} lacks {', '.join(absent)} (with or without .gz); add what is missing")
    return tuple((folder / name, None) for name in found.values() if name is not None)


def _file_of(stem: str, names: list[str]) -> str | None:
    """Return the name of an MNIST file: the plain file first, in both usual spellings.

    Some archives have each file also, or only, in a folder with its name.
    """
    dotted = stem.replace("-idx", ".idx")
    for name in (stem, dotted, f"{stem}.gz", f"{dotted}.gz", f"{stem}/{stem}"):
        if name in names:
            return name
    return None


# --- folders of images ---------------------------------------------------------------------------


def _class_folders(folder: Path, folders: list[str]) -> FoundFiles:
    """Return the folders with class folders: the training set's folder first, or a folder without sets.

    Raises:
        DataError: The class folders have no files, but folders elsewhere have images; or a test class has no
            training images.
    """
    roots, notes = _roots(folder, folders)
    for root, _ in roots:
        if loose := sum(map(is_image_name, os.listdir(root))):
            notes += f"; {counted(loose, 'image')} beside the class folders of {root} not read"
    trained, classes = roots[0][0], folders_in(roots[0][0])
    _check_depth(trained, classes)
    numbers = number_folders(map(class_name, classes))
    for root, _ in roots[1:]:
        unknown = [name for name in folders_in(root) if class_name(name) not in numbers]
        if unknown:
            raise DataError(
                f"{root / unknown[0]} is a class that {trained} lacks; "
                "training and test images need the same class folders"
            )
    return FoundFiles(kind="folders", files=roots, notes=notes)


def _roots(folder: Path, folders: list[str]) -> tuple[Files, str]:
    """Return the folders with class folders, the training images' first, and a note on unread folders."""
    sets = {name: folder / inner for name, inner in sets_of_folders(folders).items()}
    if not sets:
        return ((folder, None),), ""
    train = _unwrapped(sets.pop("train"))
    trained = set(map(class_name, folders_in(train)))
    roots: Files = ((train, None),)
    for name in ("test", "val"):
        if name in sets and len(roots) == 1:
            held_out = _unwrapped(sets[name])
            classes = set(map(class_name, folders_in(held_out)))
            # Images to be classified have no class folder, or one of a name such as "unknown".
            if len(classes) > 1 or classes & trained:
                roots = ((train, "train"), (held_out, "test"))
                del sets[name]
    unread = " and ".join(str(each) for each in sets.values())
    return roots, f"; {unread} not read" if unread else ""


def _unwrapped(folder: Path) -> Path:
    """Return `folder`; or its only folder if that has the same name, as in some archives."""
    return folder / folder.name if folders_in(folder) == [folder.name] else folder


def _check_depth(root: Path, classes: list[str]) -> None:
    """Refuse class folders without files, and name the folder that the user may mean.

    Raises:
        DataError: No class folder has files, and there are images elsewhere.
    """
    meant: list[Path] = []
    for name in classes:
        if _has_files(root / name):
            return
        meant += _likely(root / name, MAX_DEPTH)
    if meant:
        cures = " or ".join(f"--data {quote(str(each))}" for each in meant[:3])
        raise DataError(
            f"{root} has images deeper than in class folders, {root / 'CLASS'}/*.png: did you mean {cures}?"
        )
    unsorted = _unsorted(root, MAX_DEPTH)
    if unsorted is not None:
        raise DataError(f"{unsorted} has images that are in no class folder: {SORT}")


def _has_files(folder: Path) -> bool:
    visible = [name for name in os.listdir(folder) if not is_clutter(name)]
    return len(visible) > len(folders_in(folder))


def _likely(folder: Path, depth: int) -> list[Path]:
    """Return this folder or folders in it that have folders of sets, or of classes with files."""
    inner = folders_in(folder)
    if sets := sets_of_folders(inner):
        return [folder] if folders_in(folder / sets["train"]) else []
    if any(_has_files(folder / name) for name in inner):
        return [folder]
    return [each for name in inner if depth for each in _likely(folder / name, depth - 1)]


def _unsorted(folder: Path, depth: int) -> Path | None:
    """Return the first folder with images, this one or one in it; None without such a folder."""
    if any(map(is_image_name, os.listdir(folder))):
        return folder
    for name in folders_in(folder) if depth else ():
        found = _unsorted(folder / name, depth - 1)
        if found is not None:
            return found
    return None
