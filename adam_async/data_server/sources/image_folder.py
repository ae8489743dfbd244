"""Folders of images: one folder for each class, below ``train`` and ``test`` or without them.

    DIR/train/CLASS/*.png, DIR/test/CLASS/*.png     or other usual names of sets, such as Training and valid
    DIR/CLASS/*.png                                 one image in five is a test image, by a hash of CLASS/NAME

The reader skips files and folders whose names begin with a dot, files outside class folders and the files of
desktops, such as ``Thumbs.db``.
"""

from dataclasses import replace
from pathlib import Path
from shlex import quote

from adam_async.data_server.dataset import Dataset, class_name, number_folders
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.catalogue import leave_stored, listed
from adam_async.data_server.sources.files import check_kind, folders_in, is_clutter, is_image_name, read_image
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import LoadRequest, Sample, Samples, StoredSample, assemble, each
from adam_async.data_server.sources.splits import Split, rank_of_image, sets_of_folders
from adam_async.errors import DataError, counted
from adam_async.runtime.disk import Disk

MAX_DEPTH = 3
"""Number of levels of folders below a class folder in which the folder that the user means is searched."""

SORT = "put the images of each class into a folder of its own, or list them in a .csv file of path,label"
"""Remedy for images without classes."""


async def load_image_folder(request: LoadRequest, folders: list[str]) -> Dataset:
    """Load a folder of images by class.

    Raises:
        DataError: No images, a test class without training images, or an error of `assemble`.
    """
    require_pillow()
    disk = request.disk
    request, roots = await _roots(request, folders)
    for root, _ in roots:
        loose = sum(map(is_image_name, await disk.names(root)))
        if loose:
            source = (
                f"{request.source}; {counted(loose, 'image')} beside the class folders of {root} not read"
            )
            request = replace(request, source=source)
    classes = {root: await folders_in(root, disk) for root, _ in roots}
    trained = roots[0][0]
    await _check_depth(trained, classes[trained], disk)
    numbers = number_folders(map(class_name, classes[trained]))
    for root, found in classes.items():
        unknown = [name for name in found if class_name(name) not in numbers]
        if unknown:
            raise DataError(
                f"{root / unknown[0]} is a class that {trained} lacks; "
                "training and test images need the same class folders"
            )
    folders_of = [(root / name, name, split) for root, split in roots for name in classes[root]]
    if request.cache is not None:
        places = listed(request)
        for place in folders_of:
            await _list_class(places, *place)
        stored = await leave_stored(places, request.cache, numbers=numbers, class_names=tuple(numbers))
        if stored is not None:
            return stored
    samples = Samples[Sample](request)
    for place in folders_of:
        await _add_class(samples, *place)
    return await assemble(samples, numbers=numbers, class_names=tuple(numbers))


async def _roots(
    request: LoadRequest, folders: list[str]
) -> tuple[LoadRequest, list[tuple[Path, Split | None]]]:
    """Return the folders with class folders, that of the training images first.

    Returns:
        Also the request, whose source names the folders of sets that are not read.
    """
    sets = {name: request.path / folder for name, folder in sets_of_folders(folders).items()}
    if not sets:
        return request, [(request.path, None)]
    disk = request.disk
    train = await _unwrapped(sets.pop("train"), disk)
    trained = {class_name(name) for name in await folders_in(train, disk)}
    roots: list[tuple[Path, Split | None]] = [(train, None)]
    for name in ("test", "val"):
        if name in sets and len(roots) == 1:
            held_out = await _unwrapped(sets[name], disk)
            classes = {class_name(label) for label in await folders_in(held_out, disk)}
            # Images to be classified have no class folder, or one of a name such as "unknown".
            if len(classes) > 1 or classes & trained:
                roots = [(train, "train"), (held_out, "test")]
                del sets[name]
    unread = " and ".join(str(folder) for folder in sets.values())
    return (replace(request, source=f"{request.source}; {unread} not read") if unread else request), roots


async def _unwrapped(folder: Path, disk: Disk) -> Path:
    """Return the folder of a set in a folder of its name, in which some archives have it; else the folder."""
    names = await folders_in(folder, disk)
    return folder / folder.name if names == [folder.name] else folder


async def _check_depth(root: Path, classes: list[str], disk: Disk) -> None:
    """Refuse class folders that have no files, and name the folder that the user may mean.

    Raises:
        DataError: No class folder has files, and there are images elsewhere.
    """
    meant: list[Path] = []
    for name in classes:
        if await _has_files(root / name, disk):
            return
        meant += await _likely(root / name, disk, MAX_DEPTH)
    if meant:
        cures = " or ".join(f"--data {quote(str(each))}" for each in meant[:3])
        raise DataError(
            f"{root} has images deeper than in class folders, {root / 'CLASS'}/*.png: did you mean {cures}?"
        )
    unsorted = await _unsorted(root, disk, MAX_DEPTH)
    if unsorted is not None:
        raise DataError(f"{unsorted} has images that are in no class folder: {SORT}")


async def _has_files(folder: Path, disk: Disk) -> bool:
    visible = [name for name in await disk.names(folder) if not is_clutter(name)]
    return len(visible) > len(await folders_in(folder, disk))


async def _likely(folder: Path, disk: Disk, depth: int) -> list[Path]:
    """Return the folders, this one or folders in it, that have folders of sets, or of classes with files."""
    inner = await folders_in(folder, disk)
    if sets := sets_of_folders(inner):
        return [folder] if await folders_in(folder / sets["train"], disk) else []
    for name in inner:
        if await _has_files(folder / name, disk):
            return [folder]
    return [each for name in inner if depth for each in await _likely(folder / name, disk, depth - 1)]


async def _unsorted(folder: Path, disk: Disk, depth: int) -> Path | None:
    """Return the first folder, this one or one in it, that has images; None without one."""
    if any(map(is_image_name, await disk.names(folder))):
        return folder
    for name in await folders_in(folder, disk) if depth else ():
        found = await _unsorted(folder / name, disk, depth - 1)
        if found is not None:
            return found
    return None


async def _list_class(places: Samples[StoredSample], folder: Path, label: str, split: Split | None) -> None:
    """List the places of the images of a class."""

    def look(name: str) -> None:
        """Add the place of one image, if it is a file of permitted size."""
        try:
            size = check_kind(folder / name, limits.MAX_IMAGE_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a zero character in the path
            raise DataError(
                f"{folder / name} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        chosen = split or rank_of_image(f"{label}/{name}")
        places.add(StoredSample(str(folder / name), class_name(label), chosen, folder / name, 0, size))

    request = places.request
    await each(await _images_in(folder, request), look, request.damage, request.disk)


async def _images_in(folder: Path, request: LoadRequest) -> list[str]:
    """Return the names in a class folder, without hidden ones."""
    return [name for name in await request.disk.names(folder) if not is_clutter(name)]


async def _add_class(samples: Samples[Sample], folder: Path, label: str, split: Split | None) -> None:
    request = samples.request
    for name in await _images_in(folder, request):
        data = await read_image(folder / name, request.disk, request.damage)
        if data is not None:
            chosen = split or rank_of_image(f"{label}/{name}")
            samples.add(Sample(str(folder / name), class_name(label), chosen, data))
