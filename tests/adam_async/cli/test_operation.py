"""The table of a status has durations in words."""

import pytest

from adam_async.cli.terminal import age_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (61, "1m 01s"), (3725, "1h 02m"), (86400, "1d 00h"), (1e6, "11d 13h")],
)
def test_an_age_has_two_units_at_most(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
