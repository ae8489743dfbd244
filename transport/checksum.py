"""Pure: the CRC-32C of payload bytes, which finds errors that the 16-bit checksum of TCP misses.

checksum([memoryview(b"123"), b"456789"])       # 0xE3069283
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from google_crc32c import extend

from transport.tensors import Tensor

__all__ = ["CHECKSUM_BYTES", "checksum"]

CHECKSUM_BYTES: Final = 4
"""Length of a checksum on the wire, in bytes."""

_UINT8 = np.dtype(np.uint8)


def checksum(parts: Iterable[bytes | memoryview | Tensor], begun: int = 0) -> int:
    """Return the CRC-32C of contiguous parts in order, continued from the checksum ``begun``."""
    for part in parts:
        # The extension accepts arrays, but not memoryviews.
        begun = extend(begun, np.frombuffer(part, _UINT8))
    return begun
