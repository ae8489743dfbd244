"""Pure: one training step that changes weights in place.

If a worker's weights are the shard's own memory, no push carries a gradient. The thread that computes a
gradient applies the rule, without a lock. Several threads may change the same weights and rule state at once,
so an update may get lost, as in Hogwild. The weights stay finite: each gradient is checked before its tensor
changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from adam_async.model.context import BEGUN, Context, JobNotes, StepBuffers, StepInput, StepOutcome, is_finite
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Array, Weights
from adam_async.model.network import Network
from adam_async.model.rules import Rule, RuleState, Sgd

CALL_WORK = 100_000_000
"""Number of multiply-adds, forward, up to which groups are trained in one call. The call takes about 20 ms: a
reader of the weights waits for its end."""


class InPlaceStep:
    """Forward, backward and rule on given memory. Holds no arrays, so any number of threads may share it.

    Args:
        network: The network to train.
        rule: Update rule of the weights.
    """

    def __init__(self, network: Network, rule: Rule) -> None:
        self._network = network
        self._rule = rule

    def new_scratch(self) -> StepBuffers:
        """Allocate the buffers that one thread needs in addition to its context."""
        return StepBuffers.of(self._network.trained, self._network.dtype)

    def train(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: Context,
        scratch: StepBuffers,
        *,
        rate: float,
    ) -> StepOutcome:
        """Train on the group loaded in `context`, changing `weights` and `state`.

        The step updates each layer's tensors right after its backward, while its arrays are in the cache. No
        earlier layer reads these tensors again, so the result of one thread alone equals updates at the end.

        Args:
            weights: All tensors of the network, C-contiguous and writable.
            state: State of each tensor, from the rule's `new_state`.
            context: The thread's context for training, with images and labels loaded.
            scratch: The thread's buffers, from `new_scratch`.
            rate: Learning rate of this step.

        Raises:
            ModelError: An array has the wrong shape, dtype or layout.
        """
        network, refused, engine = self._network, [], context.kernel_set.engine
        if engine is not None and type(self._rule) is Sgd:
            return engine.descend(weights, state, context, scratch, self._rule, float(rate))
        loss = network.forward(weights, context)
        for number in reversed(range(len(network.layers))):
            network.backward_layers(weights, context, range(number, number + 1))
            for parameter in network.layers[number].parameters:
                if parameter.frozen:
                    continue
                name = parameter.name
                gradient = scratch.gradients[name]
                network.deltas(context, {name: gradient})
                if not is_finite(gradient):
                    refused.append(name)
                    continue
                self._rule.apply(weights[name], state[name], gradient, rate=rate, scratch=scratch.scratch)
        return StepOutcome(loss=loss, refused=tuple(refused))

    def train_groups(
        self,
        weights: Weights,
        state: Mapping[str, RuleState],
        context: Context,
        scratch: StepBuffers,
        groups: Sequence[StepInput],
        *,
        steps: Array,
        dice: Dice,
        notes: JobNotes | None = None,
    ) -> Iterator[list[StepOutcome]]:
        """Load groups and train on them one after the other; see `train`. Yields the outcomes of each call.

        If `Engine.can_descend_groups` allows it, one call without the interpreter's lock trains neighbouring
        groups of one size, up to `CALL_WORK`. So no thread waits for the lock between these groups.

        Args:
            weights: See `train`.
            state: See `train`.
            context: The thread's context for training, for at least as many images as a group has.
            scratch: See `train`.
            groups: Groups to train on, in this order.
            steps: int64 ``(1,)``: count of the steps of all threads; each group adds 1.
            dice: Random source of layers such as dropout.
            notes: Notes on the job, in group order, all 0; None: no other process reads them.

        Raises:
            ModelError: An array has a wrong shape, dtype or layout; earlier groups may be trained.
        """
        notes, noted = notes or JobNotes.new(len(groups)), 0
        for images, alike in groupby(groups, key=lambda group: len(group.labels)):
            together = list(alike)
            # A group of an invalid size gets to `load`, which refuses it.
            if 1 <= images <= context.group_size:
                context.resize(images)
            engine = context.kernel_set.engine
            if (
                engine is not None
                and type(self._rule) is Sgd
                and engine.can_descend_groups(context, together)
            ):
                at_once = max(CALL_WORK // max(self._network.multiply_adds * images, 1), 1)
                for at in range(0, len(together), at_once):
                    some = together[at : at + at_once]
                    part = notes.part(noted, len(some))
                    yield engine.descend_groups(
                        weights, state, context, scratch, self._rule, some, steps, part
                    )
                    noted += len(some)
                continue
            for group in together:
                context.load(group.images, group.labels, dice=dice, keys=group.keys)
                before = int(steps[0])
                notes.done[noted] = BEGUN
                outcome = self.train(weights, state, context, scratch, rate=group.rate)
                staleness = max(int(steps[0]) - before, 0)
                steps[0] += 1
                notes.losses[noted], notes.done[noted] = outcome.loss, 1 + staleness
                noted += 1
                yield [replace(outcome, staleness=staleness)]


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
