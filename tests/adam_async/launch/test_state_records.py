"""Records of the state on hosts: of running launches, of ended ones, and files that are no records."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adam_async.launch.ssh import StateRecords
from adam_async.runtime.disk import Disk

FIRST, SECOND = "0" * 16, "1" * 16


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[StateRecords]:
    async with Disk() as disk:
        yield StateRecords(tmp_path / "records", disk)


async def test_only_ended_launches_have_free_records(records: StateRecords) -> None:
    async with records.held(FIRST, ["a"]):
        async with records.held(SECOND, ["a", "b"]):
            assert await records.ended() == {}
        assert await records.ended() == {SECOND: ("a", "b")}
    assert await records.ended() == {FIRST: ("a",), SECOND: ("a", "b")}


async def test_a_record_keeps_the_hosts_that_are_left_and_goes_with_the_last(records: StateRecords) -> None:
    async with records.held(FIRST, ["a", "b"]):
        await records.leave(FIRST, ["b"])
    assert await records.ended() == {FIRST: ("b",)}

    await records.leave(FIRST, [])
    await records.leave(FIRST, [])
    assert await records.ended() == {}


@pytest.mark.parametrize("name", ["..", "0", "x" * 16, "0" * 16 + ";ls", ".0000000000000000"])
async def test_a_file_with_another_name_is_no_record(
    name: str, records: StateRecords, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    if name != "..":
        (folder / name).write_text("a\n")

    assert await records.ended() == {}


async def test_a_damaged_record_is_skipped(records: StateRecords, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / FIRST).write_bytes(b"\xff\n")
    (folder / SECOND).mkdir()

    assert await records.ended() == {}


async def test_a_launch_without_a_record_goes_on_and_names_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with Disk() as disk:
        records = StateRecords(tmp_path / "file" / "records", disk)
        with caplog.at_level(logging.WARNING):
            async with records.held(FIRST, ["a"]):
                await records.leave(FIRST, [])
            assert await records.ended() == {}

    assert "set XDG_CACHE_HOME to a writable folder" in caplog.text
