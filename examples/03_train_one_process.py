"""Train in one process: controller, data server, parameter servers and workers in one event loop.

python examples/03_train_one_process.py [digits | mnist | FOLDER]
"""

import asyncio
import os
import sys

import uvloop

from adam_async import Config, Disk, EpochResult, LocalCluster, RunResult, load_dataset
from adam_async.run.counts import ServerCounts
from adam_async.runtime.kernel_cache import user_cache


def show(epoch: EpochResult) -> None:
    print(
        f"epoch {epoch.epoch}: loss {epoch.train_loss:.3f}, test accuracy {epoch.test_accuracy:.2%}, "
        f"{epoch.images_per_s:.0f} images/s"
    )


async def main(source: str = "digits", *, epochs: int = 5) -> RunResult:
    async with Disk() as disk:
        cache = user_cache(os.environ) / "mnist"  # the cache of the command line
        dataset = await load_dataset(source, disk, cache_dir=cache)
    print(f"{dataset!r}: {dataset.source}")

    config = Config(epochs=epochs, servers=2)
    async with LocalCluster(config, dataset=dataset) as cluster:
        result = await cluster.train(show)

    servers = [counts for counts in result.statistics.values() if isinstance(counts, ServerCounts)]
    pushes = sum(sum(ps.staleness.values()) for ps in servers)
    print(f"{len(result.weights)} tensors, {pushes} shard updates applied")
    return result


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
