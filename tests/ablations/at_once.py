"""Safeguards of the short way of a push, and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

FILE, TESTS = "adam_async/parameter_server/at_once.py", "tests/adam_async/parameter_server/test_at_once.py::"

_row = partial(Ablation, scenario="training")

AT_ONCE = (
    _row(
        "the short way takes only the next number",
        FILE,
        "push.numbers != number",
        "not push.numbers",
        TESTS + "test_a_push_that_differs_from_its_lane_changes_nothing",
        breaks="I2",
    ),
    _row(
        "the short way passes no queued push",
        FILE,
        "is_free = state.is_free and",
        "is_free = state.bundle.taken is None and",
        TESTS + "test_a_push_does_not_pass_what_waits",
        seldom="both pushes are applied, and the order shows only in numbers that the next push corrects",
    ),
    _row(
        "the short way refuses ended generations",
        FILE,
        "if lane.changes != state.bundle.changes or",
        "if",
        TESTS + "test_a_lane_ends_with_what_its_checks_depend_on",
        seldom="a group of an ended generation on a shard looks like one of a lease that returned",
    ),
    _row(
        "a lane takes one push in a turn of its link",
        FILE,
        "is_free = state.is_free and link.turn != lane.turn",
        "is_free = state.is_free",
        TESTS + "test_a_lane_takes_one_push_in_a_turn_of_its_link",
        seldom="it only shares the time of the loop among clients",
    ),
)
