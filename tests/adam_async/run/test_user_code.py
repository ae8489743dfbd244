"""A step may name a function by where it is; what cannot be imported is told apart."""

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from adam_async.data_server.transforms.recipe import Recipe
from adam_async.data_server.transforms.steps import read_steps
from adam_async.errors import ConfigError, TransformFailed, install_command
from adam_async.model.keyed_random import Dice
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.run import user_code
from adam_async.run.train_step import StepSpec
from adam_async.run.user_code import (
    StepSource,
    add_import_folder,
    allow_functions,
    allow_steps,
    check_allowed,
    functions_for,
    import_layers,
    import_named,
    import_words,
    imported_functions,
    named_step,
    read_args,
    read_layers,
    transform_words,
)
from tests.adam_async.runs import Trap
from tests.adam_async.steps import Softmax

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
    steps = [{"kind": kind, **options}]
    return Recipe.of(steps, (1, 4, 4), kernels="numpy", functions=functions_for(steps, {}))


def test_a_function_of_an_installed_module_is_a_kind_of_step() -> None:
    steps = read_steps('[[transform]]\nkind = "users_package.augment:invert"\nchance = 1.0\n', "steps.toml")
    images = np.arange(32, dtype=np.uint8).reshape(2, 1, 4, 4)

    recipe = Recipe.of(steps, (1, 4, 4), functions=functions_for(steps, {}))
    made = recipe.apply(images, np.arange(2), dice=Dice(1), epoch=1)

    np.testing.assert_array_equal(made, 255 - images)


async def test_a_module_that_blocks_in_its_import_leaves_the_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.delitem(sys.modules, "slow_import", raising=False)
    monkeypatch.setitem(sys.modules, "a_release", SimpleNamespace(release=release))
    (tmp_path / "slow_import.py").write_text(
        "from a_release import release\nassert release.wait(20.0)\ndef same(image, draws): return image\n"
    )
    found = asyncio.create_task(imported_functions([{"kind": "slow_import:same"}, {"kind": "flip"}], {}))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not found.done()
    release.set()
    assert list(await found) == ["slow_import:same"]


async def test_functions_of_the_caller_and_built_in_steps_need_no_import() -> None:
    given = {"nowhere:f": len}
    assert await imported_functions([{"kind": "nowhere:f"}, {"kind": "flip"}], given) is given
    with pytest.raises(ConfigError, match=r"step 2 .*there is no module 'nowhere'"):
        await imported_functions([{"kind": "nowhere:f"}, {"kind": "nowhere:g"}], given)


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


def test_a_step_without_pytorch_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(user_code, "import_module", missing)
    with pytest.raises(ConfigError) as failure:
        import_named("torch_step:cnn", "step")

    assert str(failure.value).endswith(
        f"there is no module 'torch' that torch_step imports; install it with {install_command('torch')}"
    )


def test_a_function_that_fails_is_named() -> None:
    recipe = recipe_of("users_package.augment:fails")

    with pytest.raises(TransformFailed, match=r"step 1: the function '.*:fails' failed: ZeroDivisionError"):
        recipe.apply(np.zeros((1, 1, 4, 4), np.uint8), np.arange(1), dice=Dice(1), epoch=1)


def test_an_option_that_a_function_does_not_take_is_refused_before_any_image() -> None:
    with pytest.raises(ConfigError, match=r"step 1: the function '.*:invert' .* the options chanec: "):
        recipe_of("users_package.augment:invert", chanec=1)


def test_a_recipe_imports_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "users_package.augment", raising=False)

    with pytest.raises(
        ConfigError, match=r"step 1 has the kind 'users_package\.augment:invert'; known kinds"
    ):
        Recipe.of([{"kind": "users_package.augment:invert"}], (1, 4, 4), kernels="numpy")

    assert "users_package.augment" not in sys.modules


def test_a_data_server_allows_the_functions_of_its_command_line_and_no_others_of_their_module() -> None:
    functions = allow_functions(["users_package.augment:invert"])
    assert functions["users_package.augment:invert"](np.uint8(255), [0.0]) == 0
    check_allowed([{"kind": "flip"}, {"kind": "users_package.augment:invert"}, "text"], functions)
    others = [{"kind": "users_package.augment:fails"}, {"kind": "os:system"}, {"kind": "a:b; c"}]
    with pytest.raises(
        ConfigError,
        match=r"does not allow: .* start the data server with --allow-transform users_package.augment:fails "
        "--allow-transform os:system --allow-transform 'a:b; c',",
    ):
        check_allowed([{"kind": "users_package.augment:invert"}, *others], functions)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("users_package.augment", "expected package.module:function"),
        ("users_package.augment:", "expected package.module:function"),
        ("users_package.augment:nothing", "has no 'nothing'"),
        ("users_package.broken:f", "not today"),
        ("no_such_module:f", "there is no module 'no_such_module'.*--step-path"),
    ],
)
def test_an_allowed_function_that_cannot_be_imported_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--allow-transform.*{said}"):
        allow_functions([name])


