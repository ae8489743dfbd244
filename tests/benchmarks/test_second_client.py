"""The benchmark of a second client has a row for the measured client alone and beside each size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_a_client_alone_and_beside_another_has_rows_with_and_without_the_short_way(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--rounds", "1", "--calls", "100", "--beside", "1024", "--json", str(file))
    command = [sys.executable, "-m", "benchmarks.second_client", *options]

    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)

    alone, beside = json.loads(file.read_text())["rows"]
    assert alone["case"] == "1 KiB alone"
    assert beside["case"] == "1 KiB beside pushes of 1024 bytes"
    for row in (alone, beside):
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert 0 < row["p50_us_without"] <= row["p99_us_without"]
        assert row["ratio"] > 0
    assert alone["second_pushes_per_s"] == 0 < beside["second_pushes_per_s"]
