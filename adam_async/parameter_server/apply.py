"""Pure: apply one push, or a batch of pushes, to a shard.

The two update protocols of the paper meet here. A *delta* is the summed gradient of the shard, flat
(AD-30). *Factors* are the activations and error gradients of K images, and the server multiplies
(AD-32): gradient = errors^T x.

A batch is applied block by block, and per block one push after the other in order (AD-42, AD-43), so
that a block stays in the cache while the result is that of sequential application, bit for bit.
The one exception is plain SGD on factors: there the pushes' products add up to one product of the
stacked factors, and one larger GEMM replaces several.

In bsp the contributions of all replicas to one step are added up in a given order, and the rule is applied
once to their sum: deltas one after the other, factors as one product of all of them side by side. The bits
of a sum depend on its contributions and their order, on nothing else.

Nothing that is not finite reaches the values. A delta is scanned before it is added. For factors the
scan is over the factors; if K * max|x| * max|e| is far from overflow no product can overflow either,
and only otherwise is the product itself formed and scanned first.

Letters: K images, I inputs (one row), R rows of the shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, isfinite, sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.rules import Rule, Sgd, new_scratch
from adam_async.parameter_server.shard import Shard
from adam_async.placement import ShardSpec

BLOCK = 32_768
"""Elements of a block in a batch: values, gradient and state of 128 KiB each stay inside a 1 MiB L2."""

PRODUCT_ROWS = 512
"""Rows of a block at least, where factors are multiplied: each piece of a product packs the activations anew.
At 2048 columns and K = 128 pieces of 16 rows take twice as long as pieces of 128 or more."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A summed gradient, flat, as long as the shard."""

    values: NDArray[Any]
    rate: float
    finite: bool = False
    """Whether it is known to hold finite values only; otherwise the applier looks."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Activations (I, K) and the error gradients (R, K) of the shard's rows; gradient = errors x^T."""

    x_IK: NDArray[Any]
    errors_RK: NDArray[Any]
    rate: float
    bound: float = inf
    """No element of the product is larger than this; inf if it is not known, or one is not finite."""


Gradient = Delta | Factors


class DeltaPart(msgspec.Struct, frozen=True, eq=False):
    """Deltas of several shards as they came: one after the other, in one flat tensor."""

    flat: NDArray[Any]
    sizes: tuple[int, ...]
    rate: float
    finite: bool
    """Whether it is known to hold finite values only."""

    def each(self) -> list[Gradient]:
        """One gradient per shard."""
        stops = list(accumulate(self.sizes))
        return [
            Delta(self.flat[stop - size : stop], self.rate, self.finite)
            for size, stop in zip(self.sizes, stops, strict=True)
        ]


class FactorPart(msgspec.Struct, frozen=True, eq=False):
    """Factors of several shards of one tensor as they came: shared activations, errors row after row."""

    x_IK: NDArray[Any]
    errors_RK: NDArray[Any]
    sizes: tuple[int, ...]
    """Rows of each shard."""
    rate: float
    bound: float
    """No element of the product is larger than this."""

    def each(self) -> list[Gradient]:
        """One gradient per shard."""
        stops = list(accumulate(self.sizes))
        return [
            Factors(self.x_IK, self.errors_RK[stop - size : stop], self.rate, self.bound)
            for size, stop in zip(self.sizes, stops, strict=True)
        ]


class PushGradients(msgspec.Struct, frozen=True, eq=False):
    """The gradients of one push, in the order of its shards."""

    parts: tuple[DeltaPart | FactorPart, ...] = ()

    def layout(self) -> tuple[tuple[bool, tuple[int, ...]], ...]:
        """Which shards come how; pushes of one layout can be applied part by part."""
        return tuple([(isinstance(part, FactorPart), part.sizes) for part in self.parts])

    def each(self) -> list[Gradient]:
        """One gradient per shard of the push."""
        return [gradient for part in self.parts for gradient in part.each()]

    def at(self, rates: Sequence[float]) -> list[Gradient]:
        """One gradient per shard of the push, each with a rate of its own."""
        return [replace(each, rate=rate) for each, rate in zip(self.each(), rates, strict=True)]

    def only(self, places: Sequence[int]) -> "PushGradients":
        """The same push, of the shards at these places only, each in a part of its own."""
        each = self.each()
        return PushGradients(tuple(_part_of(each[place]) for place in places))

    @property
    def is_sure(self) -> bool:
        """Whether it is known that every shard's gradient is finite, without looking at products."""
        return all(
            part.bound <= largest(part.x_IK.dtype) if isinstance(part, FactorPart) else part.finite
            for part in self.parts
        )


