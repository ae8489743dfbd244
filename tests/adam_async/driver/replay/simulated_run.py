"""An asynchronous run in a random order: real code of workers and servers, no loop, no threads.

Only the order of each link is fixed: any worker trains its next group, any message or
answer arrives, any server applies a batch, in any order. Values may land while a group is being computed.
Workers may be lost with all that is on their links: other generations train the groups that some shard lacks.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from adam_async.data_server.client import ImageGroup
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.epoch import EpochOrders
from adam_async.driver.replay.decode import Log
from adam_async.driver.replay.recording import Header
from adam_async.driver.replay.run import digest
from adam_async.messages import Lease, Pull, Push
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.events import (
    Answer,
    Applied,
    PullArrived,
    PushArrived,
    ReplicasChanged,
    SendValues,
)
from adam_async.parameter_server.gradients import read_gradients
from adam_async.parameter_server.replay_log import OrderLog
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.config import Config
from adam_async.run.group_ranges import has_groups
from adam_async.run.ids import Replica
from adam_async.run.partition import table_of
from adam_async.run.shard_table import assign_buckets
from adam_async.worker.puller import Puller, Snapshot, WorkerWeights
from adam_async.worker.push_plan import plan_pushes
from adam_async.worker.pusher import Pusher, StepReads
from adam_async.worker.stepper import ReplicaClock, Stepper
from adam_async.worker.training import GroupTrainer, ThreadScratch
from transport import BufferPool

FIRST = 7
"""The first generation of each replica."""

LATE = 0.6
"""How often something arrives while a group is being computed."""


@dataclass
class Lane:
    """Messages on their way between one worker and one server: a connection of the worker's client."""

    replica: int
    generation: int
    there: deque[tuple[Any, Callable[..., None]]] = field(default_factory=deque)
    back: deque[Callable[[], None]] = field(default_factory=deque)
    numbers: dict[int, int] = field(default_factory=dict)

    def push(self, tensors: Any, call: Any, number: int, into: Any, *, shards: Any, **fields: Any) -> None:
        for shard in shards:
            self.numbers[shard] = self.numbers.get(shard, 0) + 1
        push = Push(
            store="run",
            session=self.replica + 50,
            incarnation=self.generation,
            replica=self.replica,
            generation=1,
            shards=shards,
            numbers=tuple(self.numbers[shard] for shard in shards),
            **fields,
        )

        def answered(versions: tuple[int, ...], flat: Any) -> None:
            answer: Any = SimpleNamespace(versions=versions, clock=0)
            call.pushed(number, answer, flat if push.pull else None)
            call.freed()

        self.there.append(((push, tensors), answered))

    def pull(self, shards: Any, call: Any, number: int, *_: Any) -> None:
        def answered(versions: tuple[int, ...], flat: Any) -> None:
            call.pulled(number, SimpleNamespace(versions=versions, clock=0), flat)

        self.there.append((Pull(store="run", generation=1, shards=tuple(shards)), answered))


