"""Pure: the gradients of a push, in the two forms of the paper, with bounds on their size.

A *delta* is the summed gradient of a shard, flat (AD-30). *Factors* are the activations and error gradients
of K images, and the server multiplies them (AD-32): gradient = errors x^T.

Letters: K images, I inputs (one row), R rows of the shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf, isfinite, sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A summed gradient, flat, as long as the shard."""

    values: NDArray[Any]
    rate: float
    finite: bool = False
    """Whether the values and their products with the rate are known to be finite; otherwise the applier scans
    them."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Activations (I, K) and the error gradients (R, K) of the shard's rows; gradient = errors x^T."""

    x_IK: NDArray[Any]
    errors_RK: NDArray[Any]
    rate: float
    bound: float = inf
    """Bound on each element of the product; inf if it is unknown, or an element is not finite."""
    checked: bool = False
    """Whether the product is known to be finite although the bound does not prove it."""


Gradient = Delta | Factors


class DeltaPart(msgspec.Struct, frozen=True, eq=False):
    """Deltas of several shards as they arrived: one after the other, in one flat tensor."""

    flat: NDArray[Any]
    sizes: tuple[int, ...]
    rate: float
    finite: bool
    """Whether the values and their products with the rate are known to be finite."""

    def each(self) -> list[Gradient]:
        """Return one gradient per shard."""
        stops = list(accumulate(self.sizes))
        return [
            Delta(self.flat[stop - size : stop], self.rate, self.finite)
            for size, stop in zip(self.sizes, stops, strict=True)
        ]


class FactorPart(msgspec.Struct, frozen=True, eq=False):
    """Factors of several shards of one tensor as they arrived: shared activations, errors row after row."""

    x_IK: NDArray[Any]
    errors_RK: NDArray[Any]
    sizes: tuple[int, ...]
    """Rows of each shard."""
    rate: float
    bound: float
    """Bound on each element of the product."""
    checked: bool = False
    """Whether each product is known to be finite although the bound does not prove it."""

    def each(self) -> list[Gradient]:
        """Return one gradient per shard."""
        stops = list(accumulate(self.sizes))
        return [
            Factors(self.x_IK, self.errors_RK[stop - size : stop], self.rate, self.bound, self.checked)
            for size, stop in zip(self.sizes, stops, strict=True)
        ]


class PushGradients(msgspec.Struct, frozen=True, eq=False):
    """The gradients of one push, in the order of its shards."""

    parts: tuple[DeltaPart | FactorPart, ...] = ()
    checked: bool = False
    """Whether the server has checked each gradient, because its bound did not prove it finite."""

    def layout(self) -> tuple[tuple[bool, tuple[int, ...]], ...]:
        """Return the form (factors or deltas) and the sizes of each part.

        Pushes of one layout can be applied part by part.
        """
        return tuple([(isinstance(part, FactorPart), part.sizes) for part in self.parts])

    def each(self) -> list[Gradient]:
        """Return one gradient per shard of the push."""
        return [gradient for part in self.parts for gradient in part.each()]

    def at(self, rates: Sequence[float]) -> list[Gradient]:
        """Return one gradient per shard of the push, each with a rate of its own."""
        return [replace(each, rate=rate) for each, rate in zip(self.each(), rates, strict=True)]

    def only(self, places: Sequence[int]) -> "PushGradients":
        """Return the same push for the shards at these places only, each in a part of its own."""
        each = self.each()
        return PushGradients(tuple(part_of(each[place]) for place in places))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(
            part.x_IK.nbytes + part.errors_RK.nbytes if isinstance(part, FactorPart) else part.flat.nbytes
            for part in self.parts
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
        return PushGradients(tuple(parts), checked=True)


@cache
def largest(dtype: np.dtype[Any]) -> float:
    """Return half of the largest number of a type: rounding cannot make a sum below it overflow."""
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


@np.errstate(over="ignore", invalid="ignore")
def squares(values: NDArray[Any]) -> float:
    """Return the sum of squares; inf if it overflows or a value is not finite."""
    flat = values.reshape(-1)
    total = float(np.dot(flat, flat))
    return total if isfinite(total) else inf


def product_bound(x_IK: NDArray[Any], errors_RK: NDArray[Any]) -> float:
    """Bound every element of errors x^T, by Cauchy and Schwarz."""
    return sqrt(squares(x_IK)) * sqrt(squares(errors_RK))


def part_of(gradient: Gradient) -> DeltaPart | FactorPart:
    """Return a gradient of one shard as a part of a push."""
    if isinstance(gradient, Delta):
        return DeltaPart(gradient.values, (len(gradient.values),), gradient.rate, gradient.finite)
    rows = len(gradient.errors_RK)
    return FactorPart(
        gradient.x_IK, gradient.errors_RK, (rows,), gradient.rate, gradient.bound, gradient.checked
    )
