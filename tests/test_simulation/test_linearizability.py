"""Histories that one register explains are accepted; others are refused with the contradiction."""

import itertools
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.linearizability import (
    CompareAndSet,
    Conflict,
    Done,
    Get,
    History,
    NotLinearizable,
    Operation,
    Read,
    Refused,
    Sight,
    Undecided,
    WatchBroken,
    check,
    check_watch,
)

NUMBERS = itertools.count()


def op(begun, ended, asked, answer=None, *, key="k", client="c"):
    return Operation(
        client=client, number=next(NUMBERS), key=key, begun=begun, ended=ended, asked=asked, answer=answer
    )


def get(begun, ended, version, value=None, **names):
    """A get; the value of version 5 is v5 unless another one is given."""
    return op(begun, ended, Get(), Read(version, value or (f"v{version}" if version else None)), **names)


def put(begun, ended, expected, version, value=None, **names):
    """A compare-and-set that took effect."""
    return op(begun, ended, CompareAndSet(expected, value or f"v{version}"), Done(version), **names)


def conflict(begun, ended, expected, seen=None, **names):
    return op(begun, ended, CompareAndSet(expected, "lost"), Conflict(seen), **names)


def unknown(begun, expected, value, **names):
    return op(begun, None, CompareAndSet(expected, value), **names)


def checked(*operations):
    """Steps that it took to accept a history."""
    return check(operations)


def refused(*operations):
    """Return the contradiction in a history, and its operations."""
    with pytest.raises(NotLinearizable) as caught:
        checked(*operations)
    assert set(caught.value.operations) <= set(operations)
    assert all(str(operation) in str(caught.value) for operation in caught.value.operations)
    return caught.value.why, caught.value.operations


# --- by hand -------------------------------------------------------------------------------------


def test_an_operation_takes_effect_between_its_begin_and_its_end():
    slow = put(0, 10, 0, 5)

    checked(slow, get(1, 2, 0), get(3, 4, 5))
    checked(slow, get(1, 2, 5), get(3, 4, 5))
    checked(slow, get(11, 12, 5))
    why, operations = refused(slow, early := get(1, 2, 5), late := get(3, 4, 0))
    assert why == "version 0 was over by 2.000000, but was seen from 3.000000 on"
    assert operations == (early, late)


def test_a_stale_read_is_refused_with_the_operation_that_replaced_its_version():
    first, second, stale = put(0, 1, 0, 5), put(2, 3, 5, 6), get(4, 5, 5)

    why, operations = refused(first, second, stale, get(6, 7, 6), conflict(8, 9, 1))

    assert why == "version 5 was over by 3.000000, but was seen from 4.000000 on"
    assert operations == (first, second, stale)


def test_two_winners_of_one_version_are_refused():
    one, other = put(0, 10, 0, 5), put(0, 10, 0, 6)

    assert refused(one, other) == ("version 0 was replaced twice", (one, other))


def test_a_read_of_a_later_version_is_refused():
    early, late = get(0, 1, 5), put(2, 3, 0, 5)

    why, operations = refused(late, early)
    assert why == "version 0 was over by 1.000000, but nothing had begun that can replace it"
    assert operations == (early, late)


def test_an_unknown_operation_that_took_effect_before_it_began_is_refused():
    why, operations = refused(early := get(0, 1, 5), late := unknown(2, 0, "v5"))

    assert why == "version 0 was over by 1.000000, but nothing had begun that can replace it"
    assert operations == (early, late)


def test_a_conflict_that_saw_nothing_else_needs_another_version():
    why, operations = refused(
        made := put(0, 1, 0, 5), wrong := conflict(2, 3, 5), next_one := put(4, 5, 5, 6)
    )

    assert why == "the key had version 5 all the time until 3.000000: that was no conflict"
    assert operations == (made, wrong, next_one)
    checked(put(0, 1, 0, 5), conflict(2, 4, 5), put(3, 5, 5, 6))
    checked(put(0, 3, 0, 5), conflict(2, 4, 5), put(5, 6, 5, 6))
    checked(put(0, 1, 0, 5), conflict(2, 3, 5), unknown(0, 5, "x"), put(4, 5, 8, 9))
    checked(put(0, 1, 0, 5), conflict(2, 3, 5), unknown(0, 5, "x"))
    checked(put(0, 1, 0, 5), conflict(2, 3, 5), unknown(0, 5, "x"), conflict(4, 5, 6))


