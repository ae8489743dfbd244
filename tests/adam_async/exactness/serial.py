"""Serial training without any of the system: the reference of the tests of exactness."""

from collections import deque

import numpy as np

from adam_async.data_server.epoch import EpochOrders
from adam_async.model.keyed_random import Dice
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.run.config import Config
from tests.adam_async.model.passes import gradients_of

RULES = {
    "sgd": {"rule": "sgd", "rate": 0.1},
    "momentum": {"rule": "sgd", "rate": 0.05, "momentum": 0.9},
    "decay": {"rule": "sgd", "rate": 0.05, "momentum": 0.5, "weight_decay": 0.01},
    "nesterov": {"rule": "sgd", "rate": 0.05, "momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
    "adagrad": {"rule": "adagrad", "rate": 0.01, "initial_accumulator_value": 0.1},
    "adam": {"rule": "adam", "rate": 0.002, "weight_decay": 0.001, "betas": (0.9, 0.95), "eps": 1e-6},
    "adamw": {"rule": "adamw", "rate": 0.002, "weight_decay": 0.1},
}


def rule_step(config, p, g, memory, t, *, rate=None):
    """One application of the rule of a run, or of a store's array, to one whole tensor."""
    rate = config.rate if rate is None else rate
    rule = config.rule if isinstance(config, Config) else type(config).__name__.lower()
    if rule == "adamw":
        p = p - rate * config.weight_decay * p
    else:
        g = g + config.weight_decay * p
    if rule in ("auto", "sgd"):
        memory["m"] = config.momentum * memory.get("m", 0.0) + g
        return p - rate * (g + config.momentum * memory["m"] if config.nesterov else memory["m"])
    if rule == "adagrad":
        memory["s"] = memory.get("s", config.initial_accumulator_value) + g * g
        return p - rate * g / (np.sqrt(memory["s"]) + (config.eps or 1e-10))
    b1, b2 = config.betas or (0.9, 0.999)
    memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
    memory["s"] = b2 * memory.get("s", 0.0) + (1 - b2) * g * g
    root = np.sqrt(memory["s"] / (1 - b2**t))
    return p - rate * memory["m"] / (1 - b1**t) / (root + (config.eps or 1e-8))


def order_of(config, dataset, epoch):
    """The groups of an epoch, each the numbers of its images."""
    order = EpochOrders(
        Dice(config.seed), num_images=len(dataset.train_labels), images_per_group=config.images_per_group
    ).order(epoch)
    return [order.group(number) for number in range(order.num_groups)]


def stretches_of(config, groups, epoch):
    """The steps of an epoch in lockstep, as (first group, behind the last), between two meetings.

    In the warm start of the run, rounded up to whole steps of one replica, that one is alone.
    """
    round_groups, first = config.push_every, (epoch - 1) * groups
    warm = min(max(-(-config.warm_start // round_groups) * round_groups - first, 0), groups)
    alone = [(at, min(at + round_groups, warm)) for at in range(0, warm, round_groups)]
    size = round_groups * config.replicas
    together = [(at, min(at + size, groups)) for at in range(warm, groups, size)]
    return [stretch for stretch in (alone, together) if stretch]


def lockstep_sgd(config, dataset, spec=None, *, layers=BUILTIN_LAYERS, rate_at=None, refused=(), limit=None):
    """SGD on one thread on all images of a step at once; with `lag` on gradients of delayed values (CL-08).

    Args:
        config: The run, of consistency bsp.
        dataset: The images.
        spec: The model.
        layers: Kinds of layers that it may use.
        rate_at: Rate by progress, in epochs; without it that of the run.
        limit: Changes a step's gradients, given the values that they are of and the rate.
        refused: Images without a finite gradient: the pushes that they are in count for nothing.

    Returns:
        The weights, and how many steps were made.
    """
    model = Network(spec or digits(), dtype=config.dtype, layers=layers)
    weights = model.initial_weights(Dice(config.seed))
    context = model.context(config.images_per_group * config.push_every * config.replicas)
    memory = {name: {} for name in weights}
    steps = 0
    for epoch in range(1, config.epochs + 1):
        groups = order_of(config, dataset, epoch)
        for stretch in stretches_of(config, len(groups), epoch):
            # At a sync clock the values are those of every replica's last step, with any lag.
            history = deque([dict(weights)], maxlen=1 + config.lag)
            for first, behind in stretch:
                turns = [
                    groups[at : min(at + config.push_every, behind)]
                    for at in range(first, behind, config.push_every)
                ]
                pushes = [np.concatenate(round_groups) for round_groups in turns]
                chosen = np.concatenate([push for push in pushes if not np.isin(push, refused).any()])
                read = history[0]
                context.load(dataset.train_images[chosen], dataset.train_labels[chosen])
                model.forward(read, context)
                model.backward(read, context)
                steps += 1
                rate = config.rate if rate_at is None else rate_at(epoch - 1 + first / len(groups))
                gradients = gradients_of(model, context)
                if limit is not None:
                    limit(gradients, read, rate)
                for name, gradient in gradients.items():
                    p = weights[name]
                    stepped = rule_step(config, p, gradient, memory[name], steps, rate=rate)
                    weights[name] = stepped.astype(p.dtype)
                history.append(dict(weights))
    return weights, steps


def assert_close(found, expected, tolerance):
    """Whether each tensor is as expected, by norm."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        distance, size = np.linalg.norm(found[name] - values), np.linalg.norm(values)
        assert distance <= tolerance * size, f"{name} is off by {distance:.2e} of {size:.2e}"


def assert_equal_bits(found, expected):
    """Whether each tensor is as expected, to the last bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), f"{name} differs"
