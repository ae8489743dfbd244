"""The rate at which a worker reads images from a data server over TCP, against our link with equal messages.

    python -m benchmarks.data_wire --json FILE [--rounds 7] [--seconds 1]

A process has a controller and a data server with images in memory, and members without work in place of the
other roles; in this process a `DataClient`, the client of workers, takes and reports groups. For comparison,
one of our links between the same two processes requests messages of the size of these answers: the images in
memory order, one after the other. Both alternate for `--rounds` rounds; megabytes of images per second, and
the medians. Both have one open request at a time.

Rows: case, ours, peer (the link), ratio, unit. Wanted: 0.8.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.dataset import make_dataset
from adam_async.data_server.service import DataServer
from adam_async.driver.preparation import store_of
from adam_async.driver.submission import submit, update_program
from adam_async.messages import Finished, Reported, ReportGroups, pack
from adam_async.run.cluster_map import NodeRecord, ready_word
from adam_async.run.config import Config, Waits
from adam_async.run.group_limits import GroupLimits
from adam_async.run.learning_rate import decide
from adam_async.run.model_selection import choose_model
from adam_async.run.store_record import ArrayRecord, served_word
from adam_async.run.training_program import ProgramRecord, TrainingProgram
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.traffic import Traffic
from transport import BufferPool, Identity, Link, Request

RUN = "wire"
WORKER = Identity(role="worker", node="worker-0", incarnation=5)
CASES = {
    "MNIST, groups of 16, 64 ahead": ((1, 28, 28), 16, 64),
    "MNIST, groups of 1, 64 ahead": ((1, 28, 28), 1, 64),
    "32x32 in colour, groups of 64, 32 ahead": ((3, 32, 32), 64, 32),
    "96x96 in colour, groups of 32, 16 ahead": ((3, 96, 96), 32, 16),
}
"""(C, H, W), images of a group, groups ahead."""


def count_of(shape: tuple[int, int, int]) -> int:
    """Return the number of training images of this shape."""
    return min(60_000, (256 << 20) // int(np.prod(shape)))


def child(channel: Any, shape: tuple[int, int, int], images: int, ahead: int) -> None:
    """Run the process of the servers."""
    uvloop.run(serve(channel, shape, images, ahead))


async def serve(channel: Any, shape: tuple[int, int, int], images: int, ahead: int) -> None:
    count = count_of(shape)
    dice = np.random.default_rng(7)
    pictures = dice.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = np.arange(count) % 10
    origins = ("images", "labels", "test images", "test labels")
    dataset = make_dataset(
        name="wire",
        source="random",
        train=(pictures, labels),
        test=(pictures[:10], labels[:10]),
        origins=origins,
    )
    config = Config(images_per_group=images, read_ahead=ahead, epochs=1_000_000, servers=1)
    waits = config.waits
    buffers = BufferPool()
    network = cluster_network(None, entropy=system_entropy, buffers=buffers)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        controller = await stack.enter_async_context(
            Controller(
                RoleSettings(network=network, address=LOOPBACK, identity=who("controller"), waits=waits),
            )
        )
        server = await stack.enter_async_context(
            DataServer(
                RoleSettings(
                    network=network,
                    address=LOOPBACK,
                    identity=who("data"),
                    waits=waits,
                    controller=controller.address,
                ),
                dataset,
            )
        )
        members = []
        for identity in (who("driver"), who("ps"), WORKER):
            # Nothing dials these members, which have no listeners.
            member = Membership(
                network=network,
                controller=controller.address,
                identity=identity,
                record=NodeRecord(
                    role=identity.role, address="tcp://127.0.0.1:1", incarnation=identity.incarnation
                ),
                waits=waits,
                traffic=Traffic(identity.node),
            )
            group.create_task(member.run())
            await joined(member)
            members.append(member)
        driver, ps, worker = members
        spec = choose_model("auto", dataset.info())
        program = TrainingProgram(config=decide(config, 1), spec=spec.to_dict())
        run, arrays = program.record(RUN, driver.member), (ArrayRecord("w", (4,)),)
        await submit(driver, run)
        await driver.create_store(RUN, store_of(run, program, arrays), arrays)
        await ps.wait_for(lambda m: bool(m.buckets), "the placement", 10)
        assert ps.map.run_store is not None
        await ps.set_node(serves=(served_word(ps.map.run_store),))  # without values: no worker pulls
        cluster = await worker.wait_for(
            lambda m: m.run is not None and m.replica_generation(0) != 0, "a place", 10
        )
        life = cluster.replica_generation(0)
        await worker.set_node(ready=ready_word(RUN, life))
        await worker.wait_for(lambda m: m.epoch is not None, "the epoch", 30)

        size = min(images * int(np.prod(shape)) * max(ahead // 2, 1), 8 << 20)
        memory = pictures.reshape(-1)
        raw = await stack.enter_async_context(
            network.listen(LOOPBACK, who("data"), lambda link: answer(link, memory, size))
        )
        channel.send((server.address, raw.address, life))

        async def next_epochs() -> None:
            def go_on(run: ProgramRecord) -> ProgramRecord | None:
                return msgspec.structs.replace(run, phase="training", epoch=run.epoch + 1)

            async for newest in driver.changes():
                if newest.run is not None and newest.run.phase == "between":
                    await update_program(driver, go_on)

        await next_epochs()


async def joined(member: Membership) -> None:
    """Wait until a member is in the cluster map."""
    await member.wait_for(lambda _: member.joined, f"{member.node} in the map", 10)


async def answer(link: Link, memory: Any, size: int) -> None:
    """A link that answers every request with the next bytes of the images, in memory order."""
    at = 0

    def handle(request: Request) -> None:
        request.charge(size, lambda: reply(request))

    def reply(request: Request) -> None:
        nonlocal at
        request.reply(pack(Reported(), [memory[at : at + size]]))
        at = at + size if at + 2 * size <= len(memory) else 0

    link.serve(handle)
    await link.wait_closed()


def who(role: str) -> Identity:
    return Identity(role=role, node=f"{role}-0", incarnation=3)


async def measure(case: tuple[tuple[int, int, int], int, int], rounds: int, seconds: float) -> dict[str, Any]:
    """Median rates of the client and of the bare link, in bytes per second."""
    shape, images, ahead = case
    ours, theirs = [], []
    channel, far = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(far, *case), daemon=True)
    process.start()
    address, raw, life = await asyncio.to_thread(channel.recv)
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    client = DataClient(
        Endpoint(network, WORKER, Traffic(WORKER.node)),
        WorkerSlot(RUN, 0, life, 0),
        address=lambda: address,
        servers=lambda: (address,),
        ahead=ahead,
        limits=GroupLimits(
            images=images,
            shape=shape,
            classes=10,
            epochs=1_000_000,
            train_images=count_of(shape),
        ),
        waits=Waits(),
    )
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(client.run())
        link = await network.dial(raw, WORKER)
        for _ in range(rounds + 1):
            ours.append(await read_images(client, seconds))
            theirs.append(await read_link(link, seconds))
        reading.cancel()
        await link.aclose()
    process.kill()
    process.join()
    return {"ours": statistics.median(ours[1:]), "peer": statistics.median(theirs[1:])}


async def read_images(client: DataClient, seconds: float) -> float:
    begin, got = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        while not client.has_group:
            await client.wait_group()
        group = client.take()
        lease = group.lease
        assert group.images is not None
        got += group.images.nbytes
        client.finished(Finished(lease.epoch, lease.number, lease.attempt, lease.images, 0.0, 0))
        if lease.number % 8 == 0:
            await asyncio.sleep(0)
    return got / (time.perf_counter() - begin)


async def read_link(link: Link, seconds: float) -> float:
    begin, got = time.perf_counter(), 0
    question = pack(ReportGroups(run=RUN, replica=0, replica_generation=0, partition=0, finished=()))
    while time.perf_counter() < begin + seconds:
        reply = await link.call(question, timeout_s=30)
        got += reply.tensors[0].nbytes
    return got / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    rows = []
    for name in options.cases:
        found = uvloop.run(measure(CASES[name], options.rounds, options.seconds))
        row = {
            "case": name,
            "ours": round(found["ours"] / 1e6, 1),
            "peer": round(found["peer"] / 1e6, 1),
            "ratio": round(found["ours"] / found["peer"], 3),
            "unit": "MB/s",
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
