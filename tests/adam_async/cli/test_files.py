"""Checks of the files and folders that options name."""

import os
import stat
from pathlib import Path

import pytest

from adam_async.cli.commands import run_command
from adam_async.cli.files import check_regular, check_target, make_folder, read_file
from adam_async.errors import ConfigError
from adam_async.model.toml_text import MOST_TEXT_BYTES
from adam_async.runtime.disk import Disk
from tests.adam_async.cli.heads import write_head


@pytest.mark.parametrize("kind", ["pipe", "socket"])
async def test_a_result_replaces_no_device_and_no_pipe(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "result"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        os.mknod(file, stat.S_IFSOCK | 0o600)
    async with Disk() as disk:
        with pytest.raises(
            ConfigError, match=f"--report: {file} is no regular file, and a result would replace it"
        ):
            await check_target(file, "--report", disk)


@pytest.mark.parametrize("target", ["/dev/null", "file", "absent", "/proc/self/fd/1"])
def test_a_result_replaces_no_link(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of another program")
    link = tmp_path / "link"
    link.symlink_to(target)
    for name in (link, Path("/dev/stdout"), Path("/dev/fd/1")):
        with pytest.raises(ConfigError, match=f"--report: {name} is a link, and a result would replace it"):
            check_regular(name, "--report")


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "folder"])
async def test_a_file_of_an_option_that_is_no_ordinary_file_is_an_error_and_no_wait(
    kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "adam.toml"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "link to a pipe":
            os.mkfifo(tmp_path / "pipe")
            file.symlink_to("pipe")
        case "socket":
            os.mknod(file, stat.S_IFSOCK | 0o600)
        case "device":
            file = Path("/dev/zero")
        case _:
            file.mkdir()
    async with Disk() as disk:
        with pytest.raises(ConfigError, match=f"--config {file} cannot be read: (.* is a pipe|Is a dir)"):
            await read_file(file, "--config", disk)


async def test_a_text_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_bytes(b"#" * MOST_TEXT_BYTES)
    async with Disk() as disk:
        assert len(await read_file(file, "--config", disk)) == MOST_TEXT_BYTES
        os.truncate(file, 1 << 40)  # without a block on the disk
        with pytest.raises(ConfigError, match="has 1099511627776 bytes, expected at most 1048576"):
            await read_file(file, "--config", disk)


async def test_a_result_may_replace_a_file_or_be_the_first_in_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"earlier")
    async with Disk() as disk:
        await check_target(tmp_path / "there", "--onnx", disk)
        await check_target(tmp_path / "new" / "absent", "--onnx", disk)
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("taken", ["file", "device", "link to nothing"])
def test_a_folder_of_results_whose_name_is_taken_is_an_error_with_the_reason(
    taken: str, tmp_path: Path
) -> None:
    folder = Path("/dev/null") if taken == "device" else tmp_path / "out"
    if taken == "file":
        folder.write_bytes(b"")
    elif taken == "link to nothing":
        folder.symlink_to("nowhere")
    with pytest.raises(
        ConfigError, match=f"^--out: {folder} cannot be made: it exists and is no folder; name"
    ):
        make_folder(folder, "--out")


OPTIONS = {
    *("--report", "--profile", "--record", "--out", "--checkpoint", "--store", "--onnx", "--torch"),
    *("--json", "--trace", "--dir"),
}

READ_ONLY = [
    *(["train", "--data", "digits", option, "r"] for option in ("--report", "--profile", "--record")),
    *(["train", "--data", "digits", option, "r/s"] for option in ("--out", "--checkpoint", "--store")),
    ["export", "model", "--onnx", "r"],
    ["export", "model", "--torch", "r"],
    ["plan", "--json", "r"],
    ["drill", "--json", "r"],
    ["simulate", "--scenario", "members", "--seed", "1", "--trace", "r"],
    ["controller", "--dir", "r"],
    ["ps", "--controller", "tcp://127.0.0.1:1", "--dir", "r"],
    ["store", "save", "net", "r", "--controller", "tcp://127.0.0.1:1"],
]


@pytest.mark.parametrize("words", READ_ONLY, ids=lambda words: " ".join(words))
def test_the_error_of_a_folder_without_permission_names_the_option(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").touch()
    write_head(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    option = "store save" if words[0] == "store" else next(word for word in words if word in OPTIONS)
    assert run_command(words) == 2
    told = capfd.readouterr().err
    assert told == f"adam-async: {option}: the folder {tmp_path} cannot be written to; name another\n"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_a_byte_order_mark_belongs_to_no_text(mark: bytes, tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_bytes(mark + b"epochs = 2\r\n")
    async with Disk() as disk:
        assert await read_file(file, "--config", disk) == "epochs = 2\r\n"
