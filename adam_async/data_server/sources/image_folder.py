"""Folders of images: one folder for each class, below ``train`` and ``test`` or without them.

    DIR/train/CLASS/*.png, DIR/test/CLASS/*.png     or val instead of test
    DIR/CLASS/*.png                                 one image in five is a test image, by a hash of CLASS/NAME

The reader skips files and folders whose names begin with a dot, files outside class folders and the files of
desktops, such as ``Thumbs.db``.
"""

from pathlib import Path

from adam_async.data_server.dataset import Dataset, number_folders
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.catalogue import leave_stored, listed
from adam_async.data_server.sources.files import check_kind, folders_in, is_clutter, read_image
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import LoadRequest, Sample, Samples, StoredSample, assemble, each
from adam_async.data_server.sources.splits import Split, rank_of_image
from adam_async.errors import DataError


async def load_image_folder(request: LoadRequest, folders: list[str]) -> Dataset:
    """Load a folder of images by class.

    Raises:
        DataError: No images, a test class without training images, or an error of `assemble`.
    """
    require_pillow()
    folder, disk = request.path, request.disk
    roots = _roots(folder, folders)
    classes = {root: folders if split is None else await folders_in(root, disk) for root, split in roots}
    trained = classes[roots[0][0]]
    for root, found in classes.items():
        unknown = [name for name in found if name not in trained]
        if unknown:
            raise DataError(
                f"{root / unknown[0]} is a class that {roots[0][0]} lacks; "
                "training and test images need the same class folders"
            )
    numbers = number_folders(trained, str(folder))
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


def _roots(folder: Path, folders: list[str]) -> list[tuple[Path, Split | None]]:
    """Return the folders with class folders, that of the training images first."""
    held_out = [name for name in ("test", "val", "validation") if name in folders]
    if "train" in folders and held_out:
        return [(folder / "train", "train"), (folder / held_out[0], "test")]
    if folders == ["train"]:
        raise DataError(
            f"{folder} holds train but neither test nor val; add one, or name {folder / 'train'} to have "
            "its images split"
        )
    return [(folder, None)]


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
        places.add(StoredSample(str(folder / name), label, chosen, folder / name, 0, size))

    request = places.request
    await each(await _images_in(folder, request), look, request.damage, request.disk)


async def _images_in(folder: Path, request: LoadRequest) -> list[str]:
    """Return the names in a class folder, without hidden ones; unprintable names are damage."""
    names = []
    for name in await request.disk.names(folder):
        if is_clutter(name):
            continue
        if name.isprintable():
            names.append(name)
        else:
            request.damage.note(f"{folder / ascii(name)} has a name that cannot be shown")
    return names


async def _add_class(samples: Samples[Sample], folder: Path, label: str, split: Split | None) -> None:
    request = samples.request
    for name in await _images_in(folder, request):
        data = await read_image(folder / name, request.disk, request.damage)
        if data is not None:
            chosen = split or rank_of_image(f"{label}/{name}")
            samples.add(Sample(str(folder / name), label, chosen, data))
