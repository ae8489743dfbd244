"""Pure: apply one push, or a batch of pushes, to a shard.

A batch is applied block by block, and per block one push after the other in order (AD-42, AD-43). So a block
stays in the cache, and the result is that of sequential application, bit for bit. Products of factors are
formed first, and then applied as deltas are. With plain SGD, factors of few images are instead stacked, and
one larger GEMM forms the sum of their products; factors in other batches are applied push by push. With any
rule, factors of many images are applied push by push, because their activations fill the cache.

The work is cut into pieces of bounded size, so that an event loop may run between two of them. The cuts
depend on the batch alone, and no bit of the result depends on the times at which the pieces run.

In bsp the contributions of all replicas to one step are added up in a given order, and the rule is applied
once to their sum. Deltas are added one after the other; factors are placed side by side and multiplied once.
The bits of a sum depend only on its contributions and their order.

Only finite gradients reach the values. A delta is scanned before it is added. Factors are scanned instead of
their product if their norms prove that it cannot overflow; otherwise the product is formed and scanned first.

Letters: K images, I inputs (one row), R rows of the shard.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.rule_batches import BLOCK, Batches, NumpyBatches, Target
from adam_async.model.rules import Rule, Sgd
from adam_async.model.vectors import NumpyVectors, Vectors
from adam_async.parameter_server.gradients import (
    DeltaPart,
    FactorPart,
    Gradient,
    PushGradients,
    is_finite,
    is_surely_finite,
    largest,
)
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.run.shard_table import ShardSpec

JOINED_IMAGES = 64
"""Maximum number of images of a push whose factors are stacked with those of other pushes. With more images,
one product per push is as fast, and stacking takes longer than it saves."""

PIECE_WORK = 1 << 20
"""Maximum work of a piece: number of values times number of gradients applied to them. The scan of a larger
shard for values that are not finite exceeds it."""

PRODUCTS_PER_VALUE = 64
"""Number of multiplications in a product of factors that take as long as applying a gradient to a value."""


@dataclass(slots=True, eq=False)
class Work:
    """A batch or a sum in progress, in bounded pieces, between which the event loop may run.

    Until the last piece is done, the values of the shards may be changed in part.
    """

    _pieces: Iterator[tuple[int, list[Sequence[bool]]]]
    finite: list[Sequence[bool]] = field(default_factory=list)
    """Outcomes of the finished shards: for each push, whether it was finite and applied."""
    done: bool = False

    @np.errstate(over="ignore", invalid="ignore")
    def run(self, room: float = inf) -> int:
        """Do pieces until their work reaches `room` or all are done; return their work, see `PIECE_WORK`."""
        spent = 0
        while spent < room:
            piece = next(self._pieces, None)
            if piece is None:
                self.done = True
                break
            work, finite = piece
            self.finite += finite
            spent += work
        return spent


Pieces = Iterator[tuple[int, list[Sequence[bool]]]]
"""Pieces, each with its work, and the outcomes of the shards that it finished."""


class Applier:
    """Applies pushes under one rule. An applier owns its scratch memory, so each writer needs its own.

    Args:
        shards: The shards to which it applies pushes; they size the scratch memory.
        join: Whether batches of factor pushes may be joined into one product under plain SGD.
        batches: Kernels of the rule; NumPy's by default.
    """

    may_refuse = False
    """Whether the rule may refuse a finite push."""

    def __init__(
        self,
        rule: Rule,
        shards: Sequence[ShardSpec],
        dtype: DTypeLike,
        *,
        join: bool = True,
        batches: Batches | None = None,
    ) -> None:
        self.rule = rule
        self.dtype = np.dtype(dtype)
        self._limit = largest(self.dtype)
        self._plain = rule.is_plain
        self._join = join
        self.batches: Batches = batches or NumpyBatches(rule, self.dtype)
        self.vectors: Vectors = NumpyVectors(self.dtype)
        largest_shard = max((shard.size for shard in shards), default=0)
        self._stacks: dict[str, NDArray[Any]] = {"products": np.empty(largest_shard, self.dtype)}

    @cached_property
    def adding(self) -> "Applier":
        """Applier of plain SGD, push after push, for vectors to which pushes are added."""
        return Applier(Sgd(), (), self.dtype, join=False)

    def work_on(
        self,
        shards: Sequence[Shard],
        pushes: Sequence[PushGradients],
        rates: Sequence[Sequence[float]] | None = None,
    ) -> Work:
        """Begin to apply whole pushes for the same shards, in order. See `apply_pushes`."""
        return Work(self._push_pieces(shards, pushes, rates))

    def apply_changing(self, group: ShardGroup, flat: NDArray[Any], rate: float) -> bool:
        """Apply a delta in memory that its sender can change: check and apply a copy of each block.

        The copies stay in the cache. Returns False at the first block that is not finite; the blocks before
        it are applied.
        """
        block, at = self.room("block", 1, BLOCK)[0], 0
        for strip in group.strips:
            has_begun = strip.begin()
            for target in (strip,) if has_begun else strip.shards:
                size = len(target.values)
                for start in range(0, size, BLOCK):
                    part = block[: min(BLOCK, size - start)]
                    part[:] = flat[at : at + len(part)]
                    if not is_finite(part, rate):
                        return False
                    self.batches.apply([_range_of(target, start, start + len(part))], [part], [rate])
                    at += len(part)
            if has_begun:
                strip.end()
        return True

    def apply_counted(self, group: ShardGroup, flat: NDArray[Any], rate: float) -> None:
        """Apply a finite delta of at most `PIECE_WORK` values to a group whose strips copy counts."""
        for _ in self._strip_pieces(group, [DeltaPart(flat, group.sizes, rate, True)]):
            pass

    def work_on_assignment(self, shards: Sequence[Shard], values: PushGradients) -> Work:
        """Begin to replace the values of shards by the finite values of a push."""

        def pieces() -> Pieces:
            """Copy a bounded part of a shard at each step, and report each finished shard as applied."""
            for shard, new in zip(shards, values.each(), strict=True):
                if isinstance(new, DeltaPart):
                    for start in range(0, shard.spec.size, PIECE_WORK):
                        part = new.flat[start : start + PIECE_WORK]
                        shard.values[start : start + PIECE_WORK] = part
                        yield len(part), []
                yield 0, [(True,)]

        return Work(pieces())

    def apply_pushes(
        self,
        shards: Sequence[Shard],
        pushes: Sequence[PushGradients],
        rates: Sequence[Sequence[float]] | None = None,
    ) -> list[Sequence[bool]]:
        """Apply whole pushes for the same shards, in order.

        Args:
            rates: For each push its rate on each shard; None for the push's own rate.

        Returns, shard by shard, for each push whether it was finite and applied.
        """
        work = self.work_on(shards, pushes, rates)
        work.run()
        return work.finite

    def apply(self, shard: Shard, batch: Sequence[Gradient]) -> Sequence[bool]:
        """Apply `batch` to `shard` in order. Returns, for each, whether it was finite and applied."""
        work = Work(self._shard_pieces(shard, batch))
        work.run()
        return work.finite[0]

    def _push_pieces(
        self,
        shards: Sequence[Shard],
        pushes: Sequence[PushGradients],
        rates: Sequence[Sequence[float]] | None,
    ) -> Pieces:
        if rates is None and all(push.layout() == pushes[0].layout() for push in pushes[1:]):
            at = 0
            for parts in zip(*(push.parts for push in pushes), strict=True):
                count = len(parts[0].sizes)
                mine = shards if count == len(shards) else shards[at : at + count]
                at += count
                deltas = [part for part in parts if isinstance(part, DeltaPart) and part.finite]
                if len(deltas) == len(parts):
                    yield from self._delta_pieces(mine, deltas)
                    continue
                factors = [part for part in parts if isinstance(part, FactorPart)]
                if self._can_join(factors, len(parts)):
                    whole = yield from self._join_pieces(factors)
                    for shard, gradient in zip(mine, whole.each(), strict=True):
                        yield from self._one_pieces(shard, gradient)
                        yield shard.spec.size, [(True,) * len(parts)]
                    continue
                if len(factors) == len(parts) and _images(factors) > JOINED_IMAGES:
                    yield from self._apart_pieces(mine, factors)
                    continue
                for shard, batch in zip(
                    mine, zip(*(part.each() for part in parts), strict=True), strict=True
                ):
                    yield from self._shard_pieces(shard, batch)
            return
        if rates is None:
            each = [push.each() for push in pushes]
        else:
            each = [push.at(by_shard) for push, by_shard in zip(pushes, rates, strict=True)]
        for shard, batch in zip(shards, zip(*each, strict=True), strict=True):
            yield from self._shard_pieces(shard, batch)

    def _delta_pieces(self, shards: Sequence[Shard], parts: Sequence[DeltaPart]) -> Pieces:
        """Apply deltas known to be finite to as many shards at a time as fit into a piece."""
        rates = [part.rate for part in parts]
        done: list[Sequence[bool]] = [(True,) * len(parts)]
        if isinstance(shards, ShardGroup):
            yield from self._strip_pieces(shards, parts)
            return
        for first, last, at, end in _spans(shards, len(parts)):
            flats = [part.flat if last - first == len(shards) else part.flat[at:end] for part in parts]
            yield from self._rule_pieces(shards[first:last], flats, rates)
            yield (end - at) * len(parts), done * (last - first)

    def _strip_pieces(self, group: ShardGroup, parts: Sequence[DeltaPart]) -> Pieces:
        """Apply deltas known to be finite to the strips of a group."""
        rates = [part.rate for part in parts]
        done: list[Sequence[bool]] = [(True,) * len(parts)]
        strips = group.strips
        for first, last, at, end in _spans(strips, len(parts)):
            flats = [part.flat if last - first == len(strips) else part.flat[at:end] for part in parts]
            some = strips[first:last]
            if all(strip.begin() for strip in some):
                yield from self._rule_pieces(some, flats, rates)
                for strip in some:
                    strip.end()
            else:
                yield from self._rule_pieces(
                    [shard for strip in some for shard in strip.shards], flats, rates
                )
            yield (end - at) * len(parts), done * sum([len(strip.shards) for strip in some])

    def _apart_pieces(self, shards: Sequence[Shard], parts: Sequence[FactorPart]) -> Pieces:
        """Apply factors push by push: the activations of one push stay in the cache for all shards."""
        finite: list[list[bool]] = [[] for _ in shards]
        for part in parts:
            for shard, gradient, found in zip(shards, part.each(), finite, strict=True):
                for work, done in self._shard_pieces(shard, [gradient]):
                    for applied in done:
                        found += applied
                    yield work, []
        yield 0, list(finite)

    def _shard_pieces(self, shard: Shard, batch: Sequence[Gradient]) -> Pieces:
        size = shard.spec.size
        finite: list[bool] = []
        for gradient in batch:
            if isinstance(gradient, DeltaPart):
                finite.append(gradient.finite or is_finite(gradient.flat, gradient.rate))
            elif gradient.checked or gradient.bound * max(gradient.rate, 1.0) <= self._limit:
                finite.append(True)
            else:
                # The bound is coarse or unknown: scan the product before adding any of it.
                formed = self.room("formed", 1, size).reshape(-1)
                yield from self._product_pieces(shard.spec, gradient, formed)
                finite.append(is_finite(formed, gradient.rate))
        good = [gradient for gradient, ok in zip(batch, finite, strict=True) if ok]
        if self._plain and len(good) > 1:
            factors = [gradient for gradient in good if isinstance(gradient, FactorPart)]
            if self._can_join(factors, len(good)):
                whole = yield from self._join_pieces(factors)
                good = [whole]
        if len(good) == 1:
            yield from self._one_pieces(shard, good[0])
        elif self._plain and any(isinstance(gradient, FactorPart) for gradient in good):
            # One subtraction after each product costs less than keeping several products.
            for gradient in good:
                yield from self._one_pieces(shard, gradient)
        elif good:
            yield from self._many_pieces(shard, good)
        yield size * len(batch), [finite]

    @np.errstate(over="ignore", invalid="ignore")
    def check_finite(self, specs: Sequence[ShardSpec], push: PushGradients) -> list[bool]:
        """Return for each shard whether its gradient is finite, before the push is applied."""
        if push.is_sure:
            return [True] * len(specs)
        return [self._finite(spec, gradient) for spec, gradient in zip(specs, push.each(), strict=True)]

    def _finite(self, spec: ShardSpec, gradient: Gradient) -> bool:
        if isinstance(gradient, DeltaPart):
            return gradient.finite or is_finite(gradient.flat, gradient.rate)
        if gradient.bound * max(gradient.rate, 1.0) <= self._limit:
            return True
        # The product has memory of its own, because a batch in progress may use that of products.
        formed = self.room("check", 1, spec.size).reshape(-1)
        self._multiply(spec, gradient, formed)
        return is_finite(formed, gradient.rate)

    # --- sums (bsp) --------------------------------------------------------------------------

    def work_on_sum(
        self, shards: Sequence[Shard], pushes: Sequence[PushGradients], *, scale: float, rate: float
    ) -> Work:
        """Begin to apply a sum. See `apply_sum`."""
        if any(push.layout() != pushes[0].layout() for push in pushes):
            pushes = [push.only(range(len(shards))) for push in pushes]
        return Work(self._sum_pieces(shards, pushes, scale, rate))

    def apply_sum(
        self, shards: Sequence[Shard], pushes: Sequence[PushGradients], *, scale: float, rate: float
    ) -> list[bool]:
        """Add up contributions to the same shards in order, and apply the rule once to `scale` times the sum.

        Args:
            pushes: Pushes of finite gradients; their own rates are not used.

        Returns, shard by shard, whether the sum was finite and applied.
        """
        work = self.work_on_sum(shards, pushes, scale=scale, rate=rate)
        work.run()
        return [finite for (finite,) in work.finite]

    def _sum_pieces(
        self, shards: Sequence[Shard], pushes: Sequence[PushGradients], scale: float, rate: float
    ) -> Pieces:
        at = 0
        for parts in zip(*(push.parts for push in pushes), strict=True):
            mine = shards[at : at + len(parts[0].sizes)]
            at += len(mine)
            deltas = [part for part in parts if isinstance(part, DeltaPart)]
            factors = [part for part in parts if isinstance(part, FactorPart)]
            if len(deltas) == len(parts):
                yield from self._delta_sum_pieces(mine, deltas, scale, rate)
            elif len(factors) == len(parts):
                yield from self._factor_sum_pieces(mine, factors, scale, rate)
            else:
                (shard,) = mine
                for number, part in enumerate(parts):
                    if isinstance(part, FactorPart):
                        formed = np.empty(shard.spec.size, self.dtype)
                        yield from self._product_pieces(shard.spec, part, formed)
                        deltas.insert(number, DeltaPart(formed, (shard.spec.size,), part.rate, finite=True))
                yield from self._delta_sum_pieces(mine, deltas, scale, rate)

    def _delta_sum_pieces(
        self, shards: Sequence[Shard], parts: Sequence[DeltaPart], scale: float, rate: float
    ) -> Pieces:
        """Add up and apply the deltas of as many shards at a time as fit into a piece."""
        for first, last, at, end in _spans(shards, len(parts)):
            flat = parts[0].flat[at:end]
            if len(parts) > 1 or scale != 1.0:
                flat = self.room("sum", 1, end - at).reshape(-1)
                step = max(PIECE_WORK // len(parts), 1)
                for start in range(at, end, step):
                    stop = min(start + step, end)
                    into = flat[start - at : stop - at]
                    np.copyto(into, parts[0].flat[start:stop])
                    for part in parts[1:]:
                        np.add(into, part.flat[start:stop], out=into)
                    if scale != 1.0:
                        np.multiply(into, np.asarray(scale, self.dtype), out=into)
                    if stop < end:
                        yield len(into) * len(parts), []
            whole = DeltaPart(flat, parts[0].sizes[first:last], rate, is_surely_finite(flat, rate))
            mine = shards[first:last]
            if whole.finite:
                yield from self._delta_pieces(mine, [whole])
            else:
                for shard, delta in zip(mine, whole.each(), strict=True):
                    yield from self._shard_pieces(shard, [delta])

    def _factor_sum_pieces(
        self, shards: Sequence[Shard], parts: Sequence[FactorPart], scale: float, rate: float
    ) -> Pieces:
        images = sum([part.x_IK.shape[1] for part in parts])
        x_IK = self.room("sum x", len(parts[0].x_IK), images)
        errors_RK = self.room("sum errors", len(parts[0].errors_RK), images)
        at = 0
        for part in parts:
            end = at + part.x_IK.shape[1]
            x_IK[:, at:end] = part.x_IK
            errors_RK[:, at:end] = part.errors_RK
            at = end
        if scale != 1.0:
            np.multiply(errors_RK, np.asarray(scale, self.dtype), out=errors_RK)
        bound = sum([part.bound for part in parts]) * max(scale, 1.0)
        whole = FactorPart(x_IK, errors_RK, parts[0].sizes, rate, bound)
        yield x_IK.size + errors_RK.size, []
        for shard, factors in zip(shards, whole.each(), strict=True):
            yield from self._shard_pieces(shard, [factors])

    # --- pieces ------------------------------------------------------------------------------

    def _can_join(self, parts: Sequence[FactorPart], pushes: int) -> bool:
        """Return whether one product of stacked factors may replace the products of all pushes.

        A sum of products that may overflow is not replaced.
        """
        if not (self._plain and self._join) or len(parts) < 2 or len(parts) < pushes:
            return False
        if _images(parts) > JOINED_IMAGES:
            return False
        return _scaled_bound(parts) <= self._limit

    def _join_pieces(
        self, parts: Sequence[FactorPart]
    ) -> Generator[tuple[int, list[Sequence[bool]]], None, FactorPart]:
        """Stack factors of the same shards, each times its rate, for one product per shard."""
        images = sum([part.x_IK.shape[1] for part in parts])
        x_IK = self.room("x", len(parts[0].x_IK), images)
        errors_RK = self.room("errors", len(parts[0].errors_RK), images)
        at = 0
        for part in parts:
            end = at + part.x_IK.shape[1]
            x_IK[:, at:end] = part.x_IK
            np.multiply(part.errors_RK, np.asarray(part.rate, self.dtype), out=errors_RK[:, at:end])
            at = end
            yield part.x_IK.size + part.errors_RK.size, []
        return FactorPart(x_IK, errors_RK, parts[0].sizes, 1.0, _scaled_bound(parts))

    def room(self, what: str, rows: int, columns: int) -> NDArray[Any]:
        """Return scratch memory; it grows to the largest request and is kept."""
        room = self._stacks.get(what)
        if room is None or len(room) < rows * columns:
            room = self._stacks[what] = np.empty(rows * columns, self.dtype)
        return room[: rows * columns].reshape(rows, columns)

    def _one_pieces(self, shard: Shard, gradient: Gradient) -> Pieces:
        """Apply a gradient known to be finite."""
        if isinstance(gradient, DeltaPart):
            yield from self._rule_pieces([shard], [gradient.flat], [gradient.rate])
            return
        step = self.room("products", 1, shard.spec.size).reshape(-1)
        rate = gradient.rate
        bound = gradient.bound * max(abs(rate), 1.0)
        if self._plain and bound <= self._limit:
            # The errors are multiplied by the rate, so that the product is the step itself.
            if rate != 1.0:
                errors = gradient.errors_RK
                room = self.room("errors", *errors.shape)
                errors = np.multiply(errors, np.asarray(rate, self.dtype), out=room)
                gradient = FactorPart(gradient.x_IK, errors, gradient.sizes, 1.0, bound)
            yield from self._product_pieces(shard.spec, gradient, step)
            for start in range(0, len(step), PIECE_WORK):
                values = shard.values[start : start + PIECE_WORK]
                np.subtract(values, step[start : start + PIECE_WORK], out=values)
                if start + PIECE_WORK < len(step):
                    yield PIECE_WORK, []
        else:
            yield from self._product_pieces(shard.spec, gradient, step)
            yield from self._rule_pieces([shard], [step], [rate])

    def _many_pieces(self, shard: Shard, batch: Sequence[Gradient]) -> Pieces:
        """Apply gradients known to be finite: form all products, then go over the values once."""
        factors = [gradient for gradient in batch if isinstance(gradient, FactorPart)]
        products = iter(self.room("products", len(factors), shard.spec.size))
        values = []
        for gradient in batch:
            if isinstance(gradient, DeltaPart):
                values.append(gradient.flat)
            else:
                values.append(next(products))
                yield from self._product_pieces(shard.spec, gradient, values[-1])
        yield from self._rule_pieces([shard], values, [gradient.rate for gradient in batch])

    def _rule_pieces(
        self, targets: Sequence[Target], flats: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> Pieces:
        """Apply finite gradients by the rule; cut a shard that exceeds a piece into ranges."""
        size, step = len(flats[0]), max(PIECE_WORK // len(flats), 1)
        if len(targets) > 1 or size <= step:
            self.batches.apply(targets, flats, rates)
            return
        for start in range(0, size, step):
            some = [flat[start : start + step] for flat in flats]
            self.batches.apply([_range_of(targets[0], start, start + step)], some, rates)
            yield len(some[0]) * len(flats), []

    def _product_pieces(self, spec: ShardSpec, gradient: FactorPart, out: NDArray[Any]) -> Pieces:
        """Form a gradient in `out`, as many rows at a time as fit into a piece.

        A row that exceeds a piece is formed in ranges of columns.
        """
        row, images = spec.row_size, gradient.x_IK.shape[1]
        most = max(PIECE_WORK * PRODUCTS_PER_VALUE // max(images, 1), 1)
        rows = most // row
        if rows * row >= spec.size:
            self._multiply(spec, gradient, out)
            yield spec.size * images // PRODUCTS_PER_VALUE, []
            return
        out_RI = out.reshape(-1, row)
        step, columns = max(rows, 1), row if rows else most
        for first, start in product(range(0, len(out_RI), step), range(0, row, columns)):
            last, end = min(first + step, len(out_RI)), min(start + columns, row)
            np.matmul(
                gradient.errors_RK[first:last], gradient.x_IK[start:end].T, out=out_RI[first:last, start:end]
            )
            yield (last - first) * (end - start) * images // PRODUCTS_PER_VALUE, []

    def _multiply(self, spec: ShardSpec, gradient: FactorPart, out: NDArray[Any]) -> None:
        """Form a gradient in `out`."""
        np.matmul(gradient.errors_RK, gradient.x_IK.T, out=out.reshape(-1, spec.row_size))


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """A range of a shard, as a target of the rule."""

    values: NDArray[Any]
    rule_state: Mapping[str, NDArray[Any]]


def _range_of(target: Target, start: int, stop: int) -> _Range:
    """Return a range of a large shard. Counts such as Adam's steps advance with the last range only."""
    size = len(target.values)
    state = {
        name: array[start:stop] if len(array) == size else array if stop >= size else array.copy()
        for name, array in target.rule_state.items()
    }
    return _Range(target.values[start:stop], state)


def _spans(shards: Sequence[Target], pushes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut shards into spans of at most a piece's work, or of one shard.

    Yields for each span the index of its first shard, the index after its last shard, and the range of its
    values in a push.
    """
    first = at = 0
    while first < len(shards):
        last, end = first + 1, at + len(shards[first].values)
        while last < len(shards) and (end - at + len(shards[last].values)) * pushes <= PIECE_WORK:
            end += len(shards[last].values)
            last += 1
        yield first, last, at, end
        first, at = last, end


def _images(parts: Sequence[FactorPart]) -> int:
    """Return the largest number of images of a push."""
    return max([part.x_IK.shape[1] for part in parts], default=0)


def _scaled_bound(parts: Sequence[FactorPart]) -> float:
    """Return a bound on the sum of products, each times its rate."""
    return sum([part.bound * max(abs(part.rate), 1.0) for part in parts])
