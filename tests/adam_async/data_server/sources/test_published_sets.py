"""Downloads from a real server that cuts, lies and stalls: the file is whole, or there is none."""

import asyncio
import hashlib
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from adam_async.data_server.sources.published_sets import CHUNK_BYTES, Downloader, RemoteFile, RemoteSet
from adam_async.errors import DataError
from tests.adam_async.data_server.web import Answer, Web, open_web

pytestmark = pytest.mark.thorough

BODY = hashlib.shake_128(b"what is to be downloaded").digest(1_000_000)
GARBAGE = b"<html>no such file, but status 200</html>"
FILE = RemoteFile(name="file.bin", checksum=f"md5:{hashlib.md5(BODY).hexdigest()}", limit_bytes=1_100_000)
SOON = Downloader(connect_s=20.0, stall_s=20.0)


@pytest_asyncio.fixture
async def web(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Web]:
    monkeypatch.setenv("no_proxy", "*")
    async with open_web() as web:
        yield web


def remote(*mirrors: str, files: tuple[RemoteFile, ...] = (FILE,), file_s: float = 40.0) -> RemoteSet:
    return RemoteSet(name="Bytes", mirrors=mirrors, files=files, file_s=file_s)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


async def download_into(
    folder: Path, web: Web, *answers: Answer, file_s: float = 40.0, **changes: Any
) -> str:
    """Download the file from a mirror that gives these answers, the last one for ever."""
    web.answers["/a/file.bin"] = list(answers)
    return await replace(SOON, **changes).download(remote(f"{web.address}/a", file_s=file_s), folder)


