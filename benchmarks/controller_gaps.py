"""Length of the pause in training when controllers are killed.

    ADAM_DATA_DIR=DIR python -m benchmarks.controller_gaps [--data mnist] [--epochs 12] [--every 4] [--json
    FILE]

`adam-async train --processes --controllers 3` runs with a profile. The benchmark kills the controllers
(SIGKILL) in turn, at a fixed interval, and the command starts them again. Two rows, with kills and without:
case; kills; the longest time between the beginnings of two pushes of one epoch, and from the last push of an
epoch to the first of the next, in seconds; accuracy. Wanted with kills: 1 s and 4 s. The evaluation between
epochs is in the second time.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

WITHIN_S, BETWEEN_S = 1.0, 4.0


def controllers_of(parent: int) -> list[int]:
    """Process ids of the controllers that a training has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            status = (folder / "status").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if b"controller" in words and f"PPid:\t{parent}\n" in status:
            found.append((words[words.index(b"--id") + 1], int(folder.name)))
    return [pid for _, pid in sorted(found)]


def run(arguments: argparse.Namespace, every_s: float, folder: Path) -> dict[str, Any]:
    """Train once; kill a controller every `every_s` seconds, none if that is 0."""
    profile = folder / "profile.json"
    words = ["train", "--data", arguments.data, "--epochs", str(arguments.epochs), "--replicas", "2"]
    words += ["--processes", "--controllers", "3", "--profile", str(profile), "--quiet"]
    command = [sys.executable, "-m", "adam_async", *words]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kills = 0
    begun = time.monotonic()
    while training.poll() is None:
        time.sleep(0.05)
        if every_s and time.monotonic() - begun > arguments.after + kills * every_s:
            pids = controllers_of(training.pid)
            if len(pids) == 3:
                os.kill(pids[kills % 3], signal.SIGKILL)
                kills += 1
    said, errors = training.communicate()
    if training.returncode:
        raise SystemExit(f"training ended with {training.returncode}: {said}{errors}")
    within, between = gaps(json.loads(profile.read_text())["traceEvents"])
    accuracy = re.search(r"([\d.]+)%", said)
    return {
        "case": f"{kills} kills" if every_s else "none killed",
        "kills": kills,
        "within_s": round(within, 3),
        "between_s": round(between, 3),
        "accuracy": float(accuracy[1]) if accuracy is not None else None,
    }


def gaps(events: list[dict[str, Any]]) -> tuple[float, float]:
    """The longest times between two pushes, within an epoch and between two, in seconds."""
    noted = [event for event in events if event.get("ph") == "X" and event["name"] == "push"]
    pushes = sorted((event["ts"], event["args"]["epoch"]) for event in noted)
    within = max((b - a for (a, one), (b, other) in pairwise(pushes) if one == other), default=0.0)
    between = max((b - a for (a, one), (b, other) in pairwise(pushes) if one != other), default=0.0)
    return within / 1e6, between / 1e6


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--after", type=float, default=10.0, help="seconds before the first kill")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for every_s in (0.0, arguments.every):
        with tempfile.TemporaryDirectory() as folder:
            row = run(arguments, every_s, Path(folder))
        row["met"] = row["within_s"] <= WITHIN_S and row["between_s"] <= BETWEEN_S
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
