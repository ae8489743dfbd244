"""The profile of a run of processes, on one clock; the report of a run, with each path as text."""

import json
import os
from pathlib import Path

import pytest

from tests.processes.commands import run

pytestmark = pytest.mark.processes


def test_a_profile_of_processes_follows_groups_from_process_to_process(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    roles = ("--processes", "--replicas", "2", "--servers", "2")
    run("train", "--data", "digits", "--epochs", "1", "--profile", str(file), *roles)
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["adam-async", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    trained = [event["args"]["group"] for event in events if event["name"] == "train"]
    assert sorted(trained) == list(range(90))
    journeys: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "stf":
            journeys.setdefault(event["id"], []).append(names[event["pid"]])
    assert len(journeys) == 90
    for journey in journeys.values():
        # With clocks of their own, effects could precede their causes.
        assert journey[0] == "data-0"
        assert journey[1] == journey[-1]
        assert journey[1].startswith("worker-")
        assert set(journey[2:-1]) == {"ps-0", "ps-1", journey[1]}


def test_a_report_names_a_path_of_another_encoding_with_escapes(tmp_path: Path) -> None:
    report, out = tmp_path / "report.json", os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    run("train", "--data", "digits", "--epochs", "1", "--report", str(report), "--out", out)
    assert json.loads(report.read_text())["command"][-1] == f"{tmp_path}/caf\\udce9"
    assert os.path.exists(os.path.join(out, "model.safetensors"))
