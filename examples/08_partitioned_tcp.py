"""Example 7 over TCP: every role listens on its own port, and the two parts of the model exchange frames.

This program has all roles, to be short. Workers on two machines, started by `adam-async worker`, send each
other the same messages.

python examples/08_partitioned_tcp.py [digits | mnist | FOLDER]
"""

import asyncio
import os
import sys

import uvloop

from adam_async import Config, Disk, LocalCluster, RunResult, load_dataset
from adam_async.messages import role_table
from adam_async.run.counts import WorkerCounts
from adam_async.runtime.kernel_cache import user_cache
from transport import TcpNetwork


async def main(source: str = "digits", *, epochs: int = 3) -> RunResult:
    async with Disk() as disk:
        cache = user_cache(os.environ) / "mnist"
        dataset = await load_dataset(source, disk, cache_dir=cache)
    config = Config(epochs=epochs, partitions=2, plan="vertical", halo="exchange", in_flight=8)
    network = TcpNetwork(token=os.urandom(32), entropy=os.urandom, rules=role_table())
    async with LocalCluster(config, dataset=dataset, network=network, address="tcp://127.0.0.1:0") as cluster:
        print("workers listen at", *(worker.address for worker in cluster.workers))
        result = await cluster.train(print)
    for name in ("worker-0", "worker-1"):
        counted = result.statistics[name]
        assert isinstance(counted, WorkerCounts)
        for sent in counted.sent:
            if sent.type == "Blocks":
                size = sent.payload_bytes + sent.frame_bytes
                print(f"{sent.sender} -> {sent.receiver}: {sent.messages} messages of blocks, {size} bytes")
        for other, talk in counted.neighbours.items():
            print(f"{name} has {talk.blocks_received} tensors from {other}")
    return result


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