def test_answers_that_belie_themselves_or_one_another_are_refused():
    wrong = conflict(0, 1, 5, 5)
    assert refused(put(0, 1, 0, 5), wrong) == ("the expected version is no conflict", (wrong,))
    wrong = put(2, 3, 5, 4)
    assert refused(put(0, 1, 0, 5), wrong) == ("version 4 does not come after version 5", (wrong,))
    one, other = get(2, 3, 5, "a"), get(2, 3, 5, "b")
    assert refused(unknown(0, 0, "a"), one, other) == ("version 5 has two values", (one, other))
    jump, between = put(0, 9, 0, 7), get(0, 9, 5)
    assert refused(unknown(0, 0, "v5"), jump, between) == (
        "version 5 lies between the one that was expected and the one that replaced it",
        (jump, between),
    )


def test_keys_are_apart_but_no_version_is_given_twice():
    a, b = put(0, 1, 0, 5, key="a"), put(0, 1, 0, 5, key="b")

    checked(a, put(0, 1, 0, 6, key="b"), get(2, 3, 5, key="a"), get(2, 3, 6, key="b"))
    with pytest.raises(NotLinearizable, match="key b: version 5 was given twice, the other time to key a"):
        checked(a, b)
    with pytest.raises(NotLinearizable, match="key b: ") as caught:
        checked(a, get(2, 3, 5, key="b"))
    assert caught.value.key == "b"


def test_a_search_without_steps_left_decides_nothing():
    with pytest.raises(Undecided, match=r"not decided after 2 steps"):
        check([put(n, n, n, n + 1) for n in range(9)], most_steps=2)


@pytest.mark.parametrize(
    ("ended", "asked", "answer", "claim"),
    [
        (None, Get(), Read(0, None), "an end and an answer, or neither"),
        (2.0, Get(), None, "an end and an answer, or neither"),
        (0.5, Get(), Read(0, None), "ends after it begins"),
        (float("nan"), Get(), Read(0, None), "ends after it begins"),
        (2.0, Get(), Done(5), "does not belong to the question"),
        (2.0, CompareAndSet(0, "x"), Read(5, "x"), "does not belong to the question"),
        (2.0, Get(), Read(0, "x"), "a value is None if and only if the version is 0"),
        (2.0, Get(), Read(5, None), "a value is None if and only if the version is 0"),
    ],
)
def test_operations_that_cannot_be_are_no_operations(ended, asked, answer, claim):
    with pytest.raises(ValueError, match=claim):
        op(1.0, ended, asked, answer)


# --- noting histories ----------------------------------------------------------------------------


def noted():
    """A history of each kind of end, on a clock that stands still for a while."""
    times = iter([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5])
    history = History(clock=lambda: next(times))
    a = history.begin("a", "k", CompareAndSet(0, "x"))
    history.end(a, Done(5))
    b = history.begin("b", "k", Get())
    history.end(b, Read(5, "x"))
    lost = history.begin("a", "k", CompareAndSet(5, "y"))
    history.unknown(lost)
    nothing = history.begin("b", "k", CompareAndSet(5, "z"))
    history.refused(nothing)
    return history


def test_a_history_keeps_the_order_in_which_things_were_noted():
    history = noted()
    operations = history.operations()
    times = [time for each in operations for time in (each.begun, each.ended) if time is not None]

    assert [each.answer for each in operations] == [Done(5), Read(5, "x"), None, Refused()]
    assert times == sorted(set(times))
    assert times == pytest.approx([0, 0, 0, 0, 1, 1, 1])
    checked(*operations)
    with pytest.raises(
        ValueError, match=r"has ended already: .* a: compare-and-set 0 to 'x': done, version 5"
    ):
        history.end(0, Done(6))
    with pytest.raises(ValueError, match="is known"):
        history.unknown(0)


