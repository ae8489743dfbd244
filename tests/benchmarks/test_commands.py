"""Every benchmark is listed, explains its arguments, and exists under the names that pages use."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if "\nif __name__" in path.read_text())
LISTED = set(re.findall(r"python -m benchmarks\.(\w+)", (FOLDER / "README.md").read_text()))


def test_the_table_has_every_benchmark_and_no_other() -> None:
    assert set(COMMANDS) == LISTED


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: page.name,
)
def test_a_page_names_benchmarks_that_exist(page: Path) -> None:
    named = set(re.findall(r"benchmarks[./](\w+)(?:\.py)?\b(?!/)", page.read_text())) - {"README", "results"}
    assert named <= {path.stem for path in FOLDER.iterdir()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_explains_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "torch_training":
        pytest.importorskip("torch")
        for variable in ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            monkeypatch.setenv(variable, "1")  # or the benchmark would set it, for all tests that follow
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert ("--json" in capsys.readouterr().out) == (name not in ("floor", "staleness_plot"))
