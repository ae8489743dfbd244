"""Adagrad on shards is Adagrad in one process, bit for bit, on the same gradients in the same order."""

from itertools import pairwise

import numpy as np
import pytest

from adam_async.driver.replay.decode import load_record, make_recording
from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.rules import Adagrad, new_scratch
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from tests.adam_async.exactness.serial import assert_equal_bits, order_of
from tests.adam_async.model.passes import gradients_of
from tests.adam_async.runs import NETWORKS, SHARDED, tiny_dataset, train

OPTIONS = {
    "rule": "adagrad",
    "rate": 0.01,
    "schedule": "constant",
    "epochs": 2,
    "images_per_group": 4,
    "threads": 1,
    "protocol": "delta",
    "weights": "copy",
    "record": True,
    **SHARDED,
}


class OneProcess:
    """Adagrad on whole tensors, of which a range may be stepped at a time, and gradients of any values."""

    def __init__(self, config, dataset):
        self.config, self.dataset = config, dataset
        self.model = Network(digits(), dtype=config.dtype, kernels=config.kernels)
        self.weights = self.model.initial_weights(Dice(config.seed))
        self.rule = Adagrad()
        self.state = {p.name: self.rule.new_state(p.shape, self.model.dtype) for p in self.model.parameters}
        self._context = self.model.context(config.images_per_group)
        self._scratch = new_scratch(self.model.dtype)

    def gradients(self, weights, epoch, number):
        chosen = order_of(self.config, self.dataset, epoch)[number]
        self._context.load(self.dataset.train_images[chosen], self.dataset.train_labels[chosen])
        self.model.forward(weights, self._context)
        self.model.backward(weights, self._context)
        return gradients_of(self.model, self._context)

    def step(self, name, gradient, chosen=slice(None)):
        flat = self.weights[name].reshape(-1)[chosen]
        state = {key: values.reshape(-1)[chosen] for key, values in self.state[name].items()}
        self.rule.apply(
            flat, state, gradient.reshape(-1)[chosen], rate=self.config.rate, scratch=self._scratch
        )


@pytest.mark.thorough
@pytest.mark.parametrize("network", NETWORKS)
async def test_one_worker_with_one_group_in_flight_steps_as_one_process_does(network):
    config = Config(in_flight=1, **OPTIONS)
    result = await train(config, NETWORKS[network]())
    alone = OneProcess(config, tiny_dataset())
    for epoch in (1, 2):
        for number in range(15):
            for name, gradient in alone.gradients(alone.weights, epoch, number).items():
                alone.step(name, gradient)
    assert_equal_bits(result.weights, alone.weights)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [{}, {"consistency": "ssp:1"}], ids=["asp", "ssp"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_two_workers_step_as_one_process_does_in_the_order_that_each_shard_recorded(network, mode):
    config = Config(replicas=2, in_flight=3, **mode, **OPTIONS)
    result = await train(config, NETWORKS[network]())
    header, logs = load_record(result.record, origin="the run")
    recording = make_recording(header, logs, result.model)
    alone = OneProcess(config, tiny_dataset())
    shards = table_of(alone.model, shard_bytes=config.shard_bytes).shards
    history = [[alone.weights[s.tensor].reshape(-1)[s.start : s.stop].copy()] for s in shards]
    made = {}
    waiting = [(reads, group) for reads in recording.reads.values() for group in range(len(reads.numbers))]
    orders = [list(zip(order.clients, order.clocks, strict=True)) for order in recording.orders]
    while waiting or any(orders):
        left = len(waiting) + sum(map(len, orders))
        for reads, group in list(waiting):
            read = reads.versions[group]
            if all(version < len(versions) for version, versions in zip(read, history, strict=True)):
                values = {name: np.empty_like(whole) for name, whole in alone.weights.items()}
                for spec, version, versions in zip(shards, read, history, strict=True):
                    values[spec.tensor].reshape(-1)[spec.start : spec.stop] = versions[version]
                found = alone.gradients(values, int(reads.epochs[group]), int(reads.numbers[group]))
                made[reads.replica, reads.clocks[group]] = found
                waiting.remove((reads, group))
        for spec, order, versions in zip(shards, orders, history, strict=True):
            while order and order[0] in made:
                chosen = slice(spec.start, spec.stop)
                alone.step(spec.tensor, made[order.pop(0)][spec.tensor], chosen)
                versions.append(alone.weights[spec.tensor].reshape(-1)[chosen].copy())
        assert len(waiting) + sum(map(len, orders)) < left, "the record goes in a circle"
    assert_equal_bits(result.weights, alone.weights)
    apart = [order.clients.tolist() for order in recording.orders]
    assert any(a != b for replicas in apart for a, b in pairwise(replicas)), "nobody came between"
