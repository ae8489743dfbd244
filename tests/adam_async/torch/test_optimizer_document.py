"""The programs for the optimizer in its reference and in the README run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[3]


def program_of(page: str) -> str:
    """Return the one program of a page that needs PyTorch."""
    (program,) = re.findall(r"```python torch\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert isinstance(program, str)
    return program


@pytest.mark.thorough
def test_the_program_of_the_reference_trains_and_saves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program_of("docs/reference/torch.md")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert torch.nn.Linear(20, 2).load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.thorough
def test_the_loop_of_the_readme_trains_the_readers_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 2)
    first = model.weight.detach().clone()
    loader = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 2

    exec(
        compile(program_of("README.md"), "README.md", "exec"),
        {"model": model, "loader": loader, "criterion": torch.nn.functional.cross_entropy},
    )

    assert not torch.equal(model.weight, first)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)
