"""A checkpoint or a record imports no function that only it names, unless the user allows it."""

import sys
from pathlib import Path

import pytest

from adam_async.cli.data import load_data
from adam_async.cli.options import TrainOptions
from adam_async.cli.replay import run_replay
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import configure, run_training
from adam_async.cluster.local import LocalCluster
from adam_async.data_server.dataset import Dataset
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.user_code import check_named, named_functions
from adam_async.runtime.disk import Disk

KIND = "strangers_module:invert"
STEPS = [{"kind": "flip"}, {"kind": KIND}]


@pytest.fixture(autouse=True)
def strangers_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a test could import, but does not."""
    (tmp_path / "strangers_module.py").write_text("def invert(image, draws):\n    return 255 - image\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers_module", raising=False)


async def digits() -> Dataset:
    async with Disk() as disk:
        return await load_data("digits", disk, {}, damaged="error")


async def trained(folder: Path) -> None:
    """A run that brings the function; its checkpoint and its record name it."""
    config = Config(data="digits", epochs=1, augment=True, images_per_group=240)
    cluster = LocalCluster(
        config,
        dataset=await digits(),
        transforms=STEPS,
        functions={KIND: lambda image, draws: image},
        checkpoint=folder,
    )
    async with cluster:
        await cluster.train()


async def resume(folder: Path, **options: object) -> int:
    asked = TrainOptions(resume=folder, epochs=2, quiet=True, **options)
    return await run_training(asked, {}, Terminal(quiet=True))


async def test_a_checkpoint_imports_what_is_allowed_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await trained(tmp_path / "run")

    with pytest.raises(ConfigError, match=f"{KIND}; if you trust .* --allow-functions, or --transforms FILE"):
        await resume(tmp_path / "run")
    assert "strangers_module" not in sys.modules

    # The same holds without the command.
    config = Config(data="digits", epochs=2, augment=True, images_per_group=240)
    async with LocalCluster(config, dataset=await digits(), resume=tmp_path / "run") as cluster:
        with pytest.raises(ConfigError, match="--allow-functions"):
            await cluster.train()
    assert "strangers_module" not in sys.modules

    assert await resume(tmp_path / "run", allow_functions=True) == 0
    assert f"whose modules are imported: {KIND}" in capsys.readouterr().err
    assert "strangers_module" in sys.modules


async def test_a_function_that_the_users_own_file_names_needs_no_further_word(tmp_path: Path) -> None:
    await trained(tmp_path / "run")
    file = tmp_path / "steps.toml"
    file.write_text(f'[[transform]]\nkind = "{KIND}"\n')

    assert await resume(tmp_path / "run", transforms=str(file)) == 0


async def test_a_module_that_is_not_there_is_a_mistake_of_the_user_and_no_lost_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained(tmp_path / "run")
    (tmp_path / "strangers_module.py").unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    with pytest.raises(ConfigError, match="there is no module 'strangers_module'; install it"):
        await resume(tmp_path / "run", allow_functions=True)


async def test_a_record_imports_what_is_allowed_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, record = tmp_path / "steps.toml", tmp_path / "run.record"
    file.write_text(f'[[transform]]\nkind = "{KIND}"\n')
    asked = TrainOptions(
        data="digits", epochs=1, augment=True, transforms=str(file), record=record, images_per_group=240
    )
    assert await run_training(asked, {}, Terminal(quiet=True)) == 0
    del sys.modules["strangers_module"]

    with pytest.raises(ConfigError, match=rf"run.record names functions .*{KIND}; .* --allow-functions"):
        await run_replay(TrainOptions(replay=record), {}, Terminal(quiet=True))
    assert "strangers_module" not in sys.modules

    capsys.readouterr()
    assert await run_replay(TrainOptions(replay=record, allow_functions=True), {}, Terminal(quiet=True)) == 0
    assert f"whose modules are imported: {KIND}" in capsys.readouterr().err


DATA = "strangers_data:images"


@pytest.fixture
def strangers_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose function makes a data set."""
    (tmp_path / "strangers_data.py").write_text(
        "import numpy as np\n\n\ndef images():\n"
        "    return [(np.full((8, 8), 40 * (n % 4), np.uint8), n % 4) for n in range(40)]\n"
    )
    monkeypatch.delitem(sys.modules, "strangers_data", raising=False)


@pytest.mark.usefixtures("strangers_data")
async def test_a_checkpoint_imports_no_data_that_only_it_names(tmp_path: Path) -> None:
    small = {"epochs": 1, "images_per_group": 12, "quiet": True, "checkpoint": tmp_path / "run"}
    assert await run_training(TrainOptions(data=DATA, **small), {}, Terminal(quiet=True)) == 0
    del sys.modules["strangers_data"]

    with pytest.raises(
        ConfigError, match=f"names data .*: {DATA}; .* give --allow-functions, or --data {DATA}"
    ):
        await resume(tmp_path / "run")
    assert "strangers_data" not in sys.modules

    assert await resume(tmp_path / "run", data=DATA) == 0


@pytest.mark.usefixtures("strangers_data")
async def test_a_record_imports_no_data_that_only_it_names(tmp_path: Path) -> None:
    record = tmp_path / "run.record"
    asked = TrainOptions(data=DATA, epochs=1, record=record, images_per_group=12, quiet=True)
    assert await run_training(asked, {}, Terminal(quiet=True)) == 0
    del sys.modules["strangers_data"]

    with pytest.raises(ConfigError, match=rf"run.record names data .*: {DATA}; .* give --allow-functions"):
        await run_replay(TrainOptions(replay=record), {}, Terminal(quiet=True))
    assert "strangers_data" not in sys.modules

    for allowed in ({"allow_functions": True}, {"data": DATA}):
        assert await run_replay(TrainOptions(replay=record, **allowed), {}, Terminal(quiet=True)) == 0


async def test_the_permission_is_for_a_checkpoint_or_a_record() -> None:
    async with Disk() as disk:
        with pytest.raises(ConfigError, match="--allow-functions is for --resume and --replay"):
            await configure(TrainOptions(allow_functions=True), {}, disk)


def test_functions_are_the_kinds_with_a_colon() -> None:
    steps = [{"kind": "b:g"}, {"kind": "flip"}, {"kind": 3}, "text", {"kind": "a.b:f"}, {"kind": "b:g"}]

    assert named_functions(steps) == ("b:g", "a.b:f")
    check_named(steps, "it", allowed=["a.b:f", "b:g"])
    with pytest.raises(ConfigError, match=r"it names functions .*: a\.b:f;"):
        check_named(steps, "it", allowed=["b:g"])
