"""What is written as PNG is read again, pixel for pixel, by readers that share nothing with the writer."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from adam_async.cli.png import png_bytes

PICTURES = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)),
).flatmap(lambda shape: arrays(np.uint8, shape))


def read(data: bytes) -> NDArray[np.uint8]:
    """Read a PNG of unfiltered rows by hand, checking every checksum and the order of the chunks."""
    assert data[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    chunks, at = [], 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert int.from_bytes(data[at + 8 + size : at + 12 + size], "big") == zlib.crc32(name + body)
        chunks.append((name, body))
        at += 12 + size
    assert [name for name, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    assert at == len(data)
    columns, rows, bits, kind, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (bits, rest) == (8, [0, 0, 0])
    shape = {0: (rows, columns), 2: (rows, columns, 3)}[kind]
    lines = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(rows, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(shape)


@given(PICTURES)
def test_what_is_written_is_read_again(pixels: NDArray[np.uint8]) -> None:
    again = read(png_bytes(pixels))

    assert again.shape == pixels.shape
    assert again.tobytes() == pixels.tobytes()


@given(PICTURES)
def test_pillow_reads_the_same(pixels: NDArray[np.uint8]) -> None:
    image = pytest.importorskip("PIL.Image", reason="an independent reader needs Pillow")

    with image.open(io.BytesIO(png_bytes(pixels))) as opened:
        assert opened.mode == ("L" if pixels.ndim == 2 else "RGB")
        assert np.array_equal(np.asarray(opened), pixels)


def test_a_view_is_written_as_what_it_shows() -> None:
    pixels = np.arange(60, dtype=np.uint8).reshape(6, 10)[::2, ::-3]

    assert np.array_equal(read(png_bytes(pixels)), pixels)


def test_the_same_pixels_are_the_same_bytes() -> None:
    pixels = np.arange(3 * 40 * 50, dtype=np.uint8).reshape(40, 50, 3)

    assert png_bytes(pixels) == png_bytes(pixels.copy())


@pytest.mark.parametrize(
    ("pixels", "claim"),
    [
        (np.zeros((2, 2), np.float32), r"not of float32 of \(2, 2\)"),
        (np.zeros(4, np.uint8), r"not of uint8 of \(4,\)"),
        (np.zeros((2, 2, 4), np.uint8), r"not of uint8 of \(2, 2, 4\)"),
        (np.zeros((0, 2), np.uint8), r"at least one pixel, not \(0, 2\)"),
        (np.zeros((2, 0, 3), np.uint8), r"at least one pixel, not \(2, 0, 3\)"),
    ],
)
def test_what_is_no_picture_is_refused(pixels: NDArray[np.uint8], claim: str) -> None:
    with pytest.raises(ValueError, match=claim):
        png_bytes(pixels)
