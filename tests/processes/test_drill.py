"""Short drills of real servers: their claims hold, and a fault that cannot be injected has a reason."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from adam_async.cli.commands import run_command
from tests.drill import network_namespaces
from tests.drill.network_namespaces import namespace_network
from tests.processes.commands import Command
from tests.processes.namespaces import hosts, listed

OTHER_PID = os.getpid() + 256

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def drilled(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run a drill; return its exit code and its report."""
    file = folder / "drill.json"
    code = run_command(["drill", *words, "--require", "--json", str(file)])
    return code, json.loads(file.read_text())


def test_kills_and_freezes_lose_no_push_and_a_cut_needs_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    code, report = drilled(tmp_path, "--count", "2", "--faults", "kill,freeze,cut")

    assert code == 3, report
    assert "skipped: cut: cuts need root and network namespaces: `ip`" in capsys.readouterr().err
    assert all(claim["holds"] for claim in report["claims"]), report["claims"]
    assert {row["kind"] for row in report["kinds"]} == {"kill", "freeze"}
    assert report["observations"]["audit"]["acknowledged"] > 100
    assert report["observations"]["copies"]["compared"] == 9


def test_a_cut_moves_a_primary_and_loses_no_push_and_its_namespaces_end_with_the_drill(
    tmp_path: Path,
) -> None:
    code, report = drilled(tmp_path, "--count", "2", "--faults", "cut")
    if report["skipped"]:
        pytest.skip(report["skipped"]["cut"])

    assert code == 0, report
    assert [row["kind"] for row in report["kinds"]] == ["cut"]
    assert report["observations"]["failovers"] >= 2
    assert report["observations"]["audit"]["acknowledged"] > 100
    assert sum(report["observations"]["pushes"]) == report["observations"]["audit"]["acknowledged"]
    assert names_of(os.getpid()) == set()


def test_a_drill_in_training_cuts_the_network_of_a_server(tmp_path: Path) -> None:
    words = ("--workload", "train", "--epochs", "60", "--count", "1", "--every", "2", "--faults", "cut")
    code, report = drilled(tmp_path, *words)
    if report["skipped"]:
        pytest.skip(report["skipped"]["cut"])

    assert code == 0, report
    assert [row["faults"] for row in report["kinds"]] == [1]
    assert report["observations"]["failovers"] >= 1
    claims = {claim["name"]: claim for claim in report["claims"]}
    assert claims["each push applied once"]["holds"], claims
    assert report["observations"]["audit"]["acknowledged"] > 1000


async def test_processes_with_equal_ids_modulo_256_have_different_subnets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosts(["ps-0"]) as first:
        monkeypatch.setattr(os, "getpid", lambda: OTHER_PID)
        async with hosts(["ps-0"]) as second:
            addresses = {first.address, first.address_of("ps-0"), second.address, second.address_of("ps-0")}
        monkeypatch.undo()
    assert len({address.rpartition(".")[0] for address in addresses}) == 2
    assert len(addresses) == 4


async def test_without_a_free_subnet_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_namespaces, "SUBNETS", 1)
    async with hosts(["ps-0"]):
        monkeypatch.setattr(os, "getpid", lambda: OTHER_PID)
        with pytest.raises(OSError, match=r"have all 1 subnets 198\.19\.N\.0/24: end other drills"):
            async with namespace_network(["ps-0"]):
                pass
        left = names_of(os.getpid())
        monkeypatch.undo()
    assert left == set()


def test_an_interrupted_drill_leaves_no_namespace() -> None:
    with Command("drill", "--count", "100", "--faults", "cut") as command:
        line = command.wait_for("cut")
        if "skipped" in line:
            pytest.skip(line)
        during = names_of(command.pid)
        command.signal(signal.SIGINT)
        command.ends(130)

    assert len(during) == 7  # three namespaces, their links, and the bridge
    assert names_of(command.pid) == set()


def names_of(pid: int) -> set[str]:
    """Return the names of the namespaces and interfaces of a process."""
    return {name for name in listed() if name.startswith((f"adam-async-{pid}-", f"adam{pid}-"))}
