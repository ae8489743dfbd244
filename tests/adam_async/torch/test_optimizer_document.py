"""The programs for the optimizer in its reference and in the README run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[3]


def programs_of(page: str) -> list[str]:
    """Return the programs of a page that need PyTorch."""
    return re.findall(r"```python torch\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )


@pytest.mark.thorough
def test_the_program_of_the_reference_trains_and_saves(tmp_path: Path) -> None:
    done = run(programs_of("docs/reference/torch.md")[0], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert torch.nn.Linear(20, 2).load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.thorough
def test_the_programs_of_the_reference_save_and_restore_a_training(tmp_path: Path) -> None:
    done = run("\n".join(programs_of("docs/reference/torch.md")), tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    # Each line is a warning: the store goes on, and the state_dict has rates and counters only.
    restored, rates = done.stderr.splitlines()
    assert "goes on from the disks" in restored
    assert "rates and counters only" in rates
    assert torch.load(tmp_path / "training" / "rates.pt")["adam_async"]["steps"] == 10


@pytest.mark.thorough
def test_the_loop_of_the_readme_trains_the_readers_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 2)
    first = model.weight.detach().clone()
    loader = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 2

    exec(
        compile(programs_of("README.md")[0], "README.md", "exec"),
        {"model": model, "loader": loader, "criterion": torch.nn.functional.cross_entropy},
    )

    assert not torch.equal(model.weight, first)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)
