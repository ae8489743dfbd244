"""Train with every role in a separate process, over loopback TCP; --kill kills a worker during training.

    python examples/04_train_processes.py [--kill]

The killed worker starts again, and the next worker that requests groups trains its groups: none is lost.
"""

import asyncio
import sys

import uvloop

from adam_async import Config, EpochResult, ProcessCluster, RunResult


async def main(*, epochs: int = 5, kill: bool = False) -> RunResult:
    config = Config(data="digits", epochs=epochs, replicas=2, servers=2, threads=1, processes=True)
    async with ProcessCluster(config, on_line=print) as cluster:
        print(f"started {', '.join(cluster.children)}")

        def on_epoch(epoch: EpochResult) -> None:
            print(f"epoch {epoch.epoch}: {epoch.images} images, test accuracy {epoch.test_accuracy:.2%}")
            if kill and epoch.epoch == 1:
                cluster.children["worker-0"].kill()

        result = await cluster.train(on_epoch)
    for event in result.events:
        print(f"after {event['s']} s: {event['event']}")
    return result


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(kill="--kill" in sys.argv))