class SimulatedServer:
    def __init__(self, run: "SimulatedRun", name: str) -> None:
        specs = [spec for spec in run.table.shards if run.buckets[spec.bucket] == name]
        self.name, self.run = name, run
        shards = [
            Shard(spec=spec, values=run.storage.values(spec), rule_state=run.storage.rule_state(spec))
            for spec in specs
        ]
        for shard in shards:
            first = run.network.initial_values(Dice(run.config.seed), shard.spec.tensor)
            shard.values[:] = first.reshape(-1)[shard.spec.start : shard.spec.stop]
        self.log = OrderLog([int(spec.id) for spec in specs])
        self.applier = Applier(run.rule, specs, run.network.dtype)
        self.state = ServerState(
            store="run",
            generation=1,
            shards=shards,
            scale_by_staleness=run.config.scale_by_staleness,
            log=self.log,
        )
        self.state.handle(ReplicasChanged({Replica(n): FIRST for n in range(run.config.replicas)}))

    def take(self, lane: Lane) -> None:
        body, answered = lane.there.popleft()
        request = partial(lane.back.append), answered
        if isinstance(body, tuple):
            push, tensors = body
            table = self.run.table.shards
            gradients, finite = read_gradients(push, tensors, table, self.run.network.dtype), None
            if not gradients.is_sure:
                finite = self.applier.check_finite([table[number] for number in push.shards], gradients)
                gradients = gradients.trusted()
            self.perform(self.state.handle(PushArrived(request, push, gradients, finite)))
        else:
            self.perform(self.state.handle(PullArrived(request, body)))

    def apply(self) -> None:
        batch, effects = self.state.take_batch()
        self.perform(effects)
        if batch is not None:
            whole = len(batch.shards()) == len(batch.pushes[0].push.shards)
            gradients = [
                queued.gradients if whole else queued.gradients.only(queued.accepted)
                for queued in batch.pushes
            ]
            self.applier.apply_pushes(batch.shards(), gradients, batch.rates)
            self.perform(self.state.handle(Applied(batch)))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            assert isinstance(effect, Answer | SendValues), effect
            send, answered = effect.request
            versions = tuple(shard.version for shard in effect.shards)
            flat = np.concatenate([shard.values for shard in effect.shards]) if effect.shards else None
            send(partial(answered, versions, flat))


