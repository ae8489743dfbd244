"""Unauthenticated clients: properties of every seed, and failures without a safeguard."""

from typing import Any
from unittest.mock import ANY

import pytest

from adam_async.simulation.runner import draw_case, run_seed
from tests.ablations.patches import Patch, replaces, replaces_property
from tests.adam_async.simulation.other_processes import replay_hash_elsewhere
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.scenarios.unauthenticated_clients import UNAUTHENTICATED
from transport import Message, decoder, handshake
from transport.admission import Admission
from transport.handshake import Handshake
from transport.link import Link
from transport.tcp import TcpLink

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


@replaces(Handshake, "_check_proof")
def take_any_proof(_: Any, self: Handshake, body: bytes, expected: bytes) -> None:
    """Take any token."""
    self.peer = self._candidate


@replaces(Handshake, "_open")
def open_records_of_other_kinds(opened: Any, self: Handshake, record: bytes, expected: int) -> Any:
    """Take a record of any kind as the expected one."""
    magic, version, kind, has_token = handshake._HEAD.unpack_from(record)
    if kind != handshake._REJECT:
        head = handshake._HEAD.pack(magic, version, expected, has_token)
        record = head + record[handshake._HEAD.size :]
    return opened(self, record, expected)


@replaces_property(Admission, "over_limit")
def admit_every_connection(_: Any) -> bool:
    """Regard the number of connections as within the limit."""
    return False


@replaces(decoder, "_DECODE")
def take_any_checksum(decode: Any, *args: Any) -> Any:
    """Give a frame a checksum that equals every other one."""
    *fields, _ = decode(*args)
    return (*fields, ANY)


@replaces(TcpLink, "_wake_senders")
def wake_at_low_water_alone(wake: Any, self: TcpLink) -> None:
    """Leave senders waiting unless few bytes are unsent."""
    if self.unsent_bytes <= self._config.low_water_bytes:
        wake(self)


REFUSED = "unauthenticated clients are refused"
ABLATIONS = {
    "a token is checked": (take_any_proof, REFUSED),
    "a record of another kind is not answered": (open_records_of_other_kinds, REFUSED),
    "connections above the limit are closed": (admit_every_connection, REFUSED),
    "a checksum is checked": (take_any_checksum, "who breaks a rule is shown out"),
    "senders that wait for room are woken when the whole queue leaves at once": (
        wake_at_low_water_alone,
        "all are answered",
    ),
}


@pytest.mark.parametrize(("patch", "invariant"), ABLATIONS.values(), ids=ABLATIONS)
def test_a_run_fails_after_the_removal_of_a_safeguard(
    patch: Patch, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch.setattr)

    assert run_seed(UNAUTHENTICATED, 2).invariant == invariant


def test_swapped_answers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Link._on_reply

    def mixed(link: Link, request_id: int, message: Message) -> None:
        other = next((one for one in link._calls.waiting if one != request_id), request_id)
        shipped(link, other if request_id % 5 == 0 else request_id, message)

    monkeypatch.setattr(Link, "_on_reply", mixed)

    assert run_seed(UNAUTHENTICATED, 1).invariant == "answers fit"
