"""IDX files: what is accepted, and what each kind of damage is called."""

import contextlib
import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from adam_async.data_server.sources.idx import gunzip, parse_idx
from adam_async.errors import DataError


def idx(array: np.ndarray, type_code: int = 0x08) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, type_code, array.ndim, *array.shape) + array.tobytes()


LABELS = idx(np.arange(5, dtype=np.uint8))


@given(npst.arrays(np.uint8, npst.array_shapes(min_dims=3, max_dims=3)), st.booleans())
def test_images_come_back_as_they_were_written_compressed_or_not(images: np.ndarray, packed: bool) -> None:
    data = gzip.compress(idx(images)) if packed else idx(images)

    np.testing.assert_array_equal(parse_idx(data, "images", axes=3), images)


@given(st.binary(max_size=40))
def test_any_bytes_are_an_array_or_a_data_error(data: bytes) -> None:
    with contextlib.suppress(DataError):
        assert parse_idx(data, "noise", axes=1).ndim == 1


@pytest.mark.parametrize(
    ("data", "claims"),
    [
        (b"", "holds 0 bytes, too few"),
        (b"<html>not found</html>", "not an IDX file: it begins with 0x3c68746d, expected .* 0x00000801"),
        (idx(np.zeros(3, np.float32), 0x0D), r"holds float32 values \(magic number 0x00000d01\)"),
        (idx(np.zeros((2, 3, 3), np.uint8)), "3 axes .* swapped"),
        (LABELS[:6], "ends inside its header, after 6 of 8 bytes"),
        (LABELS[:-1], r"holds 4 values, fewer than the 5 of its header \(5,\)"),
        (LABELS + b"x", "holds 6 values, more than the 5"),
        # Without a time of its own: the data are part of the name, which must be the same wherever tests run.
        (gzip.compress(LABELS, mtime=0)[:-9], "ends in the middle of its gzip data"),
        (b"\x1f\x8b" + b"\0" * 20, "damaged gzip file"),
    ],
)
def test_damage_is_named_with_the_file(data: bytes, claims: str) -> None:
    with pytest.raises(DataError, match=f"^labels.gz .*{claims}"):
        parse_idx(data, "labels.gz", axes=1)


@pytest.mark.parametrize("cuts", [(3,), (3, 8), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)])
@pytest.mark.parametrize("padding", [b"", bytes(512)])
def test_a_gzip_file_may_have_several_members(cuts: tuple[int, ...], padding: bytes) -> None:
    parts = [LABELS[a:b] for a, b in zip((0, *cuts), (*cuts, None), strict=True)]
    packed = b"".join(map(gzip.compress, parts)) + padding

    np.testing.assert_array_equal(parse_idx(packed, "labels", axes=1), np.arange(5))
    with pytest.raises(DataError, match="ends in the middle of its gzip data"):
        parse_idx(b"".join(map(gzip.compress, parts))[:-1], "labels", axes=1)


def test_content_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adam_async.data_server.sources.idx.LIMIT_BYTES", 1000)
    with pytest.raises(DataError, match="bomb unpacks to more than 1000 bytes"):
        gunzip(gzip.compress(bytes(100_000)), "bomb")
