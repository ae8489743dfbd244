"""Roles share the CPUs of a Ray cluster, and wrong amounts, variables and addresses are refused."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.launch.ray_resources import (
    RaySettings,
    actor_options,
    full_ask,
    largest_share,
    read_asks,
    read_variables,
    shortage_text,
    with_memory,
    without,
)


@pytest.mark.parametrize(
    ("cpus", "roles", "expected"),
    [
        ([8, 8], 2, 8),
        ([8, 8], 4, 4),
        ([8, 8], 5, 2),
        ([8, 3], 2, 4),
        ([7.5], 2, 3),
        ([2], 5, 0.4),
        ([], 1, 0.01),
    ],
)
def test_a_share_is_the_largest_that_fits(cpus: list[float], roles: int, expected: float) -> None:
    assert largest_share(cpus, roles) == expected


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8), st.integers(1, 64))
def test_all_roles_fit_with_their_share_and_none_with_the_next(cpus: list[int], roles: int) -> None:
    share = largest_share(cpus, roles)

    hundredths = round(share * 100)
    step = 100 if share >= 1 else 1
    assert sum(one * 100 // hundredths for one in cpus) >= roles
    assert sum(one * 100 // (hundredths + step) for one in cpus) < roles or share == 0.99


def test_roles_with_an_amount_of_their_own_leave_the_rest() -> None:
    assert without([4, 3], [2, 0, 2]) == [2, 1]
    assert without([1], [3]) == [0]


def test_asks_are_read_by_role_and_resource() -> None:
    asks = read_asks(["worker:CPU=4", "worker:ssd=1", "ps:memory=2e9"])

    assert asks == {"worker": {"CPU": 4, "ssd": 1}, "ps": {"memory": 2e9}}
    assert full_ask(asks, "worker", 9) == {"CPU": 4, "ssd": 1}
    assert full_ask(asks, "ps", 1) == {"CPU": 1, "memory": 2e9}
    assert actor_options(asks["worker"]) == {"num_cpus": 4, "resources": {"ssd": 1}}
    assert actor_options(asks["ps"]) == {"num_cpus": 0, "memory": 2e9, "resources": {}}


def test_memory_of_the_options_is_asked_of_ray_unless_the_role_asks_for_its_own() -> None:
    assert with_memory({"CPU": 1}, 2 << 30) == {"memory": 2 << 30, "CPU": 1}
    assert with_memory({"CPU": 1, "memory": 5.0}, 2 << 30) == {"CPU": 1, "memory": 5.0}
    assert with_memory({"CPU": 1}, 0) == {"CPU": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CPU=4", "another form than ROLE:RESOURCE=AMOUNT"),
        ("worker:CPU", "another form than ROLE:RESOURCE=AMOUNT"),
        ("driver:CPU=1", "names no role; roles are ps, data, worker, controller"),
        ("worker:CPU=many", "nan is no amount"),
        ("worker:CPU=nan", "nan is no amount"),
        ("worker:CPU=inf", "inf is no amount"),
        ("worker:CPU=0", "0 is no amount"),
        ("worker:CPU=1.5", "give one above 0, and whole CPUs above 1"),
        ("worker:=1", "is no amount"),
    ],
)
def test_a_wrong_ask_is_refused_with_the_form(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_asks([text])


@pytest.mark.parametrize("text", ["A", "=b", "1A=b", "A=\0"])
def test_a_wrong_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="another form than NAME=VALUE"):
        read_variables([text])


def test_a_variable_may_have_further_equals_signs_in_its_value() -> None:
    assert read_variables(["A=b=c", "B="]) == {"A": "b=c", "B": ""}


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:x", ":6379", "10.0.0.1:0", "10.0.0.1:70000"])
def test_an_address_without_host_or_port_is_refused_with_the_cure(address: str) -> None:
    with pytest.raises(ConfigError, match="give auto, local, or the HOST:PORT"):
        RaySettings(address=address)


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "[::1]:6379"])
def test_an_address_with_host_and_port_is_accepted(address: str) -> None:
    assert RaySettings(address=address).address == address


@pytest.mark.parametrize("wait_s", [0, -1, math.nan, math.inf])
def test_a_wait_without_end_is_refused(wait_s: float) -> None:
    with pytest.raises(ConfigError, match="wait_s must be a number of seconds above 0"):
        RaySettings(wait_s=wait_s)


def test_the_token_is_no_variable_of_an_actor() -> None:
    with pytest.raises(ConfigError, match="leave ADAM_TOKEN out of environment"):
        RaySettings(environment={"ADAM_TOKEN": "x"})


@pytest.mark.parametrize(("pack", "expected"), [(False, "SPREAD"), (True, "PACK")])
def test_workers_are_packed_as_asked_and_servers_are_spread(pack: bool, expected: str) -> None:
    assert RaySettings(pack=pack).strategies == {"ps": "SPREAD", "data": "SPREAD", "worker": expected}


@pytest.mark.parametrize(
    ("ask", "named"), [({"CPU": 4.0, "ssd": 1.0}, "worker:CPU=N"), ({"ssd": 1.0}, "worker:ssd=N")]
)
def test_missing_room_names_amounts_and_remedies(ask: Mapping[str, float], named: str) -> None:
    text = shortage_text("worker", 3, ask, {"CPU": 2.0}, 5)

    assert text.startswith("room on Ray for 3 x worker, each with ")
    assert "the 5 nodes have" in text
    assert "ssd 0 free" in text
    assert f"--ask {named}" in text
