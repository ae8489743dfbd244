"""Memory of a process that serves more images than it may hold, while some of its answers are not taken."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
IMAGES, SHAPE, GROUP = 30_000, (3, 64, 64), 16
BUDGET = 100 << 20

SERVE = f"""
import asyncio
import sys
from pathlib import Path

from adam_async.run.memory_sizes import CacheLimits
from adam_async.run.training_program import TrainingProgram
from adam_async.run.config import Config
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.data_server.epoch import EpochOrders
from adam_async.data_server.group_producer import GroupProducer
from adam_async.model.keyed_random import Dice
from adam_async.runtime.machine import peak_rss_mb
from adam_async.runtime.disk import Disk


async def main(folder):
    async with Disk() as disk:
        dataset = await load_dataset(folder, disk, cache=CacheLimits({BUDGET}))
    async with asyncio.TaskGroup() as group:
        supply = GroupProducer(dataset, name="images", on_failure=print)
        work = group.create_task(supply.run())
        await supply.take_up(TrainingProgram(config=Config(), spec={{}}))
        idle = peak_rss_mb()
        stuck = []
        for epoch in (1, 2):
            order = EpochOrders(Dice(1), num_images={IMAGES}, images_per_group={GROUP}).order(epoch)
            supply.begin_epoch(order, takers=1)
            number, per_answer = 0, supply.answer_bytes // ({GROUP} * 3 * 64 * 64)
            while number < order.num_groups:
                numbers = range(number, min(number + per_answer, order.num_groups))
                supply.prepare(range(numbers.stop, min(numbers.stop + 16, order.num_groups)))
                ready = asyncio.get_running_loop().create_future()
                supply.when_ready(numbers, lambda: ready.set_result(supply.take(numbers)))
                answer = await ready
                if epoch == 1 and len(stuck) < 8:
                    stuck.append(answer)
                number = numbers.stop
        told = supply.cache_statistics()
        print(peak_rss_mb() - idle, told.decoded, told.resident_bytes, len(stuck))
        work.cancel()


asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's status")
def test_memory_stays_within_the_budget_while_eight_answers_are_not_taken(tmp_path: Path) -> None:
    for split, images in (("train", IMAGES), ("test", 16)):
        # Files with a hole in them: they take no disk.
        pixels = np.lib.format.open_memmap(tmp_path / f"x_{split}.npy", "w+", np.uint8, (images, *SHAPE))
        del pixels
        np.save(tmp_path / f"y_{split}.npy", np.arange(images) % 10)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growth_mb, decoded, resident, stuck = done.stdout.split()

    assert int(stuck) == 8
    assert int(decoded) > IMAGES
    assert int(resident) > 0.7 * BUDGET
    assert float(growth_mb) * (1 << 20) <= 1.1 * BUDGET
