"""Readers get the events in order; a slow or dead one loses the oldest, and costs the publisher no wait."""

import asyncio
import threading
from pathlib import Path

import pytest

from adam_async.errors import ConfigError, DataError
from adam_async.report.stream import KEPT, Callback, Caller, EventFile, EventStream, check_callbacks
from adam_async.run.events import AnyEvent, Dropped, Noted, WorkerCounted, read_event
from adam_async.runtime.clock import fine_clock
from tests.adam_async.role_counts import counts_of


def numbers(events: list[AnyEvent]) -> list[str]:
    return [each.text if isinstance(each, Noted) else f"dropped {each.events}" for each in events]


async def test_each_reader_gets_the_events_in_order_with_their_times() -> None:
    stream = EventStream(lambda: 12.5)
    stream.publish(Noted(text="nobody reads"))
    with stream.reader() as one, stream.reader() as two:
        for number in range(3):
            stream.publish(Noted(text=f"{number}"))
        assert numbers(one.take()) == numbers(two.take()) == ["0", "1", "2"]
        stream.publish(Noted(at=7.0, text="earlier"))
        assert [each.at for each in one.take()] == [7.0]
    assert not stream.is_read


async def test_a_slow_reader_loses_the_oldest_events_and_hears_how_many() -> None:
    stream = EventStream()
    with stream.reader(most=3) as reader:
        for number in range(5):
            stream.publish(Noted(text=f"{number}"))
        assert numbers(reader.take()) == ["dropped 2", "2", "3", "4"]
        assert reader.take() == []


async def test_newer_counts_of_a_role_take_the_place_of_unread_ones() -> None:
    stream = EventStream()
    with stream.reader() as reader:
        for clock in range(4):
            for node in ("worker-0", "worker-1"):
                stream.publish(WorkerCounted(counts=counts_of("worker", node, clock=clock)))
        dropped, *found = reader.take()
    assert isinstance(dropped, Dropped)
    assert dropped.events == 6
    clocks = [(each.counts.node, each.counts.clock) for each in found if isinstance(each, WorkerCounted)]
    assert clocks == [("worker-0", 3), ("worker-1", 3)]


async def test_fifty_dead_readers_keep_little_memory_and_little_time_of_the_publisher() -> None:
    stream = EventStream()
    event = WorkerCounted(counts=counts_of("worker", "worker-0"))
    readers = [stream.reader() for _ in range(50)]
    dead = [each.__enter__() for each in readers]
    begin = fine_clock()
    for number in range(2000):
        stream.publish(event)
        stream.publish(Noted(text=f"{number}"))
    each_s = (fine_clock() - begin) / 4000
    assert each_s < 2e-3, "of fifty readers; a poll of 20 roles takes less than 2 % of its second"
    assert all(len(reader.take()) <= 1025 for reader in dead)


class Kept(Callback):
    """Keeps what it gets."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.events: list[AnyEvent] = []
        self.threads: set[str] = set()
        self.closed = False
        self._fails_at = fails_at

    def on_event(self, event: AnyEvent) -> None:
        self.threads.add(threading.current_thread().name)
        if len(self.events) == self._fails_at:
            raise OSError("no space left")
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


async def passed(callback: Kept, count: int) -> None:
    """Publish events to a callback from its beginning to its end."""
    stream = EventStream()
    caller = Caller(stream, callback)
    task = asyncio.ensure_future(caller.run())
    for number in range(count):
        stream.publish(Noted(text=f"{number}"))
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await caller.finish()
    assert not stream.is_read


async def test_a_callback_gets_all_events_in_a_thread_of_its_own_and_is_closed() -> None:
    callback = Kept()
    await passed(callback, 20)
    assert numbers(callback.events) == [f"{number}" for number in range(20)]
    assert callback.threads == {"events/Kept"}
    assert callback.closed


async def test_a_callback_that_raises_gets_no_further_event(caplog: pytest.LogCaptureFixture) -> None:
    callback = Kept(fails_at=2)
    await passed(callback, 20)
    assert len(callback.events) == 2
    assert "events/Kept gets no further events: OSError('no space left')" in caplog.text


async def test_the_warning_has_the_sentence_of_an_error_of_this_package(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Kept):
        def on_event(self, event: AnyEvent) -> None:
            raise DataError("run.jsonl cannot be written: No space left on device")

    await passed(Full(), 3)
    assert "gets no further events: run.jsonl cannot be written: No space left on device" in caplog.text


async def test_a_callback_that_hangs_delays_the_end_by_its_deadline_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("adam_async.report.stream.END_S", 0.05)
    go_on = threading.Event()

    class Hangs(Kept):
        def on_event(self, event: AnyEvent) -> None:
            go_on.wait()

    await passed(Hangs(), 3)
    go_on.set()
    assert "events/Hangs took longer than 0.05 s" in caplog.text


def test_other_objects_are_no_callbacks() -> None:
    check_callbacks([Kept()])
    for wrong in (print, [print], Kept()):
        with pytest.raises(ConfigError, match="subclasses of Callback"):
            check_callbacks(wrong)


def test_a_line_of_a_file_is_an_event_again() -> None:
    line = b'{"kind":"incident-ends","at":3.5,"incident":"lost","subject":"ps-0","lasted_s":0.25}'
    event = read_event(line)
    assert (event.at, event.incident, event.lasted_s) == (3.5, "lost", 0.25)  # type: ignore[union-attr]


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
