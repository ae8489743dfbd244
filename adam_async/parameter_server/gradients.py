"""Pure: the gradients of a push, in the paper's two forms, with bounds on their size.

A *delta* is the summed gradient of a shard, flat (AD-30). *Factors* are the activations and error gradients
of K images; the server multiplies them (AD-32): gradient = errors x^T.

Letters: K images, I inputs (one row), R rows of the shard.

Each shard's gradient is a view of the push's tensors.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Push, check_tensor, fits
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.run.shard_table import ShardSpec
from transport import RemoteProtocolError


class DeltaPart(msgspec.Struct, frozen=True, eq=False):
    """Deltas of one or several shards as they arrived: concatenated in one flat tensor."""

    flat: NDArray[Any]
    sizes: tuple[int, ...]
    rate: float
    finite: bool
    """Whether the values and their products with the rate are known to be finite; if not, the applier scans
    them."""

    def each(self) -> "list[DeltaPart]":
        """Return one gradient per shard."""
        stops = list(accumulate(self.sizes))
        return [
            DeltaPart(self.flat[stop - size : stop], (size,), self.rate, self.finite)
            for size, stop in zip(self.sizes, stops, strict=True)
        ]


class FactorPart(msgspec.Struct, frozen=True, eq=False):
    """Factors of one or several shards of a tensor, as they arrived; gradient = errors x^T."""

    x_IK: NDArray[Any]
    """Activations (I, K), which all shards share."""
    errors_RK: NDArray[Any]
    """Error gradients (R, K): the rows of all shards, concatenated."""
    sizes: tuple[int, ...]
    """Rows of each shard."""
    rate: float
    bound: float
    """Bound on each element of the product; inf if unknown, or if an element is not finite."""
    checked: bool = False
    """Whether each product is known to be finite although the bound does not prove it."""

    def each(self) -> "list[FactorPart]":
        """Return one gradient per shard."""
        stops = list(accumulate(self.sizes))
        rows = [self.errors_RK[stop - size : stop] for size, stop in zip(self.sizes, stops, strict=True)]
        return [
            FactorPart(self.x_IK, mine, (len(mine),), self.rate, self.bound, self.checked) for mine in rows
        ]


Gradient = DeltaPart | FactorPart
"""Gradients in one of the two forms; the applier takes a part's shards together or one by one."""


class PushGradients(msgspec.Struct, frozen=True, eq=False):
    """The gradients of one push, in shard order."""

    parts: tuple[Gradient, ...] = ()
    checked: bool = False
    """Whether the server has checked each gradient, because its bound did not prove it finite."""
    reads: NDArray[Any] | None = None
    """Size in bytes of the recorded reads of the step's groups; None if the run is not recorded."""

    def layout(self) -> tuple[tuple[bool, tuple[int, ...]], ...]:
        """Return the form (factors or deltas) and the sizes of each part.

        Pushes of one layout can be applied part by part.
        """
        return tuple([(isinstance(part, FactorPart), part.sizes) for part in self.parts])

    def each(self) -> list[Gradient]:
        """Return one gradient per shard of the push."""
        return [gradient for part in self.parts for gradient in part.each()]

    def at(self, rates: Sequence[float]) -> list[Gradient]:
        """Return one gradient per shard of the push, each with its own rate."""
        return [
            msgspec.structs.replace(each, rate=rate) for each, rate in zip(self.each(), rates, strict=True)
        ]

    def only(self, places: Sequence[int]) -> "PushGradients":
        """Return the gradients at these places only, each as its own part, without the reads."""
        each = self.each()
        return PushGradients(tuple([each[place] for place in places]))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(
            (
                part.x_IK.nbytes + part.errors_RK.nbytes if isinstance(part, FactorPart) else part.flat.nbytes
                for part in self.parts
            ),
            start=0 if self.reads is None else self.reads.nbytes,
        )

    @property
    def is_sure(self) -> bool:
        """Whether every shard's gradient is known to be finite at its rate without forming products."""
        return all(
            part.bound * max(part.rate, 1.0) <= largest(part.x_IK.dtype)
            if isinstance(part, FactorPart)
            else part.finite
            for part in self.parts
        )

    def trusted(self) -> "PushGradients":
        """Return the same gradients, marked as finite: the primary has checked each.

        The bounds stay the same.
        """
        parts = [
            msgspec.structs.replace(part, checked=True)
            if isinstance(part, FactorPart)
            else msgspec.structs.replace(part, finite=True)
            for part in self.parts
        ]
        return msgspec.structs.replace(self, parts=tuple(parts), checked=True)


@cache
def largest(dtype: np.dtype[Any]) -> float:
    """Return half of a type's largest number: rounding cannot make a smaller sum overflow."""
    return float(np.finfo(dtype).max) / 2


def is_finite(values: NDArray[Any], rate: float = 1.0) -> bool:
    """Return whether every value and its product with a rate are finite.

    A small sum of squares proves this; otherwise each value is checked.
    """
    if is_surely_finite(values, rate):
        return True
    if not np.isfinite(values).all():
        return False
    return rate <= 1 or float(np.abs(values).max(initial=0.0)) * rate <= largest(values.dtype)


def is_surely_finite(values: NDArray[Any], rate: float) -> bool:
    """Return whether the sum of squares proves that every value and its product with a rate are finite."""
    return sqrt(squares(values)) * max(rate, 1.0) <= largest(values.dtype)


