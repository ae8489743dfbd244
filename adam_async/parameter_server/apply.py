"""Pure: apply one push, or a batch of pushes, to a shard.

The two update protocols of the paper meet here. A *delta* is the summed gradient of the shard, flat
(AD-30). *Factors* are the activations and error gradients of K images, and the server multiplies
(AD-32): gradient = errors^T x.

A batch is applied block by block, and per block one push after the other in order (AD-42, AD-43), so
that a block stays in the cache while the result is that of sequential application, bit for bit.
The one exception is plain SGD on factors: there the pushes' products add up to one product of the
stacked factors, and one larger GEMM replaces several.

Nothing that is not finite reaches the values. A delta is scanned before it is added. For factors the
scan is over the factors; if K * max|x| * max|e| is far from overflow no product can overflow either,
and only otherwise is the product itself formed and scanned first.

Letters: K images, I inputs (one row), R rows of the shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.rules import Rule, Sgd, new_scratch
from adam_async.parameter_server.shard import Shard
from adam_async.placement import ShardSpec

BLOCK = 32_768
"""Elements of a block: 128 KiB of values, as much of gradient and of state, stay inside a 1 MiB L2."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A summed gradient, flat, as long as the shard."""

    values: NDArray[Any]
    rate: float


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Activations (K, I) and the error gradients (K, R) of the shard's rows."""

    x_KI: NDArray[Any]
    errors_KR: NDArray[Any]
    rate: float


Gradient = Delta | Factors


def is_finite(values: NDArray[Any]) -> bool:
    """Whether every value is finite. One pass: a finite sum proves it, anything else is looked at."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(values, axis=None)
    return bool(np.isfinite(total)) or bool(np.isfinite(values).all())


def _largest(values: NDArray[Any]) -> float:
    """Largest magnitude; NaN if there is one."""
    if values.size == 0:
        return 0.0
    return float(max(np.max(values), -np.min(values)))


def _product_bound(factors: Factors) -> float:
    """No element of the product is larger than this; NaN or inf if a factor is not finite."""
    x, errors = _largest(factors.x_KI), _largest(factors.errors_KR)
    return float("nan") if x != x or errors != errors else len(factors.x_KI) * x * errors


class Applier:
    """Applies pushes under one rule. Owns the scratch memory, so one per writer.

    Args:
        rule: The update rule of the run.
        shards: The shards it will be used on; they size the scratch memory.
        dtype: Type of values and gradients.
        join: Whether batches of factor pushes may be joined into one product under plain SGD.
    """

    def __init__(
        self, rule: Rule, shards: Sequence[ShardSpec], dtype: DTypeLike, *, join: bool = True
    ) -> None:
        self.rule = rule
        self._dtype = np.dtype(dtype)
        self._limit = float(np.finfo(self._dtype).max) / 2
        self._join = join and isinstance(rule, Sgd) and not rule.momentum and not rule.weight_decay
        longest = max((min(max(BLOCK, s.row_size), s.size) for s in shards), default=0)
        self._product = np.empty(longest, self._dtype)
        self._scratch = new_scratch(self._dtype)

    def apply(self, shard: Shard, batch: Sequence[Gradient]) -> list[bool]:
        """Apply `batch` to `shard` in order. Returns, for each, whether it was finite and applied."""
        finite = [self._finite(shard, gradient) for gradient in batch]
        good = [gradient for gradient, ok in zip(batch, finite, strict=True) if ok]
        joined = self._joined(good)
        if joined is not None:
            good = [joined]
        if good:
            self._apply_in_blocks(shard, good)
        return finite

    def _finite(self, shard: Shard, gradient: Gradient) -> bool:
        if isinstance(gradient, Delta):
            return is_finite(gradient.values)
        bound = _product_bound(gradient)
        if bound <= self._limit:
            return True
        if bound != bound or bound == float("inf"):
            # An infinite bound may also come from two large finite factors: look before refusing.
            if not (is_finite(gradient.x_KI) and is_finite(gradient.errors_KR)):
                return False
        return all(
            is_finite(self._multiply(shard.spec, gradient, start, stop))
            for start, stop in self._blocks(shard.spec)
        )

    def _joined(self, batch: Sequence[Gradient]) -> Factors | None:
        """Stack the factors of a batch for one product, where that is the same sum."""
        factors = [g for g in batch if isinstance(g, Factors)]
        if not self._join or len(factors) < 2 or len(factors) < len(batch):
            return None
        if sum(_product_bound(g) * abs(g.rate) for g in factors) > self._limit:
            return None
        rate = factors[0].rate
        if any(g.rate != rate for g in factors):
            errors = np.concatenate([g.errors_KR * self._dtype.type(g.rate) for g in factors])
            rate = 1.0
        else:
            errors = np.concatenate([g.errors_KR for g in factors])
        return Factors(np.concatenate([g.x_KI for g in factors]), errors, rate)

    def _apply_in_blocks(self, shard: Shard, batch: Sequence[Gradient]) -> None:
        whole = shard.rule_state
        counts = {name: whole[name].copy() for name in self.rule.scalar_names}
        for start, stop in self._blocks(shard.spec):
            values = shard.values[start:stop]
            state = {name: whole[name][start:stop] for name in self.rule.state_names}
            for name, before in counts.items():
                # Per-shard counts advance once per push, not once per push and block.
                whole[name][...] = before
                state[name] = whole[name]
            for gradient in batch:
                part = (
                    gradient.values[start:stop]
                    if isinstance(gradient, Delta)
                    else self._multiply(shard.spec, gradient, start, stop)
                )
                self.rule.apply(values, state, part, rate=gradient.rate, scratch=self._scratch)

    def _blocks(self, spec: ShardSpec) -> list[tuple[int, int]]:
        """Ranges of about `BLOCK` elements, whole rows where the shard has whole rows."""
        step = max(BLOCK // spec.row_size, 1) * spec.row_size if spec.whole_rows else BLOCK
        return [(start, min(start + step, spec.size)) for start in range(0, spec.size, step)]

    def _multiply(self, spec: ShardSpec, gradient: Factors, start: int, stop: int) -> NDArray[Any]:
        """Form elements `start` to `stop` of the gradient, in scratch memory."""
        row = spec.row_size
        out = self._product[: stop - start]
        rows = gradient.errors_KR[:, start // row : stop // row]
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(rows.T, gradient.x_KI, out=out.reshape(-1, row))
        return out
