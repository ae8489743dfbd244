"""A run of processes is repeated in one process, byte for byte."""

from pathlib import Path

import pytest

from adam_async.driver.replay.record_head import MAGIC
from tests.processes.commands import run

pytestmark = pytest.mark.processes


@pytest.mark.slow
@pytest.mark.parametrize("push_every", [1, 2])
def test_a_run_of_processes_is_replayed_to_the_same_file(tmp_path: Path, push_every: int) -> None:
    file, first, again = (str(tmp_path / name) for name in ("run.record", "first", "again"))
    roles = ("--processes", "--replicas", "2", "--servers", "2", "--push-every", str(push_every))
    output = run("train", "--data", "digits", "--epochs", "2", "--record", file, "--out", first, *roles)

    output = run("train", "--replay", file, "--out", again)
    assert "all weights are those of the run, to the last bit" in output
    assert Path(first, "model.safetensors").read_bytes() == Path(again, "model.safetensors").read_bytes()


def test_options_of_the_record_cannot_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "run.record"
    file.write_bytes(MAGIC)
    output = run("train", "--replay", str(file), "--epochs", "3", code=2)
    assert output == "adam-async: --replay takes these options from the record: leave out --epochs\n"
