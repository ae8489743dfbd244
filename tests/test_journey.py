"""Four journeys through a cluster stay short: ceilings of their calls, files and lines, without timing."""

import platform
import re
import sys
from pathlib import Path

import pytest

from tests.journey import JOURNEYS, counts_of

PAGE = (Path(__file__).resolve().parents[1] / "ARCHITECTURE.md").read_text()
CEILINGS = {
    "push_pull": (94, 22, 688),
    "worker push": (110, 27, 874),
    "image group": (64, 24, 320),
    "map change": (330, 33, 1522),
}
"""Calls, files and lines of each journey. A change that shortens a journey lowers its row, here and in
ARCHITECTURE.md."""

SLACK = 1.01
"""Factor by which a journey may exceed its calls and lines, for repairs that need a branch more."""


@pytest.mark.skipif(
    (platform.python_implementation(), *sys.version_info[:2]) != ("CPython", 3, 11),
    reason="counts are those of CPython 3.11; other versions inline other functions",
)
@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_stays_below_its_ceilings(name: str) -> None:
    counts = counts_of(name)
    calls, files, lines = CEILINGS[name]

    assert counts.calls <= calls * SLACK, counts.by_file.most_common(10)
    assert counts.files <= files, sorted(counts.by_file)
    assert counts.lines <= lines * SLACK


def test_a_push_of_a_worker_is_at_most_1_3_times_as_long_as_a_push_pull() -> None:
    pairs = zip(CEILINGS["worker push"], CEILINGS["push_pull"], strict=True)

    assert all(of_worker <= 1.3 * of_store for of_worker, of_store in pairs)


def test_the_page_quotes_the_ceilings() -> None:
    section = PAGE.split("## Length of the journeys")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", section, re.MULTILINE)

    quoted = {name: tuple(int(count.replace(",", "")) for count in counts) for name, *counts in rows}
    assert quoted == CEILINGS