def squares(values: NDArray[Any]) -> float:
    """Return the sum of squares; inf on overflow or if a value is not finite."""
    flat = values.reshape(-1)
    total = float(np.vdot(flat, flat))  # unlike `dot`, it does not warn of an overflow
    return total if isfinite(total) else inf


def product_bound(x_IK: NDArray[Any], errors_RK: NDArray[Any]) -> float:
    """Bound every element of errors x^T, by Cauchy and Schwarz."""
    return sqrt(squares(x_IK)) * sqrt(squares(errors_RK))


MOST_LAYOUTS = 8
"""Number of cached layouts of a shard group above which all are dropped: clients choose the parts."""


class PartLayout(NamedTuple):
    """The sizes of one part of a push; they depend only on its shards."""

    what: str
    """Name for errors."""
    row: int
    """For factors, the number of values in a row; 0 for deltas."""
    sizes: tuple[int, ...]
    """Number of values of each shard; for factors, of rows."""
    size: int
    """Sum of the sizes."""


def read_gradients(
    push: Push,
    tensors: Sequence[NDArray[Any]],
    table: Sequence[ShardSpec],
    dtype: np.dtype[Any],
    group: ShardGroup | None = None,
) -> PushGradients:
    """Decode the gradients of a push, without copying.

    Args:
        table: All shards of the store, by number.
        group: The shards of the push, if they are known.

    Raises:
        RemoteProtocolError: Counts, shapes or types do not fit the shards named.
    """
    if not fits(len(push.shards), push.numbers, push.versions, push.own_applied):
        raise RemoteProtocolError(
            "push", "shards, numbers, versions and own_applied of a Push differ in length"
        )
    if push.commands is not None and not (push.parts or tensors or push.recorded):
        return PushGradients()
    layout = None if group is None else group.layouts.get(push.parts)
    if layout is None:
        layout = _layout_of(push, table)
        if group is not None:
            if len(group.layouts) >= MOST_LAYOUTS:
                group.layouts.clear()
            group.layouts[push.parts] = layout
    parts: list[Gradient] = []
    rest = iter(tensors)
    try:
        for part in layout:
            read = _read_factors if part.row else _read_deltas
            parts.append(read(part, rest, push.rate, dtype))
    except StopIteration:
        raise RemoteProtocolError("push", "a Push carries fewer tensors than its parts need") from None
    reads = next(rest, None) if push.recorded else None
    if push.recorded and (reads is None or reads.ndim != 1 or reads.dtype != np.uint8):
        raise RemoteProtocolError("push", "the last tensor of a recorded Push has the reads of its groups")
    if next(rest, None) is not None:
        raise RemoteProtocolError("push", "the parts of a Push do not cover its shards and tensors")
    return PushGradients(tuple(parts), reads=reads)


def _layout_of(push: Push, table: Sequence[ShardSpec]) -> tuple[PartLayout, ...]:
    layout, at = [], 0
    for part in push.parts:
        shards = [_spec(table, number) for number in push.shards[at : at + part.count]]
        at += part.count
        layout.append(_factor_layout(shards) if part.factors else _delta_layout(shards))
    if at != len(push.shards):
        raise RemoteProtocolError("push", "the parts of a Push do not cover its shards and tensors")
    return tuple(layout)


def _spec(table: Sequence[ShardSpec], number: int) -> ShardSpec:
    if number >= len(table):
        raise RemoteProtocolError("push", f"the model has no shard {number}")
    return table[number]


def _delta_layout(shards: Sequence[ShardSpec]) -> PartLayout:
    sizes = tuple([shard.size for shard in shards])
    return PartLayout("deltas", 0, sizes, sum(sizes))


def _factor_layout(shards: Sequence[ShardSpec]) -> PartLayout:
    if not shards:
        raise RemoteProtocolError("push", "factors need at least one shard")
    row = shards[0].row_size
    what = f"factors of {shards[0].tensor}"
    if any(not shard.whole_rows or shard.row_size != row for shard in shards):
        raise RemoteProtocolError("push", f"{what}: need shards of whole rows of {row} values")
    sizes = tuple([shard.size // row for shard in shards])
    return PartLayout(what, row, sizes, sum(sizes))


def _read_deltas(
    part: PartLayout, tensors: Iterator[NDArray[Any]], rate: float, dtype: np.dtype[Any]
) -> DeltaPart:
    flat = next(tensors)
    check_tensor(flat, part.what, (part.size,), dtype)
    return DeltaPart(flat, part.sizes, rate, is_surely_finite(flat, rate))


def _read_factors(
    part: PartLayout, tensors: Iterator[NDArray[Any]], rate: float, dtype: np.dtype[Any]
) -> FactorPart:
    x_IK, errors_RK = next(tensors), next(tensors)
    if x_IK.ndim != 2:
        raise RemoteProtocolError("push", f"{part.what}: need activations ({part.row}, K)")
    images = x_IK.shape[1]
    check_tensor(x_IK, part.what, (part.row, images), dtype)
    check_tensor(errors_RK, part.what, (part.size, images), dtype)
    return FactorPart(x_IK, errors_RK, part.sizes, rate, product_bound(x_IK, errors_RK))
