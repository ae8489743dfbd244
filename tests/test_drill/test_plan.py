"""The faults of a drill are a function of its seed."""

from collections import Counter

import pytest

from adam_async.errors import ConfigError
from tests.drill.plan import plan_faults, read_kinds, skipped_kinds


def test_a_plan_depends_on_the_seed_only() -> None:
    kinds = ("kill", "freeze")

    assert plan_faults(kinds, 50, 3) == plan_faults(kinds, 50, 3)
    assert plan_faults(kinds, 50, 3) != plan_faults(kinds, 50, 4)


def test_a_plan_has_each_kind_equally_often() -> None:
    plan = plan_faults(("kill", "freeze"), 401, 0)

    assert Counter(fault.kind for fault in plan) == {"kill": 201, "freeze": 200}
    assert [fault.number for fault in plan] == list(range(1, 402))


def test_no_kind_makes_an_empty_plan() -> None:
    assert plan_faults((), 5, 0) == ()


def test_every_primary_can_be_a_victim() -> None:
    victims = {fault.victim({"ps-2", "ps-0", "ps-1"}) for fault in plan_faults(("kill",), 60, 0)}

    assert victims == {"ps-0", "ps-1", "ps-2"}


def test_kinds_are_read_in_one_order() -> None:
    assert read_kinds("cut, kill") == ("kill", "cut")


@pytest.mark.parametrize("text", ["", ",", "kill,fire"])
def test_a_list_of_unknown_kinds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--faults takes kill, freeze, cut"):
        read_kinds(text)


def test_a_kind_that_cannot_be_injected_has_a_reason() -> None:
    assert skipped_kinds(("kill", "freeze", "cut"), has_signals=True, no_network="") == {}
    assert skipped_kinds(("kill", "cut"), has_signals=True, no_network="no root") == {"cut": "no root"}
    assert skipped_kinds(("kill", "freeze"), has_signals=True, no_network="no root") == {}
    assert list(skipped_kinds(("kill", "freeze"), has_signals=False, no_network="")) == ["freeze"]