class SimulatedWeights(WorkerWeights):
    """A copy that may change right after a group has read it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__(recorded=True)
        self._meanwhile = meanwhile

    def snapshot(self) -> Snapshot:
        read = super().snapshot()
        self._meanwhile()
        return read


class SimulatedWorker:
    """A worker that is also the client of the servers."""

    def __init__(self, run: "SimulatedRun", replica: int, generation: int = FIRST) -> None:
        config, network = run.config, run.network
        self.run, self.replica, self.generation = run, replica, generation
        self.lanes = self.connections = {name: Lane(replica, generation) for name in run.names}
        self.trained: list[int] = []
        self.weights = SimulatedWeights(self.meanwhile)
        plan = plan_pushes(
            network,
            run.table,
            run.buckets,
            images=config.images_per_group * config.push_every,
            wanted=config.protocol,
        )
        client: Any = self
        puller = Puller(
            network=network,
            table=run.table,
            buckets=run.buckets,
            client=client,
            weights=self.weights,
            buffers=BufferPool(),
        )
        trainer = self.trainer = GroupTrainer(network, config, weights=self.weights, plan=plan, buffers=2)
        shards = {name: len(specs) for name, specs in run.table.by_tensor.items()}
        pusher = Pusher(
            config,
            plan=plan,
            client=client,
            puller=puller,
            trainer=trainer,
            on_finished=lambda _: None,
            reads=StepReads(shards),
        )
        clock = ReplicaClock(push_every=config.push_every, pull_every=config.pull_every)
        self.stepper = Stepper(clock, pusher)
        self.bench: Any = SimpleNamespace(
            scratch=ThreadScratch(network, network.context(config.images_per_group))
        )
        puller.pull(lambda: None)

    def meanwhile(self) -> None:
        """Something may arrive while a group is being computed."""
        for lane in self.lanes.values():
            while lane.back and self.run.dice.random() < LATE:
                lane.back.popleft()()

    def train(self, epoch: int, number: int, attempt: int) -> None:
        images, labels = self.run.group(epoch, number)
        progress = epoch - 1 + number / self.run.groups
        lease = Lease(epoch, number, attempt, len(labels), progress)
        self.trained.append(number)
        self.stepper.add(self.bench, self.trainer.train(self.bench, ImageGroup(lease, images, labels)))


class SimulatedRun:
    """Run at construction; `header` and `logs` are the record, `weights` the final values.

    Args:
        losses: How often each epoch loses a worker.
    """

    def __init__(
        self, seed: int, config: Config, spec: ModelSpec, dataset: Dataset, losses: float = 0.0
    ) -> None:
        self.losses = losses
        self.dice = random.Random(seed)
        self.config = config
        self.dataset = dataset
        self.network = Network(spec, dtype=config.dtype, kernels="numpy")
        self.table = table_of(self.network, shard_bytes=config.shard_bytes)
        self.names = [f"ps-{number}" for number in range(config.servers)]
        self.buckets = assign_buckets(self.table, self.names)
        self.rule = rule_of(config)
        self.storage = ShardStorage(self.network.parameters, self.rule, self.network.dtype)
        self.servers = {name: SimulatedServer(self, name) for name in self.names}
        self.workers = [SimulatedWorker(self, replica) for replica in range(config.replicas)]
        self.orders = {
            epoch: EpochOrders(
                Dice(config.seed),
                num_images=len(dataset.train_labels),
                images_per_group=config.images_per_group,
            ).order(epoch)
            for epoch in range(1, config.epochs + 1)
        }
        self.groups = self.orders[1].num_groups
        self._settle()
        for epoch in self.orders:
            self._run_epoch(epoch)
        self.weights = {name: array.copy() for name, array in self.storage.weights.items()}
        self.header = Header(
            config=msgspec.to_builtins(config),
            spec=spec.to_dict(),
            data=dataset.info(),
            buckets=tuple(self.buckets),
            kernels="numpy",
            machine={},
            epochs=(),
            weights=digest(self.network, self.weights),
        )
        self.logs = [Log(home=name, data=server.log.packed()) for name, server in self.servers.items()]

    def group(self, epoch: int, number: int) -> tuple[Any, Any]:
        chosen = self.orders[epoch].group(number)
        return self.dataset.train_images[chosen], self.dataset.train_labels[chosen]

    def _run_epoch(self, epoch: int) -> None:
        replicas = len(self.workers)
        shares = [[(group, 1) for group in range(n, self.groups, replicas)] for n in range(replicas)]
        while any(shares):
            number = self.dice.randrange(replicas)
            if shares[number] and self.dice.random() < 0.5:
                self.workers[number].train(epoch, *shares[number].pop(0))
            self._round_groups()
            if self.losses and self.dice.random() < self.losses / self.groups:
                shares[number] = [*self._lose(number, epoch), *shares[number]]
        for worker in self.workers:
            worker.trained.clear()
            worker.stepper.close()
        self._settle()

    def _lose(self, number: int, epoch: int) -> list[tuple[int, int]]:
        """A worker is lost, and another one comes; returns the groups that some shard lacks."""
        lost, generation = self.workers[number], self.workers[number].generation + 1
        for lane in lost.lanes.values():
            lane.there.clear()
        live = {Replica(each.replica): each.generation for each in self.workers} | {
            Replica(number): generation
        }
        for server in self.servers.values():
            while not server.state.idle:
                server.apply()
            server.state.handle(ReplicasChanged(live))
        self.workers[number] = SimulatedWorker(self, number, generation)
        self._settle()
        kept = [
            shard.tables.groups for server in self.servers.values() for shard in server.state.shards.values()
        ]
        return [
            (group, 2)
            for group in lost.trained
            if not all(has_groups(groups, (epoch, group, group + 1)) for groups in kept)
        ]

    def _round_groups(self) -> None:
        """One thing happens somewhere."""
        name = self.dice.choice(self.names)
        lane = self.dice.choice(self.workers).lanes[name]
        match self.dice.randrange(3):
            case 0 if lane.there:
                self.servers[name].take(lane)
            case 1 if lane.back:
                lane.back.popleft()()
            case 2:
                self.servers[name].apply()

    def _settle(self) -> None:
        """Everything arrives."""
        lanes = [(name, lane) for worker in self.workers for name, lane in worker.lanes.items()]
        while any(lane.there or lane.back for _, lane in lanes) or any(
            not server.state.idle for server in self.servers.values()
        ):
            self._round_groups()
