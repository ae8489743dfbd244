"""Folders of images: one folder for each class, below ``train`` and ``test`` or without them.

    DIR/train/CLASS/*.png, DIR/test/CLASS/*.png     or other usual names of sets, such as Training and valid
    DIR/CLASS/*.png                                 one image in five is a test image, by a hash of CLASS/NAME

The reader skips files and folders whose names begin with a dot, files outside class folders and the files of
desktops, such as ``Thumbs.db``.
"""

from pathlib import Path

from adam_async.data_server.class_names import class_name, number_folders
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.files import is_clutter
from adam_async.data_server.sources.kinds import Files, folders_in
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import (
    LoadRequest,
    Samples,
    StoredSample,
    assemble,
    each,
    stored_image,
)
from adam_async.data_server.sources.splits import Split, rank_of_image


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
