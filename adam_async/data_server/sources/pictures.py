"""Pure: one encoded image, from bytes to pixels, with Pillow (of the extra ``data``).

Images have the orientation that a viewer shows: the reader rotates JPEG and WebP files by their EXIF data,
and Pillow rotates TIFF files. An image's header is checked before decoding. Every error of a decoder becomes
a `DataError`. The result has one channel (grey) or three. The reader drops transparency, and reads only the
first picture of an animation or document. Sixteen bits are scaled to eight: 0 to 65535 become 0 to 255.
"""

import io
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.sources import limits
from adam_async.errors import DataError, install_command

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF")

OTHER_FORMATS = (
    (b"%PDF", "a PDF document"),
    (b"II*\0\x10\0\0\0CR", "a raw photo of a camera"),
    (b"FUJIFILMCCD-RAW", "a raw photo of a camera"),
    (b"8BPS", "a file of Photoshop"),
    (b"gimp xcf", "a file of GIMP"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (b"\xffO\xffQ", "a JPEG 2000 image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\xff\n", "a JPEG XL image"),
    (b"\0\0\x01\0", "an icon (ICO)"),
    (b"DDS ", "a texture (DDS)"),
    (b"v/1\x01", "an OpenEXR image"),
    (b"#?RADIANCE", "a Radiance HDR image"),
    (b"\x93NUMPY", "an array of NumPy"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"RIFF", "a film or sound (RIFF)"),
    (b"\x1aE\xdf\xa3", "a film (Matroska)"),
    (b"version https://git-lfs", "a pointer of Git LFS, whose content is not here (git lfs pull)"),
    (b"%!PS", "a PostScript document"),
    (b"{", "text (JSON)"),
)
"""First bytes of other files that are often among images, and descriptions of these files."""

BRANDS = {
    b"avif": "an AVIF image",
    b"avis": "an AVIF image",
    b"heic": "a HEIC image",
    b"heix": "a HEIC image",
    b"hevc": "a HEIC image",
    b"hevx": "a HEIC image",
    b"heim": "a HEIC image",
    b"heis": "a HEIC image",
    b"mif1": "a HEIF image",
    b"msf1": "a HEIF image",
    b"crx ": "a raw photo of a camera",
    b"jxl ": "a JPEG XL image",
}
"""Description of a file by the brand after its first box ``ftyp``; other brands are films."""

MARKUP = ((b"<svg", "an SVG drawing"), (b"<html", "a page of HTML"), (b"<!doctype html", "a page of HTML"))
SNIFFED_BYTES = 1024
"""Number of bytes at the start of a file that are searched for markup."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
READ_SIGNATURES = (PNG_SIGNATURE, b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")
PNG_METADATA = (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"tIME")
"""PNG chunks that do not affect pixels; decoders limit their size, or refuse damage in them."""
DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L")
PNG_DEPTH, DEEP = 24, 16
"""Index of the byte with the bits per value in a PNG file, and this byte's value in 16-bit files."""
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
            f"decoding images needs Pillow, of the extra `data`: {install_command('data')}"
        ) from None


def read_header(data: bytes, origin: str) -> Header:
    """Read an image's size and kind without decoding it.

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
    """Decode an image; scale an image of another size, and crop it around its centre.

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
        image = read(io.BytesIO(without_metadata(data)), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(too_large) from None
    except UnidentifiedImageError:
        kinds = f"{', '.join(FORMATS)} image"
        if (kind := kind_of(data)) is not None:
            raise DataError(f"{origin} is {kind}, and no {kinds}: convert it to PNG or JPEG") from None
        if data.startswith(READ_SIGNATURES):
            raise DataError(f"{origin} is a damaged image (its header ends too early)") from None
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


def kind_of(data: bytes) -> str | None:
    """Return the description of a file that is not read; None for an unknown kind."""
    if data[4:8] == b"ftyp":
        return BRANDS.get(data[8:12], "a film (MP4 or QuickTime)")
    text = data[:SNIFFED_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<"):
        return next((kind for mark, kind in MARKUP if mark in text), None)
    return next((kind for first, kind in OTHER_FORMATS if data.startswith(first)), None)


def without_metadata(data: bytes) -> bytes:
    """Return a PNG file without text, colour profile and EXIF; other and damaged files stay as they are."""
    if not data.startswith(PNG_SIGNATURE):
        return data
    kept, at, start = [], len(PNG_SIGNATURE), 0
    while at + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind in PNG_METADATA:
            kept.append(data[start:at])
            start = at + 12 + size
        at += 12 + size
    return b"".join((*kept, data[start:])) if kept else data
