"""Counts of the product's Python calls, files and executed lines on four ways through a cluster.

    python -m tests.journey [NAME ...] [--files]

Client and server run in one uvloop and talk over TCP, so one trace function sees both. It counts the calls of
functions in `dataflow`, `transport` and `adam_async`, resumed coroutines included, their files, and their
executed lines. The same work gives the same counts on every machine with CPython 3.11; other versions inline
other functions. Each journey runs 20 times unseen, and then several times with counting. The shortest of
these is the journey, because the timers of roles, such as a controller's, only add calls.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import gc
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import uvloop

from adam_async import ParameterStore, Sgd
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.group_reader import GroupLimits
from adam_async.data_server.service import DataServer
from adam_async.messages import Finished
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.cluster_map import NodeRecord, ready_word
from adam_async.run.config import Waits
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.traffic import Traffic
from adam_async.worker.copy_mode import CopyMode
from adam_async.worker.training import GroupEvents, ModeSetup
from dataflow import Engine, Tag
from tests.adam_async.runs import PATIENT, Servers, servers_of, tcp_network, tiny_dataset, turns, until
from tests.dataflow.testing import ManualPool
from transport import BufferPool, Identity

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / room}{os.sep}" for room in ("dataflow", "transport", "adam_async"))
WARM = 20
"""Number of times that a journey runs before it is counted."""

COUNTED = 7
"""Number of times that a journey is counted."""

ANSWER = 8
"""Number of groups in one answer of the data server."""

SETTLED = 20
"""Number of iterations of the loop after which loopback links and their tasks have nothing left to do."""


@cache
def product_file(name: str) -> str:
    """Return the path of a file of the product from the root; an empty text for any other file."""
    return name.removeprefix(f"{ROOT}{os.sep}") if name.startswith(PRODUCT) else ""


class Trace:
    """Counts the product's calls by file, and its lines, on this thread while it is entered."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.lines = 0

    def __enter__(self) -> Self:
        gc.disable()  # a finalizer would count as work of the journey
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        file = product_file(frame.f_code.co_filename)
        if not file:
            return None
        self.calls[file] += 1
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.lines += event == "line"
        return self._line


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of one journey."""

    calls: int
    files: int
    lines: int
    by_file: Counter[str]
    """Calls by file, in all parts together."""


Walk = Callable[[Trace], Awaitable[None]]
"""Goes the way once, and enters the trace for the part of it that counts."""


async def count(walk: Walk, *, parts: int = 1) -> Counts:
    """Count a journey.

    Args:
        walk: One time; all times do the same.
        parts: Number of equal parts of one time, such as the groups of an answer; calls and lines are those
            of one part, rounded up.
    """
    for _ in range(-(-WARM // parts)):
        await walk(Trace())
    traces = []
    for _ in range(COUNTED):
        traces.append(Trace())
        await walk(traces[-1])
    shortest = min(traces, key=lambda trace: trace.calls.total())
    return Counts(
        calls=-(-shortest.calls.total() // parts),
        files=len(shortest.calls),
        lines=-(-shortest.lines // parts),
        by_file=shortest.calls,
    )


def place_of(node: str, **more: Any) -> Place:
    """The place of a role on a network of its own."""
    buffers = BufferPool()
    network = cluster_network(None, entropy=system_entropy, buffers=buffers)
    return Place(
        node=node,
        bind=LOOPBACK,
        network=network,
        buffers=buffers,
        waits=Waits(),
        entropy=system_entropy,
        **more,
    )


async def push_pull() -> Counts:
    """One `ParameterStore.push_pull` of one array of 1 KiB: check, push, SGD, new values."""
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(controller(place_of("controller")))
        server = parameter_server(place_of("ps-0", controller=leader.address))
        await (await stack.enter_async_context(server)).joined()
        store = await stack.enter_async_context(
            ParameterStore.open(
                leader.address, {"w": np.zeros(256, np.float32)}, name="journey", rule=Sgd(rate=0.1)
            )
        )
        # The change to a compiled rule would fall between two times.
        await until(lambda: not any("kernels" in task.get_name() for task in asyncio.all_tasks()))
        gradient = {"w": np.ones(256, np.float32)}

        async def walk(trace: Trace) -> None:
            with trace:
                await store.push_pull(gradient)

        return await count(walk)


async def map_change() -> Counts:
    """One change of the map: a member sets a fact in its record, and sees it in the controller's next map."""
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(controller(place_of("controller")))
        place = place_of("client-0", controller=leader.address)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        member = member_of(place.settings("client"))
        stack.callback(group.create_task(member.run(), name="member").cancel)
        await until(lambda: member.joined)
        number = 0

        def seen() -> bool:
            return member.map.nodes["client-0"].info.get("number") == number

        async def walk(trace: Trace) -> None:
            nonlocal number
            number += 1
            with trace:
                await member.set_info(number=number)
                await until(seen)
            await turns(SETTLED)

        return await count(walk)


def member_of(settings: RoleSettings) -> Membership:
    """A membership without a role behind it."""
    identity = settings.identity
    return Membership(
        network=settings.network,
        controller=settings.controller,
        identity=identity,
        record=NodeRecord(role=identity.role, address="tcp://127.0.0.1:9", incarnation=identity.incarnation),
        waits=settings.waits,
        traffic=Traffic(identity.node),
    )


MODEL = ModelSpec(
    name="one-kib",
    input_shape=(1, 3, 5),
    layers=(
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("fc", "dense", outputs=16),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    ),
)
"""A model of 15 x 16 weights and 16 biases: 1 KiB in float32."""


