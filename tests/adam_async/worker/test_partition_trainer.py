"""Partitions of a model train groups whose blocks arrive in any order; sent blocks are in lent memory."""

import random
from contextlib import AsyncExitStack
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Lease
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.planner import layers_plan, vertical_plan
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.run.shard_table import part_table
from adam_async.worker.partition_trainer import PartitionTrainer, WirePool, partition_graph
from adam_async.worker.puller import TensorCopy, WorkerWeights
from adam_async.worker.push_plan import plan_pushes
from dataflow import ComputePool, Engine, Tag
from tests.adam_async.model.parts import run_whole
from tests.adam_async.runs import turns

MODEL = Network(digits(), dtype="float64")
WEIGHTS = MODEL.initial_weights(Dice(1))
GROUP, GROUPS, IN_FLIGHT = 4, 12, 3
PLANS = {
    "exchange": vertical_plan(MODEL, 3, halo="exchange"),
    "recompute": vertical_plan(MODEL, 3, halo="recompute"),
    "layers": layers_plan(MODEL, 3),
}


class Part:
    """One partition with its graph and engine; its blocks go to a hub, and its pushes are kept."""

    def __init__(self, plan, worker, hub):
        self.partition = partition = Partition(MODEL, plan, worker)
        network = partition.network
        table = part_table(table_of(MODEL, shard_bytes=4 << 10, plan=plan.to_dict()), network.parameters)
        weights = WorkerWeights()
        for p in network.parameters:
            weights.install(
                [TensorCopy(p.name, WEIGHTS[p.name][p.first_row : p.first_row + p.shape[0]].copy(), (1,))]
            )
        self.trainer = PartitionTrainer(
            partition,
            Config(images_per_group=GROUP, seed=1),
            weights=weights,
            plan=plan_pushes(
                network, table, ["ps"] * 64, images=GROUP, wanted="delta", owned=partition.owned
            ),
            buffers=1,
        )
        self.pushed = {}
        self.losses = {}
        self.graph = partition_graph(
            self.trainer,
            partition,
            lambda target, parcel: hub.append((target, parcel)),
            self._push,
            waits_for_pull=False,
        )

    def _push(self, firing, trained):
        number = firing.tag.number
        assert number not in self.pushed, "a group is trained once"
        self.losses[number] = trained.loss
        self.pushed[number] = {name: trained.buffer.delta(name).copy() for name in self.trained_here}
        self.trainer.group_buffers.give_back(trained.buffer)

    @property
    def trained_here(self):
        return [p.name for p in self.partition.network.trained if p.name in self.partition.owned]

    def group(self, number):
        """A group as a data server gives it: only the rows that are asked for."""
        images, labels = group_of(number)
        rows = self.partition.image_rows
        if rows == (0, 0):
            images = None
        elif rows is not None:
            images = images[:, :, slice(*rows)]
        return ImageGroup(Lease(1, number, 1, len(labels)), images, labels)


def group_of(number):
    """Images and labels; the last group is a short one."""
    count = GROUP if number < GROUPS - 1 else GROUP - 1
    dice = np.random.default_rng(number)
    return dice.integers(0, 255, (count, 1, 8, 8), dtype=np.uint8), dice.integers(0, 10, count)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 3))])
