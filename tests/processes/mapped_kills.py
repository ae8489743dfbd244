"""Workers that train in place, and their server, are killed by single steps; each group is counted once.

    python -m tests.processes.mapped_kills [--workers N] [--servers N]

The images are zeros, so the gradient of the first weights is 0, and each step only multiplies them by a
decay. So their values tell how often steps were applied to each of them, whatever the notes and reports say.
With one worker this is exactly the number of groups, less the steps that were cut off; two workers may
overwrite a step of each other, and never double one.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from adam_async.cluster.launcher import RestartPolicy
from adam_async.cluster.processes import ProcessCluster
from adam_async.data_server.dataset import Dataset
from adam_async.errors import RoleDied, first_cause
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.option_sources import make_config
from adam_async.run.result import EpochResult, RunResult
from tests.processes.commands import Command, descendants, roles_among, until, watched
from tests.processes.shared_kills import regions_of
from tests.processes.single_steps import Tracer

IMAGES, GROUP = 1000, 16
"""Number of images of an epoch, and of a group; the last group has fewer."""

DECAY = 1e-4
"""Share of the first weights that a step takes away."""

MOST_STEPS = 30_000
"""Largest number of single steps from the begin of a phase on: a part of a training step."""

END_S = 60.0
"""Deadline for the end of a run and of its processes, in seconds."""

_MEMORY, _MODE = "adam_async.worker.mapped_memory", "adam_async.worker.in_place_mode"
_SERVER = "adam_async.parameter_server"
WORKER = {
    "ask": f"{_MEMORY}:MapShards",
    "map": f"{_MEMORY}:_storage_in",
    "begin": f"{_SERVER}.storage:StepNotes.begin",
    "write": "adam_async.model.rules.sgd:Sgd.apply",
    "written": "adam_async.model.in_place:InPlaceStep.train+",
    "job": "adam_async.model.fast.tape:Tape.run_groups",
    "report": f"{_MODE}:StepReports.close",
    "still": f"{_MEMORY}:_Stills._on_request",
    "unmap": f"{_MEMORY}:UnmapShards",
}
SERVER = {
    "hand": f"{_SERVER}.mapped_workers:ShardsMapped",
    "report": f"{_SERVER}.state:ServerState._report_steps",
    "still": f"{_SERVER}.mapped_workers:MappedWorkers._kept_still",
    "lost": f"{_SERVER}.mapped_workers:PeerProcess.kill",
    "count": f"{_SERVER}.served_store:ServedStore._count_mapped",
}
"""The place in the program where each phase of a worker, and of a server, begins."""

NUMPY = ("ask", "map", "begin", "write", "written", "report", "still", "unmap")
COMPILED = ("begin", "job", "report", "still")
"""Phases of a worker with each kind of kernels."""


# --- the run, in a process of its own ---------------------------------------------------------


def say(line: str) -> None:
    """Write a line to stdout at once."""
    os.write(1, f"{line}\n".encode())


async def train(folder: str, replicas: int, kernels: str) -> None:
    """Train in place until ``stop`` comes on stdin; ``scale N`` starts and ends workers."""
    roles = {"processes": True, "weights": "aliased", "replicas": replicas, "threads": 1, "flush_s": 0.1}
    epochs = {"epochs": 100_000, "epoch_fraction": 1.0, "images_per_group": GROUP, "seed": 7}
    steps = {"rate": 0.01, "weight_decay": DECAY / 0.01, "schedule": "constant", "dtype": "float64"}
    layers = (
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("first", "dense", outputs=64),
        LayerSpec.of("relu", "relu"),
        LayerSpec.of("last", "dense", outputs=10),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    )
    images, labels = np.zeros((IMAGES, 1, 1, 64), np.uint8), np.arange(IMAGES) % 10
    data = Dataset(
        name="zeros",
        source="zeros of a test",
        train_images=images,
        train_labels=labels,
        test_images=images[:10],
        test_labels=labels[:10],
        num_classes=10,
    )
    stops = False
    async with ProcessCluster(
        make_config({**roles, **epochs, **steps, "kernels": kernels}),
        dataset=data,
        spec=ModelSpec(name="decay", input_shape=(1, 1, 64), layers=layers),
        store=folder or None,
        restarts=RestartPolicy(most=1 << 20),
        on_line=say,
    ) as cluster:

        async def ended(epoch: EpochResult) -> None:
            say(f"epoch {epoch.epoch} of {epoch.images} images")
            if stops:
                cluster.driver.stop()

        async def scale(workers: int) -> None:
            say(await cluster.scale(workers))

        def obey() -> None:
            nonlocal stops
            word, *workers = os.read(0, 80).split()
            stops = stops or word == b"stop"
            if workers:
                tasks.append(loop.create_task(scale(int(workers[0]))))

        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        loop.add_reader(0, obey)
        try:
            result = await cluster.train(ended)
        finally:
            loop.remove_reader(0)
        say(json.dumps(facts_of(result)))


def facts_of(result: RunResult) -> dict[str, Any]:
    """Return the counts of a run: by the dealer, by the shards, and by the values."""
    assert isinstance(result.model, Network)
    name, server = "first.weight", result.statistics["ps-0"]
    begun = result.model.initial_values(Dice(7), name).reshape(-1)
    applied = np.log(result.weights[name].reshape(-1) / begun) / log(1.0 - DECAY)
    assert abs(applied - np.rint(applied)).max() < 0.1
    return {
        "images": [epoch.images for epoch in result.epochs],
        "counted": sorted(set(server.versions.values())),
        "cut": server.steps_cut,
        "in_place": server.steps_in_place,
        "applied": [int(np.rint(applied.min())), int(np.rint(applied.max()))],
    }


class Run(Command):
    """A run in place, with the tracer of its roles."""

    def __init__(self, tracer: Tracer, *, replicas: int, kernels: str = "numpy", folder: str = "") -> None:
        words = ["--folder", folder, "--replicas", str(replicas), "--kernels", kernels]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.mapped_kills", *words],
            env={**os.environ, **tracer.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def say(self, line: str) -> None:
        """Send a line to the run."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def child(self, node: str) -> int:
        """Process id of a role, which may still start."""
        until(lambda: node in roles_among(descendants(self.pid)), f"the process of {node}")
        return roles_among(descendants(self.pid))[node]

    def stop(self) -> dict[str, Any]:
        """End the run after its present epoch, and return its counts."""
        self.say("stop")
        facts: dict[str, Any] = json.loads(self.wait_for('{"images"'))
        self.ends(0, seconds=END_S)
        return facts


