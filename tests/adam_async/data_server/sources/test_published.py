"""Data sets known by name: downloaded once, then from the cache, with a clear error where neither works."""

import gzip
import hashlib
import re
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources import published_sets
from adam_async.data_server.sources.datasets import load_published
from adam_async.data_server.sources.kinds import STEMS
from adam_async.data_server.sources.published_sets import (
    PUBLISHED,
    Downloader,
    Published,
    RemoteFile,
    RemoteSet,
)
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk
from tests.adam_async.data_server.sources.test_cifar import WHOLE as CIFAR_ARCHIVE
from tests.adam_async.data_server.web import Answer, Web, open_web

TRAIN = np.arange(12 * 5 * 5, dtype=np.uint8).reshape(12, 5, 5)
ARRAYS = (TRAIN, np.arange(12, dtype=np.uint8) % 3, TRAIN[:4], np.arange(4, dtype=np.uint8) % 3)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


FILES = {
    "fashion-mnist": {
        f"{stem}.gz": gzip.compress(idx(array)) for stem, array in zip(STEMS, ARRAYS, strict=True)
    },
    "cifar-10": {published_sets.ARCHIVE: gzip.compress(CIFAR_ARCHIVE)},
}


@pytest_asyncio.fixture
async def web(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Web]:
    monkeypatch.setenv("no_proxy", "*")
    async with open_web() as web:
        for source, files in FILES.items():
            for name, data in files.items():
                web.answers[f"/{source}/{name}"] = [Answer(body=data)]
        yield web


def published(web: Web) -> dict[str, Published]:
    """Return the published data sets, as small files of the test's own server."""

    def here(source: str, files: RemoteSet) -> RemoteSet:
        return replace(
            files,
            mirrors=(f"{web.address}/{source}",),
            files=tuple(
                replace(file, checksum=f"md5:{hashlib.md5(FILES[source][file.name]).hexdigest()}")
                for file in files.files
            ),
        )

    return {source: replace(known, files=here(source, known.files)) for source, known in PUBLISHED.items()}


async def loaded(source: str, folder: Path | None, web: Web, *, online: bool = True) -> Dataset:
    async with Disk() as disk:
        return await load_published(
            source,
            disk,
            downloader=Downloader() if online else None,
            cache_dir=folder,
            published=published(web),
        )


@pytest.mark.parametrize(
    ("source", "title", "shape", "second"),
    [
        ("fashion-mnist", "Fashion-MNIST", (1, 5, 5), "Trouser"),
        ("cifar-10", "CIFAR-10", (3, 32, 32), "automobile"),
    ],
)
async def test_a_data_set_is_downloaded_once_and_then_cached(
    tmp_path: Path, web: Web, source: str, title: str, shape: tuple[int, int, int], second: str
) -> None:
    folder = tmp_path / source
    first = await loaded(source, tmp_path, web)
    again = await loaded(source, tmp_path, web, online=False)

    assert first.name == source
    assert first.image_shape == shape
    assert (first.num_classes, first.class_names[1]) == (10, second)
    assert first.source == f"{title}, downloaded from {web.address}/{source} into {folder}"
    assert again.source == f"{title}, from the cache in {folder}"
    np.testing.assert_array_equal(first.train_images, again.train_images)
    assert len(web.asked) == len(FILES[source])
    if source == "fashion-mnist":
        np.testing.assert_array_equal(first.train_images[:, 0], TRAIN)


async def test_an_error_names_the_attempts_to_get_a_data_set(tmp_path: Path, web: Web) -> None:
    with pytest.raises(DataError, match="no CIFAR-10: there is no cache folder"):
        await loaded("cifar-10", None, web)
    with pytest.raises(
        DataError, match=r"no CIFAR-10: .* does not hold it yet, and downloading is switched off; put"
    ):
        await loaded("cifar-10", tmp_path, web, online=False)
    web.answers.clear()
    failed = r"no CIFAR-10: .* yet, and the download failed \(CIFAR-10 broke .*404.*\)"
    with pytest.raises(
        DataError, match=rf"{failed}; put {published_sets.ARCHIVE} into {tmp_path / 'cifar-10'}$"
    ):
        await loaded("cifar-10", tmp_path, web)


async def test_a_damaged_cache_is_named_and_downloaded_anew(tmp_path: Path, web: Web) -> None:
    await loaded("cifar-10", tmp_path, web)
    path = tmp_path / "cifar-10" / published_sets.ARCHIVE
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(DataError, match=r"the cache is unusable \(.*gzip.*switched off"):
        await loaded("cifar-10", tmp_path, web, online=False)
    assert "downloaded from" in (await loaded("cifar-10", tmp_path, web)).source


def test_every_published_file_has_a_whole_checksum_a_limit_and_a_secure_or_second_address() -> None:
    digits = {"md5": 32, "sha256": 64}
    files: list[RemoteFile] = []
    for remote in (published_sets.MNIST, *(known.files for known in PUBLISHED.values())):
        assert remote.mirrors[0].startswith("https://")
        files += remote.files
    for file in files:
        algorithm, _, checksum = file.checksum.partition(":")
        assert re.fullmatch(rf"[0-9a-f]{{{digits[algorithm]}}}", checksum), file
        assert 1 << 20 < file.limit_bytes <= 256 << 20
    assert len({file.checksum for file in files}) == len(files) == 9
    for source, known in PUBLISHED.items():
        assert {file.name for file in known.files.files} == set(known.names) == set(FILES[source])
