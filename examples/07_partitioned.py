"""Train one replica with its model cut over two workers, in one process; print blocks and crossings.

python examples/07_partitioned.py [digits | mnist | FOLDER]
"""

import asyncio
import os
import sys

import uvloop

from adam_async import Config, Disk, LocalCluster, RunResult, load_dataset
from adam_async.model import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.partition.planner import longest_chain
from adam_async.run.training_program import read_training
from adam_async.runtime.kernel_cache import user_cache


def show_plan(model: Network, plan: PartitionPlan) -> None:
    for layer in plan.layers:
        blocks = " | ".join(f"{start} to {stop - 1}" if start < stop else "-" for start, stop in layer.blocks)
        print(
            f"{layer.layer:8} rows or features  {'computed by each reader' if layer.recomputed else blocks}"
        )
    parts = [Partition(model, plan, worker) for worker in range(plan.workers)]
    for crossing in parts[0].layout.crossings:
        what = f"{crossing.kind} of {plan.layers[crossing.layer].layer}"
        size = f"{crossing.values} values{'' if crossing.kind == 'gradient' else ' per image'}"
        print(f"worker {crossing.source} -> worker {crossing.target}: {what}, {size}")
    print(f"{longest_chain(parts)} crossings, one after the other, before a group is done")


async def main(source: str = "digits", *, epochs: int = 3) -> RunResult:
    async with Disk() as disk:
        cache = user_cache(os.environ) / "mnist"
        dataset = await load_dataset(source, disk, cache_dir=cache)
    config = Config(epochs=epochs, partitions=2, plan="vertical", halo="exchange")
    async with LocalCluster(config, dataset=dataset) as cluster:
        result = await cluster.train(print)
        run = cluster.controller.map.run
    assert run is not None
    plan = read_training(run).plan
    assert plan is not None
    show_plan(result.model, PartitionPlan.from_dict(plan))
    return result


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
