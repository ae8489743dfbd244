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

import json
import os
import re
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import Any

from benchmarks.harness import ADAM, Option, Row, compared, program, run, turns
from benchmarks.images import save_noise
from benchmarks.pacing import cpu_seconds

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


def ended(training: "Popen[str]", log: Path) -> str:
    """Wait for the end of a training; returns its output."""
    code, text = training.wait(), log.read_text()
    if code:
        raise SystemExit(f"training ended with {code}: {text}")
    return text


def pause(arguments: Namespace, every_s: float, folder: Path) -> Row:
    """Train once; kill a controller every `every_s` seconds, none if that is 0."""
    profile, log = folder / "profile.json", folder / "log"
    words = ["train", "--data", arguments.data, "--epochs", str(arguments.epochs), "--replicas", "2"]
    words += ["--processes", "--controllers", "3", "--profile", str(profile), "--quiet"]
    kills, begun = 0, time.monotonic()
    with log.open("wb") as file, program(*ADAM, *words, stdout=file, stderr=file) as training:
        while training.poll() is None:
            time.sleep(0.05)
            if every_s and time.monotonic() - begun > arguments.after + kills * every_s:
                pids = controllers_of(training.pid)
                if len(pids) == 3:
                    os.kill(pids[kills % 3], signal.SIGKILL)
                    kills += 1
        text = ended(training, log)
    within, between = gaps(json.loads(profile.read_text())["traceEvents"])
    accuracy = re.search(r"([\d.]+)%", text)
    return {
        "case": f"{kills} kills" if every_s else "none killed",
        "kills": kills,
        "within_s": round(within, 3),
        "between_s": round(between, 3),
        "accuracy": float(accuracy[1]) if accuracy is not None else None,
        "met": within <= WITHIN_S and between <= BETWEEN_S,
    }


def gaps(events: list[dict[str, Any]]) -> tuple[float, float]:
    """The longest times between two pushes, within an epoch and between two, in seconds."""
    noted = [event for event in events if event.get("ph") == "X" and event["name"] == "push"]
    pushes = sorted((event["ts"], event["args"]["epoch"]) for event in noted)
    within = max((b - a for (a, one), (b, other) in pairwise(pushes) if one == other), default=0.0)
    between = max((b - a for (a, one), (b, other) in pairwise(pushes) if one != other), default=0.0)
    return within / 1e6, between / 1e6


# --- the rate within an epoch --------------------------------------------------------------------


def epoch_rate(folder: Path, rule: str, case: str, *, images: int, every_s: float) -> float:
    """Train one epoch under the faults of a case; return its images per second."""
    data, model, report, log = (folder / name for name in ("noise.npz", "wide.toml", "report.json", "log"))
    save_noise(data, images, side=8, tests=64)
    model.write_text(MODEL)
    words = ["train", "--data", str(data), "--model", str(model), "--epochs", "1", "--epoch-fraction", "1"]
    words += ["--replicas", "2", "--threads", "1", "--slow", "worker-0:0.25", "--slow", "worker-1:0.25"]
    words += ["--epoch-rule", RULES[rule], "--processes", "--controllers", "3", "--rate", "0.001"]
    words += ["--report", str(report)]
    with log.open("wb") as file, program(*ADAM, *words, stdout=file, stderr=file) as training:
        try:
            faults(training, case, every_s)
        finally:
            for pid in controllers_of(training.pid):
                os.kill(pid, signal.SIGCONT)
        ended(training, log)
    (epoch,) = json.loads(report.read_text())["epochs"]
    if epoch["images"] != images:
        raise SystemExit(f"the epoch has {epoch['images']} of {images} images")
    return float(epoch["images_per_s"])


def faults(training: "Popen[str]", case: str, every_s: float) -> None:
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
    used = [cpu_seconds(pid) for pid in children_of(parent, b"worker")]
    return len(used) == 2 and min(used) > WORKER_START_S


def rates(arguments: Namespace) -> Iterator[Row]:
    """Yield the rows of the rates within an epoch."""
    for rule in RULES:
        found: dict[str, list[float]] = {"none": [], "killed": [], "no majority": []}
        with tempfile.TemporaryDirectory() as folder:
            first = epoch_rate(Path(folder), rule, "none", images=CALIBRATION_IMAGES, every_s=0.0)
        images = int(first * arguments.epoch_s) // 16 * 16
        for case in turns(found, arguments.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rate = epoch_rate(Path(folder), rule, case, images=images, every_s=arguments.every)
            found[case].append(rate)
        for case in ("killed", "no majority"):
            name = f"{rule}, {case} / undisturbed"
            yield compared(name, found[case], found["none"], "images/s", goal=LEAST_RATE)


def measure(arguments: Namespace) -> Iterator[Row]:
    """Yield the rows of pauses, or of rates."""
    if arguments.rate:
        yield from rates(arguments)
        return
    for every_s in (0.0, arguments.every):
        with tempfile.TemporaryDirectory() as folder:
            yield pause(arguments, every_s, Path(folder))


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        data="mnist",
        epochs=12,
        every=Option(4.0, "seconds from one kill to the next"),
        after=Option(10.0, "seconds before the first kill"),
        rate=Option(False, "rates within an epoch, in place of pauses"),
        epoch_s=Option(26.0, "length of the epoch of --rate in seconds"),
        rounds=Option(1, "epochs of each case of --rate"),
    )