def is_zombie(process: int) -> bool:
    """Return whether a process has ended without its parent's notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def check(facts: dict[str, Any], *, cut: int, alone: bool) -> None:
    """Check that each group of each epoch was counted once, and applied once or cut off.

    Args:
        cut: Largest number of steps that were cut off.
        alone: Whether one worker trained at a time.
    """
    groups = sum([-(-images // GROUP) for images in facts["images"]])
    assert facts["images"][:-1] == [IMAGES] * (len(facts["images"]) - 1), facts
    assert facts["counted"] == [groups], facts
    least, most = facts["applied"]
    assert most <= groups, facts
    if alone:
        assert groups - cut <= least, facts


# --- kills -----------------------------------------------------------------------------------


def kill_workers(phases: Iterable[str], *, replicas: int, kernels: str, seed: int = 1) -> Counter[str]:
    """Kill a worker of one run in each of these phases, one after the other, and return the counts."""
    dice, counts = random.Random(seed), Counter[str]()
    places = {phase: WORKER[phase] for phase in (NUMPY if kernels == "numpy" else COMPILED)}
    with ExitStack() as stack:
        tracer = stack.enter_context(Tracer({"worker": places}))
        folder = stack.enter_context(TemporaryDirectory())
        run = stack.enter_context(Run(tracer, replicas=replicas, kernels=kernels, folder=folder))
        run.wait_for("epoch 1 ")
        server = run.child("ps-0")
        regions = regions_of(server)
        for number, phase in enumerate(phases):
            node = f"worker-{replicas - 1 if phase == 'unmap' else number % replicas}"
            victim = run.child(node)

            def begin(phase: str = phase, victim: int = victim) -> None:
                if phase in ("ask", "map"):
                    os.kill(victim, signal.SIGKILL)
                elif phase == "unmap":
                    run.say(f"scale {replicas - 1}")

            tracer.kill(f"{node}.{phase}", dice.randrange(MOST_STEPS), begin)
            deaths = 1 + (phase in ("ask", "map")) - (phase == "unmap")
            if phase == "unmap":
                run.wait_for(f"{replicas - 1} worker")
                run.say(f"scale {replicas}")
                run.wait_for(f"started {node}")
            for _ in range(deaths):
                run.wait_for(f"{node} died: killed by signal 9; starting it again")
            until(lambda: regions_of(server) <= regions, "the regions of a lost worker to be freed")
            until(lambda: not any(map(is_zombie, descendants(run.pid))), "the end of a killed process")
            run.wait_for("epoch ")
            counts["deaths"] += deaths
            counts[f"worker {kernels} x{replicas}: {phase}"] += 1
        with watched(descendants(run.pid)[1:]) as all_end:
            facts = run.stop()
            all_end(END_S)
        check(facts, cut=facts["cut"], alone=replicas == 1)
        assert facts["cut"] <= counts["deaths"], facts
        assert facts["in_place"] == facts["counted"][0] - facts["cut"], facts
        counts.update(cut=facts["cut"], groups=facts["counted"][0])
    return counts


def kill_servers(phases: Iterable[str], *, seed: int = 1) -> Counter[str]:
    """Kill the server of one run after the other, each of which goes on with the store of the last one."""
    dice, counts = random.Random(seed), Counter[str]()
    with ExitStack() as stack:
        tracer = stack.enter_context(Tracer({"ps": SERVER}))
        folder = stack.enter_context(TemporaryDirectory())
        for phase in phases:
            with Run(tracer, replicas=1, folder=folder) as run:
                run.wait_for("epoch ")
                run.wait_for("epoch ")
                worker = run.child("worker-0")

                def begin(phase: str = phase, worker: int = worker) -> None:
                    if phase in ("hand", "lost", "count"):
                        os.kill(worker, signal.SIGKILL)

                with watched(descendants(run.pid)) as all_end:
                    tracer.kill(f"ps-0.{phase}", dice.randrange(MOST_STEPS), begin)
                    run.ends(RoleDied.exit_code, seconds=END_S)
                    all_end(END_S)
                assert "ps-0 died: " in run.output, run.output
            counts[f"server: {phase}"] += 1
        with Run(tracer, replicas=1, folder=folder) as run:
            run.wait_for("epoch ")
            facts = run.stop()
        # A server that starts again does not know how many steps were cut off before.
        check(facts, cut=sum(counts.values()), alone=True)
        counts.update(groups=facts["counted"][0])
    return counts


def repeated(phases: Sequence[str], kills: int) -> list[str]:
    """Return the phases in turns, as many as there are kills."""
    return [phases[number % len(phases)] for number in range(kills)]


def main() -> None:
    """Run the kills of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--servers", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--kernels", default="numpy")
    options = parser.parse_args()
    if options.folder is not None:
        try:
            asyncio.run(train(options.folder, options.replicas, options.kernels))
        except (RoleDied, ExceptionGroup) as errors:  # other roles may have errors of their own
            error = first_cause(errors)
            say(str(error))
            sys.exit(error.exit_code if isinstance(error, RoleDied) else 1)
        return
    third = options.workers // 3
    alone, compiled = repeated(NUMPY[:-1], third), repeated(COMPILED, third)
    rounds = [
        kill_workers(alone, replicas=1, kernels="numpy", seed=options.seed),
        kill_workers(repeated(NUMPY, third), replicas=2, kernels="numpy", seed=options.seed),
        kill_workers(compiled, replicas=1, kernels="numba", seed=options.seed),
        kill_servers(repeated([*SERVER], options.servers), seed=options.seed),
    ]
    for counts in rounds:
        for name, count in counts.items():
            say(f"{name}: {count}")


if __name__ == "__main__":
    main()
