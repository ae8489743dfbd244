"""Unauthenticated clients: properties of every seed, and failures without a safeguard."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adam_async.simulation.runner import draw_case, run_seed
from adam_async.simulation.scenarios import SCENARIOS
from adam_async.simulation.scenarios.unauthenticated_clients import UNAUTHENTICATED
from tests.ablations.rewriting import rewrite
from transport.calls import CallTable
from transport.decoder import FrameDecoder
from transport.entrance import Entrance
from transport.handshake import Handshake
from transport.tcp import TcpLink

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[4]


def test_seeds_count() -> None:
    for seed in range(1, 4):
        result = run_seed(SCENARIOS["strangers"], seed)
        assert result.seed_counts, result


def test_every_plan_has_each_kind_and_plans_differ() -> None:
    plans = [draw_case(UNAUTHENTICATED, seed).plan for seed in range(100)]

    for plan in plans:
        assert {fault.kind for fault in plan.faults} == set(UNAUTHENTICATED.kinds)
    assert len({plan.faults for plan in plans}) == 100


IN_A_PROCESS = """
from adam_async.simulation.runner import run_seed
from adam_async.simulation.scenarios.unauthenticated_clients import UNAUTHENTICATED
print(run_seed(UNAUTHENTICATED, 2).replay_hash)
"""


def test_a_seed_is_the_same_run_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout

    assert done.strip() == run_seed(UNAUTHENTICATED, 2).replay_hash


ABLATIONS = {
    "a token is checked": (
        Handshake, "_check_proof", "not hmac.compare_digest(body[: len(expected)], expected)", "False",
        "unauthenticated clients are refused", 1,
    ),
    "a record of another kind is not answered": (
        Handshake, "_open", "if kind != expected", "if kind < 0", "unauthenticated clients are refused", 1,
    ),
    "connections above the limit are closed": (
        Entrance, "connected", "self._admission.over_limit", "False",
        "unauthenticated clients are refused", 1,
    ),
    "a checksum is checked": (
        FrameDecoder, "_parse", "start + _CHECKED_BYTES])) != crc", "start + _CHECKED_BYTES])) < 0",
        "who breaks a rule is shown out", 1,
    ),
    "senders that wait for room are woken when the whole queue leaves at once": (
        TcpLink, "resume_writing", "(self._writing or unsent <=", "(unsent <=", "all are answered", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("safeguard", ABLATIONS)
def test_a_run_fails_after_the_removal_of_a_safeguard(
    safeguard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, old, new, invariant, seed = ABLATIONS[safeguard]
    rewrite(monkeypatch, owner, method, old, new)

    assert run_seed(UNAUTHENTICATED, seed).invariant == invariant


def test_swapped_answers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = CallTable.pop

    def mixed(calls: CallTable[Any], request_id: int) -> object:
        other = next((one for one in calls.waiting if one != request_id), request_id)
        return shipped(calls, other if request_id % 5 == 0 else request_id)

    monkeypatch.setattr(CallTable, "pop", mixed)

    assert run_seed(UNAUTHENTICATED, 1).invariant == "answers fit"
