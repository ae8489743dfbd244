"""Length of the pause in training when controllers are killed, and the rate within an epoch.

    ADAM_DATA_DIR=DIR python -m benchmarks.controller_gaps [--data mnist] [--epochs 12] [--every 4] [--json
    FILE]
    python -m benchmarks.controller_gaps --rate [--epoch-s 26] [--rounds 1] [--json FILE]

`adam-async train --processes --controllers 3` runs with a profile. The benchmark kills the controllers
(SIGKILL) in turn, at a fixed interval, and the command starts them again. Two rows, with kills and without:
case; kills; the longest time between the beginnings of two pushes of one epoch, and from the last push of an
epoch to the first of the next, in seconds; accuracy. Wanted with kills: 1 s and 4 s. The evaluation between
epochs is in the second time.

With `--rate` one long epoch of noise is trained, in shares and from a pool: without faults, with a kill every
four seconds, and with two of three controllers stopped (SIGSTOP) for 20 s. The cases take turns. Each worker
uses a quarter of a core, because a controller that starts again needs processor time, too. Rows: images a
second within the epoch, their ratio to the undisturbed rate, of which at least 0.98 is wanted.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

WITHIN_S, BETWEEN_S = 1.0, 4.0
LEAST_RATE = 0.98
"""Least rate within an epoch, in parts of the undisturbed rate."""

STOPPED_S = 20.0
"""Time without a majority of the controllers, in seconds."""

STARTED_S = 2.0
"""Time from the first group to the first fault, in seconds."""

CALIBRATION_IMAGES = 8000
WORKER_START_S = 2.0
"""Processor time after which a worker has started and trains, in seconds."""
RULES = {"shares": "replicas", "pool": "images"}
MODEL = """
name = "wide"
input = [1, 8, 8]

[[layers]]
name = "flat"
kind = "flatten"

[[layers]]
name = "fc1"
kind = "dense"
outputs = 512

[[layers]]
name = "relu1"
kind = "relu"

[[layers]]
name = "fc2"
kind = "dense"
outputs = 10

[[layers]]
name = "loss"
kind = "softmax_cross_entropy"
"""


def children_of(parent: int, role: bytes) -> list[int]:
    """Process ids of the roles of a kind that a training has started, by their names."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            status = (folder / "status").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if role in words and f"PPid:\t{parent}\n" in status:
            found.append((words[words.index(b"--id") + 1], int(folder.name)))
    return [pid for _, pid in sorted(found)]


def controllers_of(parent: int) -> list[int]:
    """Process ids of the controllers that a training has started."""
    return children_of(parent, b"controller")


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


# --- the rate within an epoch --------------------------------------------------------------------


def save_noise(file: Path, images: int) -> None:
    """Write random images with labels."""
    dice = np.random.default_rng(0)
    train, test = (dice.integers(0, 256, (count, 8, 8), dtype=np.uint8) for count in (images, 64))
    np.savez(file, x_train=train, y_train=np.arange(images) % 10, x_test=test, y_test=np.arange(64) % 10)


def epoch_rate(folder: Path, rule: str, case: str, *, images: int, every_s: float) -> float:
    """Train one epoch under the faults of a case; return its images per second."""
    data, model, report = folder / "noise.npz", folder / "wide.toml", folder / "report.json"
    save_noise(data, images)
    model.write_text(MODEL)
    words = ["train", "--data", str(data), "--model", str(model), "--epochs", "1", "--epoch-fraction", "1"]
    words += ["--replicas", "2", "--threads", "1", "--slow", "worker-0:0.25", "--slow", "worker-1:0.25"]
    words += ["--epoch-rule", RULES[rule], "--processes", "--controllers", "3", "--rate", "0.001"]
    words += ["--report", str(report)]
    command = [sys.executable, "-m", "adam_async", *words]
    with (folder / "log").open("wb") as log:
        training = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            faults(training, case, every_s)
        finally:
            for pid in controllers_of(training.pid):
                os.kill(pid, signal.SIGCONT)
        if training.wait():
            raise SystemExit(f"training ended with {training.returncode}: {(folder / 'log').read_text()}")
    (epoch,) = json.loads(report.read_text())["epochs"]
    if epoch["images"] != images:
        raise SystemExit(f"the epoch has {epoch['images']} of {images} images")
    return float(epoch["images_per_s"])


def faults(training: "subprocess.Popen[bytes]", case: str, every_s: float) -> None:
    """Strike the controllers of a training until it ends."""
    while training.poll() is None and not is_busy(training.pid):
        time.sleep(0.05)
    begun, kills = time.monotonic() + STARTED_S, 0
    while training.poll() is None:
        time.sleep(0.05)
        pids = controllers_of(training.pid)
        if case == "killed" and time.monotonic() > begun + kills * every_s and len(pids) == 3:
            os.kill(pids[kills % 3], signal.SIGKILL)
            kills += 1
        elif case == "no majority" and time.monotonic() > begun:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids[:2]:
                    os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(STOPPED_S)
            return


def is_busy(parent: int) -> bool:
    """Return whether the workers of a training have started, by their processor time."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = []
    for pid in children_of(parent, b"worker"):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used.append((int(fields[11]) + int(fields[12])) / ticks)
    return len(used) == 2 and min(used) > WORKER_START_S


def rates(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the rates within an epoch."""
    rows = []
    for rule in RULES:
        found: dict[str, list[float]] = {"none": [], "killed": [], "no majority": []}
        with tempfile.TemporaryDirectory() as folder:
            first = epoch_rate(Path(folder), rule, "none", images=CALIBRATION_IMAGES, every_s=0.0)
        images = int(first * arguments.epoch_s) // 16 * 16
        for _ in range(arguments.rounds):
            for case, each in found.items():
                with tempfile.TemporaryDirectory() as folder:
                    each.append(epoch_rate(Path(folder), rule, case, images=images, every_s=arguments.every))
        undisturbed = statistics.median(found["none"])
        for case, each in found.items():
            ratio = statistics.median(each) / undisturbed
            rows.append(
                {
                    "case": f"{rule}, {case}",
                    "images_per_s": [round(rate, 1) for rate in each],
                    "ratio": round(ratio, 3),
                    "met": ratio >= LEAST_RATE,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def pauses(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the longest pauses."""
    rows = []
    for every_s in (0.0, arguments.every):
        with tempfile.TemporaryDirectory() as folder:
            row = run(arguments, every_s, Path(folder))
        row["met"] = row["within_s"] <= WITHIN_S and row["between_s"] <= BETWEEN_S
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--after", type=float, default=10.0, help="seconds before the first kill")
    parser.add_argument("--rate", action="store_true", help="rates within an epoch, in place of pauses")
    parser.add_argument(
        "--epoch-s", type=float, default=26.0, help="length of the epoch of --rate in seconds"
    )
    parser.add_argument("--rounds", type=int, default=1, help="epochs of each case of --rate")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = rates(arguments) if arguments.rate else pauses(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
