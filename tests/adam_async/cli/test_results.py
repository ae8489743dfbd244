"""On a full disk, `train` writes the other results, and the model to another folder."""

import errno
from pathlib import Path

import pytest

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.trained_model import load_model
from adam_async.cli import train
from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import run_training
from adam_async.errors import ConfigError, RunFailed
from adam_async.runtime.disk import Disk


class PoorDisk(Disk):
    """Has no room below folders called ``full``."""

    async def write_atomic(self, path, parts):
        if "full" in path.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        await super().write_atomic(path, parts)


async def trained(monkeypatch, environment, data="digits", epochs=1, **options):
    monkeypatch.setattr(train, "Disk", PoorDisk)
    asked = TrainOptions(
        data=data, epochs=epochs, images_per_group=64, kernels="numpy", quiet=True, **options
    )
    return await run_training(asked, environment, Terminal(quiet=True))


async def test_a_full_disk_costs_no_model_and_every_file_is_named(tmp_path, monkeypatch, capsys):
    full, spare = tmp_path / "full", tmp_path / "spare"
    with pytest.raises(ConfigError) as failure:
        await trained(
            monkeypatch,
            {"TMPDIR": str(spare)},
            out=full / "model",
            profile=full / "profile.json",
            report=spare / "report.json",
        )
    (saved,) = spare.glob("adam-async-*/model.safetensors")
    assert str(failure.value) == (
        f"{full}/model/model.safetensors cannot be written: No space left on device; "
        f"the model is in {saved} instead; {full}/profile.json cannot be written: No space left on device"
    )
    load_model(saved.read_bytes())
    assert (spare / "report.json").exists()
    assert "test accuracy" in capsys.readouterr().out


async def test_a_run_names_the_file_of_its_model(tmp_path, capsys):
    asked = TrainOptions(data="digits", epochs=1, images_per_group=64, kernels="numpy", out=tmp_path / "out")
    assert await run_training(asked, {}, Terminal()) == 0
    assert f"saved  {tmp_path}/out/model.safetensors\n" in capsys.readouterr().out


async def test_a_model_that_is_replaced_is_named_before_training(tmp_path, capsys):
    options = TrainOptions(data="synthetic:40", epochs=1, threads=1, kernels="numpy", out=tmp_path / "m")
    assert await run_training(options, {}, Terminal()) == 0
    assert "exists" not in capsys.readouterr().err
    assert await run_training(options, {}, Terminal()) == 0

    assert (
        f"{tmp_path / 'm' / 'model.safetensors'} exists, and is replaced at the end"
        in capsys.readouterr().err
    )


async def test_where_nothing_has_room_each_place_is_named(tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.chdir(full)
    with pytest.raises(ConfigError, match="nor can the model be written to") as failure:
        await trained(monkeypatch, {"TMPDIR": str(full / "tmp"), "HOME": str(full)}, out=full)
    assert str(full / "tmp") in str(failure.value)


@pytest.mark.parametrize("misses", [3, 0])
async def test_a_last_checkpoint_that_failed_is_no_success_unless_that_was_asked_for(
    tmp_path: Path, monkeypatch, misses, capsys
):
    async def fail(*_, keep):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("adam_async.checkpoint.files.CheckpointFolder.write", fail)
    options = {"checkpoint": tmp_path / "c", "checkpoint_misses": misses}
    if misses:
        with pytest.raises(
            RunFailed, match="the last checkpoint is missing: a checkpoint could not be written"
        ):
            await trained(monkeypatch, {}, **options)
    else:
        assert await trained(monkeypatch, {}, **options) == 0
    assert "could not be written: No space left on device; training goes on" in capsys.readouterr().err


async def test_the_refusal_of_other_data_names_the_run_on_disks_and_promises_no_continuation(
    tmp_path: Path, monkeypatch, capsys
):
    store = {"store": tmp_path / "shards"}
    assert await trained(monkeypatch, {}, **store) == 0
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"^run \S+ was trained on data whose name is digits"):
        await trained(monkeypatch, {}, "synthetic", epochs=2, **store)
    assert "goes on" not in capsys.readouterr().err