@pytest.mark.parametrize("plan", PLANS)
async def test_in_whatever_order_blocks_come_each_group_is_trained_once_and_right(plan, seed):
    dice, hub = random.Random(seed), []
    parts = [Part(PLANS[plan], worker, hub) for worker in range(3)]
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            ComputePool(threads=2, name="parts", contexts=WeakKeyDictionary)
        )
        engines = []
        for part in parts:
            contexts = [part.partition.network.context(GROUP) for _ in range(IN_FLIGHT)]
            engine = Engine(part.graph, pool=pool, in_flight=IN_FLIGHT, contexts=contexts)
            engines.append(await stack.enter_async_context(engine))
        begun = [0, 0, 0]
        while any(len(part.pushed) < GROUPS for part in parts):
            worker = dice.randrange(3)
            if begun[worker] < GROUPS and engines[worker].has_room and dice.random() < 0.3:
                number = begun[worker]
                begun[worker] += 1
                engines[worker].admit_nowait(Tag(1, number, 1))
                engines[worker].deliver("group", Tag(1, number, 1), parts[worker].group(number))
            if hub and dice.random() < 0.5:
                target, parcel = hub.pop(dice.randrange(len(hub)))
                block = parcel.block
                tag = Tag(block.epoch, block.number, block.attempt)
                engines[target].deliver(f"in-{block.crossing}", tag, parcel.tensor.copy())
                parcel.tensor.fill(np.nan)  # it is the sender's again, who writes over it
                parcel.let_go()
            await turns()
        assert not hub
        for engine in engines:
            counts = engine.statistics()
            assert (counts.finished, counts.early_tokens, counts.dropped_tokens) == (GROUPS, 0, 0)
    for part in parts:
        buffer_pools = part.trainer._buffer_pools.values()
        assert sum(len(buffer_pool._free) for buffer_pool in buffer_pools) == part.trainer.wires_made
    for number in range(GROUPS):
        assert_right(parts, number)


def assert_right(parts, number):
    """Compare the pushes and losses of all partitions for a group with those of the whole model."""
    images, labels = group_of(number)
    expected = run_whole(MODEL, WEIGHTS, images, labels)
    (loss,) = {part.losses[number] for part in parts} - {None}  # one part computes it
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    rows = dict.fromkeys(expected.gradients, 0)
    for part in parts:
        for name, value in part.pushed[number].items():
            parameter = part.partition.network.parameter(name)
            right = expected.gradients[name][parameter.first_row :][: parameter.shape[0]]
            np.testing.assert_allclose(value, right, rtol=1e-9, atol=1e-12, err_msg=name)
            rows[name] += len(value)
    assert rows == {name: len(value) for name, value in expected.gradients.items()}


def buffer_pool_of():
    partition = Partition(MODEL, PLANS["layers"], 0)
    return WirePool(partition, partition.outgoing[0], GROUP)


def test_memory_of_a_short_group_is_the_beginning_of_that_of_a_full_one():
    buffer_pool = buffer_pool_of()
    flat, whole = buffer_pool.take(GROUP)
    buffer_pool.give_back(flat, whole)
    again, short = buffer_pool.take(1)
    assert again is flat
    assert short.shape == (*whole.shape[:-1], 1)
    assert short.flags.c_contiguous
    assert np.shares_memory(short, flat[: short.size])


def test_wire_memory_is_made_only_while_all_is_lent():
    buffer_pool = buffer_pool_of()
    first, second = buffer_pool.take(GROUP), buffer_pool.take(GROUP)
    assert not np.shares_memory(first[0], second[0])
    for flat, tensor in (first, second):
        buffer_pool.give_back(flat, tensor)
    for _ in range(10):
        buffer_pool.give_back(*buffer_pool.take(GROUP))
    assert buffer_pool.made == 2


@pytest.mark.parametrize("plan", PLANS)
def test_each_segment_waits_for_what_it_receives_and_the_sum_for_what_others_computed(plan):
    for worker in range(3):
        part = Part(PLANS[plan], worker, [])
        nodes = {node.name: node for node in part.graph.nodes}
        partition = part.partition
        assert set(part.graph.inputs) == {"group", *(f"in-{c.number}" for c in partition.incoming)}
        for number, segment in enumerate(partition.segments):
            node = nodes[f"segment-{number}"]
            assert node.heavy
            assert set(node.inputs[1:]) == {f"in-{crossing}" for crossing in segment.receives}
        assert ("summed" in nodes) == bool(partition.sums)
        assert [node.name for node in part.graph.nodes if not node.heavy][-1] == "push"