def largest(dtype: np.dtype[Any]) -> float:
    """Half of the largest number of a type: a sum that is bounded by it cannot overflow in its last bit."""
    return float(np.finfo(dtype).max) / 2


def is_finite(values: NDArray[Any]) -> bool:
    """Whether every value is finite. A finite sum of squares proves it; anything else is looked at."""
    return squares(values) < inf or bool(np.isfinite(values).all())


@np.errstate(over="ignore", invalid="ignore")
def squares(values: NDArray[Any]) -> float:
    """Sum of squares; inf if it overflows or a value is not finite."""
    flat = values.reshape(-1)
    total = float(np.dot(flat, flat))
    return total if isfinite(total) else inf


def product_bound(x_IK: NDArray[Any], errors_RK: NDArray[Any]) -> float:
    """Bound every element of errors x^T, by Cauchy and Schwarz."""
    return sqrt(squares(x_IK)) * sqrt(squares(errors_RK))


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
        self._limit = largest(self._dtype)
        self._plain = isinstance(rule, Sgd) and not rule.momentum and not rule.weight_decay
        self._join = join
        self._product = np.empty(max((s.size for s in shards), default=0), self._dtype)
        self._scratch = new_scratch(self._dtype)
        self._flat = np.empty(0, self._dtype)
        self._stacks: dict[str, NDArray[Any]] = {}

    @np.errstate(over="ignore", invalid="ignore")
    def apply_pushes(
        self,
        shards: Sequence[Shard],
        pushes: Sequence[PushGradients],
        rates: Sequence[Sequence[float]] | None = None,
    ) -> list[Sequence[bool]]:
        """Apply whole pushes for the same shards, in order.

        Args:
            rates: For each push its rate on each shard, where that is not simply its own.

        Returns, shard by shard, for each push whether it was finite and applied.
        """
        if rates is not None:
            each = [push.at(own) for push, own in zip(pushes, rates, strict=True)]
            columns = zip(*each, strict=True)
            return [self.apply(shard, batch) for shard, batch in zip(shards, columns, strict=True)]
        if len(pushes) > 1 and any(push.layout() != pushes[0].layout() for push in pushes):
            each = [push.each() for push in pushes]
            columns = zip(*each, strict=True)
            return [self.apply(shard, batch) for shard, batch in zip(shards, columns, strict=True)]
        finite: list[Sequence[bool]] = []
        for parts in zip(*(push.parts for push in pushes), strict=True):
            mine = shards[len(finite) : len(finite) + len(parts[0].sizes)]
            if self._plain and all(isinstance(part, DeltaPart) and part.finite for part in parts):
                for part in parts:
                    assert isinstance(part, DeltaPart)
                    self._step_all(mine, part)
                finite += [(True,) * len(parts)] * len(mine)
                continue
            columns = zip(*(part.each() for part in parts), strict=True)
            finite += [self.apply(shard, batch) for shard, batch in zip(mine, columns, strict=True)]
        return finite

    def _step_all(self, shards: Sequence[Shard], part: DeltaPart) -> None:
        """Plain SGD on many small shards: the rate is multiplied in once for all of them."""
        if part.flat.size > self._flat.size:
            self._flat = np.empty(part.flat.size, self._dtype)
        step = np.multiply(part.flat, part.rate, out=self._flat[: part.flat.size])
        at = 0
        for shard in shards:
            values = shard.values
            end = at + len(values)
            np.subtract(values, step[at:end], out=values)
            at = end

    def apply(self, shard: Shard, batch: Sequence[Gradient]) -> list[bool]:
        """Apply `batch` to `shard` in order. Returns, for each, whether it was finite and applied."""
        if len(batch) == 1:
            (gradient,) = batch
            if not self._finite(shard.spec, gradient):
                return [False]
            self._apply_one(shard, gradient)
            return [True]
        finite = [self._finite(shard.spec, gradient) for gradient in batch]
        good = [gradient for gradient, ok in zip(batch, finite, strict=True) if ok]
        joined = self._joined(good)
        if joined is not None:
            self._apply_one(shard, joined)
        elif good:
            self._apply_in_blocks(shard, good)
        return finite

    @np.errstate(over="ignore", invalid="ignore")
    def look_at(self, specs: Sequence[ShardSpec], push: PushGradients) -> list[bool]:
        """Whether each shard's gradient of a push is finite, before any of it is applied."""
        if push.is_sure:
            return [True] * len(specs)
        return [self._finite(spec, gradient) for spec, gradient in zip(specs, push.each(), strict=True)]

    def _finite(self, spec: ShardSpec, gradient: Gradient) -> bool:
        if isinstance(gradient, Delta):
            return gradient.finite or is_finite(gradient.values)
        if gradient.bound <= self._limit:
            return True
        # The bound is coarse, or was not taken: look at the product itself before adding any of it.
        return is_finite(self._multiply(spec, gradient, 0, spec.size))

    # --- sums (bsp) --------------------------------------------------------------------------

    @np.errstate(over="ignore", invalid="ignore")
    def apply_sum(
        self, shards: Sequence[Shard], pushes: Sequence[PushGradients], *, scale: float, rate: float
    ) -> list[bool]:
        """Add up contributions to the same shards in this order, and apply the rule once to `scale` times it.

        Args:
            pushes: Of finite gradients; their own rates are not looked at.

        Returns, shard by shard, whether the sum was finite and applied.
        """
        if any(push.layout() != pushes[0].layout() for push in pushes):
            pushes = [push.only(range(len(shards))) for push in pushes]
        done: list[bool] = []
        for parts in zip(*(push.parts for push in pushes), strict=True):
            mine = shards[len(done) : len(done) + len(parts[0].sizes)]
            deltas = [part for part in parts if isinstance(part, DeltaPart)]
            factors = [part for part in parts if isinstance(part, FactorPart)]
            if len(deltas) == len(parts):
                done += self._apply_deltas(mine, deltas, scale, rate)
            elif len(factors) == len(parts):
                done += self._apply_factors(mine, factors, scale, rate)
            else:
                (shard,) = mine
                done += self._apply_deltas(mine, [self._as_delta(shard.spec, p) for p in parts], scale, rate)
        return done

    def _apply_deltas(
        self, shards: Sequence[Shard], parts: Sequence[DeltaPart], scale: float, rate: float
    ) -> list[bool]:
        first, *others = parts
        flat = first.flat
        if others or scale != 1.0:
            flat = self._room("sum", 1, flat.size).reshape(-1)
            np.copyto(flat, first.flat)
            for part in others:
                np.add(flat, part.flat, out=flat)
            if scale != 1.0:
                np.multiply(flat, np.asarray(scale, self._dtype), out=flat)
        whole = DeltaPart(flat, first.sizes, rate, squares(flat) < inf)
        if self._plain and whole.finite:
            self._step_all(shards, whole)
            return [True] * len(shards)
        return [self.apply(s, [delta])[0] for s, delta in zip(shards, whole.each(), strict=True)]

    def _apply_factors(
        self, shards: Sequence[Shard], parts: Sequence[FactorPart], scale: float, rate: float
    ) -> list[bool]:
        images = sum([part.x_IK.shape[1] for part in parts])
        x_IK = self._room("sum x", len(parts[0].x_IK), images)
        errors_RK = self._room("sum errors", len(parts[0].errors_RK), images)
        at = 0
        for part in parts:
            end = at + part.x_IK.shape[1]
            x_IK[:, at:end] = part.x_IK
            errors_RK[:, at:end] = part.errors_RK
            at = end
        if scale != 1.0:
            np.multiply(errors_RK, np.asarray(scale, self._dtype), out=errors_RK)
        bound = sum([part.bound for part in parts]) * max(scale, 1.0)
        whole = FactorPart(x_IK, errors_RK, parts[0].sizes, rate, bound)
        return [self.apply(s, [factors])[0] for s, factors in zip(shards, whole.each(), strict=True)]

    def _as_delta(self, spec: ShardSpec, part: DeltaPart | FactorPart) -> DeltaPart:
        """A contribution of one shard as a delta, where others came as deltas."""
        if isinstance(part, DeltaPart):
            return part
        product = self._multiply(
            spec, Factors(part.x_IK, part.errors_RK, part.rate, part.bound), 0, spec.size
        )
        return DeltaPart(product.copy(), (spec.size,), part.rate, finite=True)

    # --- pieces ------------------------------------------------------------------------------

    def _joined(self, batch: Sequence[Gradient]) -> Factors | None:
        """Stack the factors of a batch for one product, where that is the same sum."""
        factors = [g for g in batch if isinstance(g, Factors)]
        if not (self._plain and self._join) or len(factors) < 2 or len(factors) < len(batch):
            return None
        bound = sum([g.bound * max(abs(g.rate), 1.0) for g in factors])
        if bound > self._limit:
            return None
        images = sum([g.x_IK.shape[1] for g in factors])
        x_IK = self._room("x", len(factors[0].x_IK), images)
        errors_RK = self._room("errors", len(factors[0].errors_RK), images)
        at = 0
        for g in factors:
            end = at + g.x_IK.shape[1]
            x_IK[:, at:end] = g.x_IK
            np.multiply(g.errors_RK, np.asarray(g.rate, self._dtype), out=errors_RK[:, at:end])
            at = end
        return Factors(x_IK, errors_RK, 1.0, bound)

    def _room(self, what: str, rows: int, columns: int) -> NDArray[Any]:
        """Scratch memory for factors; it grows to the largest batch and stays."""
        room = self._stacks.get(what)
        if room is None or len(room) < rows * columns:
            room = self._stacks[what] = np.empty(rows * columns, self._dtype)
        return room[: rows * columns].reshape(rows, columns)

    def _apply_one(self, shard: Shard, gradient: Gradient) -> None:
        if isinstance(gradient, Delta):
            values = gradient.values
        elif self._plain and gradient.bound * max(abs(gradient.rate), 1.0) <= self._limit:
            # The rate goes into the smaller factor, so that the product is the step itself.
            errors = gradient.errors_RK
            if gradient.rate != 1.0:
                room = self._room("errors", *errors.shape)
                errors = np.multiply(errors, np.asarray(gradient.rate, self._dtype), out=room)
            scaled = Factors(gradient.x_IK, errors, 1.0, gradient.bound * max(abs(gradient.rate), 1.0))
            step = self._multiply(shard.spec, scaled, 0, shard.spec.size)
            np.subtract(shard.values, step, out=shard.values)
            return
        else:
            values = self._multiply(shard.spec, gradient, 0, shard.spec.size)
        self.rule.apply(shard.values, shard.rule_state, values, rate=gradient.rate, scratch=self._scratch)

    def _apply_in_blocks(self, shard: Shard, batch: Sequence[Gradient]) -> None:
        whole = shard.rule_state
        counts = {name: whole[name].copy() for name in self.rule.scalar_names}
        rows = PRODUCT_ROWS if any(isinstance(gradient, Factors) for gradient in batch) else 1
        for start, stop in self._blocks(shard.spec, rows):
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

    def _blocks(self, spec: ShardSpec, rows: int) -> list[tuple[int, int]]:
        """Ranges of about `BLOCK` elements; of a shard of whole rows, whole rows and at least `rows`."""
        step = max(BLOCK // spec.row_size, rows) * spec.row_size if spec.whole_rows else BLOCK
        return [(start, min(start + step, spec.size)) for start in range(0, spec.size, step)]

    def _multiply(self, spec: ShardSpec, gradient: Factors, start: int, stop: int) -> NDArray[Any]:
        """Form elements `start` to `stop` of the gradient, in scratch memory."""
        row = spec.row_size
        out = self._product[: stop - start]
        errors_RK = gradient.errors_RK[start // row : stop // row]
        if gradient.bound <= self._limit:
            np.matmul(errors_RK, gradient.x_IK.T, out=out.reshape(-1, row))
            return out
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(errors_RK, gradient.x_IK.T, out=out.reshape(-1, row))
        return out


def _part_of(gradient: Gradient) -> DeltaPart | FactorPart:
    """A gradient of one shard as a part of a push."""
    if isinstance(gradient, Delta):
        return DeltaPart(gradient.values, (len(gradient.values),), gradient.rate, gradient.finite)
    rows = len(gradient.errors_RK)
    return FactorPart(gradient.x_IK, gradient.errors_RK, (rows,), gradient.rate, gradient.bound)
