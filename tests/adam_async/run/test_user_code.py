"""A step may name a function by where it is; what cannot be imported is told apart."""

from pathlib import Path

import numpy as np
import pytest

from adam_async.data_server.transforms.recipe import Recipe, read_steps
from adam_async.errors import ConfigError, DataError
from adam_async.model.keyed_random import Dice
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.run.user_code import import_layers
from tests.adam_async.runs import Trap

MODULE = """
import numpy as np

LEVELS = 3


class Painted:
    @staticmethod
    def black(image, draws):
        return np.zeros_like(image)


def invert(image, draws, *, chance=1.0):
    return 255 - image if draws[0] < chance else image


def fails(image, draws):
    raise ZeroDivisionError("by hand")
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    (tmp_path / "users_package" / "augment.py").write_text(MODULE)
    (tmp_path / "users_package" / "needy.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "users_package" / "broken.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "users_package" / "leaving.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)


def recipe_of(kind: str, **options: object) -> Recipe:
    return Recipe.of([{"kind": kind, **options}], (1, 4, 4), kernels="numpy")


def test_a_function_of_an_installed_module_is_a_kind_of_step() -> None:
    steps = read_steps('[[transform]]\nkind = "users_package.augment:invert"\nchance = 1.0\n', "steps.toml")
    images = np.arange(32, dtype=np.uint8).reshape(2, 1, 4, 4)

    made = Recipe.of(steps, (1, 4, 4)).apply(images, np.arange(2), dice=Dice(1), epoch=1)

    np.testing.assert_array_equal(made, 255 - images)


def test_a_function_may_stand_in_a_class() -> None:
    images = np.full((1, 1, 4, 4), 9, np.uint8)

    made = recipe_of("users_package.augment:Painted.black").apply(images, np.arange(1), dice=Dice(1), epoch=1)

    assert not made.any()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nowhere:f", "there is no module 'nowhere'; install it, or name the folder"),
        ("users_package.nowhere:f", "there is no module 'users_package.nowhere'; install it"),
        ("users_package.needy:f", "no module 'a_module_that_is_not_there' that users_package.needy imports"),
        ("users_package.broken:f", r"importing users_package.broken failed: RuntimeError\('not today'\)"),
        ("users_package.leaving:f", r"importing users_package.leaving failed: SystemExit\(0\)"),
        ("users_package.augment:inverse", "users_package.augment has no 'inverse'; it has Painted, invert"),
        ("users_package.augment:Painted.red", "users_package.augment has no 'Painted.red'"),
        ("users_package.augment:LEVELS", "LEVELS is a int, expected a function"),
        ("users_package.augment:", "expected package.module:function"),
        (":invert", "expected package.module:function"),
        ("/tmp/augment.py:invert", "expected package.module:function"),
    ],
)
def test_a_failed_import_is_named_with_its_step(kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as failure:
        recipe_of(kind)

    assert str(failure.value).startswith("step 1 ")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("users_package.augment:fails", {}, "failed: ZeroDivisionError"),
        ("users_package.augment:invert", {"chanec": 1}, "failed: TypeError.*chanec"),
    ],
)
def test_a_function_that_fails_is_named(kind: str, options: dict[str, object], said: str) -> None:
    recipe = recipe_of(kind, **options)

    with pytest.raises(DataError, match=f"step 1: the function '{kind}' {said}"):
        recipe.apply(np.zeros((1, 1, 4, 4), np.uint8), np.arange(1), dice=Dice(1), epoch=1)


def test_a_named_layer_is_imported_beside_those_of_the_package():
    found = import_layers({"trap": "tests.adam_async.runs:Trap"})
    assert found == {**BUILTIN_LAYERS, "trap": Trap}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.adam_async.runs:Nothing", "layer 'mine'.*has no 'Nothing'"),
        ("no_such_module_at_all:Mine", "layer 'mine'.*no module"),
        ("tests.adam_async.runs:tiny_dataset", "layer 'mine'.*derives from Layer"),
    ],
)
def test_a_path_that_is_no_layer_is_refused_with_its_kind(name, said):
    with pytest.raises(ConfigError, match=said):
        import_layers({"mine": name})
