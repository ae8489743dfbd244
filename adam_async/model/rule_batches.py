"""Pure: one update rule on several gradients of the same shards, push after push, block by block (AD-43).

`Batches` is the interface and `NumpyBatches` uses NumPy's loops; `adam_async.model.fast.rules` has compiled
kernels, whose results equal NumPy's to the last bit.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.rules import Rule, new_scratch

BLOCK = 32_768
"""Number of values in a block. A block's values, gradient and state arrays have 128 KiB each in float32, so
together they stay in a second-level cache of 1 MiB."""


class Target(Protocol):
    """A shard, which a rule changes."""

    @property
    def values(self) -> NDArray[Any]:
        """Flat values."""
        ...

    @property
    def rule_state(self) -> Mapping[str, NDArray[Any]]:
        """The rule's arrays."""
        ...


class Batches(Protocol):
    """Applies one rule. Has scratch memory, so each writer needs its own object."""

    def apply(
        self, targets: Sequence[Target], gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        """Apply each gradient to all targets, one gradient after the other.

        Args:
            targets: The shards to change, in place.
            gradients: Flat and finite, as long as all targets together, in the same order.
            rates: The rate of each gradient.
        """
        ...

    def step(self, values: NDArray[Any], into: NDArray[Any], gradient: NDArray[Any], rate: float) -> bool:
        """Write the values after plain SGD into other memory, with the bits of `apply`.

        Each part of the new values is checked in the cache. Returns False at the first part that is not
        finite. The gradient may have any values, and another process may change it during the step.
        """
        ...

    def forget(self) -> None:
        """Forget targets of earlier calls, so that their memory can be freed."""
        ...


class NumpyBatches:
    """Batches by NumPy's loops.

    Args:
        rule: The update rule.
        dtype: Type of values and gradients.
    """

    def __init__(self, rule: Rule, dtype: DTypeLike) -> None:
        self._rule = rule
        self._plain = rule.is_plain
        self._scratch = new_scratch(dtype)

    def apply(
        self, targets: Sequence[Target], gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        if self._plain and len(gradients[0]) <= BLOCK:
            self._step_together(targets, gradients, rates)
            return
        stops = list(accumulate([len(target.values) for target in targets], initial=0))
        first = 0
        while first < len(targets):
            last = first + 1
            # Neighbouring small shards share a block, which saves calls of NumPy; the step has no state.
            while self._plain and last < len(targets) and stops[last + 1] - stops[first] <= BLOCK:
                last += 1
            if last > first + 1:
                self._step_together(
                    targets[first:last], [g[stops[first] : stops[last]] for g in gradients], rates
                )
            else:
                target, mine = targets[first], [g[stops[first] : stops[last]] for g in gradients]
                size = len(target.values)
                # Blocks keep values in the cache from gradient to gradient; one gradient needs only the
                # rule's own blocks.
                step = BLOCK if len(gradients) > 1 else max(size, 1)
                for start in range(0, size, step):
                    stop = min(start + step, size)
                    self._apply_block(target, start, stop, [g[start:stop] for g in mine], rates)
            first = last

    def step(self, values: NDArray[Any], into: NDArray[Any], gradient: NDArray[Any], rate: float) -> bool:
        for start in range(0, len(values), BLOCK):
            part = slice(start, start + BLOCK)
            new, change = into[part], self._scratch[0, : len(gradient[part])]
            np.multiply(gradient[part], float(rate), out=change)
            np.subtract(values[part], change, out=new)
            if not np.isfinite(new).all():
                return False
        return True

    def forget(self) -> None:
        pass

    def _step_together(
        self, targets: Sequence[Target], gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        """Apply plain SGD to small shards: one product with the rate for all of them."""
        for gradient, rate in zip(gradients, rates, strict=True):
            step = np.multiply(gradient, float(rate), out=self._scratch[0, : len(gradient)])
            at = 0
            for target in targets:
                values = target.values
                end = at + len(values)
                np.subtract(values, step[at:end], out=values)
                at = end

    def _apply_block(
        self, target: Target, start: int, stop: int, gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        """Apply the rule to one block of a shard; counts such as Adam's advance only with the last block."""
        whole = target.rule_state
        values = target.values[start:stop]
        state = {name: whole[name][start:stop] for name in self._rule.state_names}
        before = {name: whole[name].copy() for name in self._rule.scalar_names}
        state.update({name: whole[name] for name in before})
        for gradient, rate in zip(gradients, rates, strict=True):
            self._rule.apply(values, state, gradient, rate=rate, scratch=self._scratch)
        if stop < len(target.values):
            for name, count in before.items():
                whole[name][...] = count
