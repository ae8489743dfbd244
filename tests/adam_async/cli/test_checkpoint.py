"""The commands of `checkpoint` list, verify and export the checkpoints of a run."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adam_async.checkpoint.checkpoint import Checkpoint
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.trained_model import dump_model
from adam_async.cli.checkpoint import export_checkpoint, list_checkpoints, verify_checkpoints
from adam_async.cli.commands import run_command
from adam_async.cli.options import JsonOptions, LayerOptions
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError, DataError
from adam_async.model import Network, mlp
from adam_async.run.train_step import StepSpec
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import DATA, FILES, checkpoint_of

SPEC = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")
WEIGHTS = {"fc1.weight": np.eye(3, 4, dtype=np.float32) * 50, "fc1.bias": np.ones(3, np.float32)}
NAMES = ["checkpoint-0002-000004", "checkpoint-0002-000003"]
LIST, EXPORT = JsonOptions(), LayerOptions()


async def write(path: Path, *checkpoints: Checkpoint) -> None:
    async with Disk() as disk:
        folder = CheckpointFolder(path, disk)
        await folder.take_up(None)
        for each in checkpoints:
            await folder.write(each)


def trained(groups: int = 4, **weights: object) -> Checkpoint:
    """Return a checkpoint of a network."""
    data = {**DATA, "class_names": ["north", "east", "south"]}
    return checkpoint_of(groups, spec=SPEC.to_dict(), data=data, weights={**WEIGHTS, **weights})


async def test_a_list_has_a_row_for_each_checkpoint_and_the_newest_is_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await write(tmp_path, checkpoint_of(3), checkpoint_of(4))
    (tmp_path / NAMES[1] / FILES[0]).unlink()
    assert await list_checkpoints(tmp_path, LIST, Terminal()) == 0
    head, first, second, problem = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["checkpoint", "files", "epoch", "groups"]
    assert first.split()[:7] == [NAMES[0], "whole", "2", "4", "run-1", "asp", "a"]
    assert second.split()[:4] == [NAMES[1], "damaged", "2", "3"]
    assert problem == f"{tmp_path / NAMES[1]}/{FILES[0]} is missing"

    assert await list_checkpoints(tmp_path, JsonOptions(json=True), Terminal()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["latest"], each["whole"]) for each in found["checkpoints"]] == [
        (NAMES[0], True, True),
        (NAMES[1], False, False),
    ]


async def test_control_characters_of_a_manifest_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await write(tmp_path, checkpoint_of(3, spec={"name": "\x1b[2Jmodel\nnext" + "x" * 9999}))
    assert await list_checkpoints(tmp_path, LIST, Terminal()) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2Jmodel\nnext" in out
    assert "x" * 81 not in out


def test_a_damaged_checkpoint_ends_with_code_3_and_the_way_to_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_handlers: None
) -> None:
    asyncio.run(write(tmp_path, checkpoint_of(3), checkpoint_of(4)))
    command = ["checkpoint", "verify", str(tmp_path)]
    assert run_command(command) == 0
    path = tmp_path / NAMES[0] / FILES[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    capsys.readouterr()

    assert run_command(command) == 3
    captured = capsys.readouterr()
    first, problem, second = captured.out.splitlines()
    assert first == f"{NAMES[0]}: damaged"
    assert problem.startswith(f"  {path} is damaged at byte ")
    assert second.startswith(f"{NAMES[1]}: whole, 2 files, ")
    assert captured.err == (
        f"adam-async: damaged: {NAMES[0]}; --resume {tmp_path / NAMES[1]} continues from a whole one\n"
    )
    assert run_command(["checkpoint", "verify", str(tmp_path / NAMES[1])]) == 0
    capsys.readouterr()
    assert run_command([*command, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [each["whole"] for each in found["checkpoints"]] == [False, True]
    assert run_command(["checkpoint", "verify", str(tmp_path / "absent")]) == 2
    assert run_command(["checkpoint", "lst", str(tmp_path)]) == 2
    assert "did you mean 'checkpoint list'?" in capsys.readouterr().err


def test_a_folder_with_the_shards_of_a_store_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_handlers: None
) -> None:
    (tmp_path / "ps-0" / "store-0").mkdir(parents=True)
    (tmp_path / "ps-0" / "lock").touch()
    for folder in (tmp_path, tmp_path / "ps-0"):
        for command in (["checkpoint", "verify"], ["train", "--data", "digits", "--resume"]):
            assert run_command([*command, str(folder)]) == 2
            assert f"{folder} has the shards of a store, not checkpoints" in capsys.readouterr().err


def test_a_renamed_checkpoint_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_handlers: None
) -> None:
    asyncio.run(write(tmp_path, checkpoint_of(3)))
    renamed = (tmp_path / NAMES[1]).rename(tmp_path / f"{NAMES[1]}.kept")
    for command in (["checkpoint", "verify"], ["train", "--data", "digits", "--resume"]):
        assert run_command([*command, str(renamed)]) == 2
        assert f"{renamed} has the files of one checkpoint, and not its name" in capsys.readouterr().err


async def test_a_latest_that_names_no_checkpoint_is_damage(tmp_path: Path) -> None:
    await write(tmp_path, checkpoint_of(3))
    (tmp_path / "latest").write_bytes(b"checkpoint-0002-000007")
    with pytest.raises(DataError, match="latest names 'checkpoint-0002-000007', which is not there"):
        await verify_checkpoints(tmp_path, LIST, Terminal())


async def test_an_export_is_the_file_that_a_run_writes_with_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, file = tmp_path / "kept", tmp_path / "new" / "quarters.safetensors"
    await write(kept, trained(3, **{"fc1.bias": np.zeros(3, np.float32)}), trained(4))
    assert await export_checkpoint(kept, file, EXPORT, Terminal()) == 0
    assert file.read_bytes() == dump_model(Network(SPEC), WEIGHTS, ("north", "east", "south"))
    assert f"{file}: 2 arrays of {NAMES[0]}" in (printed := capsys.readouterr()).out
    assert not printed.err

    await export_checkpoint(kept / NAMES[1], file, EXPORT, Terminal())
    assert capsys.readouterr().err == f"{file} exists, and is replaced\n"
    assert not load_file(file)["fc1.bias"].any()

    (kept / NAMES[0] / FILES[0]).unlink()
    await export_checkpoint(kept, file, EXPORT, Terminal())
    assert "an older checkpoint is exported" in capsys.readouterr().err


async def test_an_export_of_a_step_has_its_arrays_and_imports_nothing(tmp_path: Path) -> None:
    step = StepSpec(name="no.such.module:Step", shape=(1, 8, 8), classes=10)
    values = {"w": np.eye(3), "scale": np.array(2.0)}
    await write(tmp_path / "kept", checkpoint_of(4, spec=step.to_dict(), weights=values))
    file = tmp_path / "step.safetensors"
    await export_checkpoint(tmp_path / "kept", file, EXPORT, Terminal())
    found = load_file(file)
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in values.items()
    }


@pytest.mark.parametrize(
    ("checkpoint", "claim"),
    [
        (trained(**{"fc1.bias": np.full(3, np.nan, np.float32)}), "3 values of 'fc1.bias' are not finite"),
        (trained(more=np.ones(2, np.float32)), "has more, which model 'quarters' does not have"),
        (checkpoint_of(4), "model"),
    ],
)
async def test_a_model_that_cannot_be_used_is_not_exported(
    tmp_path: Path, checkpoint: Checkpoint, claim: str
) -> None:
    await write(tmp_path / "kept", checkpoint)
    with pytest.raises(ConfigError, match=claim):
        await export_checkpoint(tmp_path / "kept", tmp_path / "x", EXPORT, Terminal())
    assert not (tmp_path / "x").exists()


async def test_an_export_does_not_write_into_the_folder_of_the_checkpoints(tmp_path: Path) -> None:
    await write(tmp_path, trained())
    for file in (tmp_path / "latest", tmp_path / NAMES[0] / FILES[0]):
        with pytest.raises(ConfigError, match="name a file elsewhere"):
            await export_checkpoint(tmp_path, file, EXPORT, Terminal())
