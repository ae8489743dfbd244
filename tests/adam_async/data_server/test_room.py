"""A data server refuses a small file that decodes to more than its room, before decoding it."""

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from adam_async.cli.data import load_data
from adam_async.data_server.dataset import Dataset
from adam_async.errors import DataError
from adam_async.run.memory_sizes import CacheLimits, cache_limits, room_for_whole
from adam_async.runtime.disk import Disk

AVAILABLE = 1 << 20
BOMB = 6 << 20
"""Decoded size of each file below, in bytes."""


def npz(folder: Path) -> Path:
    images = np.zeros((BOMB // 1024, 32, 32), np.uint8)
    labels = np.zeros(len(images), np.uint8)
    np.savez_compressed(folder / "bomb.npz", x_train=images, y_train=labels, x_test=images[:1], y_test=[1])
    return folder / "bomb.npz"


def idx(folder: Path) -> Path:
    count = BOMB // 1024
    for stem, images in (("train", count), ("t10k", 1)):
        pixels = np.array([0x803, images, 32, 32], ">u4").tobytes() + bytes(images * 1024)
        labels = np.array([0x801, images], ">u4").tobytes() + bytes(images)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pixels, 1))
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels, 1))
    return folder


def tar_gz(folder: Path) -> Path:
    with tarfile.open(folder / "bomb.tar.gz", "w:gz", compresslevel=1) as archive:
        for name in ("1.png", "1.cls", "2.png"):
            member = tarfile.TarInfo(name)
            member.size = BOMB // 2
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return folder / "bomb.tar.gz"


def picture(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        (folder / split / "a").mkdir(parents=True)
        image.new("L", (3000, 2000)).save(folder / split / "a" / "bomb.png")
    return folder


def parquet(folder: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [bytes([n]) * (BOMB // 4) for n in range(4)], "label": [0, 1, 0, 1]})
    pq.write_table(table, folder / "bomb.parquet", compression="zstd", use_dictionary=False)
    return folder / "bomb.parquet"


def table(folder: Path) -> Path:
    (folder / "bomb.csv").write_text("label,a,b,c,d\n" + "1,0,0,0,0\n" * (BOMB // 10))
    return folder / "bomb.csv"


async def loaded(source: Path, cache: CacheLimits | None = None) -> Dataset:
    async with Disk() as disk:
        return await load_data(str(source), disk, {}, cache=cache, available=lambda: AVAILABLE)


@pytest.mark.parametrize("make", [npz, idx, tar_gz, picture, parquet, table])
async def test_a_source_above_half_of_the_memory_is_refused_before_it_is_decoded(
    make, tmp_path: Path
) -> None:
    source = make(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=f".* takes [0-9]+ bytes in memory, but .* {AVAILABLE // 2} only.* raise --cache"
        ):
            await loaded(source)
        assert tracemalloc.get_traced_memory()[1] < BOMB // 2
    finally:
        tracemalloc.stop()


async def test_a_cache_that_is_asked_for_makes_room(tmp_path: Path) -> None:
    source = npz(tmp_path)

    dataset = await loaded(source, cache_limits("64M", "", available_bytes=AVAILABLE))

    assert dataset.train_images.nbytes == BOMB


async def test_images_that_stay_in_their_files_need_no_room(tmp_path: Path) -> None:
    for key, images in (("train", BOMB // 1024), ("test", 1)):
        np.save(tmp_path / f"x_{key}.npy", np.zeros((images, 32, 32), np.uint8))
        np.save(tmp_path / f"y_{key}.npy", np.zeros(images, np.uint8))

    dataset = await loaded(tmp_path, cache_limits("auto", "", available_bytes=AVAILABLE))

    assert len(dataset.train_images) == BOMB // 1024


def test_the_room_is_that_of_the_cache_or_half_of_what_is_available() -> None:
    assert room_for_whole(None, available_bytes=1000) == 500
    assert room_for_whole(cache_limits("auto/4", "", available_bytes=1000), available_bytes=1000) == 125
    assert room_for_whole(CacheLimits(700), available_bytes=1000) == 700
    assert room_for_whole(CacheLimits(1), available_bytes=1000) == 500
