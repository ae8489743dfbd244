"""Checks of the files and folders that options name."""

import os
from pathlib import Path

import pytest

from adam_async.cli.files import check_target
from adam_async.errors import ConfigError
from adam_async.runtime.disk import Disk


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
async def test_a_result_replaces_no_device_and_no_pipe(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "result"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/null")
    async with Disk() as disk:
        with pytest.raises(ConfigError, match=f"{file} is no regular file, and a result would replace it"):
            await check_target(file, disk)


async def test_a_result_may_replace_a_file_or_be_the_first_in_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"earlier")
    async with Disk() as disk:
        await check_target(tmp_path / "there", disk)
        await check_target(tmp_path / "new" / "absent", disk)
    assert (tmp_path / "new").is_dir()
