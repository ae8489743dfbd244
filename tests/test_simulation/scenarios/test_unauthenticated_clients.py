"""Unauthenticated clients: properties of every seed, and failures without a safeguard."""

import pytest

from tests.ablations.ablation import Ablation
from tests.simulation.runner import draw_case, run_seed
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.scenarios.unauthenticated_clients import UNAUTHENTICATED
from tests.test_simulation.other_processes import replay_hash_elsewhere
from transport import Message
from transport.link import Link

pytestmark = pytest.mark.thorough

HERE = "tests.simulation.scenarios.unauthenticated_clients"


def test_seeds_count() -> None:
    for seed in range(1, 4):
        result = run_seed(SCENARIOS["strangers"], seed)
        assert result.seed_counts, result


def test_every_plan_has_each_kind_and_plans_differ() -> None:
    plans = [draw_case(UNAUTHENTICATED, seed).plan for seed in range(100)]

    for plan in plans:
        assert {fault.kind for fault in plan.faults} == set(UNAUTHENTICATED.kinds)
    assert len({plan.faults for plan in plans}) == 100


def test_a_seed_is_the_same_run_in_every_process() -> None:
    elsewhere = replay_hash_elsewhere(HERE, "UNAUTHENTICATED", 2)

    assert elsewhere == run_seed(UNAUTHENTICATED, 2).replay_hash


REFUSED = "unauthenticated clients are refused"
ABLATIONS = {
    Ablation(
        "a token is checked",
        "transport/handshake.py",
        "if not hmac.compare_digest(body[: len(expected)], expected):",
        "if False:",
    ): REFUSED,
    Ablation(
        "a record of another kind is not answered",
        "transport/handshake.py",
        "if kind != expected:",
        "if False:",
    ): REFUSED,
    Ablation(
        "connections above the limit are closed",
        "transport/entrance.py",
        "return len(self._source_of) > self._limit",
        "return False",
    ): REFUSED,
    Ablation(
        "a checksum is checked",
        "transport/decoder.py",
        "if crc32(packed, crc32(scratch[start : start + _CHECKED_BYTES])) != crc:",
        "if False:",
    ): "who breaks a rule is shown out",
    Ablation(
        "senders that wait for room are woken when the whole queue leaves at once",
        "transport/stream.py",
        "if self._room and (self._writing or unsent <= self._config.low_water_bytes):",
        "if self._room and unsent <= self._config.low_water_bytes:",
    ): "all are answered",
}


@pytest.mark.parametrize(("ablation", "invariant"), ABLATIONS.items(), ids=[each.name for each in ABLATIONS])
def test_a_run_fails_after_the_removal_of_a_safeguard(
    ablation: Ablation, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation.remove(monkeypatch.setattr)

    assert run_seed(UNAUTHENTICATED, 2).invariant == invariant


def test_swapped_answers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Link._on_reply

    def mixed(link: Link, request_id: int, message: Message) -> None:
        other = next((one for one in link._calls.waiting if one != request_id), request_id)
        shipped(link, other if request_id % 5 == 0 else request_id, message)

    monkeypatch.setattr(Link, "_on_reply", mixed)

    assert run_seed(UNAUTHENTICATED, 1).invariant == "answers fit"