def test_the_words_of_a_data_server_name_the_functions_of_the_users_transforms(tmp_path: Path) -> None:
    steps = [{"kind": "flip"}, {"kind": "a.b:f"}, {"kind": "c:g"}]
    folder = ("--step-path", str(tmp_path.resolve()))
    words = ("--allow-transform", "a.b:f", "--allow-transform", "c:g")
    assert transform_words(steps, [tmp_path]) == (*folder, *words)
    assert transform_words([{"kind": "flip"}], [tmp_path]) == ()
    assert transform_words(None, [tmp_path]) == ()


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


STEPS = "tests.adam_async.steps"


def test_a_step_is_made_by_its_factory_and_keeps_its_name():
    named = named_step(f"{STEPS}:softmax", {"factors": ["w"]})
    assert (named.name, named.args, named.step.factors) == (f"{STEPS}:softmax", {"factors": ["w"]}, ["w"])
    own = Softmax()
    named = named_step(own, None)
    assert (named.name, named.step) == (f"{STEPS}:Softmax", own)
    assert named_step(None, None) is None


@pytest.mark.parametrize(
    ("step", "args", "said"),
    [
        (f"{STEPS}:dataclass", {}, f"{STEPS} does not define dataclass: define a factory"),
        ("os:system", {"command": "true"}, "os does not define system"),
        (f"{STEPS}:Wrong.evaluate", {}, "give package.module:factory"),
        (STEPS, {}, "give package.module:factory"),
        (f"{STEPS}:nothing", {}, "has no 'nothing'"),
        ("no_such_module:f", {}, "there is no module 'no_such_module'.*--step-path"),
        (f"{STEPS}:softmax", {"hidden": 3}, "softmax.*failed: TypeError.*hidden"),
        (f"{STEPS}:softmax", {"factors": {1, 2}}, "its arguments"),
        (f"{STEPS}:softmax", {"factors": [float("nan")]}, "its arguments"),
        (f"{STEPS}:softmax", {"factors": ["w" * 40_000]}, "at most 32768 bytes"),
        (None, {"hidden": 3}, "step names none"),
        (Softmax(), {"hidden": 3}, "step names none"),
    ],
)
def test_a_step_that_cannot_be_made_is_named(step, args, said):
    with pytest.raises(ConfigError, match=said):
        named_step(step, args)


def test_a_worker_imports_only_the_steps_of_the_modules_that_it_allows(monkeypatch):
    spec = StepSpec(name=f"{STEPS}:softmax", args={"factors": ["w"]}, shape=(1, 8, 8), classes=10)
    assert allow_steps([STEPS]).step_for(spec).factors == ["w"]
    for source in (StepSource(), allow_steps(["tests.adam_async.runs"]), allow_steps(["tests.adam_async"])):
        with pytest.raises(ConfigError, match=f"start the worker with --allow-step {STEPS}"):
            source.step_for(spec)
    mine = named_step(f"{STEPS}:softmax", spec.args)
    assert StepSource(given=mine).step_for(spec) is mine.step
    with pytest.raises(ConfigError, match="--allow-step"):
        StepSource(given=mine).step_for(msgspec.structs.replace(spec, args={}))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module", "its import failed: ModuleNotFoundError"),
        ("users_package.broken", "not today"),
        ("a:b", "is no name of a module"),
    ],
)
def test_an_allowed_module_that_cannot_be_imported_is_named(module, said):
    with pytest.raises(ConfigError, match=rf"--allow-step.*{said}"):
        allow_steps([module])


def test_folders_of_imports_come_last_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.path", ["first"])
    for _ in range(2):
        add_import_folder(tmp_path)
    assert sys.path == ["first", str(tmp_path.resolve())]
    with pytest.raises(ConfigError, match="is no folder"):
        add_import_folder(tmp_path / "nothing")


def test_the_words_of_a_worker_name_all_that_it_may_import(tmp_path: Path):
    words = import_words({"mine": "a.b:Mine"}, "c.d:make", [tmp_path])
    assert words == (
        "--step-path",
        str(tmp_path.resolve()),
        "--layer",
        "mine=a.b:Mine",
        "--allow-step",
        "c.d",
    )
    assert read_layers(["mine=a.b:Mine", "other=a.b:Other"]) == {"mine": "a.b:Mine", "other": "a.b:Other"}
    for wrong in (["mine"], ["=a.b:C"], ["mine=a:B", "mine=a:C"]):
        with pytest.raises(ConfigError, match=r"KIND=package\.module:Class"):
            read_layers(wrong)


@pytest.mark.parametrize("text", ["[1]", "{", "3", '{"a": NaN}'])
def test_arguments_of_a_step_are_a_json_object(text):
    assert read_args('{"hidden": 64}', "--step-args") == {"hidden": 64}
    assert read_args(None, "--step-args") == {}
    with pytest.raises(ConfigError, match="--step-args must be a JSON object"):
        read_args(text, "--step-args")
