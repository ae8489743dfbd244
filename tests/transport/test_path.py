"""A path has the delay and bandwidth of its conditions, and keeps the order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.slow import Path, PathConditions

SENT = st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 10_000)), min_size=1, max_size=50)


def path(**conditions: float) -> Path:
    return Path(PathConditions(**conditions), random.Random(7))


def arrivals(path: Path, sent: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the time of sending and of arrival of each; pauses precede each."""
    now, sent_and_arrived = 0.0, []
    for pause, nbytes in sent:
        now += pause
        sent_and_arrived.append((now, path.arrival(now=now, nbytes=nbytes)))
    return sent_and_arrived


@given(SENT)
def test_without_jitter_all_take_the_delay(sent):
    for then, arrival in arrivals(path(delay_s=0.25), sent):
        assert arrival == then + 0.25


@given(SENT)
def test_with_jitter_none_is_early_none_overtakes_and_none_is_later_than_the_most(sent):
    sent_and_arrived = arrivals(path(delay_s=0.02, jitter_s=0.05), sent)
    for then, arrival in sent_and_arrived:
        assert then + 0.02 <= arrival <= then + 0.07
    assert [arrival for _, arrival in sent_and_arrived] == sorted(arrival for _, arrival in sent_and_arrived)


@given(SENT)
def test_a_narrow_path_passes_no_more_bytes_than_its_width(sent):
    sent_and_arrived = arrivals(path(delay_s=0.02, bytes_per_s=100_000.0), sent)
    free_at = 0.0
    for (then, arrival), (_, nbytes) in zip(sent_and_arrived, sent, strict=True):
        free_at = max(free_at, then) + nbytes / 100_000
        assert arrival == pytest.approx(free_at + 0.02)


def test_equal_dice_give_equal_jitter():
    sent = [(0.01, 10)] * 20
    assert arrivals(path(delay_s=0.0, jitter_s=1.0), sent) == arrivals(path(delay_s=0.0, jitter_s=1.0), sent)


@pytest.mark.parametrize(
    ("conditions", "claim"),
    [
        ({"delay_s": -1}, "must not be negative, they are -1 and 0.0"),
        ({"delay_s": float("nan")}, "must not be negative"),
        ({"delay_s": 0, "jitter_s": -0.1}, "they are 0 and -0.1"),
        ({"delay_s": 0, "bytes_per_s": 0}, "bytes_per_s must be positive or None, not 0"),
    ],
)
def test_impossible_conditions_are_refused(conditions, claim):
    with pytest.raises(ValueError, match=claim):
        PathConditions(**conditions)
