"""Downloads from a real server that cuts, lies, stalls and ignores: the file is whole, or there is none."""

import asyncio
import gzip
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.sources.downloads import TRIES, Patience, RemoteFile, RemoteSet, download, watched
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk, Piece, fetch_url
from tests.adam_async.data_server.web import Answer, Web, open_web

pytestmark = pytest.mark.thorough

BODY = hashlib.shake_128(b"what is to be downloaded").digest(1_000_000)
GARBAGE = b"<html>no such file, but status 200</html>"
FILE = RemoteFile(name="file.bin", checksum=f"md5:{hashlib.md5(BODY).hexdigest()}", limit_bytes=1_100_000)
SOON = Patience(connect_s=20.0, stall_s=20.0, file_s=40.0)


@pytest_asyncio.fixture
async def web(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Web]:
    monkeypatch.setenv("no_proxy", "*")
    async with open_web() as web:
        yield web


def remote(*mirrors: str, file: RemoteFile = FILE) -> RemoteSet:
    return RemoteSet(name="Bytes", mirrors=mirrors, files=(file,))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()]


async def fetch_into(folder: Path, web: Web, *answers: Answer, **changes: Any) -> str:
    """Download the file from a mirror that gives these answers, the last one for ever."""
    web.answers["/a/file.bin"] = list(answers)
    wanted = remote(f"{web.address}/a", file=changes.pop("file", FILE))
    async with Disk() as disk:
        return await download(wanted, folder, disk=disk, fetch=fetch_url, patience=replace(SOON, **changes))


