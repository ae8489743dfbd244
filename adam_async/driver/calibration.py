"""Measured times of a network's layers, on one thread of this machine while no other thread computes.

A *pass* trains one group: forward, backward, weight gradients and a step of plain SGD. Passes over the
whole network alternate with passes that read the clock after each layer, so every layer runs with about the
same cache contents as in training. A call of a single layer has an overhead; for a group of one image the
overhead takes longer than the layer itself. So the calibration scales the layer times until their sum is the
time of a whole pass. Medians over all passes hide disturbances of some milliseconds.

The module reads no clock itself; the caller passes a clock, and provides the thread.
"""

from collections.abc import Callable
from math import prod
from statistics import median

import numpy as np

from adam_async.model.context import Context, StepBuffers
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Array, Layer, Weights
from adam_async.model.network import Network
from adam_async.model.partition.planner import LayerTimes
from adam_async.model.rules import Rule, RuleState, Sgd

SECONDS = 0.4
"""Time in seconds after which no further pass begins, once `LEAST_PASSES` are done."""
LEAST_PASSES, MOST_PASSES = 3, 300
"""Minimum and maximum number of measured passes of each kind."""
RATE = 1e-4
"""Learning rate of the steps, small enough to leave the weights almost unchanged."""

Clock = Callable[[], float]


def calibrate(network: Network, images: int, *, clock: Clock) -> LayerTimes:
    """Measure one thread's time for each layer of a network: forward, backward, update.

    The measurement takes about half a second, or longer if `LEAST_PASSES` take longer. Run the function on a
    thread while no other thread computes, after `Network.warm_up`.

    Args:
        clock: Returns seconds, with a resolution of microseconds.

    Raises:
        ModelError: `images` is below 1.
    """
    passes = _Passes(network, images, clock)
    passes.layers()  # makes tapes and first touches memory
    passes.whole()
    whole: list[float] = []
    layers: list[dict[str, float]] = []
    begin = clock()
    while len(whole) < LEAST_PASSES or (len(whole) < MOST_PASSES and clock() - begin < SECONDS):
        whole.append(passes.whole())
        layers.append(passes.layers())
    typical = {layer.name: median(each[layer.name] for each in layers) for layer in network.layers}
    total = sum(typical.values())
    scale = median(whole) / total if total > 0 else 1.0
    return LayerTimes(
        images=images, seconds={name: seconds * scale for name, seconds in typical.items()}, measured=True
    )


class _Passes:
    """One group of random images, with weights and memory to train on it."""

    def __init__(self, network: Network, images: int, clock: Clock) -> None:
        self._network = network
        self._clock = clock
        self._rule: Rule = Sgd()
        self._weights: Weights = network.initial_weights(Dice(1))
        self._state: dict[str, RuleState] = {
            p.name: self._rule.new_state(p.shape, network.dtype) for p in network.trained
        }
        self._buffers = StepBuffers.of(network.trained, network.dtype)
        self._context: Context = network.context(images)
        drawn = Dice(1).bits("images", count=images * prod(network.input_shape))
        pixels = (drawn >> np.uint64(56)).astype(np.uint8).reshape(images, *network.input_shape)
        self._context.load(pixels, _labels(network, images), dice=Dice(1), keys=(0,))

    def whole(self) -> float:
        """Train the group once; return the duration in seconds."""
        network, begin = self._network, self._clock()
        network.forward(self._weights, self._context)
        network.backward(self._weights, self._context)
        for layer in reversed(network.layers):
            self._update(layer)
        return self._clock() - begin

    def layers(self) -> dict[str, float]:
        """Train the group once, layer by layer; return the duration of each layer in seconds."""
        network, found = self._network, {}
        for number, layer in enumerate(network.layers):
            begin = self._clock()
            network.forward_layers(self._weights, self._context, range(number, number + 1))
            found[layer.name] = self._clock() - begin
        for number in reversed(range(len(network.layers))):
            layer, begin = network.layers[number], self._clock()
            network.backward_layers(self._weights, self._context, range(number, number + 1))
            self._update(layer)
            found[layer.name] += self._clock() - begin
        return found

    def _update(self, layer: Layer) -> None:
        for parameter in layer.parameters:
            if parameter.frozen:
                continue
            name = parameter.name
            gradient = self._buffers.gradients[name]
            self._network.deltas(self._context, {name: gradient})
            values = self._weights[name]
            self._rule.apply(values, self._state[name], gradient, rate=RATE, scratch=self._buffers.scratch)


def _labels(network: Network, images: int) -> Array:
    """Return labels for the loss: class 0 for a vector of scores, otherwise zeros in the scores' shape."""
    shape = network.layers[-1].input_shapes[0]
    return np.zeros(images, np.int64) if len(shape) == 1 else np.zeros((images, *shape), network.dtype)
