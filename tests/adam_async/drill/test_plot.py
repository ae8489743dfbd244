"""The picture of a drill has the rate of pushes, a mark per fault, and a band while copies are missing."""

import numpy as np
import pytest

from adam_async.drill.observations import FaultObservation, Observations
from adam_async.drill.plot import INCHES, MOST_POINTS, draw, goodput
from adam_async.report.plot import encode, new_figure
from tests.adam_async.reports import read_fonts


def test_goodput_is_pushes_per_second_from_the_start_of_each_interval() -> None:
    times, rates = goodput([5, 0, 20])

    assert times == pytest.approx([0.0, 0.1, 0.2])
    assert rates == pytest.approx([50.0, 0.0, 200.0])
    assert goodput([]) == ([], [])


def test_a_long_drill_has_fewer_points_with_the_same_mean() -> None:
    times, rates = goodput([3] * (2 * MOST_POINTS + 1))

    assert len(times) == len(rates) <= MOST_POINTS
    assert rates == pytest.approx([30.0] * len(rates))
    assert times[1] == pytest.approx(0.3)


@pytest.fixture(scope="module")
def fonts() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    read_fonts()


@pytest.mark.slow  # fonts are looked for once
def test_every_fault_has_its_mark_and_the_time_until_its_copies_were_back(fonts: None) -> None:
    faults = [
        FaultObservation(number=1, kind="kill", server="ps-0", at_s=1.0, whole_s=2.5),
        FaultObservation(number=2, kind="cut", server="ps-1", at_s=5.0),
    ]
    figure = new_figure(INCHES)
    draw(Observations(faults=faults, pushes=[10] * 80), figure)

    (axes,) = figure.axes
    _, *marks = axes.lines
    assert [np.asarray(line.get_xdata()).tolist() for line in marks] == [[1.0, 1.0], [5.0, 5.0]]
    assert [line.get_label() for line in marks] == ["kill", "cut"]
    spans = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert [(span.x0, span.x1) for span in spans] == [pytest.approx((1.0, 3.5)), pytest.approx((5.0, 8.0))]
    assert encode(figure, "svg").startswith(b"<?xml")