# --- histories of a real register ----------------------------------------------------------------


def real_history(dice, *, operations, clients, keys=("a", "b"), lost=0.1, silent=0.2):
    """Return a history of registers that apply one operation at a time.

    Args:
        dice: For everything.
        operations: How many.
        clients: Number of clients, each with one operation at a time.
        keys: Of the registers.
        lost: Share of answers that are lost; half of these operations take effect, some of them much later.
        silent: Share of conflicts that do not say what they saw.
    """
    state = dict.fromkeys(keys, (0, None))
    known = {(client, key): 0 for client in range(clients) for key in keys}
    free = [(dice.random(), client) for client in range(clients)]
    versions, pending, done = itertools.count(1), [], []
    for number in range(operations):
        begun, client = min(free)
        key = dice.choice(keys)
        asked = Get()
        if dice.random() < 0.6:
            asked = CompareAndSet(
                known[client, key] if dice.random() < 0.8 else state[key][0], f"value {number}"
            )
        is_lost = dice.random() < lost
        effect = begun + dice.expovariate(1.0) * (dice.choice((1, 20)) if is_lost else 1)
        ended = effect + dice.expovariate(1.0)
        if not is_lost or dice.random() < 0.5:
            pending.append((effect, number))
        done.append([client, key, begun, None if is_lost else ended, asked, None])
        free[free.index((begun, client))] = ended, client
        for moment, index in sorted(pending):
            if moment < min(free)[0]:
                pending.remove((moment, index))
                take_effect(done[index], state, versions, known, dice.random() < silent)
    for _, index in sorted(pending):
        take_effect(done[index], state, versions, known, False)
    return [
        Operation(
            client=f"client-{client}",
            number=number,
            key=key,
            begun=begun,
            ended=ended,
            asked=asked,
            answer=answer,
        )
        for number, (client, key, begun, ended, asked, answer) in enumerate(done)
    ]


def take_effect(row, state, versions, known, is_silent):
    """Apply a question, and put the answer into the row if its client still waits."""
    client, key, _, ended, asked, _ = row
    version, _ = state[key]
    match asked:
        case Get():
            answer = Read(*state[key])
        case CompareAndSet(expected, value) if expected == version:
            state[key] = version, value = next(versions), value
            answer = Done(version)
        case _:
            answer = Conflict(None if is_silent else version)
    if ended is not None:
        row[5] = answer
        known[client, key] = version


HISTORIES = st.builds(
    lambda seed, clients, lost: real_history(random.Random(seed), operations=60, clients=clients, lost=lost),
    st.integers(0, 2**32),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.1, 0.4]),
)


@given(HISTORIES)
def test_a_history_of_a_real_register_is_accepted(operations):
    checked(*operations)


def with_answer(operations, operation, **changes):
    return [msgspec.structs.replace(each, **changes) if each is operation else each for each in operations]


def winners(operations):
    return [each for each in operations if isinstance(each.answer, Done)]


def stale_reads(operations):
    """Give a get a version that was replaced before its begin."""
    for winner, read in itertools.product(winners(operations), operations):
        if isinstance(read.answer, Read) and read.key == winner.key and winner.ended < read.begun:
            old = winner.asked.expected
            value = next(
                (each.asked.value for each in winners(operations) if each.answer.version == old), "?"
            )
            yield with_answer(operations, read, answer=Read(old, value if old else None))


def early_reads(operations):
    """Give a get a version before any question for it."""
    for winner, read in itertools.product(winners(operations), operations):
        if isinstance(read.answer, Read) and read.key == winner.key and read.ended < winner.begun:
            yield with_answer(operations, read, answer=Read(winner.answer.version, winner.asked.value))


def wrong_values(operations):
    """Give a get a value that was never set."""
    made = {winner.answer.version for winner in winners(operations)}
    for read in operations:
        if isinstance(read.answer, Read) and read.answer.version in made:
            yield with_answer(operations, read, answer=Read(read.answer.version, "wrong"))


