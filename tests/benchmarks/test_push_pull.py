"""The benchmark of pushes and pulls has rows for the store, the client below it, and a peer."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEER = """import json; print(json.dumps({"bytes": 1024, "pair_us": 100.0}))"""


@pytest.mark.processes
def test_each_size_has_rows_of_store_client_and_peer_and_small_arrays_have_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    peer = f"other={shlex.join([sys.executable, '-c', PEER])}"
    options = ("--rounds", "1", "--sizes", "1024", "--many", "10", "--warm", "0", "--peer", peer)
    command = [sys.executable, "-m", "benchmarks.push_pull", *options, "--json", str(file)]

    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)

    rows = json.loads(file.read_text())
    assert [row["case"] for row in rows] == [
        "push, SGD, pull of 1024 bytes: store against client",
        "push, SGD, pull of 1024 bytes: store against other",
        "push, SGD, pull of 1024 bytes: client against other",
        "10 arrays of 1024 bytes together against one of 1 MiB",
    ]
    assert all(row["ours"] > 0 and row["unit"] == "us" for row in rows)
    assert rows[1]["peer"] == rows[2]["peer"] == 100.0
