"""`data inspect` says what is there, and stands beside the data server's own command."""

import asyncio
import json
import struct
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from adam_async.cli.commands import app
from adam_async.cli.data_inspect import channel_values, describe, kind_of, lines, run_inspection
from adam_async.cli.options import DataServerOptions, InspectOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import make_dataset
from adam_async.errors import ConfigError, DataError
from adam_async.runtime.disk import Disk

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
    assert arguments["data"] == "mnist"
    assert arguments["options"] == DataServerOptions(controller="tcp://10.0.0.1:7070", id="inspect")


def test_inspecting_is_a_command_beside_it() -> None:
    assert parsed("data", "inspect") == ("inspect_data", {})

    command, arguments = parsed("data", "inspect", "folder", "--png", "a.png", "--augment", "--seed", "7")

    assert command == "inspect_data"
    assert arguments["source"] == "folder"
    assert arguments["options"] == InspectOptions(png=Path("a.png"), augment=True, seed=7)


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


async def test_a_contact_sheet_is_drawn_and_the_same_one_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, later = (tmp_path / "sheets" / name for name in ("a.png", "b.png", "c.png"))

    told = await inspected(capsys, "digits", augment=True, png=first, samples=3, classes=4)
    await inspected(capsys, "digits", augment=True, png=again, samples=3, classes=4)
    await inspected(capsys, "digits", augment=True, png=later, samples=3, classes=4, epoch=2)

    assert f"contact sheet: {first}\n" in told
    assert "transforms: " in told
    size = struct.unpack(">II", first.read_bytes()[16:24])
    assert size == (4 * (32 + 2) + 2, 4 * (32 + 2) + 2)
    assert first.read_bytes() == again.read_bytes() != later.read_bytes()


async def test_the_transforms_of_a_file_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps.toml").write_text('[[transform]]\nkind = "shift"\npixels = 1\n')

    options = {"transforms": tmp_path / "steps.toml"}
    told = await inspected(capsys, "digits", **options)
    found = json.loads(await inspected(capsys, "digits", augment=True, **options, json=True))

    assert "transforms: shift\n" in told
    assert found["transforms"] == [{"kind": "shift", "pixels": 1}]


@pytest.mark.parametrize(
    ("options", "claim"),
    [
        ({"samples": 0}, "--samples must be within 1 and 256, not 0"),
        ({"classes": 0}, "--classes must be within 1 and 1024, not 0"),
        ({"epoch": 0}, "--epoch must be at least 1, not 0"),
        ({"seed": -1}, "--seed must be at least 0, not -1"),
        ({"png": Path("a.jpg")}, "--png a.jpg: name a file that ends in .png"),
        ({"transforms": Path("/gone/a.toml")}, "--transforms /gone/a.toml cannot be read"),
        ({"png": Path("/dev/null/a.png")}, "/dev/null cannot be made"),
    ],
)
async def test_options_that_cannot_be_are_named(options: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        await run_inspection("digits", InspectOptions(**options), {}, Terminal())


@pytest.mark.parametrize(
    ("step", "claim"),
    [
        ('kind = "melt"', "melt"),
        ('kind = "shift"\npixels = "far"', r"steps.toml, step 1 \(shift\): pixels = 'far'"),
        ('kind = "pad"\npixels = 2', r"make images of \(1, 12, 12\)"),
    ],
)
async def test_a_transform_that_no_run_would_take_is_refused_and_nothing_is_drawn(
    tmp_path: Path, step: str, claim: str
) -> None:
    (tmp_path / "steps.toml").write_text(f"[[transform]]\n{step}\n")
    options = InspectOptions(transforms=tmp_path / "steps.toml", png=tmp_path / "a.png")

    with pytest.raises(ConfigError, match=claim):
        await run_inspection("digits", options, {}, Terminal())

    assert not (tmp_path / "a.png").exists()


async def test_a_source_that_is_not_there_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="/gone does not exist"):
        await run_inspection("/gone", InspectOptions(), {}, Terminal())