async def test_a_file_is_fetched_once_and_its_progress_told(tmp_path: Path, web: Web) -> None:
    web.answers["/a/file.bin"] = [Answer(body=BODY)]
    told: list[tuple[str, int, int | None]] = []
    fetch = watched(fetch_url, lambda *news: told.append(news))
    folder = tmp_path / "new" / "cache"
    async with Disk() as disk:
        for _ in range(2):
            wanted = remote(f"{web.address}/a")
            assert await download(wanted, folder, disk=disk, fetch=fetch) == f"{web.address}/a"

    assert (folder / "file.bin").read_bytes() == BODY
    assert names(folder) == ["file.bin"]
    assert web.asked == [("/a/file.bin", 0)]
    assert told[-1] == (f"{web.address}/a/file.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})


async def test_what_is_cut_is_continued_where_it_broke_off(tmp_path: Path, web: Web) -> None:
    cut = Answer(body=BODY, cut=300_000)
    await fetch_into(tmp_path, web, cut, cut, Answer(body=BODY))

    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert web.asked == [("/a/file.bin", start) for start in (0, 300_000, 600_000)]


async def test_a_server_that_ignores_ranges_begins_again(tmp_path: Path, web: Web) -> None:
    await fetch_into(tmp_path, web, Answer(body=BODY, cut=300_000), Answer(body=BODY, ranges=False))

    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert web.asked[-1] == ("/a/file.bin", 300_000)
    assert names(tmp_path) == ["file.bin"]


async def test_cancelling_leaves_the_part_and_a_later_call_continues_it(tmp_path: Path, web: Web) -> None:
    arrived = asyncio.Event()
    web.answers["/a/file.bin"] = [Answer(body=BODY, stall=400_000)]

    def look(url: str, done: int, total: int | None) -> None:
        if done == 400_000:
            arrived.set()

    async with Disk() as disk, asyncio.TaskGroup() as group:
        fetching = group.create_task(
            download(remote(f"{web.address}/a"), tmp_path, disk=disk, fetch=watched(fetch_url, look)),
            name="download",
        )
        await arrived.wait()
        fetching.cancel()
    held = (tmp_path / "file.bin.part").read_bytes()

    assert names(tmp_path) == ["file.bin.part"]
    assert held
    assert held == BODY[: len(held)]

    await fetch_into(tmp_path, web, Answer(body=BODY))
    assert web.asked[-1] == ("/a/file.bin", len(held))
    assert names(tmp_path) == ["file.bin"]


async def test_mirrors_are_tried_in_turn_and_each_failure_is_named(tmp_path: Path, web: Web) -> None:
    web.answers = {
        "/garbage/file.bin": [Answer(body=GARBAGE)],
        "/silent/file.bin": [Answer(body=BODY, stall=0)],
        "/good/file.bin": [Answer(body=BODY)],
    }
    mirrors = [f"{web.address}/{name}" for name in ("absent", "garbage", "silent", "good")]
    patience = replace(SOON, connect_s=1.0)
    async with Disk() as disk:
        with pytest.raises(DataError) as caught:
            await download(remote(*mirrors[:3]), tmp_path, disk=disk, fetch=fetch_url, patience=patience)
        assert names(tmp_path) == []
        served = await download(remote(*mirrors), tmp_path, disk=disk, fetch=fetch_url, patience=patience)

    for claim in (
        "Bytes broke off at file.bin (",
        "/absent/file.bin answers 404 Not Found",
        "/garbage/file.bin does not contain file.bin of Bytes (md5 ",
        "/silent/file.bin: no answer in time, after 0 bytes",
    ):
        assert claim in str(caught.value)
    assert served == mirrors[3]
    assert (tmp_path / "file.bin").read_bytes() == BODY


async def test_the_mirror_that_has_served_is_asked_first_for_the_next_file(tmp_path: Path, web: Web) -> None:
    files = (FILE, replace(FILE, name="second.bin"))
    web.answers = {f"/b/{file.name}": [Answer(body=BODY)] for file in files}
    wanted = RemoteSet(name="Two", mirrors=(f"{web.address}/a", f"{web.address}/b"), files=files)
    async with Disk() as disk:
        assert await download(wanted, tmp_path, disk=disk, fetch=fetch_url) == f"{web.address}/b"

    assert [path for path, _ in web.asked] == ["/a/file.bin", "/b/file.bin", "/b/second.bin"]


async def test_a_part_that_was_wrong_is_fetched_anew_from_its_start(tmp_path: Path, web: Web) -> None:
    (tmp_path / "file.bin.part").write_bytes(GARBAGE)
    await fetch_into(tmp_path, web, Answer(body=BODY))

    assert web.asked == [("/a/file.bin", len(GARBAGE)), ("/a/file.bin", 0)]
    assert (tmp_path / "file.bin").read_bytes() == BODY


@pytest.mark.parametrize("more", [b"", b"and more"])
async def test_a_part_as_long_as_the_file_begins_again(tmp_path: Path, web: Web, more: bytes) -> None:
    (tmp_path / "file.bin.part").write_bytes(BODY + more)
    await fetch_into(tmp_path, web, Answer(body=BODY))

    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert names(tmp_path) == ["file.bin"]


async def test_a_damaged_file_in_the_cache_is_replaced(tmp_path: Path, web: Web) -> None:
    (tmp_path / "file.bin").write_bytes(BODY[:-1])
    await fetch_into(tmp_path, web, Answer(body=BODY))

    assert (tmp_path / "file.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    ("lie", "claim", "left"),
    [
        (Answer(body=BODY, length=1_050_000), "breaks off after 1000000 of 1050000 bytes", 1_000_000),
        (Answer(body=BODY, length=1000), r"does not contain file.bin of Bytes \(md5", 0),
        (Answer(body=BODY, length=1_100_001), "sends more than the 1100000 bytes expected", 0),
        (Answer(body=BODY + bytes(100_001), length=-1), "sends more than the 1100000 bytes expected", 0),
        (Answer(body=b""), "sends nothing", 0),
        (Answer(body=BODY, content_range="bytes 5-9/10"), "sends bytes from 5 on, asked for .* 0", 0),
        (Answer(body=BODY, content_range="pages 1 to 3"), "answers with the range 'pages 1 to 3'", 0),
        (Answer(body=BODY, length=10**30), "sends more than the 1100000 bytes expected", 0),
        (Answer(status="503 Come back later"), "answers 503 Come back later", 0),
        (Answer(status="nonsense"), "nonsense", 0),
    ],
)
async def test_lies_are_found_out_and_leave_no_file(
    tmp_path: Path, web: Web, lie: Answer, claim: str, left: int
) -> None:
    # Asked for the rest it ignores the range, so that nothing new comes of it.
    with pytest.raises(DataError, match=claim):
        await fetch_into(tmp_path, web, lie, replace(lie, ranges=False))

    assert names(tmp_path) == (["file.bin.part"] if left else [])
    assert sum(sizes(tmp_path)) == left
    assert len(web.asked) <= 2


async def test_a_mirror_that_gives_little_by_little_is_given_up_after_some_tries(
    tmp_path: Path, web: Web
) -> None:
    with pytest.raises(DataError, match="breaks off after"):
        await fetch_into(tmp_path, web, Answer(body=BODY, cut=1000))

    assert len(web.asked) == TRIES
    assert (tmp_path / "file.bin.part").read_bytes() == BODY[: 1000 * TRIES]


@pytest.mark.parametrize(
    ("deadlines", "claim"),
    [
        ({"stall_s": 0.2}, "no answer in time, after 1000 bytes"),
        ({"file_s": 0.2}, "not whole after 0.2 s.; try again, it continues from .*file.bin.part"),
    ],
)
async def test_a_server_that_stalls_is_left_at_the_deadline(
    tmp_path: Path, web: Web, deadlines: dict[str, float], claim: str
) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(DataError, match=claim):
            await fetch_into(
                tmp_path, web, Answer(body=BODY, stall=1000), Answer(body=BODY, stall=0), **deadlines
            )

    assert names(tmp_path) == ["file.bin.part"]


async def test_a_checksum_of_the_content_takes_any_compression_of_it(tmp_path: Path, web: Web) -> None:
    digest = hashlib.sha256(BODY).hexdigest()
    file = RemoteFile(
        name="file.bin", checksum=f"sha256:{digest}", of_content=True, limit_bytes=FILE.limit_bytes
    )
    for level in (1, 9):
        folder = tmp_path / str(level)
        await fetch_into(folder, web, Answer(body=gzip.compress(BODY, level)), file=file)
        assert names(folder) == ["file.bin"]

    with pytest.raises(DataError, match="damaged gzip"):
        await fetch_into(tmp_path / "bad", web, Answer(body=b"\x1f\x8bno gzip"), file=file)


async def test_two_downloads_of_one_file_at_once_never_leave_a_wrong_one(tmp_path: Path, web: Web) -> None:
    both = await asyncio.gather(
        *(fetch_into(tmp_path, web, Answer(body=BODY)) for _ in range(2)), return_exceptions=True
    )

    for outcome in both:
        assert isinstance(outcome, (str, OSError, DataError))
    await fetch_into(tmp_path, web, Answer(body=BODY))
    assert (tmp_path / "file.bin").read_bytes() == BODY


SMALL = bytes(range(100))
SMALL_FILE = RemoteFile(name="small", checksum=f"md5:{hashlib.md5(SMALL).hexdigest()}", limit_bytes=150)

tries = st.lists(
    st.tuples(
        st.sampled_from(["heeds ranges", "ignores ranges", "garbage", "refused"]),
        st.integers(0, 120),  # bytes until it breaks
        st.integers(1, 60),  # bytes of a piece
    ),
    max_size=12,
)


@given(tries)
async def test_whatever_happens_the_file_is_right_or_not_there(
    script: list[tuple[str, int, int]],
) -> None:
    """A fetch that follows a script, and works once that is at its end."""
    left = list(script)

    async def fetch(url: str, *, timeout_s: float, start: int = 0) -> AsyncGenerator[Piece, None]:
        kind, breaks_after, step = left.pop(0) if left else ("heeds ranges", 1000, 33)
        if kind == "refused":
            raise OSError("refused")
        whole = bytes(120) if kind == "garbage" else SMALL
        at = start if kind != "ignores ranges" and start < len(whole) else 0
        stop = min(at + breaks_after, len(whole))
        while at < stop:
            data = whole[at : min(at + step, stop)]
            yield Piece(at, data, len(whole))
            at += len(data)
        if stop < len(whole):
            raise OSError("broke off")

    with TemporaryDirectory() as name:
        folder = Path(name)
        async with Disk() as disk:
            while left:
                wanted = remote("one", "two", file=SMALL_FILE)
                try:
                    await download(wanted, folder, disk=disk, fetch=fetch)
                    assert (folder / "small").read_bytes() == SMALL
                    (folder / "small").unlink()
                except DataError:
                    assert names(folder) in ([], ["small.part"])
            assert await download(remote("one", file=SMALL_FILE), folder, disk=disk, fetch=fetch) == "one"
        assert (folder / "small").read_bytes() == SMALL
        assert names(folder) == ["small"]