class Worker:
    """The parts of a worker in a real run: data client, engine, and training on a copy, without threads."""

    def __init__(
        self, servers: Servers, data: DataClient, identity: Identity, replica_generation: int
    ) -> None:
        self.data = data
        self.reports: list[Finished] = []
        client = servers.client(identity=identity, replica_generation=replica_generation).client
        self.mode = CopyMode(
            ModeSetup(
                config=servers.config,
                table=servers.table,
                buckets=servers.map.buckets,
                client=client,
                events=GroupEvents(
                    finished=self.reports.append,
                    landed=lambda tag: self.engine.deliver("landed", tag, None),
                    section_done=lambda *_: None,
                ),
            ),
            model=servers.model,
            session=client._session,
            buffers=BufferPool(),
            in_flight=1,
        )
        self.pool = ManualPool(context=self.mode.new_scratch())
        contexts = [self.mode.new_context() for _ in range(2)]
        self.engine = Engine(self.mode.graph(), pool=self.pool, in_flight=1, contexts=contexts)

    def admit(self) -> None:
        """Admit the next group to the engine."""
        group = self.data.take()
        lease = group.lease
        tag = Tag(lease.epoch, lease.number, lease.attempt)
        self.engine.admit_nowait(tag)
        self.engine.deliver("group", tag, group)

    async def push(self, trace: Trace) -> None:
        """Train the admitted group unseen, and push its step; then report the group unseen."""
        self.pool.execute()
        with trace:
            self.pool.deliver()
            await until(self.is_installed)
        self.data.finished(self.reports.pop())

    def is_installed(self) -> bool:
        """Whether the values after the step are installed, and its push is acknowledged."""
        return bool(self.reports) and not self.engine._scheduler._live

    def has_all(self) -> bool:
        """Whether the data client has all groups that it reads ahead."""
        return len(self.data._groups) == 2 * ANSWER


@asynccontextmanager
async def worker_in_training() -> AsyncIterator[Worker]:
    """Run controller, parameter server, data server and worker over TCP, with a run in its first epoch."""
    options = {"weights": "copy", "kernels": "numpy", "protocol": "delta", "rate": 0.1}
    groups = ANSWER * (-(-WARM // ANSWER) + COUNTED + 4)
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(
            servers_of(
                tcp_network(), spec=MODEL, waits=PATIENT, images_per_group=1, read_ahead=2 * ANSWER, **options
            )
        )

        # Before the roles end, so that no member misses its controller.
        stack.callback(lambda: [task.cancel() for task in servers.tasks])

        def settings(role: str) -> RoleSettings:
            return RoleSettings(
                network=servers.network,
                address=LOOPBACK,
                identity=servers.identity(role),
                waits=servers.waits,
                controller=servers.controller.address,
            )

        dataset = tiny_dataset(groups, shape=MODEL.input_shape, classes=16)
        await stack.enter_async_context(DataServer(settings("data"), dataset))
        place = settings("worker")
        member = member_of(place)
        servers.tasks.append(servers._group.create_task(member.run(), name="worker"))
        placed = await member.wait_for(lambda m: m.replica_generation(0) > 0, "a place", 30.0)
        generation = placed.replica_generation(0)
        await member.set_node(ready=ready_word("run", generation))
        await member.wait_for(lambda m: m.epoch is not None, "the epoch", 30.0)
        data = DataClient(
            Endpoint(servers.network, place.identity, Traffic("worker-0")),
            WorkerSlot("run", 0, generation, 0),
            address=lambda: member.map.dealer_address,
            servers=lambda: member.map.data_servers_for(0),
            ahead=2 * ANSWER,
            limits=GroupLimits(images=1, shape=MODEL.input_shape, classes=16, epochs=1, train_images=groups),
            waits=servers.waits,
        )
        servers.tasks.append(servers._group.create_task(data.run(), name="data"))
        worker = Worker(servers, data, place.identity, generation)
        await worker.mode.prepare()
        await stack.enter_async_context(worker.engine)
        await until(worker.has_all)
        yield worker


async def worker_push() -> Counts:
    """One push of a worker's step of 1 KiB on a copy, from the trained group to the installed values."""
    async with worker_in_training() as worker:

        async def walk(trace: Trace) -> None:
            worker.admit()
            await turns(SETTLED)  # the data client may ask for groups, and report some
            await worker.push(trace)

        return await count(walk)


async def image_group() -> Counts:
    """One group of an answer of eight, from the worker's question to the group's admission to the engine."""
    async with worker_in_training() as worker:

        async def walk(trace: Trace) -> None:
            for _ in range(ANSWER - 1):
                with trace:
                    worker.admit()
                await worker.push(Trace())
            with trace:
                worker.admit()  # the client has half of its groups left, and asks for the next eight
                await until(worker.has_all)
            await worker.push(Trace())
            await turns(SETTLED)  # the reports

        return await count(walk, parts=ANSWER)


JOURNEYS: dict[str, Callable[[], Coroutine[Any, Any, Counts]]] = {
    "push_pull": push_pull,
    "worker push": worker_push,
    "image group": image_group,
    "map change": map_change,
}


def counts_of(name: str) -> Counts:
    """Run a journey by its name, and return its counts."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(JOURNEYS[name]())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(JOURNEYS), metavar="NAME", help=", ".join(JOURNEYS))
    parser.add_argument("--files", action="store_true", help="list the calls of each file")
    arguments = parser.parse_args()
    for name in arguments.names:
        counts = counts_of(name)
        sys.stdout.write(f"{name}: {counts.calls} calls, {counts.files} files, {counts.lines} lines\n")
        if arguments.files:
            sys.stdout.writelines(f"{calls:6} {file}\n" for file, calls in counts.by_file.most_common())


if __name__ == "__main__":
    main()
