"""Accounts of links in one budget, without links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.budget import Account, Budget

LIMIT = 1000


def drain(account: Account, step: int) -> None:
    while account.admit(step):
        pass


def no_room() -> None:
    """Do nothing: no link waits in these tests."""


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["charge", "admit", "release", "wait", "leave", "close"]),
        st.integers(0, LIMIT // 2),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_sum_of_all_accounts_is_what_the_budget_holds_and_answers_overshoot_it_once(
    steps: list[tuple[int, str, int]],
) -> None:
    budget = Budget(LIMIT)
    accounts = [Account(budget, LIMIT // 2) for _ in range(4)]
    closed: set[int] = set()
    forced = 0
    for number, action, nbytes in steps:
        account = accounts[number]
        match action:
            case "charge":
                forced += nbytes
                account.charge(nbytes)
            case "admit":
                before = account.held_bytes
                admitted = account.admit(nbytes)
                assert account.held_bytes == before + (nbytes if admitted and number not in closed else 0)
                assert not admitted or before < account.limit_bytes
            case "release":
                account.release(min(nbytes, account.held_bytes))
            case "wait" if number not in closed:
                account.wait(no_room, in_line=True)
            case "leave":
                account.leave()
            case "close":
                closed.add(number)
                account.close()
        assert budget.held_bytes == sum(one.held_bytes for one in accounts)
        assert min(one.held_bytes for one in accounts) >= 0
        assert budget.beyond_bytes == sum(max(one.held_bytes - one.part_bytes, 0) for one in accounts)
        assert all(accounts[number].held_bytes == 0 for number in closed)
        assert budget.links == 4 - len(closed)
        # Charges always succeed; answers beyond the limit come one at a time.
        assert budget.held_bytes <= LIMIT + forced + LIMIT // 2


def test_links_that_take_all_they_can_leave_each_other_link_its_part() -> None:
    budget = Budget(80_000)
    hoarders, others = ([Account(budget, 80_000) for _ in range(5)] for _ in range(2))
    for one in hoarders:
        drain(one, 10)
    assert hoarders[0].held_bytes > 20_000
    assert budget.held_bytes < 45_000
    for one in others:
        assert one.part_bytes > 500
        assert one.admit(one.part_bytes)
    assert budget.held_bytes <= 80_000


def test_successive_links_that_take_all_they_can_stay_within_the_budget() -> None:
    """Parts that depend on the number of links would let the links hold half as much again."""
    budget = Budget(1 << 20)
    for _ in range(300):
        drain(Account(budget, 1 << 17), 16)
        assert budget.held_bytes <= budget.limit_bytes
    assert budget.held_bytes > 0.95 * budget.limit_bytes
    assert budget.reserved_bytes <= budget.limit_bytes // 2


def test_a_part_that_was_closed_is_reserved_for_the_next_link() -> None:
    budget = Budget(1 << 20)
    first = Account(budget, 1 << 17)
    part = first.part_bytes
    assert Account(budget, 1 << 17).part_bytes < part
    first.close()
    budget = Budget(1 << 20)
    for _ in range(1_000):
        account = Account(budget, 1 << 17)
        assert account.part_bytes == part
        drain(account, 1_000)
        account.close()
    assert (budget.reserved_bytes, budget.beyond_bytes, budget.held_bytes) == (0, 0, 0)


def test_within_its_part_a_link_has_room_beside_any_others() -> None:
    budget = Budget(64_000)
    greedy, small = Account(budget, 80_000), Account(budget, 80_000)
    greedy.charge(200_000)
    assert greedy.is_hoarding
    assert not greedy.admit(1)
    assert small.part_bytes == 492
    assert small.admit(492)
    assert not small.admit(1)


def test_a_link_has_room_until_its_own_limit_and_one_answer_may_exceed_it() -> None:
    account = Account(Budget(1 << 20), 1_000)
    drain(account, 700)
    assert account.held_bytes == 1_400
    account.release(700)
    assert account.admit(1)


def test_the_first_in_the_queue_may_exceed_the_limit_one_at_a_time() -> None:
    budget = Budget(800)
    first, second, third = (Account(budget, 10_000) for _ in range(3))
    woken: list[str] = []
    for one, name in ((third, "third"), (first, "first"), (second, "second")):
        one.wait(lambda name=name: woken.append(name), in_line=one is not third)  # type: ignore[misc]
    assert not second.admit(5_000)
    assert first.admit(5_000)
    first.leave()
    assert woken == ["third", "second"]
    assert not second.admit(5_000)
    assert not first.admit(5_000)
    first.release(5_000)
    assert second.admit(5_000)


def test_messages_in_progress_do_not_wait_for_one_another_for_ever() -> None:
    budget = Budget(1_000)
    one, other = Account(budget, 10_000), Account(budget, 10_000)
    for account in (one, other):
        account.charge(400)
        account.wait(no_room, in_line=True)
    assert one.may_go_on(400)
    assert not other.may_go_on(400)
    one.charge(600)
    assert one.may_go_on(1_000)
    assert not one.may_go_on(100), "a second message would come on top of a whole one"
    one.close()
    assert other.may_go_on(400)


def test_a_closed_account_releases_all_its_bytes() -> None:
    budget = Budget(1_000)
    account = Account(budget, 1_000)
    account.charge(600)
    account.close()
    assert (budget.held_bytes, budget.links) == (0, 0)


def test_an_account_cannot_release_more_than_it_holds() -> None:
    account = Account(Budget(), 1_000)
    account.charge(10)
    with pytest.raises(ValueError, match="11 bytes are released of 10"):
        account.release(11)
    assert "10 of 1000 B" in repr(account)
    with pytest.raises(ValueError, match="must be positive"):
        Budget(0)
    assert "held by 1 links" in repr(account.budget)