def second_winners(operations):
    """Give a conflict the answer of an effect, though another operation replaced its version."""
    replaced = {(winner.key, winner.asked.expected) for winner in winners(operations)}
    for loser in operations:
        if isinstance(loser.answer, Conflict) and (loser.key, loser.asked.expected) in replaced:
            yield with_answer(operations, loser, answer=Done(10**6))


def versions_given_twice(operations):
    """Give two effective operations the same version."""
    for one, other in itertools.permutations(winners(operations), 2):
        yield with_answer(operations, one, answer=other.answer)


def denied_updates(operations):
    """Give an effective operation, whose value was read, a conflict; no other one set this value."""
    read = {(each.key, each.answer.version) for each in operations if isinstance(each.answer, Read)}
    for winner in winners(operations):
        if (winner.key, winner.answer.version) in read:
            yield with_answer(operations, winner, answer=Conflict(None))


def late_begins(operations):
    """One of unknown outcome began only after its value had been read."""
    for lost, read in itertools.product(operations, operations):
        if lost.answer is None and isinstance(lost.asked, CompareAndSet) and isinstance(read.answer, Read):
            if (lost.key, lost.asked.value) == (read.key, read.answer.value):
                yield with_answer(operations, lost, begun=read.ended + 0.5)


CORRUPTIONS = [
    stale_reads,
    early_reads,
    wrong_values,
    second_winners,
    versions_given_twice,
    denied_updates,
    late_begins,
]


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.__name__)
def test_each_kind_of_corruption_is_refused(corruption):
    tried = 0
    for seed in range(60):
        dice = random.Random(seed)
        operations = real_history(dice, operations=60, clients=dice.choice((2, 8)), lost=0.2)
        corrupted = list(corruption(operations))
        for history in dice.sample(corrupted, min(3, len(corrupted))):
            why, shown = refused(*history)
            assert len(shown) <= 5, why
            tried += 1

    assert tried >= 60


# --- against a checker that tries everything ------------------------------------------------------


def explained(operations):
    """Whether any order of the operations, with any of the unknown ones, explains all answers of one key."""
    mentioned = set()
    for each in operations:
        mentioned |= {getattr(each.asked, "expected", 0), getattr(each.answer, "version", None) or 0}
    news = [*sorted(mentioned), max(mentioned) + 1]

    def goes_on(left, version, value):
        if all(each.answer is None for each in left):
            return True
        for each in left:
            if any(other.ended is not None and other.ended < each.begun for other in left):
                continue
            rest = [other for other in left if other is not each]
            if any(goes_on(rest, *state) for state in outcomes(each, version, value, news)):
                return True
        return False

    return goes_on(list(operations), 0, None)


def outcomes(operation, version, value, news):
    """States of the register after an operation that is answered as it was; none if that cannot be."""
    match operation.asked, operation.answer:
        case Get(), answer:
            return [(version, value)] if answer in (None, Read(version, value)) else []
        case CompareAndSet(expected, new), answer if expected == version:
            return [(each, new) for each in news if each > version and answer in (None, Done(each))]
        case _, answer:
            return [(version, value)] if answer in (None, Conflict(None), Conflict(version)) else []


@st.composite
def small_histories(draw):
    """Return any history of a few clients on one key with a few versions."""
    times, versions, values = st.integers(0, 8), st.integers(0, 4), st.sampled_from("xy")
    operations = []
    for _ in range(draw(st.integers(2, 6))):
        begun = draw(times)
        ended = begun + draw(st.integers(0, 5))
        kind = draw(st.sampled_from(["get", "done", "conflict", "silent", "unknown"]))
        expected, version, value = draw(versions), draw(versions), draw(values)
        if kind == "get":
            operations.append(op(begun, ended, Get(), Read(version, value if version else None)))
        elif kind == "done":
            operations.append(op(begun, ended, CompareAndSet(expected, value), Done(version)))
        elif kind in ("conflict", "silent"):
            seen = None if kind == "silent" else version
            operations.append(op(begun, ended, CompareAndSet(expected, value), Conflict(seen)))
        else:
            operations.append(op(begun, None, CompareAndSet(expected, value)))
    return operations


