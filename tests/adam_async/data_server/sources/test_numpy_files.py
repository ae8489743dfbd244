"""Archives: the four arrays, their layouts, and what is wrong with the others."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adam_async.data_server.sources import limits
from adam_async.data_server.sources.numpy_files import parse_npz
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import read, write_small


def arrays(**changes: Any) -> dict[str, Any]:
    good = {
        "x_train": np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": np.zeros((2, 4, 4), np.uint8),
        "y_test": np.array([[2], [3]], np.int32),
    }
    return {name: array for name, array in (good | changes).items() if array is not None}


def npz(**changes: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays(**changes))
    return file.getvalue()


def test_four_arrays_become_a_data_set() -> None:
    dataset = parse_npz(npz(), "small.npz", name="small", source="as asked for")

    assert dataset.train_images.shape == (6, 1, 4, 4)
    assert dataset.train_labels.dtype == np.int64
    assert dataset.test_labels.tolist() == [2, 3]
    assert dataset.num_classes == 4
    assert repr(dataset) == "<Dataset small 6 train 2 test (1, 4, 4) 4 classes>"


def test_channels_may_come_last() -> None:
    colour = np.arange(2 * 8 * 6 * 3, dtype=np.uint8).reshape(2, 8, 6, 3)
    dataset = parse_npz(
        npz(x_train=colour, y_train=np.array([0, 1]), x_test=colour), "c.npz", name="c", source=""
    )

    assert dataset.image_shape == (3, 8, 6)
    assert dataset.train_images.flags.c_contiguous
    np.testing.assert_array_equal(dataset.train_images[1, 2], colour[1, :, :, 2])


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"x_test": None}, "has no array x_test; it has x_train, y_train, y_test"),
        ({"x_train": np.zeros((6, 4, 4))}, "x_train holds float64, expected uint8"),
        ({"x_train": np.zeros((6, 16), np.uint8)}, r"x_train has shape \(6, 16\), expected \(images, rows"),
        ({"x_train": np.zeros((0, 4, 4), np.uint8)}, "x_train has shape .* holds no pixels"),
        ({"x_train": np.zeros((6, 5, 4), np.uint8)}, r"\(1, 5, 4\) .* one shape"),
        ({"y_train": np.zeros(5, np.int64)}, "6 images but a.npz:y_train has 5 labels"),
        ({"y_train": np.zeros((6, 3), np.int64)}, "y_train has shape .* one class number per image"),
        ({"y_train": np.zeros(6)}, "y_train holds float64, expected integers"),
        ({"y_train": np.full(6, -1)}, "y_train holds the label -1"),
        ({"y_train": np.array([0, 1, 2, 10**9, 1, 2])}, "y_train holds the label 1000000000, .* to 65535"),
        ({"y_test": np.array([0, 65_536])}, "y_test holds the label 65536, .* to 65535"),
        ({"y_train": np.array([None] * 6, object)}, "y_train cannot be read .*save plain arrays"),
    ],
)
def test_a_wrong_array_is_named(changes: dict[str, Any], claim: str) -> None:
    with pytest.raises(DataError, match=f"a.npz.*{claim}"):
        parse_npz(npz(**changes), "a.npz", name="a", source="")


def test_a_file_that_is_no_archive_is_refused() -> None:
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    for data, claim in [
        (b"", "not an .npz"),
        (b"\x80\x04N.", "not an .npz"),
        (
            b"label,pixels\n1,2\n",
            "not an .npz archive: it begins with b'label,pi'; write one with numpy.savez",
        ),
        (npz()[:-30], "not an .npz"),
        (single.getvalue(), "holds one array"),
    ]:
        with pytest.raises(DataError, match=claim):
            parse_npz(data, "a.npz", name="a", source="")


def test_a_damaged_member_is_named() -> None:
    data = bytearray(npz())
    data[data.index(np.arange(20, dtype=np.uint8).tobytes()) + 3] ^= 0xFF

    with pytest.raises(DataError, match="x_train is damaged"):
        parse_npz(bytes(data), "a.npz", name="a", source="")


def with_train_images(array: bytes) -> bytes:
    """An archive whose x_train.npy has these bytes."""
    file = io.BytesIO(npz(x_train=None))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("x_train.npy", array)
    return file.getvalue()


def promising(shape: tuple[int, ...], content: bytes = b"") -> bytes:
    """An archive whose x_train says that it has this shape."""
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return with_train_images(array.getvalue() + content)


@pytest.mark.parametrize("images", [10**9, 10**12, 10**30])
def test_a_header_that_promises_more_than_there_is_asks_for_no_memory(images: int) -> None:
    with pytest.raises(DataError, match=rf"has a header of uint8 \({images}, 28, 28\).*but it has"):
        parse_npz(promising((images, 28, 28), b"1234"), "a.npz", name="a", source="")


def test_an_array_larger_than_a_data_set_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_BYTES", 95)

    with pytest.raises(DataError, match=r"a\.npz has 142 bytes of images, expected at most 95"):
        parse_npz(npz(), "a.npz", name="a", source="")


def test_an_array_of_a_later_version_of_the_format_is_refused() -> None:
    array = io.BytesIO()
    np.lib.format.write_array(array, arrays()["x_train"], version=(3, 0))

    with pytest.raises(DataError, match=r"x_train cannot be read \(version 3\.0 of the format\)"):
        parse_npz(with_train_images(array.getvalue()), "a.npz", name="a", source="")


def test_an_archive_without_a_test_part_is_split_within_each_class() -> None:
    labels = np.arange(30) % 10
    images = np.zeros((30, 4, 4), np.uint8)
    images[:, 0, 0] = np.arange(30)
    without = {"x_train": images, "x_test": None, "y_test": None}

    found = parse_npz(npz(y_train=labels, **without), "a.npz", name="a", source="a")

    assert set(found.train_labels) == set(found.test_labels) == set(range(10))
    both = np.concatenate([found.train_images, found.test_images])[:, 0, 0, 0]
    assert sorted(both) == list(range(30))
    assert "images test, because it has no test part" in found.source
    with pytest.raises(DataError, match=r"has 30 images but .* has 29 labels"):
        parse_npz(npz(y_train=labels[1:], **without), "a.npz", name="a", source="a")


async def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "sprung",)

    folder = write_small(tmp_path) / "npy"
    np.save(folder / "x_train.npy", np.array([Trap()] * 24, object), allow_pickle=True)
    with pytest.raises(DataError, match=r"x_train.npy is not a .npy file, or damaged .*save plain arrays"):
        await read(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"", "not a .npy file"),
        (b"\x80\x04N.", "not a .npy file"),
        (b"\x93NUMPY\x01\x00\x05\x00{'a':", "not a .npy file"),
        (
            b"\x93NUMPY\x01\x00\x46\x00"
            + b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999,4)}".ljust(70),
            "not a .npy file",
        ),
    ],
)
async def test_a_value_that_is_no_array_is_refused(tmp_path: Path, data: bytes, claim: str) -> None:
    folder = write_small(tmp_path) / "npy"
    (folder / "x_test.npy").write_bytes(data)
    with pytest.raises(DataError, match=f"x_test.npy is {claim}"):
        await read(folder)


async def test_a_truncated_array_is_refused(tmp_path: Path) -> None:
    folder = write_small(tmp_path) / "npy"
    whole = (folder / "x_train.npy").read_bytes()
    (folder / "x_train.npy").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"x_train.npy is not a .npy file, or damaged"):
        await read(folder)
