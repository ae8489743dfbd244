"""train --record writes what train --replay repeats, and what does not go together is said."""

from pathlib import Path

import msgspec
import pytest

from adam_async.cli.options import TrainOptions
from adam_async.cli.replay import check_options, differences, run_replay
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import run_training
from adam_async.driver.replay.decode import dump_record, load_record
from adam_async.driver.replay.recording import Header
from adam_async.driver.replay.run import ReplayDiffers
from adam_async.errors import ConfigError
from adam_async.runtime.machine import numerics

HEADER = Header(
    config={}, spec={}, data={}, buckets=(), kernels="numpy", machine=numerics(), epochs=(), weights=""
)


async def train(folder: Path, **options) -> Path:
    """Record a small run into a folder."""
    file = folder / "run.record"
    asked = TrainOptions(
        **{"data": "digits", "epochs": 1, "record": file, "out": folder / "run", "quiet": True, **options}
    )
    assert await run_training(asked, {}, Terminal(quiet=True)) == 0
    return file


@pytest.mark.slow
@pytest.mark.parametrize("push_every", [1, 2])
async def test_a_replay_writes_the_same_file_byte_for_byte(tmp_path: Path, push_every: int, capsys) -> None:
    file = await train(tmp_path, replicas=2, push_every=push_every)

    again = TrainOptions(replay=file, out=tmp_path / "again")
    assert await run_replay(again, {}, Terminal()) == 0

    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert models[0] == models[1]
    said = capsys.readouterr().out
    assert "epoch 1/1: test accuracy" in said
    assert "90 groups repeated; all weights are those of the run, to the last bit" in said


@pytest.mark.slow
async def test_a_replay_that_differs_writes_no_model(tmp_path: Path) -> None:
    file = await train(tmp_path)
    header, logs = load_record(file.read_bytes(), origin="it")
    other = msgspec.structs.replace(header, config={**header.config, "rate": 0.01})
    file.write_bytes(b"".join(dump_record(other, logs)))

    with pytest.raises(ReplayDiffers, match="ended with other weights"):
        await run_replay(TrainOptions(replay=file, out=tmp_path / "again"), {}, Terminal(quiet=True))
    assert not (tmp_path / "again" / "model.safetensors").exists()


def test_a_replay_takes_no_options_that_the_record_decides() -> None:
    check_options(TrainOptions(replay=Path("x"), data="digits", out=Path("y"), quiet=True))

    with pytest.raises(ConfigError, match="leave out --epochs, --images-per-group"):
        check_options(TrainOptions(replay=Path("x"), epochs=3, images_per_group=8))


def test_differences_that_may_change_last_bits_are_printed_first() -> None:
    assert differences(HEADER) == []
    elsewhere = msgspec.structs.replace(HEADER, machine={**HEADER.machine, "numpy": "1.0", "blas": ""})
    numpy, blas = differences(elsewhere)
    assert numpy.startswith("numpy was 1.0 in the run and is")
    assert blas.startswith("blas was unknown in the run")
