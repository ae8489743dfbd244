"""The four .npy files: what is missing, damaged or hostile."""

from pathlib import Path

import numpy as np
import pytest

from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import read, write_small


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
