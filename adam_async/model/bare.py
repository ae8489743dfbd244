"""Pure: the bare kernel loop, one training step without anything around it.

It is the yardstick for the system: what the same kernels, rule and group size reach when nothing is queued,
sent or shared. Whoever measures it runs it on as many threads as wanted, each with its own context and
buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adam_async.model.context import Context
from adam_async.model.layer import Array, Weights
from adam_async.model.network import Network
from adam_async.model.rules import Rule, RuleState, new_scratch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBuffers:
    """One thread's gradients, by the name of the tensor, and its scratch for the rule."""

    gradients: Mapping[str, Array]
    scratch: Array

    @classmethod
    def of(cls, network: Network) -> "StepBuffers":
        """Allocate them."""
        gradients = {p.name: np.empty(p.shape, network.dtype) for p in network.parameters}
        return cls(gradients=gradients, scratch=new_scratch(network.dtype))


def new_rule_state(network: Network, rule: Rule) -> dict[str, RuleState]:
    """Allocate a rule's state for every tensor of a network."""
    return {p.name: rule.new_state(p.shape, network.dtype) for p in network.parameters}


def train_step(
    network: Network,
    weights: Weights,
    state: Mapping[str, RuleState],
    context: Context,
    buffers: StepBuffers,
    rule: Rule,
    *,
    rate: float,
) -> float:
    """Train on the group loaded in `context`: forward, backward, all gradients, rule. Returns the mean loss.

    Each layer's tensors are updated right after its own way back, while its arrays are in the cache; no
    layer before it reads them again, so the result is that of updating at the end.
    """
    loss = network.forward(weights, context)
    for number in reversed(range(len(network.layers))):
        network.backward_layers(weights, context, range(number, number + 1))
        for parameter in network.layers[number].parameters:
            name = parameter.name
            network.delta(context, name, out=buffers.gradients[name])
            rule.apply(
                weights[name], state[name], buffers.gradients[name], rate=rate, scratch=buffers.scratch
            )
    return loss
