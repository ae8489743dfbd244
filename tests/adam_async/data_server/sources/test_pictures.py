"""One image: formats, modes, and images that are not what they say."""

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from adam_async.data_server.sources import limits
from adam_async.data_server.sources.pictures import Header, decode, read_header, require_pillow
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import colour, encode, grey

RAMP = np.arange(0, 240, 15, dtype=np.uint8).reshape(4, 4)


def png_header(columns: int, rows: int) -> bytes:
    """A whole PNG header of an image whose pixels are not there."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 10)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        for part in (chunk, data)
    )


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "PPM"])
def test_formats_without_loss_give_the_pixels_back(kind: str) -> None:
    data = encode(RAMP, kind)

    assert read_header(data, "a").size == (4, 4)
    np.testing.assert_array_equal(decode(data, "a", size=(4, 4), channels=1)[0], RAMP)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_formats_with_loss_come_close(kind: str) -> None:
    data = encode(np.full((16, 16, 3), (200, 100, 50)), kind, quality=95)
    pixels = decode(data, "a", size=(16, 16), channels=3)

    assert pixels.shape == (3, 16, 16)
    np.testing.assert_allclose(pixels.mean(axis=(1, 2)), (200, 100, 50), atol=6)


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_stays_one_channel(mode: str) -> None:
    data = encode(np.full((4, 4), 255), mode=mode)

    assert read_header(data, "a").is_grey
    assert decode(data, "a", size=(4, 4), channels=1).tolist() == [[[255] * 4] * 4]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_everything_else_is_colour_and_loses_its_transparency(mode: str) -> None:
    data = encode(np.full((4, 4, 3), (255, 0, 0)), mode=mode)

    assert not read_header(data, "a").is_grey
    assert decode(data, "a", size=(4, 4), channels=3)[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(("deep", "level"), [(0, 0), (0xFF, 1), (0x7FFF, 127), (0xAB12, 170), (0xFFFF, 255)])
def test_sixteen_bits_are_scaled_to_the_nearest_of_eight(deep: int, level: int) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), deep, np.uint16)).save(file, "PNG")

    assert decode(file.getvalue(), "a", size=(4, 4), channels=1)[0, 0, 0] == level
    assert read_header(file.getvalue(), "a").is_deep
    assert not read_header(encode(RAMP), "a").is_deep


def test_of_an_animation_the_first_picture_counts() -> None:
    pictures = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (9, 200)]
    file = io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:])

    assert decode(file.getvalue(), "a", size=(4, 4), channels=1)[0, 0, 0] == 9


@pytest.mark.parametrize("side", [9000, 12_000, 60_000, 2**31 - 1])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    data = png_header(side, side)
    for refuse in (read_header, lambda data, origin: decode(data, origin, size=(4, 4), channels=1)):
        with pytest.raises(DataError, match=f"a is an image of more than {limits.MAX_IMAGE_PIXELS} pixels"):
            refuse(data, "a")


def test_an_image_of_no_pixels_or_with_half_of_them_is_damaged() -> None:
    for data in (png_header(0, 5), png_header(500, 500), colour(1, 2, 3, rows=40)[:-30]):
        with pytest.raises(DataError, match=r"^a is "):
            decode(data, "a", size=(4, 4), channels=1)


def test_formats_that_run_programs_or_hold_fractions_are_refused() -> None:
    for data, claim in [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n", "no PNG"),
        (b"Pf\n1 1\n-1.0\n\0\0\0\0", "floating-point"),
    ]:
        with pytest.raises(DataError, match=claim):
            read_header(data, "a")


def test_without_pillow_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_pillow()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"needs Pillow.*.*pip install .*\[data\]"):
        require_pillow()


def test_another_size_is_scaled_and_cut_in_the_middle() -> None:
    assert decode(grey(9, rows=30, columns=70), "a", size=(5, 3), channels=3).tolist() == [[[9] * 5] * 3] * 3


def photograph(orientation: object, kind: str = "JPEG") -> bytes:
    """An image of 16 rows and 24 columns whose upper left quarter is bright, with this EXIF orientation."""
    pixels = np.zeros((16, 24), np.uint8)
    pixels[:8, :12] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}, "TIFF": {}}[kind]
    return encode(pixels, kind, exif=exif, **options)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "size", "bright"),
    [
        (1, (24, 16), (0, 0)),
        (2, (24, 16), (0, 1)),
        (3, (24, 16), (1, 1)),
        (4, (24, 16), (1, 0)),
        (5, (16, 24), (0, 0)),
        (6, (16, 24), (0, 1)),
        (7, (16, 24), (1, 1)),
        (8, (16, 24), (1, 0)),
        (9, (24, 16), (0, 0)),
    ],
)
def test_an_image_is_turned_as_its_camera_noted(
    kind: str, orientation: int, size: tuple[int, int], bright: tuple[int, int]
) -> None:
    data = photograph(orientation, kind)

    assert read_header(data, "a").size == size
    pixels = decode(data, "a", size=size, channels=1)[0]
    rows, columns = pixels.shape
    quarters = pixels.reshape(2, rows // 2, 2, columns // 2).mean(axis=(1, 3))
    assert np.unravel_index(quarters.argmax(), (2, 2)) == bright
    assert quarters.max() > 240


def test_damaged_notes_of_a_camera_leave_the_image_as_it_is() -> None:
    data = photograph(6)
    at = data.index(b"Exif\0\0") + 6
    damaged = data[:at] + b"\xff" * 8 + data[at + 8 :]

    assert read_header(damaged, "a").size == (24, 16)
    assert decode(damaged, "a", size=(24, 16), channels=1).shape == (1, 16, 24)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_deflate", "packbits"])
def test_a_tiff_has_its_pixels(compression: str) -> None:
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    data = encode(pixels, "TIFF", compression=compression)

    assert read_header(data, "a") == Header((7, 5), is_grey=False, is_deep=False)
    assert decode(data, "a", size=(7, 5), channels=3).transpose(1, 2, 0).tolist() == pixels.tolist()


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"%PDF-1.7", "is a PDF document, and no PNG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1", "is a HEIC image, and no PNG"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "is an AVIF image, and no PNG"),
        (b"\0\0\0\x14ftypqt  ", "is a film"),
        (b"\xff\n\x12", "is a JPEG XL image"),
        (b"8BPS\0\1", "is a file of Photoshop"),
        (b"\n<!DOCTYPE html><html>", "is a page of HTML"),
        (b"<?xml version='1.0'?>\n<svg>", "is an SVG drawing"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"II*\0\x08", "is a damaged image"),
        (b"\x89PNG\r\n\x1a\n", "is a damaged image"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(data: bytes, claim: str) -> None:
    with pytest.raises(DataError, match=claim):
        read_header(data, "photo.jpg")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I4s", len(data), kind) + data + struct.pack(">I", zlib.crc32(kind + data))


LONG = b"a\0\0" + zlib.compress(b"x" * (2 << 20))


@pytest.mark.parametrize(
    "metadata",
    [
        chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(b"x" * (2 << 20))),
        chunk(b"zTXt", LONG),
        chunk(b"iCCP", LONG),
        chunk(b"tEXt", b"a\0" + b"y" * 1000) * 3,
        chunk(b"tEXt", b"a\0damaged")[:-4] + b"oops",
        chunk(b"eXIf", b"junk"),
    ],
)
@pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
def test_metadata_of_any_size_leave_the_pixels_of_a_png(metadata: bytes, before: bytes) -> None:
    data = encode(RAMP, "PNG")
    at = data.index(before) - 4
    longer = data[:at] + metadata + data[at:]

    assert read_header(longer, "a") == read_header(data, "a")
    np.testing.assert_array_equal(decode(longer, "a", size=(4, 4), channels=1)[0], RAMP)
