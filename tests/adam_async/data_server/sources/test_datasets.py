"""Every source of training data, from real files and a real web server."""

import asyncio
import functools
import gzip
import http.server
import io
import logging
import socket
import struct
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from adam_async.data_server.dataset import make_dataset
from adam_async.data_server.sources import datasets
from adam_async.data_server.sources.datasets import NO_MNIST, load_dataset
from adam_async.data_server.sources.kinds import STEMS
from adam_async.data_server.sources.published_sets import MNIST, Downloader, RemoteSet
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk

TRAIN = np.arange(12 * 5 * 5, dtype=np.uint8).reshape(12, 5, 5)
ARRAYS = (TRAIN, np.arange(12, dtype=np.uint8) % 3, TRAIN[:4], np.arange(4, dtype=np.uint8) % 3)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


CONTENTS = dict(zip(STEMS, map(idx, ARRAYS), strict=True))
PACKED = {f"{stem}.gz": gzip.compress(content, mtime=0) for stem, content in CONTENTS.items()}


def mnist_at(*mirrors: str) -> RemoteSet:
    """MNIST of this file's contents, at other mirrors."""
    files = [
        replace(file, checksum=f"sha256:{sha256(PACKED[file.name]).hexdigest()}") for file in MNIST.files
    ]
    return replace(MNIST, mirrors=mirrors, files=tuple(files))


