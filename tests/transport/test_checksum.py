"""The checksum is CRC-32C, independent of the division of its bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.checksum import checksum

DIGITS = b"123456789"


@given(st.integers(0, 9))
def test_the_check_value_of_crc32c_comes_out_however_the_bytes_are_cut(cut: int) -> None:
    assert checksum([DIGITS[:cut], memoryview(DIGITS)[cut:]]) == 0xE3069283
    assert checksum([memoryview(bytearray(DIGITS[cut:]))], checksum([DIGITS[:cut]])) == 0xE3069283


@pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
def test_an_array_counts_as_its_bytes(dtype: str) -> None:
    array = np.arange(12).astype(dtype).reshape(3, 4)
    assert checksum([array]) == checksum([array.tobytes()])
