"""A short drill of real servers: the command finds its claims true, and names what it cannot inject."""

import json
from pathlib import Path

import pytest

from adam_async.cli.commands import run_command

pytestmark = pytest.mark.processes


def test_kills_and_freezes_lose_no_push_and_a_required_cut_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "drill.json"

    words = ["--count", "2", "--faults", "kill,freeze,cut", "--require", "--json", str(file)]
    code = run_command(["drill", *words])

    printed = capsys.readouterr()
    assert code == 3, printed
    assert "skipped: cut" in printed.err
    report = json.loads(file.read_text())
    assert all(claim["holds"] for claim in report["claims"]), report["claims"]
    assert {row["kind"] for row in report["kinds"]} == {"kill", "freeze"}
    assert report["observations"]["audit"]["acknowledged"] > 100
    assert report["observations"]["copies"]["compared"] == 9
