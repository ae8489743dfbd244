"""Killed commands, and commands that resume them."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from adam_async.checkpoint.names import is_folder_name
from adam_async.report.report import Report
from tests.processes.commands import Command, run, until

pytestmark = pytest.mark.processes

MODES = {
    "one-process": (),
    "processes": ("--processes", "--replicas", "2", "--servers", "2"),
    "lockstep": ("--processes", "--replicas", "2", "--consistency", "bsp"),
}


def place(folder: Path) -> tuple[int, ...]:
    """Epoch and groups of the newest checkpoint."""
    latest = folder / "latest"
    return tuple(int(number) for number in latest.read_text().split("-")[1:]) if latest.exists() else (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_within_an_epoch_goes_on_where_its_last_checkpoint_was(
    mode: str, tmp_path: Path
) -> None:
    folder, report = tmp_path / "checkpoints", tmp_path / "report.json"
    train = ("train", "--data", "digits", "--seed", "3", *MODES[mode])
    again = ("--checkpoint-every", "10", "--epochs", "1000")
    with Command(*train, *again, "--checkpoint", str(folder)) as command:
        until(lambda: place(folder) >= (2, 10), "a checkpoint within the second epoch")
        os.kill(command.pid, signal.SIGKILL)
        assert command.finish() == -signal.SIGKILL
    epoch, groups = place(folder)
    epochs = str(epoch + 1)
    output = run("train", "--resume", str(folder), "--epochs", epochs, "--report", str(report))
    name = f"resumed from checkpoint-{epoch:04}-{groups:06}"
    assert name in output
    found = msgspec.json.decode(report.read_bytes(), type=Report)
    assert [each.images for each in found.epochs] == [1437] * (epoch + 1)
    assert place(folder) == (epoch + 1, 90)
    assert any(name in event.event for event in found.events)
    assert found.checkpoints
    assert sorted(file.name for file in folder.iterdir() if not is_folder_name(file.name)) == [
        "latest",
        "lock",
    ]


def test_a_failed_resume_ends_with_the_code_of_a_wrong_option(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    train = ("train", "--data", "digits", "--quiet")
    run(*train, "--epochs", "1", "--checkpoint", folder)
    for words, claim in (
        (("--resume", str(tmp_path)), "train --checkpoint writes them"),
        (
            ("--resume", folder),
            "trained 1 epoch, and epochs=1 asks for no more; to train on, give --epochs 2 or more",
        ),
        (("--resume", folder, "--epochs", "2", "--rate", "0.5"), "rate=0.5 (there 0.0); leave them out"),
        (("--checkpoint", folder), f"continue that one with --resume {folder}"),
        (("--checkpoint-every", "10"), "give --checkpoint DIR"),
        (("--checkpoint", "/proc/here"), "checkpoints cannot be written to /proc/here"),
    ):
        output = run("train", "--quiet", *words, code=2)
        assert claim in output
        assert "Traceback" not in output
