"""The command `predict` names what is in files, folders and arrays."""

import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adam_async.checkpoint.names import FILE_NAME
from adam_async.checkpoint.trained_model import dump_model
from adam_async.cli.commands import app, run_command
from adam_async.cli.options import PredictOptions
from adam_async.cli.predict import run_prediction
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Damage
from adam_async.data_server.sources.pictures import Header
from adam_async.data_server.sources.unlabelled import Unlabelled, changes
from adam_async.errors import ConfigError, DataError
from adam_async.model import Network, mlp
from adam_async.runtime.disk import Disk

SPEC = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")
WEIGHTS = {"fc1.weight": np.eye(3, 4, dtype=np.float32) * 50, "fc1.bias": np.zeros(3, np.float32)}
NAMES = ("north", "east", "south")
QUIET = Terminal()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / FILE_NAME
    path.write_bytes(dump_model(Network(SPEC), WEIGHTS, NAMES))
    return path


def picture(shown: int, size: int = 2) -> np.ndarray:
    image = np.zeros((2, 2), np.uint8)
    image.reshape(-1)[shown] = 255
    return image.repeat(size // 2, axis=0).repeat(size // 2, axis=1)


def save(path: Path, shown: int, size: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(shown, size)).save(path)
    return path


async def found(capsys: pytest.CaptureFixture[str], model: Path, *images: Path) -> list[tuple[str, str]]:
    """File and class of each image."""
    assert await run_prediction(model, images, PredictOptions(json=True), QUIET) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "quarters"
    return [(Path(row["file"]).name, row["class"]) for row in told["images"]]


async def test_files_folders_and_arrays_are_named_in_their_order(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "many" / "deep" / "b.png", 2)
    save(tmp_path / "many" / "a.png", 1)
    save(tmp_path / "many" / ".hidden.png", 0)
    (tmp_path / "many" / "notes.txt").write_text("none")
    np.save(tmp_path / "array.npy", np.stack([picture(0), picture(2)]))
    np.save(tmp_path / "floats.npy", np.stack([picture(1)]) / np.float32(255))

    names = await found(
        capsys,
        model,
        save(tmp_path / "c.png", 0),
        tmp_path / "many",
        tmp_path / "array.npy",
        tmp_path / "floats.npy",
    )

    assert names == [
        ("c.png", "north"),
        ("a.png", "east"),
        ("b.png", "south"),
        ("array.npy[0]", "north"),
        ("array.npy[1]", "south"),
        ("floats.npy[0]", "east"),
    ]


async def test_encoded_images_are_scaled_to_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await found(capsys, model, save(tmp_path / "large.png", 1, size=40)) == [("large.png", "east")]


async def test_images_unlike_the_model_are_said_to_be_changed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some"
    save(folder / "a.png", 1)
    save(folder / "b.png", 1, size=40)
    Image.new("RGB", (40, 20), (9, 9, 9)).save(folder / "c.png")  # 20 rows, and 40 columns
    Image.new("RGB", (1, 1)).save(folder / "d.png")

    await run_prediction(model, [folder], PredictOptions(), QUIET)

    assert capsys.readouterr().err.splitlines() == [
        f"2 images scaled down to the 2x2 pixels of the model, the first: {folder}/b.png (40x40)",
        f"1 image cropped around the centre to the shape of 2x2, the first: {folder}/c.png (20x40)",
        f"2 images with colours made grey, as the model takes them, the first: {folder}/c.png (20x40)",
        f"1 image enlarged to the 2x2 pixels of the model, the first: {folder}/d.png (1x1)",
    ]

    await run_prediction(model, [folder / "a.png"], PredictOptions(), QUIET)

    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "size", "channels", "expected"),
    [
        (Header((64, 51), is_grey=False, is_deep=False), (64, 51), 3, []),
        (Header((640, 510), is_grey=False, is_deep=False), (64, 51), 3, ["scaled down"]),
        (Header((400, 300), is_grey=False, is_deep=False), (64, 48), 3, ["scaled down"]),
        (Header((384, 301), is_grey=False, is_deep=False), (64, 50), 3, ["scaled down"]),
        (Header((300, 400), is_grey=False, is_deep=False), (64, 48), 3, ["scaled down", "cropped"]),
        (Header((300, 20), is_grey=False, is_deep=False), (64, 48), 3, ["enlarged", "cropped"]),
        (Header((64, 48), is_grey=True, is_deep=False), (64, 48), 3, ["in grey"]),
        (Header((64, 48), is_grey=False, is_deep=False), (64, 48), 1, ["with colours"]),
    ],
)
def test_a_change_is_named_if_there_is_one(
    header: Header, size: tuple[int, int], channels: int, expected: list[str]
) -> None:
    found = list(changes(header, size, channels))

    assert [each.startswith(start) for each, start in zip(found, expected, strict=True)] == [True] * len(
        found
    )


