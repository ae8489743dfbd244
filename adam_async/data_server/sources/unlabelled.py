"""Images without labels, from files and folders, in the input shape of a model.

Encoded images are rotated by EXIF, scaled and cropped to the model's rows and columns, and converted to its
number of channels. Arrays of ``.npy`` files, (N, H, W), (N, C, H, W) or (N, H, W, C), must have the model's
size. An array with the shape of one model image, (C, H, W) or (H, W, C), or with two axes, is one image.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Damage, channels_first
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import check_kind, is_clutter, is_image_name, read_file
from adam_async.data_server.sources.pictures import Header, decode, read_header, require_pillow
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk

AT_A_TIME = 256
"""Maximum number of images in one piece."""

ARRAY = ".npy"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Some images."""

    names: Sequence[str]
    """File of each image; for an image in an array, also its number."""
    images: NDArray[Any]
    """Shape (N, C, H, W): uint8, or the array's type."""


class Unlabelled:
    """Images of files and folders, in path order; a folder's images are sorted by name.

    Args:
        paths: Image files, ``.npy`` files and folders; a folder includes all its subfolders.
    """

    def __init__(
        self, paths: Sequence[Path], image_shape: tuple[int, int, int], disk: Disk, damage: Damage
    ) -> None:
        self._paths = paths
        self._shape = image_shape
        self._disk = disk
        self._damage = damage
        self.passed_over = 0
        """Number of files in folders that are not images."""
        self._changes: dict[str, tuple[int, str]] = {}

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Read all images, some at a time.

        Raises:
            DataError: A path does not exist, no file is an image, an image is damaged and must not be
                skipped, or an array has no images.
        """
        files = [file for path in self._paths for file in await self._files(path)]
        if not files:
            named = ", ".join(map(str, self._paths))
            raise DataError(
                f"{named}: there are no images; name image files, .npy files or folders that hold some"
            )
        waiting: list[Path] = []
        for file in files:
            if file.suffix.lower() != ARRAY:
                waiting.append(file)
            if waiting and (len(waiting) == AT_A_TIME or file.suffix.lower() == ARRAY):
                yield await self._decoded(waiting)
                waiting = []
            if file.suffix.lower() == ARRAY:
                async with aclosing(self._array(file)) as pieces:
                    async for piece in pieces:
                        yield piece
        if waiting:
            yield await self._decoded(waiting)

    def changes(self) -> list[str]:
        """Return sentences on images that were changed to fit the model, one per kind of change."""
        return [
            f"{count:,} {'image' if count == 1 else 'images'} {change}, the first: {first}"
            for change, (count, first) in self._changes.items()
        ]

    async def _files(self, path: Path) -> list[Path]:
        """Return the images at a path: the path itself, or all images in a folder and its subfolders."""
        try:
            if not await self._disk.run(path.is_dir):
                if path.suffix.lower() == ".npz":
                    raise DataError(
                        f"{path}: predict reads images, .npy files and folders, not .npz archives; save "
                        "its images with numpy.save"
                    )
                await self._disk.run(check_kind, path, limits.MAX_FILE_BYTES)
                return [path]
            found: list[Path] = []
            for name in await self._disk.names(path):
                if is_clutter(name):
                    continue
                inner = path / name
                if await self._disk.run(inner.is_dir):
                    found += await self._files(inner)
                elif inner.suffix.lower() == ARRAY or is_image_name(name):
                    found.append(inner)
                else:
                    self.passed_over += 1
        except OSError as error:
            raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
        return found

    async def _decoded(self, files: Sequence[Path]) -> Piece:
        """Read image files; leave out damaged files if the policy allows that."""
        require_pillow()
        channels, rows, columns = self._shape

        def read(data: bytes, origin: str) -> NDArray[np.uint8]:
            header = read_header(data, origin)
            pixels = decode(data, origin, size=(columns, rows), channels=channels)
            for change in changes(header, (columns, rows), channels):
                count, first = self._changes.get(change, (0, ""))
                first = first or f"{origin} ({header.size[1]}x{header.size[0]})"
                self._changes[change] = count + 1, first
            return pixels

        kept: list[str] = []
        images = np.empty((len(files), *self._shape), np.uint8)
        for file in files:
            try:
                data = await read_file(file, self._disk, limit=limits.MAX_IMAGE_BYTES)
                images[len(kept)] = await self._disk.run(read, data, str(file))
            except OSError as error:
                self._damage.note(f"{file} cannot be read: {error.strerror or error}")
            except DataError as error:
                self._damage.note(str(error))
            else:
                kept.append(str(file))
        return Piece(names=kept, images=images[: len(kept)])

    async def _array(self, file: Path) -> AsyncGenerator[Piece, None]:
        """Yield the images of an array, which stays on the disk."""
        array: NDArray[Any] = await self._disk.run(_map, file)
        channels, rows, columns = self._shape
        if array.shape == (rows, columns, channels) != self._shape:
            array = array.transpose(2, 0, 1)
        if array.ndim == 2 or array.shape == self._shape:
            array = array[np.newaxis]
        for first in range(0, len(array), AT_A_TIME):
            images = channels_first(array[first : first + AT_A_TIME], str(file))
            yield Piece(names=[f"{file}[{first + n}]" for n in range(len(images))], images=images)


def changes(header: Header, size: tuple[int, int], channels: int) -> Iterator[str]:
    """Yield the changes of an image that gets the size (columns and rows) and the channels of a model."""
    (columns, rows), (wide, high) = header.size, size
    model = f"{high}x{wide} pixels of the model"  # rows first, as in --size
    if min(columns / wide, rows / high) < 1:
        yield f"enlarged to the {model}"
    elif header.size != size:
        yield f"scaled down to the {model}"
    # Rounding causes one pixel more or less.
    lost = max(columns / wide, rows / high) / min(columns / wide, rows / high)
    if lost > 1 + 1 / min(columns, rows, wide, high):
        yield f"cropped around the centre to the shape of {high}x{wide}"
    if channels == 1 and not header.is_grey:
        yield "with colours made grey, as the model takes them"
    if channels > 1 and header.is_grey:
        yield "in grey given to a model of colours"


def _map(file: Path) -> np.memmap[Any, Any]:
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged header can make numpy raise almost anything
        raise DataError(
            f"{file} is not a .npy file, or damaged ({error}); save images with numpy.save"
        ) from None
    if array.ndim < 2:
        raise DataError(f"{file} has shape {array.shape}, expected images: (N, rows, columns) or more axes")
    return array
