"""Reports and files of events become the state of a page; only listed names are read."""

import os
from pathlib import Path

import msgspec
import pytest

from adam_async.dashboard.past_runs import PastRuns, state_of
from adam_async.report.report import Report
from adam_async.runtime.disk import Disk
from tests.adam_async.dashboard_events import beginning, epochs, predicted, seen
from tests.adam_async.reports import real_report


def lines(number: int) -> bytes:
    return b"".join(
        msgspec.json.encode(event) + b"\n" for event in (beginning(), *epochs(number), predicted())
    )


async def test_a_report_has_the_curves_of_its_run() -> None:
    report: Report = await real_report(epochs=2)
    curves = seen(state_of("a.json", msgspec.json.encode(report)), "curves")
    assert [round(point[2] or 0.0, 6) for point in curves.accuracy] == [
        round(each.test_accuracy, 6) for each in report.epochs
    ]
    assert curves.loss[-1][0] == report.totals.images
    assert curves.loss[-1][1] == pytest.approx(report.totals.train_s, abs=0.01)


def test_a_file_of_events_has_curves_and_samples_also_if_its_last_line_is_cut() -> None:
    state = state_of("a.jsonl", lines(5)[:-1] + b'\n{"kind":"not')
    assert len(seen(state, "curves").accuracy) == 5
    assert seen(state, "samples") is not None
    with pytest.raises(ValueError, match=r"truncated|malformed"):
        state_of("b.jsonl", b"no\n" + lines(1))


def test_a_file_with_huge_sample_images_is_refused() -> None:
    with pytest.raises(ValueError, match="height"):
        state_of("a.jsonl", lines(1).replace(b'"height":', b'"height":999') + lines(1))


async def test_a_file_with_a_name_in_no_encoding_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.json")).write_bytes(b"{}")
    (tmp_path / "a.json").write_bytes(b"{}")
    async with Disk() as disk:
        assert await PastRuns(tmp_path, disk).names() == ["a.json"]


async def test_runs_are_listed_by_age_and_other_names_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_bytes(lines(1))
    for age, name in enumerate(("new.jsonl", "old.jsonl", "notes.txt")):
        (folder / name).write_bytes(lines(1 + age))
        os.utime(folder / name, (1000 - age, 1000 - age))
    async with Disk() as disk:
        runs = PastRuns(folder, disk)
        assert await runs.names() == ["new.jsonl", "old.jsonl"]
        found = await runs.state("old.jsonl")
        assert found is not None
        assert len(seen(found, "curves").accuracy) == 2
        assert await runs.state("old.jsonl") is found
        (folder / "old.jsonl").write_bytes(lines(4))
        grown = await runs.state("old.jsonl")
        assert grown is not None
        assert len(seen(grown, "curves").accuracy) == 4
        for name in (
            "../secret.jsonl",
            f"{tmp_path}/secret.jsonl",
            "notes.txt",
            "inner",
            "..",
            "",
            "old.jsonl\0",
        ):
            assert await runs.state(name) is None
