"""Made photographs of three classes, as functions of a seed: a coast, a forest and a town.

Sizes, light, weather and colours vary within each class, and the colours of the classes overlap: a sea is
blue, grey or red, a forest green, brown or foggy, a town has houses of any colour below the same skies. The
mean colour of a photograph tells a part about its class; lines and textures tell the rest. Letters: H rows, W
columns.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]
Draw = Callable[[Floats, Floats, np.random.Generator], Floats]

SIZES = ((320, 240), (240, 320), (400, 300), (256, 256), (300, 225), (384, 216))
"""Columns and rows of the photographs, upright and lying."""

SKIES = np.array([[0.45, 0.65, 0.95], [0.8, 0.85, 0.9], [0.95, 0.7, 0.5], [0.4, 0.45, 0.5]])
WATERS = np.array([[0.15, 0.35, 0.6], [0.35, 0.45, 0.5], [0.2, 0.5, 0.5], [0.6, 0.4, 0.35]])
LEAVES = np.array([[0.2, 0.4, 0.15], [0.35, 0.5, 0.2], [0.6, 0.45, 0.2], [0.45, 0.5, 0.48]])
TRUNKS = np.array([[0.3, 0.2, 0.12], [0.15, 0.13, 0.12], [0.8, 0.78, 0.72], [0.45, 0.38, 0.3]])
WALLS = np.array(
    [[0.6, 0.6, 0.62], [0.65, 0.35, 0.25], [0.85, 0.78, 0.6], [0.35, 0.4, 0.5], [0.5, 0.6, 0.45]]
)
"""Usual colours: red, green and blue from 0 to 1."""


def write_photos(folder: Path, count: int, *, seed: int) -> Path:
    """Write JPEG files into one folder for each class, as equal in number as `count` allows."""
    dice = np.random.default_rng(seed)
    for number in range(count):
        name, draw = list(CLASSES.items())[number % len(CLASSES)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"IMG_{number:04}.jpg").write_bytes(_photo(draw, dice))
    return folder


def _photo(draw: Draw, dice: np.random.Generator) -> bytes:
    columns, rows = SIZES[dice.integers(len(SIZES))]
    y, x = np.mgrid[0:rows, 0:columns] / min(rows, columns)
    tilt = dice.uniform(-0.06, 0.06)  # of the camera
    picture = draw(y + tilt * x, x - tilt * y, dice)
    light = dice.uniform(0.6, 1.15) + dice.uniform(-0.25, 0.25) * (x - x.mean())
    picture = picture * light[..., np.newaxis] + dice.normal(0, 0.03, picture.shape)
    file = io.BytesIO()
    pixels = Image.fromarray((picture.clip(0, 1) * 255).astype(np.uint8))
    pixels.save(file, "JPEG", quality=int(dice.integers(70, 95)))
    return file.getvalue()


def _colour(usual: Floats, dice: np.random.Generator) -> Floats:
    return usual[dice.integers(len(usual))] + dice.normal(0, 0.06, 3)


def _noise(y: Floats, dice: np.random.Generator, down: int, across: int) -> Floats:
    """Return smooth noise from about -1 to 1, shape (H, W, 1), of this many cells."""
    coarse = Image.fromarray(dice.uniform(-1, 1, (down, across)).astype(np.float32))
    return np.asarray(coarse.resize(y.shape[::-1], Image.Resampling.BICUBIC), np.float64)[..., np.newaxis]


def _over(below: Floats, cover: NDArray[np.bool_], above: Floats) -> Floats:
    return np.where(cover[..., np.newaxis], above, below)


def _sky(y: Floats, dice: np.random.Generator) -> Floats:
    return _colour(SKIES, dice) * (1 + 0.25 * _noise(y, dice, 5, 4) + 0.15 * (y[..., np.newaxis] - 0.5))


def _coast(y: Floats, x: Floats, dice: np.random.Generator) -> Floats:
    """Draw a sea with waves below a sky, and in front of it a beach or none; shape (H, W, 3)."""
    horizon = dice.uniform(0.3, 0.6) * y.max()
    waves = _colour(WATERS, dice) * (1 + 0.35 * _noise(y, dice, 60, 5))
    beach = _colour(WALLS[2:3], dice) * (1 + 0.1 * _noise(y, dice, 40, 40))
    shore = dice.uniform(0.75, 1.2) * y.max() + dice.uniform(-0.2, 0.2) * x
    return _over(_over(_sky(y, dice), y > horizon, waves), y > shore, beach)


def _forest(y: Floats, x: Floats, dice: np.random.Generator) -> Floats:
    """Draw leaves, with trunks in front of them; shape (H, W, 3)."""
    picture = _colour(LEAVES, dice) * (1 + 0.5 * _noise(y, dice, 40, 40))
    bark = _colour(TRUNKS, dice) * (1 + 0.25 * _noise(y, dice, 8, 60))
    for _ in range(dice.integers(4, 10)):
        place, width, lean = dice.uniform(0, x.max()), dice.uniform(0.02, 0.07), dice.uniform(-0.08, 0.08)
        picture = _over(picture, np.abs(x + lean * y - place) < width, bark)
    return picture


def _town(y: Floats, x: Floats, dice: np.random.Generator) -> Floats:
    """Draw houses with windows below a sky; shape (H, W, 3)."""
    picture, left = _sky(y, dice), 0.0
    while left < x.max():
        width, top = dice.uniform(0.2, 0.5), dice.uniform(0.15, 0.6) * y.max()
        house = (x >= left) & (x < left + width) & (y > top)
        picture = _over(picture, house, _colour(WALLS, dice) * (1 + 0.08 * _noise(y, dice, 20, 20)))
        cell = dice.uniform(0.07, 0.12)
        pane = ((x - left) / cell % 1 > 0.45) & ((y - top) / cell % 1 > 0.4)
        picture = _over(
            picture, house & pane, _colour(SKIES, dice) * dice.uniform(0.3, 0.8) * np.ones_like(picture)
        )
        left += width
    return picture


CLASSES: dict[str, Draw] = {"coast": _coast, "forest": _forest, "town": _town}
