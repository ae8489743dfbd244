"""Pure: one encoded image, from bytes to pixels, with Pillow (of the extra ``data``).

Images are as a viewer shows them: turned as the camera noted in a JPEG or WebP file (EXIF's orientation).
What an image's header says is checked before anything is decoded. Whatever a decoder makes of damaged bytes
becomes a `DataError`. Grey images have one channel, all others three; transparency is dropped, and of an
animation the first picture counts. Sixteen bits are scaled to eight: 0 to 65535 become 0 to 255.
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.sources import limits
from adam_async.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP")
DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L")
PNG_DEPTH, DEEP = 24, 16
"""Index of the byte of a PNG file that says how many bits a value has; and so many are deep."""
TURNED_FORMATS = ("JPEG", "MPO", "WEBP")
"""Those that cameras write; an MPO is a JPEG with more pictures behind the first."""
ORIENTATION = 0x0112
UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What to do for each orientation, by Pillow's names."""
DRAFT = 2
"""Times the wanted size from which a JPEG may be decoded at a half, a quarter or an eighth of its own."""
LYING = (5, 6, 7, 8)
"""Orientations in which rows are shown as columns."""
GREY_MODES = ("1", "L", "LA", *DEEP_GREY_MODES)


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an image says."""

    size: tuple[int, int]
    """Columns and rows, of the image as it is shown."""
    is_grey: bool
    is_deep: bool
    """Whether it has sixteen bits for each value, which are scaled to eight."""

    @property
    def pixels(self) -> int:
        """Columns times rows."""
        return self.size[0] * self.size[1]


def require_pillow() -> None:
    """Check that images can be decoded at all.

    Raises:
        DataError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DataError(
            "decoding images needs Pillow, of the extra `data`: pip install 'adam-async[data]'"
        ) from None


def read_header(data: bytes, origin: str) -> Header:
    """Read size and kind of an image, without decoding it.

    Raises:
        DataError: No image of a known format, or one that is too large.
    """
    with _begin(data, origin) as image:
        columns, rows = image.size
        lies = _orientation(image) in LYING
        return Header(
            (rows, columns) if lies else (columns, rows),
            image.mode in GREY_MODES,
            image.mode in DEEP_GREY_MODES or (image.format == "PNG" and data[PNG_DEPTH] == DEEP),
        )


def decode(data: bytes, origin: str, *, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """Decode an image; one of another size is fitted to the middle: scaled, and cut where it is too long.

    Args:
        data: The whole file.
        origin: What to call it in an error.
        size: Columns and rows wanted.
        channels: 1 for grey or 3 for red, green and blue.

    Returns:
        Pixels of shape (channels, rows, columns).

    Raises:
        DataError: No image of a known format, a damaged one, or one that is too large.
    """
    from PIL import ImageOps
    from PIL.Image import Transpose

    with _begin(data, origin) as image:
        try:
            if image.format == "JPEG" and min(image.size) > DRAFT * max(size):
                # The decoder itself halves the image while it is much too large: several times faster.
                image.draft(None, (DRAFT * max(size), DRAFT * max(size)))
            turn = UPRIGHT.get(_orientation(image))
            plain = _plain(image, "L" if channels == 1 else "RGB")
            if turn is not None:
                plain = plain.transpose(Transpose[turn])
            if plain.size != size:
                plain = ImageOps.fit(plain, size)
            pixels = np.asarray(plain, np.uint8)
        except Exception as error:
            raise DataError(f"{origin} is a damaged image ({error})") from None
    return pixels[np.newaxis] if channels == 1 else pixels.transpose(2, 0, 1)


def _orientation(image: "Image") -> int:
    """What EXIF says of how the image is shown: 1, as it is, where it says nothing or is damaged."""
    if image.format not in TURNED_FORMATS:
        return 1
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # whatever is in it is not the image
        return 1
    return found if isinstance(found, int) else 1


def _plain(image: "Image", mode: str) -> "Image":
    from PIL import Image

    if image.mode in DEEP_GREY_MODES:
        values = np.asarray(image).clip(0, 0xFFFF).astype(np.uint32)
        image = Image.fromarray(((values * 0xFF + 0x7FFF) // 0xFFFF).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")
    return image.convert(mode)


def _begin(data: bytes, origin: str) -> "Image":
    """Read the header of an image and check it. The name `open` is kept for files, and this is memory."""
    from PIL import Image, UnidentifiedImageError
    from PIL.Image import open as read

    too_large = f"{origin} is an image of more than {limits.MAX_IMAGE_PIXELS} pixels"
    try:
        image = read(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(too_large) from None
    except UnidentifiedImageError:
        kinds = f"{', '.join(FORMATS)} image"
        raise DataError(
            f"{origin} is no {kinds}: " + (f"it begins with {data[:8]!r}" if data else "it is empty")
        ) from None
    except Exception as error:
        raise DataError(f"{origin} is a damaged image ({error})") from None
    columns, rows = image.size
    if columns * rows > limits.MAX_IMAGE_PIXELS:
        raise DataError(f"{too_large}: its header says {columns}x{rows}")
    if image.mode == "F":
        raise DataError(f"{origin} holds floating-point pixels; convert it to 8 bits")
    return image