async def thread_ends() -> None:
    """Wait until no download's thread is left."""
    while any(thread.name.startswith("download ") for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_file_is_downloaded_once_and_its_progress_reported(tmp_path: Path, web: Web) -> None:
    web.answers["/a/file.bin"] = [Answer(body=BODY)]
    news: list[tuple[str, int, int | None]] = []
    downloader = Downloader(on_bytes=lambda *each: news.append(each))
    folder = tmp_path / "new" / "cache"
    for _ in range(2):
        assert await downloader.download(remote(f"{web.address}/a"), folder) == f"{web.address}/a"

    assert (folder / "file.bin").read_bytes() == BODY
    assert names(folder) == ["file.bin"]
    assert web.asked == [("/a/file.bin", 0)]
    assert news[-1] == (f"{web.address}/a/file.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in news] == sorted({done for _, done, _ in news})


async def test_a_file_of_unknown_length_is_downloaded_too(tmp_path: Path, web: Web) -> None:
    await download_into(tmp_path, web, Answer(body=BODY, length=-1))

    assert (tmp_path / "file.bin").read_bytes() == BODY


async def test_a_download_that_breaks_off_leaves_nothing_and_begins_again(tmp_path: Path, web: Web) -> None:
    cut = Answer(body=BODY, cut=300_000)
    with pytest.raises(DataError, match=r"Bytes broke off at file.bin \(.*/a/file.bin: .*IncompleteRead"):
        await download_into(tmp_path, web, cut)
    assert names(tmp_path) == []

    await download_into(tmp_path, web, Answer(body=BODY))
    assert (tmp_path / "file.bin").read_bytes() == BODY


async def test_cancelling_ends_the_thread_at_its_next_piece_and_leaves_nothing(
    tmp_path: Path, web: Web
) -> None:
    arrived = asyncio.Event()
    web.answers["/a/file.bin"] = [Answer(body=BODY, stall=400_000)]
    downloader = Downloader(on_bytes=lambda url, done, total: arrived.set())
    async with asyncio.TaskGroup() as group:
        downloading = group.create_task(
            downloader.download(remote(f"{web.address}/a"), tmp_path), name="download"
        )
        await arrived.wait()
        downloading.cancel()
    web.ended.set()
    await thread_ends()

    assert names(tmp_path) == []


async def test_mirrors_are_tried_in_turn_and_each_failure_is_named(tmp_path: Path, web: Web) -> None:
    web.answers = {
        "/garbage/file.bin": [Answer(body=GARBAGE)],
        "/silent/file.bin": [Answer(body=BODY, stall=0)],
        "/good/file.bin": [Answer(body=BODY)],
    }
    mirrors = [f"{web.address}/{name}" for name in ("absent", "garbage", "silent", "good")]
    downloader = Downloader(connect_s=1.0)
    with pytest.raises(DataError) as caught:
        await downloader.download(remote(*mirrors[:3]), tmp_path)
    assert "file.bin" not in names(tmp_path)
    served = await downloader.download(remote(*mirrors), tmp_path)

    for claim in (
        "Bytes broke off at file.bin (",
        "/absent/file.bin: 404 Client Error: Not Found",
        "/garbage/file.bin: it does not contain the file (its checksum differs)",
        "/silent/file.bin: no answer in time, after 0 bytes",
    ):
        assert claim in str(caught.value)
    assert served == mirrors[3]
    assert (tmp_path / "file.bin").read_bytes() == BODY


async def test_the_mirror_that_has_served_is_asked_first_for_the_next_file(tmp_path: Path, web: Web) -> None:
    files = (FILE, replace(FILE, name="second.bin"))
    web.answers = {f"/b/{file.name}": [Answer(body=BODY)] for file in files}
    wanted = remote(f"{web.address}/a", f"{web.address}/b", files=files)
    assert await Downloader().download(wanted, tmp_path) == f"{web.address}/b"

    assert [path for path, _ in web.asked] == ["/a/file.bin", "/b/file.bin", "/b/second.bin"]


async def test_a_damaged_file_in_the_cache_is_replaced(tmp_path: Path, web: Web) -> None:
    (tmp_path / "file.bin").write_bytes(BODY[:-1])
    await download_into(tmp_path, web, Answer(body=BODY))

    assert (tmp_path / "file.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    ("lie", "claim"),
    [
        (Answer(body=BODY, length=1_050_000), "IncompleteRead"),
        (Answer(body=BODY, length=1000), "does not contain the file"),
        (Answer(body=BODY, length=1_100_001), "sends more than the 1100000 bytes expected"),
        (Answer(body=BODY + bytes(100_001), length=-1), "sends more than the 1100000 bytes expected"),
        (Answer(body=b""), "does not contain the file"),
        (Answer(body=BODY, length=10**30), "sends more than the 1100000 bytes expected"),
        (Answer(status="503 Come back later"), "503 Server Error: Come back later"),
        (Answer(status="nonsense"), "nonsense"),
    ],
)
async def test_lies_are_found_out_and_leave_no_file(
    tmp_path: Path, web: Web, lie: Answer, claim: str
) -> None:
    with pytest.raises(DataError, match=claim):
        await download_into(tmp_path, web, lie)

    assert names(tmp_path) == []
    assert len(web.asked) == 1


@pytest.mark.parametrize(
    ("deadlines", "claim"),
    [
        ({"stall_s": 0.2}, f"no answer in time, after {300_000 // CHUNK_BYTES * CHUNK_BYTES} bytes"),
        ({"file_s": 0.2}, "not whole after 0.2 s.; try again"),
    ],
)
async def test_a_server_that_stalls_is_left_at_the_deadline(
    tmp_path: Path, web: Web, deadlines: dict[str, float], claim: str
) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(DataError, match=claim):
            await download_into(tmp_path, web, Answer(body=BODY, stall=300_000), **deadlines)
    web.ended.set()
    await thread_ends()

    assert names(tmp_path) == []


async def test_two_downloads_of_one_file_at_once_leave_a_whole_one(tmp_path: Path, web: Web) -> None:
    await asyncio.gather(*(download_into(tmp_path, web, Answer(body=BODY)) for _ in range(2)))

    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert names(tmp_path) == ["file.bin"]


async def test_without_pooch_the_error_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match=r"needs pooch.*pip install .*\[data\]"):
        await SOON.download(remote("http://a"), tmp_path)