def test_sizes_have_rows_first_as_the_option_size_has_them() -> None:
    tall = Header((30, 90), is_grey=False, is_deep=False)  # columns first, as Pillow

    assert list(changes(tall, (16, 12), 3)) == [
        "scaled down to the 12x16 pixels of the model",
        "cropped around the centre to the shape of 12x16",
    ]


async def test_the_table_has_the_likeliest_classes_with_their_probabilities(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = save(tmp_path / "c.png", 1)

    await run_prediction(model, [image], PredictOptions(top=2), QUIET)

    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["image", "class", "probability", "then"]
    assert row.split() == [str(image), "east", "100.0%", "north", "0.0%"]


async def test_damaged_images_are_an_error_or_left_out_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn.png").write_bytes(b"no picture")
    images = [tmp_path / "torn.png", save(tmp_path / "whole.png", 2)]

    with pytest.raises(DataError, match=r"torn\.png is no PNG"):
        await run_prediction(model, images, PredictOptions(), QUIET)
    await run_prediction(model, images, PredictOptions(damaged="skip"), QUIET)

    told = capsys.readouterr()
    assert "left out" in told.err
    assert "torn.png" in told.err
    assert len(told.out.splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "array", "claim"),
    [
        ("flat.npy", np.zeros(4, np.uint8), r"flat\.npy has shape \(4,\), expected images"),
        ("wide.npy", np.zeros((1, 2, 3), np.uint8), r"wide\.npy\[0\]: images must have shape"),
        ("words.npy", np.array([["a", "b"], ["c", "d"]]), r"words\.npy\[0\]: images must be uint8"),
    ],
)
async def test_an_array_that_does_not_fit_is_named(
    model: Path, tmp_path: Path, name: str, array: np.ndarray, claim: str
) -> None:
    np.save(tmp_path / name, array)

    with pytest.raises((ConfigError, DataError), match=claim):
        await run_prediction(model, [tmp_path / name], PredictOptions(), QUIET)


async def test_a_model_that_names_no_classes_is_refused_with_a_command(tmp_path: Path) -> None:
    layers = [*SPEC.layers[:-1], replace(SPEC.layers[-1], kind="mean_squared_error")]
    spec = replace(SPEC, layers=tuple(layers))
    path = tmp_path / FILE_NAME
    path.write_bytes(dump_model(Network(spec), WEIGHTS, NAMES))
    with pytest.raises(ConfigError, match="names no classes: adam-async export MODEL --onnx FILE"):
        await run_prediction(path, (save(tmp_path / "a.png", 0),), PredictOptions(), QUIET)


async def test_a_missing_image_and_an_empty_folder_are_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        await run_prediction(model, [tmp_path / "gone"], PredictOptions(), QUIET)
    with pytest.raises(DataError, match="empty: there are no images"):
        await run_prediction(model, [tmp_path / "empty"], PredictOptions(), QUIET)


def test_the_command_takes_a_model_and_then_images(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = save(tmp_path / "c.png", 2)

    assert "predict" in app
    assert run_command(["predict", str(model), str(image), "--top", "1"]) == 0
    assert "south" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(20, 24, 3), (3, 20, 24), (1, 20, 24, 3), (1, 3, 20, 24)])
async def test_an_array_of_the_shape_of_one_image_is_one_image(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    pixels = np.arange(20 * 24 * 3, dtype=np.int64).astype(np.uint8).reshape(3, 20, 24)
    array = pixels.transpose(1, 2, 0) if shape[-1] == 3 else pixels
    np.save(tmp_path / "one.npy", array.reshape(shape))

    async with Disk() as disk:
        source = Unlabelled([tmp_path / "one.npy"], (3, 20, 24), disk, Damage("error"))
        async with aclosing(source.pieces()) as pieces:
            (piece,) = [piece async for piece in pieces]

    assert [Path(name).name for name in piece.names] == ["one.npy[0]"]
    np.testing.assert_array_equal(piece.images, pixels[np.newaxis])


async def test_an_archive_of_arrays_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=picture(0))
    with pytest.raises(DataError, match=r"x\.npz: predict reads images, \.npy files .* not \.npz"):
        await run_prediction(model, [tmp_path / "x.npz"], PredictOptions(), QUIET)
