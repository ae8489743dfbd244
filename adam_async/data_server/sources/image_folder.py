"""Folders of images: one folder for each class, below ``train`` and ``test`` or without them.

    DIR/train/CLASS/*.png, DIR/test/CLASS/*.png     or other usual names of sets, such as Training and valid
    DIR/CLASS/*.png                                 one image in five is a test image, by a hash of CLASS/NAME

The reader skips files and folders whose names begin with a dot, files outside class folders and the files of
desktops, such as ``Thumbs.db``.
"""

from pathlib import Path

from adam_async.data_server.class_names import class_name, number_folders
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.catalogue import leave_stored, listed
from adam_async.data_server.sources.files import check_kind, is_clutter, read_image
from adam_async.data_server.sources.kinds import Files, folders_in
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import LoadRequest, Sample, Samples, StoredSample, assemble, each
from adam_async.data_server.sources.splits import Split, rank_of_image
from adam_async.errors import DataError


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
