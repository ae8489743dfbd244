"""Safeguards of the short way of a push, and their removals."""

from tests.ablations.safeguards import Ablation

FILE, TESTS = "adam_async/parameter_server/at_once.py", "tests/adam_async/parameter_server/test_at_once.py::"

AT_ONCE = (
    Ablation(
        name="the short way takes only the next number",
        file=FILE,
        old="push.numbers != number",
        new="not push.numbers",
        guard=TESTS + "test_a_push_that_differs_from_its_lane_changes_nothing",
        breaks="I2",
        scenario="training",
    ),
    Ablation(
        name="the short way passes no queued push",
        file=FILE,
        old="is_free = state.is_free and",
        new="is_free = state.bundle.taken is None and",
        guard=TESTS + "test_a_push_does_not_pass_what_waits",
        seldom="both pushes are applied, and the order shows only in numbers that the next push corrects",
    ),
    Ablation(
        name="the short way refuses ended generations",
        file=FILE,
        old="if lane.changes != state.bundle.changes or",
        new="if",
        guard=TESTS + "test_a_lane_ends_with_what_its_checks_depend_on",
        seldom="a group of an ended generation on a shard looks like one of a lease that returned",
    ),
    Ablation(
        name="a lane takes one push in a turn of its link",
        file=FILE,
        old="is_free = state.is_free and link.turn != lane.turn",
        new="is_free = state.is_free",
        guard=TESTS + "test_a_lane_takes_one_push_in_a_turn_of_its_link",
        seldom="it only shares the time of the loop among clients",
    ),
)
