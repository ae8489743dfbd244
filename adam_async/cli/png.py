"""Pure: pixels as a PNG file, without a library for images.

A PNG is a signature and chunks, each with its length, its name, its bytes and their checksum. Three of them
are enough for a picture: IHDR says its size and kind, IDAT holds its rows, compressed, IEND ends it.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"

GREY, RGB = 0, 2
"""Kinds of pixels: one byte, or red, green and blue."""

_BITS = 8
_PLAIN_ROW = 0
"""The filter that leaves a row as it is; each row says its own."""


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Write pixels as a PNG file; the same pixels give the same bytes.

    Args:
        pixels: uint8 of shape (H, W), grey from black to white, or (H, W, 3), red, green and blue.

    Raises:
        ValueError: Another type or shape, or no pixels.
    """
    grey = pixels.ndim == 2
    if pixels.dtype != np.uint8 or not (grey or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise ValueError(
            "a PNG is made of uint8 of (rows, columns) or (rows, columns, 3), "
            f"not of {pixels.dtype} of {pixels.shape}"
        )
    if not pixels.size:
        raise ValueError(f"a PNG has at least one pixel, not {pixels.shape}")
    rows, columns = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", columns, rows, _BITS, GREY if grey else RGB, 0, 0, 0)
    lines = np.full((rows, 1 + pixels[0].size), _PLAIN_ROW, np.uint8)
    lines[:, 1:] = pixels.reshape(rows, -1)
    body = zlib.compress(lines.tobytes(), level=9)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
