"""The options of a page, and the epochs of a cluster that runs already."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from adam_async.cli.dashboard import publish_epochs
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import ClusterMap, EpochRecord
from adam_async.run.counts import EpochCounts, Evaluation
from adam_async.run.events import AnyEvent, EpochEnds, Evaluated, RunBegins
from tests.adam_async.cli.test_early_errors import ran_all
from tests.adam_async.cluster_maps import run_record

TOKEN = "--dashboard-token-file token"
WRONG = {
    "dashboard": "name what to show: --controller tcp://HOST:PORT, --runs FOLDER, or both",
    "dashboard --runs .. --bind 0.0.0.0:0": "--bind 0.0.0.0:0 is open to other machines",
    "dashboard --runs .. --bind 127.0.0.1": "--bind '127.0.0.1' is not of the form HOST:PORT",
    "train --dashboard 8080": "--dashboard '8080' is not of the form HOST:PORT, such as 127.0.0.1:8080",
    "dashboard --runs none": "--runs none cannot be read",
    "dashboard --runs .. --allow-operations": "has no effect without --controller",
    "train --dashboard 10.0.0.1:80": "--dashboard 10.0.0.1:80 is open to other machines",
    f"train {TOKEN}": "--dashboard-token-file is for the page of --dashboard",
    "train --allow-operations": "give --processes",
}


def test_wrong_options_of_a_page_are_named_before_its_modules_load(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token of visitors")
    for words, (code, error, *loaded) in zip(WRONG, ran_all(list(WRONG), tmp_path), strict=True):
        assert (code, WRONG[words] in error) == (2, True), error
        assert loaded == []


def at(ended: int, *evaluated: float, run: str = "run-1") -> ClusterMap:
    """The map of a run after some epochs; it has the counts of the two newest."""
    return ClusterMap(
        run=msgspec.structs.replace(
            run_record(run, phase="training", epoch=ended + 1),
            evaluated=tuple(Evaluation(n, each) for n, each in enumerate(evaluated, 1)),
        ),
        epoch=EpochRecord(run=run, number=ended + 1, groups=8, shares={}),
        ended=ended,
        results=tuple(EpochCounts(images=n) for n in range(max(ended - 1, 1), ended + 1)),
    )


async def test_a_page_begins_with_the_epochs_that_the_map_has_and_gets_each_later_one_once() -> None:
    async def changes() -> AsyncIterator[ClusterMap]:
        yield ClusterMap()
        for cluster in (
            at(3, 0.5, 0.6),
            at(3, 0.5, 0.6),
            at(3, 0.5, 0.6, 0.7),
            at(4, 0.5, 0.6, 0.7),
            at(0, run="run-2"),
        ):
            yield cluster

    stream = EventStream()
    with stream.reader() as reader:
        await publish_epochs(changes(), stream)
        found = reader.take()
    assert [fact(event) for event in found] == [
        ("run-1", 80),
        ("ends", 2),
        ("ends", 3),
        ("evaluated", 1),
        ("evaluated", 2),
        ("evaluated", 3),
        ("ends", 4),
        ("run-2", 80),
    ]


def fact(event: AnyEvent) -> tuple[str, int]:
    match event:
        case RunBegins():
            return event.run, event.images
        case EpochEnds():
            return "ends", event.epoch
        case Evaluated():
            return "evaluated", event.evaluation.epoch
        case _:
            raise AssertionError(event)
