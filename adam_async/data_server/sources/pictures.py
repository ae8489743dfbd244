"""Pure: one encoded image, from bytes to pixels, with Pillow (of the extra ``data``).

Images have the orientation that a viewer shows: the reader rotates images of JPEG and WebP files by their
EXIF data. An image's header is checked before decoding. Every error of a decoder becomes a `DataError`. The
result has one channel (grey) or three; the reader drops transparency, and reads only the first picture of an
animation. Sixteen bits are scaled to eight: 0 to 65535 become 0 to 255.
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
"""Index of the byte of a PNG file that has the number of bits of a value, and the value of this byte in
16-bit files."""
TURNED_FORMATS = ("JPEG", "MPO", "WEBP")
"""Formats of cameras; an MPO is a JPEG followed by more pictures."""
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
"""Transposition for each orientation, by Pillow's names."""
DRAFT = 2
"""Multiple of the wanted size above which a JPEG is decoded at a half, a quarter or an eighth of its size."""
LYING = (5, 6, 7, 8)
"""Orientations that exchange rows and columns."""
GREY_MODES = ("1", "L", "LA", *DEEP_GREY_MODES)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image."""

    size: tuple[int, int]
    """Columns and rows of the image as shown."""
    is_grey: bool
    is_deep: bool
    """Whether values have sixteen bits, which are scaled to eight."""

    @property
    def pixels(self) -> int:
        """Columns times rows."""
        return self.size[0] * self.size[1]


def require_pillow() -> None:
    """Refuse to continue without the library that decodes images.

    Raises DataError: Pillow is not installed.
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
        DataError: The image has no known format, or is too large.
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
    """Decode an image; an image of another size is scaled, and cropped around its centre.

    Args:
        size: Columns and rows wanted.
        channels: 1 for grey or 3 for red, green and blue.

    Returns:
        Pixels of shape (channels, rows, columns).

    Raises:
        DataError: The image has no known format, is damaged, or is too large.
    """
    from PIL import ImageOps
    from PIL.Image import Transpose

    with _begin(data, origin) as image:
        try:
            if image.format == "JPEG" and min(image.size) > DRAFT * max(size):
                # The decoder itself halves a much too large image, which is several times faster.
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
    """Return EXIF's orientation; 1 (unchanged) if it is missing or invalid."""
    if image.format not in TURNED_FORMATS:
        return 1
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF data do not damage the image
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
    """Read and check the header of an image in memory."""
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
        raise DataError(f"{too_large}: its header has {columns}x{rows}")
    if image.mode == "F":
        raise DataError(f"{origin} holds floating-point pixels; convert it to 8 bits")
    return image
