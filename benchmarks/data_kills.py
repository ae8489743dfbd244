"""Whether training continues, and trains every image once an epoch, while data servers and workers die.

    ADAM_DATA_DIR=DIR python -m benchmarks.data_kills --kills 200 --seed 1 [--data mnist] [--data-servers 3]
        [--json FILE]

Every role is a process. A killed role (SIGKILL) is started again. Every 0.2 to 2 s the benchmark draws a
victim: the dealer, all data servers, or a worker. After the last kill the current epoch and one more must
end. The result of each epoch is checked: trained images and images left for the next epoch together are the
data set.

One row: case; kills by victim; ended epochs; epochs that do not add up (the goal is none); the longest time
in seconds without progress, an ended epoch or a finished group. The driver looks once a second.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from adam_async import Config
from adam_async.cluster.launcher import RestartPolicy
from adam_async.cluster.processes import ProcessCluster
from adam_async.run.result import EpochResult
from adam_async.runtime.child_process import ChildProcess

VICTIMS = ("dealer", "all data servers", "worker")
LOOK_S = 0.05
LAST_EPOCH_S = 120.0
"""Time within which two epochs must end after the last kill, in seconds."""


class Killer:
    """Kills children of a cluster at random, and counts the kills.

    Args:
        cluster: Cluster whose children are killed.
        dice: Chooses the times and the victims.
    """

    def __init__(self, cluster: ProcessCluster, dice: random.Random) -> None:
        self._cluster = cluster
        self._dice = dice
        self.kills: Counter[str] = Counter()
        self.epochs: list[EpochResult] = []
        self.longest_s = 0.0

    async def kill(self, count: int, training: "asyncio.Task[Any]") -> None:
        """Kill this many, one after the other, while training continues."""
        while self.kills.total() < count and not training.done():
            await asyncio.sleep(self._dice.uniform(0.2, 2.0))
            self._kill_one()

    def _kill_one(self) -> None:
        cluster = self._cluster.driver.map
        if cluster.run is None or cluster.run.phase not in ("training", "between"):
            return
        victim = self._dice.choice(VICTIMS)
        names = {
            "worker": cluster.live("worker"),
            "all data servers": cluster.live("data"),
            "dealer": [cluster.dealing] if cluster.dealing else [],
        }[victim]
        if not names:
            return
        for name in names if victim != "worker" else [self._dice.choice(names)]:
            child = self._cluster.children.get(name)
            if isinstance(child, ChildProcess) and child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        self.kills[victim] += 1

    async def watch(self) -> None:
        """Measure the longest time without progress, until cancelled."""
        loop = asyncio.get_running_loop()
        since, seen = loop.time(), None
        while True:
            await asyncio.sleep(LOOK_S)
            progress = self._cluster.driver.progress
            now = len(self.epochs), progress.images
            if now != seen:
                since, seen = loop.time(), now
            self.longest_s = max(self.longest_s, loop.time() - since)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the row."""
    config = Config(
        data=arguments.data,
        data_servers=arguments.data_servers,
        replicas=arguments.replicas,
        epochs=1_000_000,
        checkpoint_every=0,
    )
    restarts = RestartPolicy(most=arguments.kills)
    async with ProcessCluster(config, restarts=restarts, on_line=lambda _: None) as cluster:
        killer = Killer(cluster, random.Random(arguments.seed))
        training = asyncio.create_task(cluster.train(killer.epochs.append), name="train")
        watch = asyncio.create_task(killer.watch(), name="watch")
        await killer.kill(arguments.kills, training)
        wanted = len(killer.epochs) + 2  # the current epoch, and a whole one
        deadline = asyncio.get_running_loop().time() + LAST_EPOCH_S
        while len(killer.epochs) < wanted and not training.done():
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(LOOK_S)
        dealer = cluster.driver.map.dealer
        assert dealer is not None, "an epoch has ended"
        images = int(dealer.data["train_images"])
        for task in (training, watch):
            task.cancel()
        ended = await asyncio.gather(training, watch, return_exceptions=True)
    goes_on = len(killer.epochs) >= wanted
    wrong = [epoch.epoch for epoch in killer.epochs if epoch.images + epoch.skipped != images]
    return {
        "case": f"{arguments.data}, {arguments.data_servers} data servers, {arguments.replicas} replicas",
        "seed": arguments.seed,
        "kills": killer.kills.total(),
        "by_victim": dict(sorted(killer.kills.items())),
        "epochs": len(killer.epochs),
        "epochs_that_do_not_add_up": wrong,
        "longest_without_progress": round(killer.longest_s, 2),
        "unit": "s",
        "met": goes_on and not wrong,
        "error": "" if goes_on else repr(ended[0]),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        row = runner.run(measure(arguments))
    print(
        f"{row['kills']} kills {row['by_victim']}, {row['epochs']} epochs, "
        f"{len(row['epochs_that_do_not_add_up'])} of them do not add up, "
        f"at most {row['longest_without_progress']} s without progress"
    )
    print(json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=1) + "\n")


if __name__ == "__main__":
    main()
