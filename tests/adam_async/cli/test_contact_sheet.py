"""A contact sheet shows the pixels that are trained on, enlarged and else untouched, in rows of one class."""

import builtins
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from adam_async.cli.contact_sheet import BACKGROUND, GAP, TILE, contact_sheet, sheet_rows
from adam_async.cli.option_checks import check_png
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice

LABELS = [4, 1, 1, 0, 4, 1]
SHIFTED = [{"kind": "shift", "pixels": 2}]


def dataset(channels: int = 1) -> Dataset:
    """Six images of three classes out of five; every image has pixels of its own."""
    images = Dice(1).bits("images", count=6 * channels * 8 * 6).astype(np.uint8).reshape(6, channels, 8, 6)
    labels = np.array(LABELS)
    origins = ("a", "b", "c", "d")
    return make_dataset(
        name="six", source="made", train=(images, labels), test=(images, labels), origins=origins
    )


def rows(data: Dataset, recipe: Recipe | None, **options: Any) -> list[list[NDArray[np.uint8]]]:
    return sheet_rows(data, recipe, **{"seed": 3, "epoch": 1, "samples": 4, "classes": 10, **options})


def drawn(
    rows: list[list[NDArray[np.uint8]]], captions: list[list[list[str]]] | None = None
) -> NDArray[np.uint8]:
    """Pixels of a sheet as Pillow reads them."""
    with Image.open(io.BytesIO(contact_sheet(rows, captions or ()))) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def tiles(sheet: NDArray[np.uint8], rows: int, columns: int) -> list[list[NDArray[np.uint8]]]:
    """Cut a sheet into its tiles, and see that there is nothing but background between them."""
    height, width = ((sheet.shape[axis] - GAP) // count - GAP for axis, count in ((0, rows), (1, columns)))
    between = np.ones(sheet.shape[:2], bool)
    found = []
    for i in range(rows):
        row = []
        for j in range(columns):
            top, left = GAP + i * (height + GAP), GAP + j * (width + GAP)
            row.append(sheet[top : top + height, left : left + width])
            between[top : top + height, left : left + width] = False
        found.append(row)
    assert (sheet[between] == BACKGROUND).all()
    return found


def test_a_row_is_an_image_and_what_becomes_of_it_in_each_epoch() -> None:
    data = dataset()
    recipe = Recipe.of(SHIFTED, data.image_shape)

    shown = rows(data, recipe, epoch=5)

    assert len(shown) == 3
    for row, number in zip(shown, (3, 1, 0), strict=True):
        assert np.array_equal(row[0], data.train_images[number])
        for epoch, variant in enumerate(row[1:], 5):
            alone = recipe.apply(
                data.train_images[number : number + 1], np.array([number]), dice=Dice(3), epoch=epoch
            )
            assert np.array_equal(variant, alone[0])
    assert len({variant.tobytes() for row in shown for variant in row}) > 6


def test_a_later_first_epoch_shows_the_same_variants_earlier() -> None:
    data = dataset()
    recipe = Recipe.of(SHIFTED, data.image_shape)

    first, later = rows(data, recipe, epoch=1, samples=5), rows(data, recipe, epoch=3, samples=3)

    for a, b in zip(first, later, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a[3:], b[1:], strict=True))


def test_seeds_differ_and_a_seed_repeats() -> None:
    data = dataset()
    recipe = Recipe.of(SHIFTED, data.image_shape)

    sheets = [contact_sheet(rows(data, recipe, seed=seed)) for seed in (3, 3, 4)]

    assert sheets[0] == sheets[1] != sheets[2]


def test_without_a_recipe_a_row_is_the_first_images_of_a_class() -> None:
    data = dataset()

    shown = rows(data, None, samples=1)

    for row, numbers in zip(shown, ([3], [1, 2], [0, 4]), strict=True):
        assert np.array_equal(np.stack(row), data.train_images[numbers])


def test_the_lowest_classes_are_shown() -> None:
    data = dataset()

    assert len(rows(data, None, classes=2)) == 2
    assert np.array_equal(rows(data, None, classes=2)[1][0], data.train_images[1])


@pytest.mark.parametrize("channels", [1, 3])
def test_every_pixel_of_an_image_is_a_square_of_its_colour(channels: int) -> None:
    data = dataset(channels)
    shown = rows(data, Recipe.of(SHIFTED, data.image_shape), samples=2)

    sheet = drawn(shown)

    scale = 6  # the least that makes 32 of 6
    assert sheet.ndim == (2 if channels == 1 else 3)
    for tiles_of, row in zip(tiles(sheet, 3, 3), shown, strict=True):
        for tile, image in zip(tiles_of, row, strict=True):
            assert tile.shape[:2] == (8 * scale, 6 * scale)
            seen = tile if channels == 1 else tile.transpose(2, 0, 1)
            assert np.array_equal(
                seen, np.kron(image[0] if channels == 1 else image, np.ones((scale, scale)))
            )


@pytest.mark.parametrize(("channels", "colours"), [(2, 1), (4, 3)])
def test_of_other_channels_the_first_are_shown(channels: int, colours: int) -> None:
    data = dataset(channels)

    sheet = drawn(rows(data, None))
    of_first = drawn([[image[:colours] for image in row] for row in rows(data, None)])

    assert np.array_equal(sheet, of_first)


def test_a_short_row_leaves_background() -> None:
    image = np.zeros((1, 32, 32), np.uint8)

    tile = tiles(drawn([[image, image], [image]]), 2, 2)[1][1]

    assert (tile == BACKGROUND).all()


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 3), st.integers(1, 3))
def test_tiles_are_large_enough_and_no_larger_than_they_must_be(
    height: int, width: int, down: int, across: int
) -> None:
    image = np.zeros((1, height, width), np.uint8)

    tile = tiles(drawn([[image] * across] * down), down, across)[0][0]

    scale, rest = divmod(tile.shape[0], height)
    assert (rest, tile.shape[1]) == (0, scale * width)
    assert min(tile.shape) >= TILE
    assert scale == 1 or (scale - 1) * min(height, width) < TILE


def test_a_sheet_that_nobody_could_look_at_is_refused() -> None:
    image = np.zeros((1, 1, 100_000), np.uint8)

    with pytest.raises(ConfigError, match=r"1 rows of images of 1 x 100000 .* lower --samples or --classes"):
        contact_sheet([[image]])


def test_a_caption_is_under_its_image_and_is_cut_at_its_width() -> None:
    image = np.full((1, 100, 100), 7, np.uint8)

    sheet = drawn(
        [[image, image]],
        [[["short", "90.0%"], ["a name that is much too long for its image" * 3, "?\u4e2d"]]],
    )

    assert sheet.shape == (200 + 2 * 14 + 2 * GAP, 2 * 200 + 3 * GAP)
    for left in (GAP, 200 + 2 * GAP):
        assert (sheet[GAP : GAP + 200, left : left + 200] == 7).all()
        assert set(np.unique(sheet[GAP + 200 : -GAP, left : left + 200])) == {0, 255}
    assert (sheet[:, 200 + GAP : 200 + 2 * GAP] == BACKGROUND).all()


def test_without_pillow_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(ConfigError, match=r"--png needs Pillow, .*.*pip install .*\[data\]"):
        check_png(Path("a.png"))
