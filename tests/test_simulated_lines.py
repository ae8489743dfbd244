"""The table of lines that simulated seeds run looks at files that there are, and tells what did not run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.simulated_lines import EXEMPT, FOLDERS

ROOT = Path(__file__).resolve().parents[1]


def test_files_left_out_exist_and_no_pure_state_is_among_them() -> None:
    assert [file for file in EXEMPT if not (ROOT / file).is_file()] == []
    assert not {f"{folder}/{name}.py" for folder in FOLDERS for name in ("state", "service", "client")} & set(
        EXEMPT
    )


@pytest.mark.slow
def test_a_seed_of_strangers_runs_the_handshake_and_no_server_of_parameters(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.simulated_lines", "--scenario", "strangers", "--seeds", "1"]

    told = subprocess.run([*command, "--json", str(rows)], cwd=ROOT, capture_output=True, text=True)

    assert told.returncode == 1, told.stderr
    share = {row["file"]: row["share"] for row in json.loads(rows.read_text())}
    assert share["transport/handshake.py"] > 90
    assert share["adam_async/parameter_server/state.py"] < 50
    assert not set(EXEMPT) & set(share)
    assert "strangers: 1 seeds, 1 count" in told.stdout
