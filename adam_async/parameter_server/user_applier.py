"""Pure: apply pushes by a rule of the user, which may fail on any of them.

The rule runs shard by shard and push by push, in ranges of bounded size, between which the event loop runs.
The rule's speed is unknown, so each range counts as a whole piece of work. The cuts depend on the shard
alone. So all copies of a shard call the rule with the same arrays, and get the same bits or the same refusal.

Results of a range are checked, and kept apart until the rule has passed the last range of the shard. Only
then results replace values and state. A push that the rule refuses on a shard changes nothing there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from adam_async.model.rules import Rule
from adam_async.model.rules.imported import ImportedRule, RuleRefused, UserRule, checked_step
from adam_async.parameter_server.apply import PIECE_WORK, Applier, Pieces
from adam_async.parameter_server.gradients import DeltaPart, Gradient, PushGradients, is_finite
from adam_async.parameter_server.shard import Shard
from adam_async.run.shard_table import ShardSpec
from adam_async.run.user_rules import RuleSource

RANGE_VALUES = 1 << 16
"""Maximum number of values for which a rule of the user is called once. A call counts as `PIECE_WORK`."""

LEAST_VALUES = 1 << 10
"""Minimum number of values that a call counts for, because the call itself takes time."""


class UserApplier(Applier):
    """Applies pushes by a rule of the user.

    Args:
        rule: The rule's record.
        code: The rule.
        refused: Called with a sentence for each push that the rule refuses on a shard.
    """

    may_refuse = True

    def __init__(
        self,
        rule: ImportedRule,
        code: UserRule,
        shards: Sequence[ShardSpec],
        dtype: DTypeLike,
        *,
        refused: Callable[[str], None],
    ) -> None:
        super().__init__(rule, shards, dtype, join=False)
        self._code = code
        self._names = rule.state_names
        self._refused = refused

    def _push_pieces(
        self,
        shards: Sequence[Shard],
        pushes: Sequence[PushGradients],
        rates: Sequence[Sequence[float]] | None,
    ) -> Pieces:
        each = [push.each() for push in pushes]
        if rates is not None:
            each = [push.at(by_shard) for push, by_shard in zip(pushes, rates, strict=True)]
        for shard, batch in zip(shards, zip(*each, strict=True), strict=True):
            yield from self._shard_pieces(shard, batch)

    def _delta_pieces(self, shards: Sequence[Shard], parts: Sequence[DeltaPart]) -> Pieces:
        for shard, batch in zip(shards, zip(*(part.each() for part in parts), strict=True), strict=True):
            yield from self._shard_pieces(shard, batch)

    def _shard_pieces(self, shard: Shard, batch: Sequence[Gradient]) -> Pieces:
        done: list[bool] = []
        for gradient in batch:
            if isinstance(gradient, DeltaPart):
                flat, applied = gradient.flat, gradient.finite
            else:
                flat, applied = self.room("products", 1, shard.spec.size)[0], gradient.checked
                yield from self._product_pieces(shard.spec, gradient, flat)
            # The primary has checked an entry's gradients; other copies trust this check, not their own sums.
            applied = applied or is_finite(flat, gradient.rate)
            if applied:
                try:
                    yield from self._rule_ranges(shard, flat, gradient.rate)
                except RuleRefused as refusal:
                    self._refused(f"rule {self.rule.name} refused a push on {shard.spec.tensor}: {refusal}")
                    applied = False
            done.append(applied)
        yield 0, [done]

    def _rule_ranges(self, shard: Shard, flat: NDArray[Any], rate: float) -> Pieces:
        """Call the rule for each range of a shard; replace values and state once all ranges have passed."""
        size = shard.spec.size
        targets = [shard.values, *[shard.rule_state[name] for name in self._names]]
        results = [self.room(f"result {number}", 1, size)[0] for number in range(len(targets))]
        for start in range(0, size, RANGE_VALUES):
            part = slice(start, start + RANGE_VALUES)
            values, *arrays = [target[part] for target in targets]
            state = dict(zip(self._names, arrays, strict=True))
            # A copy, because a rule may keep its arguments: the sender gets its memory back only after the
            # last use of the gradient.
            found = checked_step(self._code, values, flat[part].copy(), state, rate=rate)
            for result, each in zip(results, found, strict=True):
                result[part] = each
            yield max(len(values), LEAST_VALUES) * (PIECE_WORK // RANGE_VALUES), []
        for start in range(0, size, PIECE_WORK):
            part = slice(start, start + PIECE_WORK)
            for target, result in zip(targets, results, strict=True):
                target[part] = result[part]
            yield len(targets) * len(targets[0][part]), []


def appliers_of(
    shards: Sequence[Shard],
    rules: Sequence[Rule],
    source: RuleSource,
    *,
    refused: Callable[[str], None] = lambda text: None,
) -> Mapping[tuple[int, str], Applier]:
    """Return the applier of each family with shards here.

    Args:
        source: The rules of users that are allowed here.
        refused: See `UserApplier`.

    Raises:
        ConfigError: A rule of the user is not allowed here, or has another file.
    """
    families: dict[tuple[int, str], list[ShardSpec]] = {}
    for shard in shards:
        families.setdefault((shard.spec.rule, shard.spec.dtype), []).append(shard.spec)
    return {
        (rule, dtype): applier_of(rules[rule], specs, dtype, source, refused=refused)
        for (rule, dtype), specs in families.items()
    }


def applier_of(
    rule: Rule,
    shards: Sequence[ShardSpec],
    dtype: DTypeLike,
    source: RuleSource,
    *,
    refused: Callable[[str], None] = lambda text: None,
) -> Applier:
    """Return the applier of a rule; for arguments and errors see `appliers_of`."""
    if not isinstance(rule, ImportedRule):
        return Applier(rule, shards, dtype)
    return UserApplier(rule, source.rule_for(rule), shards, dtype, refused=refused)
