"""Pure: the bare kernel loop, one training step without anything around it.

It is the yardstick for the system: what the same kernels, rule and group size reach when nothing is queued,
sent or shared. Whoever measures it runs it on as many threads as wanted, each with its own context and
buffers.
"""

from collections.abc import Mapping

from adam_async.model.context import Context
from adam_async.model.in_place import InPlaceStep
from adam_async.model.layer import Weights
from adam_async.model.network import Network
from adam_async.model.rules import Rule, RuleState
from adam_async.model.step import StepBuffers as StepBuffers


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
    """Train on the group loaded in `context`, changing weights and state. Returns the mean loss."""
    return InPlaceStep(network, rule).train(weights, state, context, buffers, rate=rate).loss
