"""Reports of real runs become a real picture."""

import struct

import msgspec
import pytest

from adam_async.report.plot import draw, encode, panels
from tests.adam_async.reports import read_fonts, real_report

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


@pytest.fixture(scope="module")
def fonts() -> None:
    read_fonts()


TITLES = ["test accuracy", "training loss", "rate", "staleness", "sent, MB", "waited, s"]


async def test_the_lines_of_a_run_are_those_of_its_report() -> None:
    report = await real_report(epochs=3, weights="copy", schedule="step", decay_every=1)
    lines = panels(report)

    assert list(lines) == TITLES
    assert lines["test accuracy"][1] == [epoch.test_accuracy for epoch in report.epochs]
    assert lines["test accuracy"][0][-1] == pytest.approx(report.totals.train_s)
    assert lines["rate"][1] == [sample.rate for sample in report.series]
    assert lines["rate"][1][-1] < lines["rate"][1][0]
    of_their_own = ("test accuracy", "staleness")
    assert len({len(times) for title, (times, _) in lines.items() if title not in of_their_own}) == 1
    stale = [sample for sample in report.series if sample.staleness_mean is not None]
    assert lines["staleness"] == ([each.s for each in stale], [each.staleness_mean for each in stale])


@pytest.mark.slow  # fonts are looked for once
async def test_two_runs_are_drawn_over_one_another_in_every_panel(fonts: None) -> None:
    runs = [
        ("in place", await real_report(epochs=2)),
        ("on a copy", await real_report(epochs=3, weights="copy")),
    ]
    figure = draw(runs)
    picture = encode(figure, "png")

    assert [axes.get_title() for axes in figure.axes] == TITLES
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["in place", "on a copy"]
        assert all(len(line.get_xdata()) >= 2 for line in axes.lines)
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", picture[16:24]) == (1320, 770)
    assert len(picture) > 20_000


async def test_a_run_that_ended_before_its_first_epoch_is_drawn_as_nothing() -> None:
    empty = msgspec.structs.replace(await real_report(epochs=1), epochs=[], series=[])

    assert all(line == ([], []) for line in panels(empty).values())
    assert all(len(axes.lines) == 1 for axes in draw([("empty", empty)]).axes)
