"""A download is shown and kept in the user's cache, and damaged images are an error or left out."""

import asyncio
import io
import json
import threading
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from rich.console import Console

from adam_async.cli.commands import app
from adam_async.cli.data import (
    Downloads,
    cache_folder,
    channel_values,
    data_folder,
    describe,
    imported_dataset,
    is_import_path,
    kind_of,
    lines,
    load_data,
    run_inspection,
)
from adam_async.cli.options import DataServerOptions, InspectOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Dataset, make_dataset
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
    [("train",), ("evaluate", "model"), ("data", "--controller", "tcp://127.0.0.1:1"), ("data", "inspect")],
)
def test_every_command_that_loads_data_can_be_told_to_pass_over_damage(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_head(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def damaged(*more: str) -> Any:
        _, bound, _ = app.parse_args((*words, *more), exit_on_error=False, print_error=False)
        if "damaged" in bound.arguments:
            return bound.arguments["damaged"]
        return bound.arguments.get("options", DataServerOptions()).damaged

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


ROOT = Path(__file__).resolve().parents[3]


def parsed(*words: str) -> tuple[str, dict[str, Any]]:
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    return command.__name__, dict(bound.arguments)


async def inspected(capsys: pytest.CaptureFixture[str], source: str, **options: Any) -> str:
    code = await run_inspection(source, InspectOptions(**options), {}, Terminal())
    assert code == 0
    return capsys.readouterr().out


def colours(folder: Path, labels: tuple[int, ...] = (0, 2, 2, 5)) -> Path:
    """An archive of images in colour; red is 10, green 20 and blue 30, and one pixel is 90."""
    images = np.zeros((4, 5, 6, 3), np.uint8)
    images[:] = (10, 20, 30)
    images[3, 4, 5, 1] = 90
    np.savez(folder / "colours.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    return folder / "colours.npz"


def test_the_data_server_keeps_its_command() -> None:
    server = ("--controller", "tcp://10.0.0.1:7070", "--data", "mnist", "--id", "inspect")

    command, arguments = parsed("data", *server)

    assert command == "data"
    assert arguments["options"].config().data == "mnist"
    assert (arguments["options"].controller, arguments["options"].id) == ("tcp://10.0.0.1:7070", "inspect")


def test_inspecting_is_a_command_beside_it() -> None:
    assert parsed("data", "inspect") == ("inspect_data", {})

    command, arguments = parsed("data", "inspect", "folder", "--augment", "--classes", "7")

    assert command == "inspect_data"
    assert arguments["source"] == "folder"
    assert arguments["options"] == InspectOptions(augment=True, classes=7)


async def test_the_digits_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    told = await inspected(capsys, "digits")

    assert "digits: the digits inside the package, as asked for" in told
    assert "images of 8 x 8 pixels, 1 channel\n" in told
    assert "train     1,437 images, values 0 to 255, mean 77.84, deviation 95.92" in told
    assert "test        360 images" in told
    assert "1           154        28\n" in told
    assert "damaged: nothing" in told
    assert "transforms" not in told


async def test_channels_are_told_apart_and_missing_classes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = await inspected(capsys, str(colours(tmp_path)))

    assert "images of 5 x 6 pixels, 3 channels" in told
    assert "values 10 to 10, 20 to 90, 30 to 30, mean 10.00, 20.58, 30.00, deviation 0.00, 6.36, 0.00" in told
    assert "no train image is of class 1, 3, 4\n" in told
    assert "no test image is of class 1, 3, 4, 5\n" in told


async def test_classes_beyond_the_limit_are_counted_and_all_are_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(colours(tmp_path))

    told = await inspected(capsys, file, classes=2)
    found = json.loads(await inspected(capsys, file, classes=2, json=True))

    assert "and 4 more classes (--classes)" in told
    assert "no train image is of class 1, 3 and 1 more\n" in told
    assert [each["train"] for each in found["classes"]] == [1, 0, 2, 0, 0, 1]
    assert [each["test"] for each in found["classes"]] == [1, 0, 1, 0, 0, 0]
    assert (found["name"], found["shape"]) == ("colours", [3, 5, 6])
    assert found["train"]["channels"][0] == {"min": 10, "max": 10, "mean": 10.0, "std": 0.0}
    assert (found["damaged"], found["transforms"]) == ([], None)


def test_names_of_classes_and_what_is_damaged_are_said() -> None:
    images, labels = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    data = make_dataset(
        name="pets",
        source="made",
        train=(images, labels),
        test=(images, labels),
        origins=("a", "b", "c", "d"),
        class_names=("cat", "a dog"),
        damaged=("cat/7.png is cut short", "and 2 more"),
    )

    told = list(lines(describe(data, "made"), classes=10))

    assert told[-6:] == [
        "class     train      test",
        "cat           1         1",
        "a dog         1         1",
        "damaged, and left out:",
        "  cat/7.png is cut short",
        "  and 2 more",
    ]


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
)
def test_values_are_those_of_numpy(images: NDArray[np.uint8]) -> None:
    for channel, told in enumerate(channel_values(images)):
        values = images[:, channel].astype(np.float64)
        assert (told.min, told.max) == (values.min(), values.max())
        assert told.mean == pytest.approx(values.mean())
        assert told.std == pytest.approx(values.std(), abs=1e-9)


def test_many_images_are_counted_to_the_last() -> None:
    images = np.full((2500, 1, 2, 2), 9, np.uint8)
    images[-1] = 200

    assert channel_values(images)[0].max == 200
    assert channel_values(images)[0].mean == pytest.approx(images.mean())


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits in every format."""
    pytest.importorskip("PIL", reason="samples are written with Pillow")
    pytest.importorskip("pyarrow", reason="samples are written with pyarrow")
    folder = tmp_path_factory.mktemp("samples")
    asyncio.run(run_path(str(ROOT / "examples" / "make_sample_data.py"))["main"](str(folder)))
    return folder


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("idx", "IDX files, as MNIST's"),
        ("npz", "NumPy archive (.npz)"),
        pytest.param("npz/digits.npz", "NumPy archive (.npz)", marks=pytest.mark.thorough),
        ("npy", "NumPy arrays (.npy)"),
        ("parquet", "Parquet"),
        ("shards", "tar shards, as WebDataset's"),
        ("csv", "CSV tables"),
        ("folders", "folders of images, one for each class"),
    ],
)
def test_every_kind_of_source_is_named_and_holds_the_same(
    samples: Path, folder: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(asyncio.run(inspected(capsys, str(samples / folder), json=True)))
    digits = json.loads(asyncio.run(inspected(capsys, "digits", json=True)))

    assert found["kind"] == kind
    assert digits["kind"] == "known by name"
    for field in ("shape", "train", "test", "classes"):
        assert found[field] == digits[field]


async def test_the_folder_that_the_environment_names_is_looked_at(tmp_path: Path) -> None:
    colours(tmp_path)
    async with Disk() as disk:
        assert await kind_of("auto", tmp_path, disk) == "NumPy archive (.npz)"
        assert await kind_of("auto", None, disk) == "known by name"


async def test_a_damaged_image_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image", reason="images are written with Pillow")
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        for number in range(30):
            image.new("L", (9, 7), number).save(tmp_path / split / "cat" / f"{number}.png")
    whole = (tmp_path / "train" / "cat" / "7.png").read_bytes()
    (tmp_path / "train" / "cat" / "7.png").write_bytes(whole[:50])

    told = await inspected(capsys, str(tmp_path))

    assert "cat          29        30\n" in told
    assert f"damaged, and left out:\n  {tmp_path / 'train' / 'cat' / '7.png'} is a damaged image" in told


async def test_the_transforms_of_a_file_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps.toml").write_text('[[transform]]\nkind = "shift"\npixels = 1\n')

    options = {"transforms": tmp_path / "steps.toml"}
    told = await inspected(capsys, "digits", **options)
    found = json.loads(await inspected(capsys, "digits", augment=True, **options, json=True))

    assert "transforms: shift\n" in told
    assert found["transforms"] == [{"kind": "shift", "pixels": 1}]


@pytest.mark.parametrize(
    ("step", "claim"),
    [
        ('kind = "melt"', "melt"),
        ('kind = "shift"\npixels = "far"', r"steps.toml, step 1 \(shift\): pixels = 'far'"),
        ('kind = "pad"\npixels = 2', r"make images of \(1, 12, 12\)"),
    ],
)
async def test_a_transform_that_no_run_would_take_is_refused(tmp_path: Path, step: str, claim: str) -> None:
    (tmp_path / "steps.toml").write_text(f"[[transform]]\n{step}\n")
    options = InspectOptions(transforms=tmp_path / "steps.toml")

    with pytest.raises(ConfigError, match=claim):
        await run_inspection("digits", options, {}, Terminal())
