"""The wheel with the extra `ray` in a fresh environment: one command trains on a Ray of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.commands import PATIENCE_S, ROOT, Command, children_of, descendants, watched

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

INSTALL_S = 600.0
"""Deadline of the installation, in seconds; Ray has 70 MB."""


def installed(folder: Path) -> Path:
    """Build the wheel, and install it into a new environment; returns the program."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = folder / "venv" / "bin" / "python"
    steps = (
        (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "dist", ROOT),
        (sys.executable, "-m", "venv", folder / "venv"),
    )
    for words in steps:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs pip, venv, and the package index for hatchling: {done.stderr.strip()[-300:]}")
    (wheel,) = (folder / "dist").glob("adam_async-*.whl")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", f"{wheel}[ray]"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"needs the package index for Ray: {done.stderr.strip()[-300:]}")
    return python.with_name("adam-async")


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads /proc")
def test_one_command_trains_on_a_local_ray_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = installed(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "adam.toml").write_text('data = "digits"\nservers = 2\nreplicas = 2\nepochs = 12\n')
    words = [str(program), "launch", "ray", "--address", "local", "adam.toml", "--out", "model"]
    with Command.of(words, folder=tmp_path) as command:
        command.wait_for("epoch 2/12")
        roles = [pid for pid in descendants(command.pid) if pid != command.pid]
        with watched(roles) as all_end:
            command.ends(0, seconds=120)
            all_end(PATIENCE_S)
        assert children_of(command.pid) == {}

    accuracy = re.search(r"test accuracy ([\d.]+)% after 12 epochs", command.output)
    assert accuracy is not None, command.output
    assert float(accuracy[1]) > 90
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0
