"""Training through the whole system, beside the bare kernel loop, processes, and a peer.

    ADAM_DATA_DIR=DIR python -m benchmarks.training --json training.json [--peer 'NAME=COMMAND']

Each case is one `adam-async train` of one epoch. The bare kernel loop is the run's own measurement 3 s before
and 3 s after, from its report. A peer is a command that prints a JSON line with ``images_per_second``.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.harness import Option, Row, compared, interleaved, printed, run, trained

ONE = "one process, defaults (16 images per group, push and pull every group)"
PROCESSES = "processes: controller, data server, 2 servers, 2 one-thread workers"
CASES: dict[str, tuple[str, ...]] = {
    ONE: (),
    "one process, 64 images per group": ("--images-per-group", "64"),
    "one process, push and pull every 4 groups": ("--push-every", "4"),
    PROCESSES: ("--processes", "--replicas", "2", "--servers", "2"),
}


def rates(reports: list[dict[str, Any]], part: str = "totals") -> list[float]:
    """Return the images per second of reports, or of the bare loop in them."""
    return [float(report[part]["images_per_s"]) for report in reports]


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return accuracy, loop lag and peak memory of a run."""
    lag = max((worker["lag_s"]["p99"] for worker in report["workers"]), default=0.0)
    totals = report["totals"]
    return {
        "test_accuracy": totals["test_accuracy"],
        "loop_lag_p99_ms": round(lag * 1e3, 1),
        "peak_rss_mb": totals["peak_rss_mb"],
    }


def peer_run(command: str) -> dict[str, Any]:
    """Return the last row of a peer."""
    return printed(command)[-1]


def measure(options: Namespace) -> Iterator[Row]:
    """Yield a row for each case, and for each peer."""
    peers = dict(peer.split("=", 1) for peer in options.peer)
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        **{case: partial(trained, "--epochs", "1", *words) for case, words in CASES.items()},
        **{name: partial(peer_run, command) for name, command in peers.items()},
    }
    found = interleaved(sides, options.rounds)
    for case in CASES:
        reports = found[case]
        bare = rates(reports, "baseline")
        yield compared(f"{case} / bare kernel loop", rates(reports), bare, "images/s", **facts(reports[-1]))
    yield compared(f"{PROCESSES} / one process", rates(found[PROCESSES]), rates(found[ONE]), "images/s")
    for name in peers:
        theirs = [each["images_per_second"] for each in found[name]]
        yield compared(f"{ONE} / {name}", rates(found[ONE]), theirs, "images/s")


if __name__ == "__main__":
    run(__doc__, measure, peer=Option([], "NAME=COMMAND", repeated=True), rounds=3)