def write_mnist(folder: Path, *, packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in CONTENTS.items():
        if packed:
            (folder / f"{stem}.gz").write_bytes(PACKED[f"{stem}.gz"])
        else:
            (folder / stem.replace("-idx", ".idx")).write_bytes(content)
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve `tmp_path`/web; yield its address."""
    monkeypatch.setenv("no_proxy", "*")
    handler = functools.partial(_Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an address where nobody listens."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_the_digits_are_inside_the_package() -> None:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)

    assert repr(digits) == "<Dataset digits 1437 train 360 test (1, 8, 8) 10 classes>"
    assert digits.train_images.dtype == np.uint8
    assert (int(digits.train_images.min()), int(digits.train_images.max())) == (0, 255)
    assert np.bincount(digits.train_labels).min() > 100
    assert np.bincount(digits.test_labels).min() > 20


@pytest.mark.thorough
async def test_digits_can_be_told_apart_by_their_nearest_neighbour() -> None:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    train, test = (
        images.reshape(len(images), -1).astype(np.float64)
        for images in (digits.train_images, digits.test_images)
    )
    nearest = ((test[:, np.newaxis] - train) ** 2).sum(axis=2).argmin(axis=1)

    assert (digits.train_labels[nearest] == digits.test_labels).mean() > 0.97


@pytest.mark.parametrize("packed", [True, False])
async def test_a_folder_of_mnist_files_is_read(tmp_path: Path, packed: bool) -> None:
    async with Disk() as disk:
        dataset = await load_dataset(str(write_mnist(tmp_path, packed=packed)), disk)

    np.testing.assert_array_equal(dataset.train_images[:, 0], TRAIN)
    assert dataset.test_labels.tolist() == [0, 1, 2, 0]
    assert dataset.source == f"{tmp_path}, as asked for"


@pytest.mark.parametrize("dotted", [True, False])
async def test_mnist_files_may_be_in_folders_of_their_names(tmp_path: Path, dotted: bool) -> None:
    for stem, content in CONTENTS.items():
        (tmp_path / stem).mkdir()
        (tmp_path / stem / stem).write_bytes(content)
        if dotted:
            (tmp_path / stem.replace("-idx", ".idx")).write_bytes(content)
    async with Disk() as disk:
        dataset = await load_dataset(str(tmp_path), disk)

    np.testing.assert_array_equal(dataset.train_images[:, 0], TRAIN)


async def test_an_archive_is_read_by_its_name_or_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    np.savez(path, x_train=ARRAYS[0], y_train=ARRAYS[1], x_test=ARRAYS[2], y_test=ARRAYS[3])
    async with Disk() as disk:
        for source in (path, tmp_path):
            dataset = await load_dataset(str(source), disk)
            assert repr(dataset) == "<Dataset shapes 12 train 4 test (1, 5, 5) 3 classes>"


async def test_a_source_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    mixed = write_mnist(tmp_path / "mixed")
    (mixed / f"{STEMS[1]}.gz").write_bytes(idx(np.zeros(11, np.uint8)))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.npz").touch()
    (tmp_path / "two" / "b.npz").touch()
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "wide.npz").write_bytes(b"PK\x03\x04" + bytes(40))
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "data.npz").mkdir()

    cases = {
        "absent.npz": "does not exist; name a folder",
        "two": "holds 2 archives .*name one of them",
        "broken.npz": "not an .npz archive",
        "folder.npz": "folder.npz holds no data set",
        "folder.csv": "folder.csv holds no data set",
        "absent.tar": "does not exist; name a folder",
        "wide.npz": "wide.npz is not an .npz archive, or damaged",
        "inner": "inner holds no image",
        "mixed": "train-images-idx3-ubyte.gz has 12 images but .*train-labels-idx1-ubyte.gz has 11 labels",
    }
    async with Disk() as disk:
        for name, claim in cases.items():
            with pytest.raises(DataError, match=claim):
                await load_dataset(str(tmp_path / name), disk)


async def test_an_archive_that_asks_for_more_than_all_memory_is_damaged(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 50, 4, 4)}
    )
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{key}.npy", header.getvalue())
    async with Disk() as disk:
        with pytest.raises(
            DataError, match=r"bomb.npz:x_train has a header of uint8 .* was cut short or is damaged"
        ):
            await load_dataset(str(tmp_path / "bomb.npz"), disk)


async def test_the_data_folder_comes_before_the_cache_and_its_damage_is_an_error(tmp_path: Path) -> None:
    cache = write_mnist(tmp_path / "cache")
    chosen = write_mnist(tmp_path / "chosen")
    async with Disk() as disk:
        assert "ADAM_DATA_DIR" in (await load_dataset("auto", disk, data_dir=chosen, cache_dir=cache)).source
        assert (
            await load_dataset("auto", disk, cache_dir=cache)
        ).source == f"MNIST, from the cache in {cache}"
        (chosen / f"{STEMS[0]}.gz").write_bytes(b"?")
        with pytest.raises(DataError, match="too few for an IDX header"):
            await load_dataset("auto", disk, data_dir=chosen, cache_dir=cache)


@pytest.mark.parametrize("source", ["auto", "mnist"])
async def test_a_missing_data_folder_is_an_error_with_its_variable(source: str, tmp_path: Path) -> None:
    async with Disk() as disk:
        with pytest.raises(
            DataError, match=r"ADAM_DATA_DIR names .*/absent, which does not exist; name a folder or file"
        ):
            await load_dataset(source, disk, data_dir=tmp_path / "absent")


async def test_mnist_is_downloaded_once_and_then_cached(
    tmp_path: Path, web: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "web" / "mnist")
    cache = tmp_path / "cache" / "mnist"
    monkeypatch.setattr(datasets, "MNIST", mnist_at(refused, f"{web}/nothing", f"{web}/mnist"))
    async with Disk() as disk:
        first = await load_dataset("auto", disk, downloader=Downloader(), cache_dir=cache)
        again = await load_dataset("mnist", disk, cache_dir=cache)

    assert first.source == f"MNIST, downloaded from {web}/mnist into {cache}"
    assert again.source == f"MNIST, from the cache in {cache}"
    np.testing.assert_array_equal(first.train_images, again.train_images)
    assert sorted(path.name for path in cache.iterdir()) == sorted(f"{stem}.gz" for stem in STEMS)


async def test_without_network_auto_takes_the_digits_at_once_and_mnist_fails(
    tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adam_async.data_server.sources.datasets")
    monkeypatch.setattr(datasets, "MNIST", mnist_at(refused, f"{refused}/b"))
    cache = tmp_path / "cache"
    async with asyncio.timeout(6), Disk() as disk:
        digits = await load_dataset("auto", disk, downloader=Downloader(), cache_dir=cache)
        with pytest.raises(
            DataError, match=r"no MNIST: .* does not hold it yet, and the download failed .*digits"
        ):
            await load_dataset("mnist", disk, downloader=Downloader(), cache_dir=cache)

    assert digits.name == "digits"
    assert digits.source == NO_MNIST
    assert "Connection refused" in caplog.text
    assert list(cache.iterdir()) == []


async def test_without_pooch_auto_takes_the_digits_and_mnist_names_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    async with Disk() as disk:
        digits = await load_dataset("auto", disk, downloader=Downloader(), cache_dir=tmp_path)
        with pytest.raises(DataError, match="downloading needs pooch"):
            await load_dataset("mnist", disk, downloader=Downloader(), cache_dir=tmp_path)

    assert digits.source == NO_MNIST


async def test_a_damaged_cache_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adam_async.data_server.sources.datasets")
    (write_mnist(tmp_path) / f"{STEMS[3]}.gz").write_bytes(b"\x1f\x8bdamage")
    async with Disk() as disk:
        digits = await load_dataset("auto", disk, cache_dir=tmp_path)

    assert digits.source == NO_MNIST
    assert "the cache is unusable" in caplog.text
    assert "downloading is switched off" in caplog.text


def test_the_squared_norm_is_that_of_pixels_from_0_to_1() -> None:
    bright = np.full((300, 2, 3), 255, np.uint8)
    bright[:, 0, 0] = 0
    labels = np.zeros(300, np.int64)
    origins = ("a", "b", "c", "d")

    found = make_dataset(name="x", source="y", train=(bright, labels), test=(bright, labels), origins=origins)

    assert found.squared_norm == 5.0
    assert found.info()["squared_norm"] == 5.0


PAIR = (np.zeros((2, 4, 4), np.uint8), np.arange(2))


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        ({"test": None}, r"test must be a pair of two arrays, \(images, labels\), not None; .* both needed"),
        ({"train": PAIR[0]}, r"train must be a pair of two arrays, .*, not ndarray of 2"),
        ({"test": (*PAIR, None)}, "test must be a pair of two arrays, .*, not tuple of 3"),
        ({"origins": ("images", "labels")}, r"must name four arrays \(train images, .*, not tuple of 2;"),
        ({"train": ([], PAIR[1])}, "^train images is a list, expected a NumPy array"),
        ({"test": (PAIR[0], PAIR[1][:1])}, "^test images has 2 images but test labels has 1 labels"),
    ],
)
def test_an_error_names_an_object_that_makes_no_data_set(wrong, claim):
    with pytest.raises(DataError, match=claim):
        make_dataset(**{"name": "x", "source": "here", "train": PAIR, "test": PAIR, **wrong})
