"""Memory of a data server while eight workers request groups and do not read the answers.

The test counts the private memory of the process, `RssAnon`: the system can take pages of mapped files back.
The images are nearly four times the budget, in a sparse file that uses no disk. A server with all images in
memory would be far above the bound, and so would one with all requested answers, 50 of a megabyte for each of
eight. The budget is large beside the other memory of a run, and the lower bound shows that the answers use
it.
"""

import asyncio
import socket
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adam_async.cluster.networks import LOOPBACK
from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.group_reader import GroupLimits
from adam_async.driver.preparation import store_of
from adam_async.driver.takeover import submit
from adam_async.messages import Finished, LeaseGroups, Leases, ReadGroups, pack, role_table, unpack
from adam_async.run.cluster_map import NodeRecord, ready_word
from adam_async.run.config import Config
from adam_async.run.learning_rate import decide
from adam_async.run.model_selection import choose_model
from adam_async.run.store_record import ArrayRecord, served_word
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.traffic import Traffic
from tests.processes.commands import Command
from transport import BufferPool, Identity, LinkConfig, Message, RemoteError, TcpNetwork
from transport.stream import StreamLink

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's status"),
]

IMAGES, SHAPE, GROUP = 20_000, (3, 64, 64), 16
BUDGET = 64 << 20
STALLED = 8
RUN = "run"
LONGEST_FETCH_S = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A run that has begun, with a data server in a process of its own."""

    pid: int
    """Process id of the data server."""
    rss_before: int
    """Its memory before the run, in bytes."""
    data: str
    """Its address."""
    network: TcpNetwork
    replica_generations: Mapping[int, int]
    """Generation of each replica."""

    @property
    def rss_growth(self) -> int:
        return own_bytes(self.pid) - self.rss_before


def own_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10


def identity_of(role: str, number: int = 0) -> Identity:
    return Identity(role=role, node=f"{role}-{number}", incarnation=3)


def small_buffers() -> TcpNetwork:
    """Return a network with small socket buffers, for clients that do not read."""
    config = LinkConfig(socket_buffer_bytes=4096)
    return TcpNetwork(token=None, entropy=system_entropy, rules=role_table(), config=config)


def write_images(folder: Path) -> None:
    for split, images in (("train", IMAGES), ("test", 16)):
        pixels = np.lib.format.open_memmap(folder / f"x_{split}.npy", "w+", np.uint8, (images, *SHAPE))
        del pixels
        np.save(folder / f"y_{split}.npy", np.arange(images) % 10)


@asynccontextmanager
async def cluster_of(folder: Path, *, workers: int) -> AsyncIterator[Cluster]:
    """Begin a run of several workers over the images in a folder, all in one pool."""
    config = Config(
        images_per_group=GROUP, epochs=1, servers=1, replicas=workers, epoch_rule="images", epoch_fraction=1.0
    )
    waits, buffers = config.waits, BufferPool()
    network = TcpNetwork(token=None, entropy=system_entropy, rules=role_table(), pool=buffers)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        controller = await stack.enter_async_context(
            Controller(
                RoleSettings(
                    network=network, address=LOOPBACK, identity=identity_of("controller"), waits=waits
                )
            )
        )
        reach: dict[str, Any] = {"network": network, "controller": controller.address, "waits": waits}
        place = ("--controller", controller.address, "--id", "data-0")
        server = stack.enter_context(Command("data", *place, "--data", str(folder), "--cache", str(BUDGET)))
        memberships: list[Membership] = []
        for identity in (
            identity_of("driver"),
            identity_of("ps"),
            *(identity_of("worker", number) for number in range(workers)),
        ):
            record = NodeRecord(
                role=identity.role, address=f"local://{identity.node}", incarnation=identity.incarnation
            )
            membership = Membership(identity=identity, record=record, traffic=Traffic(identity.node), **reach)
            memberships.append(membership)
            stack.callback(group.create_task(membership.run()).cancel)
        driver, ps = memberships[:2]
        cluster = await driver.wait_for(
            lambda m: len(m.live("worker")) == workers and bool(m.live("data") and m.live("ps")),
            "everybody",
            20,
        )
        data = cluster.nodes["data-0"]
        rss_before = own_bytes(server.pid)
        spec = choose_model("auto", data.info)
        program = TrainingProgram(config=decide(config, workers), spec=spec.to_dict())
        run, arrays = program.record(RUN, driver.member), (ArrayRecord("w", (4,)),)
        await submit(driver, run)
        await driver.create_store(RUN, store_of(run, program, arrays), arrays)
        await ps.wait_for(lambda m: bool(m.buckets), "the placement", 10)
        store = ps.map.run_store
        assert store is not None
        await ps.set_node(serves=(served_word(store),))  # without values: no worker pulls
        replicas = range(workers)
        cluster = await driver.wait_for(
            lambda m: all(map(m.replica_generation, replicas)), "the places of all workers", 10
        )
        for number, membership in enumerate(memberships[2:]):
            generation = cluster.replica_generation(cluster.nodes[identity_of("worker", number).node].replica)
            await membership.set_node(ready=ready_word(RUN, generation))
        cluster = await driver.wait_for(lambda m: m.epoch is not None, "the epoch", 20)
        yield Cluster(server.pid, rss_before, data.address, network, cluster.replica_generations())


async def ask_and_stop_reading(
    network: TcpNetwork, cluster: Cluster, replica: int, *, questions: int, rows: tuple[int, int] | None
) -> StreamLink:
    """Request groups of the epoch several times on a link that is not read."""
    link = await network.dial(cluster.data, identity_of("worker", replica))
    assert isinstance(link, StreamLink)
    link._transport.pause_reading()
    for _ in range(questions):
        numbers = tuple(range(replica * 64, (replica + 1) * 64))
        question = ReadGroups(run=RUN, epoch=1, numbers=numbers, least=64, rows=rows)
        link.call_nowait(pack(question), timeout_s=60.0)
    return link


def first_groups(cluster: Cluster, replica: int, *, replica_generation: int = 0) -> Message:
    """Return the request for the first groups of a replica, by default of its current generation."""
    return pack(
        LeaseGroups(
            run=RUN,
            replica=replica,
            replica_generation=replica_generation or cluster.replica_generations[replica],
            partition=0,
            epoch=0,
            position=0,
            count=64,
            wait_s=1.0,
        )
    )


def is_owed_an_answer(link: StreamLink) -> bool:
    """Return whether the connection is open, and has unread bytes."""
    connection = link._transport.get_extra_info("socket")
    established = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01"
    (unread,) = struct.unpack("i", ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))
    return established and unread > 0


@pytest.mark.parametrize(("questions", "rows"), [(1, None), (50, None), (50, (8, 56))])
async def test_eight_stalled_clients_neither_fill_the_memory_nor_delay_a_ninth(
    questions: int, rows: tuple[int, int] | None, tmp_path: Path
) -> None:
    write_images(tmp_path)
    loop = asyncio.get_running_loop()
    async with cluster_of(tmp_path, workers=STALLED + 1) as cluster, AsyncExitStack() as stack:
        network = small_buffers()
        links = []
        for replica in range(STALLED):
            link = await ask_and_stop_reading(network, cluster, replica, questions=questions, rows=rows)
            stack.callback(link.abort)
            links.append(link)
        client = DataClient(
            Endpoint(cluster.network, identity_of("worker", STALLED), Traffic("worker")),
            WorkerSlot(RUN, STALLED, cluster.replica_generations[STALLED], 0),
            address=lambda: cluster.data,
            servers=lambda: (cluster.data,),
            ahead=16,
            limits=GroupLimits(images=GROUP, shape=SHAPE, classes=1000, epochs=1, train_images=IMAGES),
            waits=Config().waits,
        )
        reading = asyncio.create_task(client.run(), name="reading")
        stack.callback(reading.cancel)
        images, longest_fetch_s, growth = 0, 0.0, 0
        while not client.exhausted:
            began = loop.time()
            while not client.has_group and not client.exhausted:
                await client.wait_group()
            longest_fetch_s = max(longest_fetch_s, loop.time() - began)
            if client.has_group:
                lease = client.take().lease
                images += lease.images
                client.finished(Finished(lease.epoch, lease.number, lease.attempt, lease.images, 0.0, 0))
            growth = max(growth, cluster.rss_growth)
        owed = [is_owed_an_answer(link) for link in links]

    assert owed == [True] * STALLED
    assert images > 0.9 * IMAGES
    assert longest_fetch_s <= LONGEST_FETCH_S
    assert 0.7 * BUDGET <= growth <= 1.1 * BUDGET


async def test_a_link_has_one_question_for_groups_open_and_no_link_waits_for_another(tmp_path: Path) -> None:
    write_images(tmp_path)
    async with cluster_of(tmp_path, workers=2) as cluster, AsyncExitStack() as stack:
        links = []
        for replica in (0, 1):
            link = await cluster.network.dial(cluster.data, identity_of("worker", replica))
            links.append(await stack.enter_async_context(link))
        # A request of an unknown generation waits until its deadline.
        waiting = links[0].call_nowait(first_groups(cluster, 0, replica_generation=1), timeout_s=10.0)
        with pytest.raises(RemoteError, match="one question for groups at a time") as refusal:
            await links[0].call(first_groups(cluster, 0), timeout_s=10.0)
        other = await links[1].call(first_groups(cluster, 1), timeout_s=10.0)
        waited = not waiting.done()
        none = await waiting
        groups = await links[0].call(first_groups(cluster, 0), timeout_s=10.0)

    assert refusal.value.code == "busy"
    assert waited
    assert unpack(none, Leases).leases == ()
    assert len(unpack(other, Leases).leases) > 0
    assert len(unpack(groups, Leases).leases) > 0
