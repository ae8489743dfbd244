"""A download is shown and kept in the user's cache, and damaged images are an error or left out."""

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from adam_async.cli.commands import app
from adam_async.cli.data import (
    Downloads,
    cache_folder,
    data_folder,
    imported_dataset,
    is_import_path,
    load_data,
)
from adam_async.cli.data_inspect import run_inspection
from adam_async.cli.options import InspectOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.objects import from_object
from adam_async.errors import ConfigError, DataError, DeadlineExceeded
from adam_async.runtime.disk import Disk
from tests.adam_async.cli.heads import write_head


def shown(*news: tuple[str, int, int | None], terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with Downloads(console) as downloads:
        for each in news:
            downloads.on_bytes(*each)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_log_gets_one_line_for_each_download() -> None:
    text = shown(
        ("https://a/file.gz", 1, 9_900_000),
        ("https://a/file.gz", 2, 9_900_000),
        ("b", 1, None),
        terminal=False,
    )

    assert text == "downloading https://a/file.gz (9.9 MB)\ndownloading b\n"


def test_a_terminal_gets_a_bar_that_moves_and_goes() -> None:
    text = shown(("https://a/f", 25_000, 100_000), ("https://a/f", 75_000, 100_000), terminal=True)

    assert "downloading https://a/f" in text
    assert text.index("25.0/100.0 kB") < text.index("75.0/100.0 kB")
    assert text.endswith("\x1b[2K")  # the line is cleared


def test_nothing_is_shown_where_nothing_is_downloaded() -> None:
    assert shown(terminal=True) == shown(terminal=False) == ""


def test_downloads_are_kept_in_the_users_cache() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}).as_posix() == "/caches/adam-async/mnist"
    assert data_folder({"ADAM_DATA_DIR": ""}) is None
    assert str(data_folder({"ADAM_DATA_DIR": "/data"})) == "/data"


def with_a_damaged_row(folder: Path) -> str:
    rows = ["label,a,b,c,d", *(f"{number % 2},0,1,2,{number}" for number in range(60)), "1,0,1,2"]
    file = folder / "images.csv"
    file.write_text("\n".join(rows))
    return str(file)


async def test_damage_is_an_error_unless_it_is_to_be_passed_over(tmp_path: Path) -> None:
    source = with_a_damaged_row(tmp_path)
    async with Disk() as disk:
        with pytest.raises(DataError, match=r"line 62 has 3 pixels, expected 4; .* --damaged skip "):
            await load_data(source, disk, {})
        found = await load_data(source, disk, {}, damaged="skip")

    assert len(found.train_labels) + len(found.test_labels) == 60
    assert found.source.endswith("1 were damaged and left out")


@pytest.mark.parametrize(
    "words",
    [
        ("train",),
        ("evaluate", "model"),
        ("data", "--controller", "tcp://127.0.0.1:1"),
        ("data", "inspect"),
    ],
)
def test_every_command_that_loads_data_can_be_told_to_pass_over_damage(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_head(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def damaged(*more: str) -> Any:
        _, bound, _ = app.parse_args((*words, *more), exit_on_error=False, print_error=False)
        return bound.arguments.get("damaged") or bound.arguments["options"].damaged

    assert damaged("--damaged", "skip") == "skip"
    assert damaged("--damaged", "error") == "error"


async def test_inspecting_passes_over_damage_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_a_damaged_row(tmp_path)

    await run_inspection(source, InspectOptions(), {}, Terminal())
    with pytest.raises(DataError, match="line 62"):
        await run_inspection(source, InspectOptions(damaged="error"), {}, Terminal())

    assert f"damaged, and left out:\n  {source}, line 62" in capsys.readouterr().out


def make_images() -> list[tuple[np.ndarray, int]]:
    return [(np.full((4, 4), number, np.uint8), number % 2) for number in range(20)]


async def make_data_set() -> Dataset:
    return await from_object(make_images(), name="made")


def fails() -> None:
    raise OSError("no disk")


RELEASE = threading.Event()


def waits_for_release() -> list[tuple[np.ndarray, int]]:
    assert RELEASE.wait(20.0)
    return make_images()


@pytest.mark.parametrize("name", ["make_images", "make_data_set"])
async def test_data_come_from_an_imported_function(name: str) -> None:
    async with Disk() as disk:
        found = await load_data(f"{__name__}:{name}", disk, {})
    assert (len(found.train_labels), len(found.test_labels), found.image_shape) == (18, 2, (1, 4, 4))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("no_module_of_this_name:make", "there is no module 'no_module_of_this_name'"),
        (f"{__name__}:absent", "has no 'absent'"),
        (f"{__name__}:fails", r"fails failed: OSError\('no disk'\)"),
    ],
)
async def test_a_function_that_makes_no_data_is_named(source: str, text: str) -> None:
    async with Disk() as disk:
        with pytest.raises(ConfigError, match=text):
            await load_data(source, disk, {})


async def test_a_function_that_makes_data_runs_beside_the_loop_and_has_a_deadline() -> None:
    RELEASE.clear()
    loads = asyncio.create_task(imported_dataset(f"{__name__}:waits_for_release"))
    for _ in range(3):  # the loop goes on while the function blocks
        await asyncio.sleep(0)
    assert not loads.done()
    RELEASE.set()
    assert len((await loads).train_labels) == 18

    RELEASE.clear()
    try:
        with pytest.raises(DeadlineExceeded, match=r"waited 0 s for .*waits_for_release to make the images"):
            await imported_dataset(f"{__name__}:waits_for_release", within_s=0.0)
    finally:
        RELEASE.set()
        for thread in threading.enumerate():
            if thread.name == "user-code":
                thread.join(20.0)


def test_files_and_other_sources_are_no_import_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    sources = ("a:b", "synthetic:100", "digits", "tcp://host:1", "C:/images", "/data:x", "a.b:")
    assert not any(map(is_import_path, sources))
    assert is_import_path("package.module:make")


async def test_an_address_is_no_source_and_train_is_named() -> None:
    async with Disk() as disk:
        with pytest.raises(DataError, match=r"tcp://127.0.0.1:7 is an address.*train takes addresses"):
            await load_data("tcp://127.0.0.1:7", disk, {})
