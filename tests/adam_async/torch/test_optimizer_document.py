"""The program of the reference of the optimizer runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[3]
(PROGRAM,) = re.findall(
    r"```python torch\n(.*?)```", (ROOT / "docs/reference/torch.md").read_text(), re.DOTALL
)


@pytest.mark.thorough
def test_the_program_of_the_reference_trains_and_saves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert torch.nn.Linear(20, 2).load_state_dict(load_file(tmp_path / "model.safetensors"))
