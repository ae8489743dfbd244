"""Safeguards of the short way of a push, and their removals."""

from tests.ablations.safeguards import Ablation

FILE, TESTS = "adam_async/parameter_server/at_once.py", "tests/adam_async/parameter_server/test_at_once.py::"

AT_ONCE = (
    Ablation(
        name="the short way takes only the next number",
        file=FILE,
        old="push.numbers != (number,) * shards",
        new="len(push.numbers) != shards",
        guard=TESTS + "test_a_push_that_differs_from_its_lane_changes_nothing",
        breaks="I2",
        scenario="hostile",
    ),
    Ablation(
        name="the short way passes no queued push",
        file=FILE,
        old="if not state.is_free:",
        new="if state.bundle.taken is not None:",
        guard=TESTS + "test_a_push_does_not_pass_what_waits",
        breaks="I2",
        scenario="training",
    ),
    Ablation(
        name="the short way refuses ended generations",
        file=FILE,
        old="lane is None or lane.changes != state.bundle.changes or",
        new="lane is None or",
        guard=TESTS + "test_a_lane_ends_with_what_its_checks_depend_on",
        breaks="I2",
        scenario="training",
    ),
    Ablation(
        name="a lane takes one push in a turn of its link",
        file=FILE,
        old="tables.shards != shards or link.turn == lane.turn",
        new="tables.shards != shards",
        guard=TESTS + "test_a_lane_takes_one_push_in_a_turn_of_its_link",
        seldom="it only shares the time of the loop among clients",
    ),
)
