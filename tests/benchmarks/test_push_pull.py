"""The benchmark of pushes and pulls has rows for the store beside floors and a peer."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEER = """import json; print(json.dumps({"bytes": 1024, "pair_us": 100.0}))"""


@pytest.mark.processes
def test_each_size_and_the_small_arrays_have_rows_beside_floors_and_peer(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    peer = f"other={shlex.join([sys.executable, '-c', PEER])}"
    other = tmp_path / "other"
    other.symlink_to(ROOT)
    options = ("--rounds", "1", "--sizes", "1024", "--many", "10", "--warm", "0", "--peer", peer)
    floors = ("--floor-of", str(other))
    command = [sys.executable, "-m", "benchmarks.push_pull", *options, *floors, "--json", str(file)]

    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)

    rows = json.loads(file.read_text())["rows"]
    one, many = "push, SGD, pull of 1024 bytes", "10 arrays of 1024 bytes together against one of"
    assert [row["case"] for row in rows] == [
        f"{one}: shared against TCP",
        f"{one}: buffers against TCP",
        f"{one}: shared against floor in shared memory",
        f"{one}: shared against other",
        f"{one}: store against floor",
        f"{one}: store against floor of other",
        f"{one}: store against other",
        f"{many} 1 MiB",
        f"{many} all in the floor",
        f"{many} all in the floor of other",
    ]
    assert all(row["ours"] > 0 and row["unit"] == "us" for row in rows)
    assert rows[3]["peer"] == rows[6]["peer"] == 100.0
    beside_ours = {
        row["case"] for row in rows if any(word in row["case"] for word in ("floor", "shared", "buffers"))
    }
    assert {row["case"] for row in rows if row.get("multiple", 0) > 0} == beside_ours


@pytest.mark.processes
def test_a_folder_without_a_link_is_refused_as_a_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.push_pull", "--floor-of", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert f"--floor-of {tmp_path} has no folder transport" in done.stderr