def verdict(operations):
    try:
        checked(*operations)
    except NotLinearizable:
        return False
    return True


@settings(max_examples=400)
@given(small_histories())
def test_it_agrees_with_a_checker_that_tries_all_orders(operations):
    assert verdict(operations) == explained(operations)


def disturbed(operations, dice):
    """One operation is answered like another one of its kind, or done when another one was."""
    one, other = dice.sample(operations, 2)
    if dice.random() < 0.5 and None not in (one.answer, other.answer):
        return with_answer(operations, one, begun=other.begun, ended=other.ended)
    if type(one.asked) is type(other.asked) and None not in (one.answer, other.answer):
        return with_answer(operations, one, answer=other.answer)
    return operations


def test_it_agrees_on_histories_that_nearly_fit():
    verdicts = Counter()
    for seed in range(1000):
        dice = random.Random(seed)
        operations = real_history(dice, operations=6, clients=3, keys=("k",), lost=0.3)
        for _ in range(3):
            operations = disturbed(operations, dice)
        found = verdict(operations)
        assert found == explained(operations), operations
        verdicts[found] += 1

    assert min(verdicts.values()) > 200, verdicts


# --- at size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [("a",), tuple("abcdefgh")], ids=len)
def test_five_thousand_operations_of_many_clients_take_two_steps_each_at_most(keys):
    dice = random.Random(7)
    operations = real_history(dice, operations=5000, clients=32, keys=keys, lost=0.3)
    answered = sum(each.answer is not None for each in operations)
    effective = {each.answer.value for each in operations if isinstance(each.answer, Read)}

    assert (
        sum(each.answer is None and getattr(each.asked, "value", "") in effective for each in operations) > 40
    )
    assert checked(*operations) <= 2 * answered


def test_one_operation_that_takes_as_long_as_thousands_of_others_costs_no_more():
    others = [put(n, n + 0.5, n, n + 1) for n in range(5000)]
    last = get(0, 6000, 5000)

    assert checked(last, *others) <= 2 * len(others) + 2
    refused(get(0, 6000, 6000), *others)


def test_guesses_of_unknown_operations_do_not_multiply():
    """Thirty unknown operations, each of which may or may not have been in between: 2^30 ways, few places."""
    unseen = [unknown(0, expected, f"v{expected + 1}") for expected in range(30)]

    assert checked(*unseen, get(1, 2, 0), get(3, 4, 30)) < 2000
    refused(*unseen, get(1, 2, 0), get(3, 4, 30, "another"))


# --- watchers ------------------------------------------------------------------------------------


def sights(watcher, *versions, whole=(), digest="{}"):
    return [
        Sight(watcher=watcher, version=version, digest=digest.format(version), whole=version in whole)
        for version in versions
    ]


def test_watchers_that_saw_each_version_once_are_accepted():
    check_watch([])
    check_watch(sights("a", 1, 2, 3) + sights("b", 1) + sights("c", 2, 3, whole=[2]))
    check_watch(sights("a", 0, 1, 2, 9, 10, whole=[0, 9]) + sights("a", 10, whole=[10]))


@pytest.mark.parametrize(
    ("versions", "whole", "claim"),
    [
        ((1, 3), (), "a received version 3 instead of 2"),
        ((1, 2, 2), (), "a received version 2 instead of 3"),
        ((1, 2, 1), (), "a received version 1 instead of 3"),
        ((3,), (), "a received version 3 instead of 1"),
        ((5, 4), (5, 4), "a received version 4 instead of 5 or later"),
    ],
    ids=["gap", "twice", "back", "beginning", "older map"],
)
def test_a_watcher_that_missed_something_or_went_back_is_named(versions, whole, claim):
    with pytest.raises(WatchBroken, match=claim):
        check_watch(sights("b", 1, 2, 3) + sights("a", *versions, whole=whole))


def test_watchers_that_saw_different_things_at_one_version_are_named():
    with pytest.raises(WatchBroken, match="version 2 is other for b, but 2 for a"):
        check_watch(sights("a", 1, 2) + sights("b", 1) + sights("b", 2, digest="other"))
