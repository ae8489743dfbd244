"""A file of events has one event a line, few of the long ones, and a bounded size."""

from pathlib import Path

import pytest

from adam_async.errors import DataError
from adam_async.report.event_file import KEPT, EventFile
from adam_async.run.events import Noted, WorkerCounted, read_event
from tests.adam_async.role_counts import counts_of


def texts(file: Path) -> list[str]:
    events = [read_event(line) for line in file.read_bytes().splitlines()]
    return [event.text for event in events if isinstance(event, Noted)]


def test_a_full_file_is_kept_under_a_number_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    (tmp_path / "run.jsonl.3").write_text("of an earlier run")
    file = EventFile(path, most_bytes=100)
    for number in range(12):
        file.on_event(Noted(at=1.0, text=f"{number:02}"))
    file.close()
    assert texts(path)[-1] == "11"
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["run.jsonl", *(f"run.jsonl.{number}" for number in range(1, KEPT + 1))]
    found = [text for number in (3, 2, 1) for text in texts(tmp_path / f"run.jsonl.{number}")] + texts(path)
    assert found == sorted(found), "in order"
    assert all(each.stat().st_size <= 100 for each in tmp_path.iterdir())


def test_the_file_of_a_run_replaces_that_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text in ("one", "two"):
        file = EventFile(path)
        file.on_event(Noted(at=1.0, text=text))
        file.close()
    assert texts(path) == ["two"]


def test_counts_of_a_role_have_a_line_in_ten_seconds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    file = EventFile(path)
    for second in range(25):
        for node in ("worker-0", "worker-1"):
            counts = counts_of("worker", node, clock=second, late_buckets=[1] * 11)
            file.on_event(WorkerCounted(at=100.0 + second, counts=counts))
    file.close()
    events = [read_event(line) for line in path.read_bytes().splitlines()]
    clocks = [event.counts.clock for event in events if isinstance(event, WorkerCounted)]
    assert clocks == [0, 0, 10, 10, 20, 20]


def test_an_error_of_the_system_names_the_file_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "run.jsonl"
    with pytest.raises(DataError, match=r"absent/run\.jsonl cannot be written: No such file"):
        EventFile(path).on_event(Noted(at=1.0, text="one"))
