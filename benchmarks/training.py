"""Training through the whole system, against the bare kernel loop, against processes, and against a peer.

    ADAM_DATA_DIR=DIR python -m benchmarks.training --json training.json [--peer 'NAME=COMMAND']

Each case is one `adam-async train` of one epoch of the available data, alternating with the others and with
the peers for `--rounds` rounds; medians are compared. The bare kernel loop is the run's own measurement 3 s
before and 3 s after, from its report. A peer is a command that prints a JSON line with ``images_per_second``.
Rows: case, ours and peer in images per second, ratio (ours / peer), unit, test accuracy after the epoch, loop
lag.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = {
    "one process, defaults (16 images per group, push and pull every group)": [],
    "one process, 64 images per group": ["--images-per-group", "64"],
    "one process, push and pull every 4 groups": ["--push-every", "4"],
    "processes: controller, data server, 2 servers, 2 one-thread workers": [
        "--processes",
        "--replicas",
        "2",
        "--servers",
        "2",
    ],
}


def train(options: list[str]) -> dict[str, Any]:
    """Run a training; returns its report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "adam_async", "train", "--epochs", "1", "--report", str(file)]
        subprocess.run([*command, *options], check=True, capture_output=True, timeout=600)
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def peer_rate(command: str) -> float:
    """One run of a peer; images per second."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=600, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return float(rows[-1]["images_per_second"])


def row(case: str, ours: float, peer: float, **more: Any) -> dict[str, Any]:
    """One row of the result."""
    return {
        "case": case,
        "ours": round(ours),
        "peer": round(peer),
        "ratio": round(ours / peer, 3),
        "unit": "images/s",
        **more,
    }


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """Accuracy, loop lag and peak memory of a run."""
    lag = max((worker["lag_s"]["p99"] for worker in report["workers"]), default=0.0)
    return {
        "test_accuracy": report["totals"]["test_accuracy"],
        "loop_lag_p99_ms": round(lag * 1e3, 1),
        "peak_rss_mb": report["totals"]["peak_rss_mb"],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in arguments.peer)
    reports: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    rates: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(arguments.rounds):
        for case, options in CASES.items():
            reports[case].append(train(options))
        for name, command in peers.items():
            rates[name].append(peer_rate(command))
    median = {
        c: statistics.median(r["totals"]["images_per_s"] for r in found) for c, found in reports.items()
    }
    one, processes = next(iter(CASES)), list(CASES)[-1]
    rows = []
    for case, found in reports.items():
        bare = statistics.median(r["baseline"]["images_per_s"] for r in found)
        rows.append(row(f"{case} / bare kernel loop", median[case], bare, **facts(found[-1])))
    rows.append(row(f"{processes} / one process", median[processes], median[one]))
    for name, found_rates in rates.items():
        rows.append(row(f"{one} / {name}", median[one], statistics.median(found_rates)))
    for found_row in rows:
        print(json.dumps(found_row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
