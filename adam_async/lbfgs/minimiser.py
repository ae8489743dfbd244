"""Pure: L-BFGS as a state machine on numbers; the vectors stay on the servers.

Theory of operation
-------------------
A `Minimiser` says the next `Move`, and `take` takes its answer. A move is at most one evaluation, and one
message to each server: sums of vectors to store, and inner products to return. So the coordinator sends as
many bytes for ten parameters as for ten million.

    first    evaluate the gradient at the parameters
    turn     compute the direction d from the history, and keep point and gradient as the base
    search   parameters = base + step d, and evaluate; the line search repeats this
    pair     store s = parameters - base, y = gradient - base gradient, and their inner products

The direction is a sum of the history's vectors and the gradient. The direction's coefficients need only these
vectors' inner products (Chen, Wang and Zhou, Large-scale L-BFGS using MapReduce, NIPS 2014). With k pairs the
*basis* is s_1 .. s_k, y_1 .. y_k, g, the oldest pair first.

A move reads no vector that it writes. So a move may be made twice, and a coordinator that replaces a lost one
begins with the last move in the state that the lost one had stored.

A pair without positive curvature is left out. A direction without descent, or a line search that finds no
lower value, drops the history; the next direction is the negative gradient. If this direction fails, too, the
values return to the base, and the minimiser is done.

Servers refuse sums that are not finite. A trial that servers refuse is too far, and a refused direction or
pair drops the history, as inner products beyond float64 do.
"""

from collections.abc import Sequence
from math import isfinite, nan, sqrt
from typing import Annotated, Literal

import msgspec

from adam_async.lbfgs.line_search import LineSearch
from adam_async.messages.body import Finite
from adam_async.run.store_record import PARAMETERS
from adam_async.store.vectors import Combine

POINT, GRADIENT, BASE, BASE_GRADIENT, DIRECTION = PARAMETERS, "g", "x0", "g0", "d"
"""Vectors other than the history: the parameters, the summed gradient there, the values of both where the
line search began, and its direction."""

LEAST_CURVATURE = 1e-12
"""Least cosine of the angle between a pair's s and y; below it rounding decides its sign."""

MOST_HISTORY = 10
"""Maximum number of pairs: a step of a store has at most 64 inner products."""


def stored_name(vector: str) -> str:
    """Return the name of a vector in the store, where arrays may have short names, too."""
    return vector if vector == POINT else f"lbfgs.{vector}"


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """The next work of the servers.

    Attributes:
        combine: Vectors to store, in order.
        evaluates: Whether the gradient at the parameters is summed next, into an empty `GRADIENT`.
        dots: Pairs of vectors whose inner products are the answer.
    """

    combine: tuple[Combine, ...] = ()
    evaluates: bool = False
    dots: tuple[tuple[str, str], ...] = ()


class Minimiser(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state of a minimisation, as numbers that can be stored.

    Attributes:
        history: Maximum number of pairs.
        tolerance: Norm of the gradient at which the minimiser is done, as a share of the first norm.
        phase: Move that is due; see the head of this file.
        iteration: Number of accepted steps.
        evaluations: Number of evaluations that have ended.
        value: Value at the base of the line search, and after an accepted step at the parameters.
        norm: Norm of the gradient there.
        first_norm: Norm of the first gradient.
        norm_at_trial: Norm of the gradient at the last trial of the line search.
        search: The current or last line search.
        slots: Slots of the pairs in the history, the oldest first: pair i is the vectors ``s<i>``, ``y<i>``.
        products: Inner products of the history's vectors and the gradient, by the sorted names.
        reason: Why the minimiser is done.
    """

    history: Annotated[int, msgspec.Meta(ge=1, le=MOST_HISTORY)] = 10
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1e-6
    phase: Literal["first", "turn", "search", "pair", "back", "done"] = "first"
    iteration: Annotated[int, msgspec.Meta(ge=0)] = 0
    evaluations: Annotated[int, msgspec.Meta(ge=0)] = 0
    value: Finite = 0.0
    norm: Finite = 0.0
    first_norm: Finite = 0.0
    norm_at_trial: Finite = 0.0
    search: LineSearch | None = None
    slots: tuple[Annotated[int, msgspec.Meta(ge=0, le=MOST_HISTORY)], ...] = ()
    products: dict[str, Finite] = {}
    reason: str = ""

    @property
    def vectors(self) -> list[str]:
        """Names of the vectors that the store needs beside the parameters."""
        pairs = [f"{letter}{slot}" for slot in range(self.history) for letter in "sy"]
        return [GRADIENT, BASE, BASE_GRADIENT, DIRECTION, *pairs]

    @property
    def contradiction(self) -> str:
        """Why no minimisation can have a state that was read; empty if it can continue from the state."""
        if len({*self.slots}) < len(self.slots) or not all(slot < self.history for slot in self.slots):
            return f"slots {self.slots} of {self.history} pairs"
        if self.phase in ("first", "done"):
            return f"slots {self.slots} before the first move" if self.phase == "first" and self.slots else ""
        basis = self._basis
        absent = [name for a in basis for b in basis if (name := _named(a, b)) not in self.products]
        if absent:
            return f"no inner product {absent[0]!r}"
        try:
            coefficients = self._coefficients
        except ZeroDivisionError:
            coefficients = [nan]
        if not all(map(isfinite, coefficients)):
            return "inner products that give no direction"
        norms = self.norm, self.first_norm, self.norm_at_trial or 1.0  # a last trial may be a minimum
        if not all(norm > 0 and isfinite(1 / norm) for norm in norms):
            return f"the norms {norms} of gradients"
        if self.phase in ("search", "pair") and (self.search is None or not self.search.is_whole):
            return f"the line search {self.search}"
        return ""

    @property
    def is_done(self) -> bool:
        """Whether no move is left."""
        return self.phase == "done"

    @property
    def move(self) -> Move:
        """The move that is due."""
        match self.phase:
            case "first":
                return Move(evaluates=True, dots=((GRADIENT, GRADIENT),))
            case "turn":
                keep = Combine(BASE, ((1.0, POINT),)), Combine(BASE_GRADIENT, ((1.0, GRADIENT),))
                ahead = Combine(DIRECTION, tuple(zip(self._coefficients, self._basis, strict=True)))
                return Move(combine=(ahead, *keep), dots=((DIRECTION, GRADIENT),))
            case "search":
                assert self.search is not None
                trial = Combine(POINT, ((1.0, BASE), (self.search.step, DIRECTION)))
                dots = ((GRADIENT, DIRECTION), (GRADIENT, GRADIENT))
                return Move(combine=(trial,), evaluates=True, dots=dots)
            case "pair":
                return self._pair_move()
            case "back":
                base = Combine(POINT, ((1.0, BASE),)), Combine(GRADIENT, ((1.0, BASE_GRADIENT),))
                return Move(combine=base)
        raise ValueError("the minimiser is done")

    def take(self, value: float, products: list[float]) -> None:
        """Take the answer to the move: the value of the evaluation, if any, and the inner products."""
        match self.phase:
            case "first":
                self._take_first(value, products[0])
            case "turn":
                self._take_slope(products[0])
            case "search":
                self._take_trial(value, *products)
            case "pair":
                self._take_pair(products)
            case "back":
                self.phase = "done" if self.reason else "turn"

    def refused(self) -> bool:
        """Record that a sum in the move is not finite; return whether another move is possible."""
        match self.phase:
            case "search":
                self._take_trial(nan, nan, nan)
            case "turn" if self.slots:
                # The point and the gradient are whole; some servers have changed the base.
                self._drop_history()
            case "pair":
                self._take_pair([nan] * len(self._new_products))
            case _:
                return False
        return True

    # --- the parts of an iteration ---------------------------------------------------------------

    def _take_first(self, value: float, square: float) -> None:
        self.evaluations += 1
        if not (isfinite(value) and isfinite(square)):
            self._end(f"the value at the beginning is {value:g}, and the gradient's square {square:g}")
            return
        self.value, self.norm = value, sqrt(square)
        self.first_norm = self.norm
        self.products = {f"{GRADIENT} {GRADIENT}": square}
        self.phase = "turn"
        self._check_norm()

    def _take_slope(self, slope: float) -> None:
        """Begin the line search, unless the value does not fall along the direction."""
        if not slope < 0 or not isfinite(slope):
            self._restart()
            return
        # A first step has length 1 whatever the scale of the values; later directions are Newton's steps.
        step = 1.0 if self.slots else 1.0 / self.norm
        self.search = LineSearch.begin(self.value, slope, step)
        self.phase = "search"

    def _take_trial(self, value: float, slope: float, square: float) -> None:
        assert self.search is not None
        self.evaluations += 1
        verdict = self.search.take(value, slope if isfinite(square) else square)
        if verdict == "accept":
            self.value, self.norm_at_trial = value, sqrt(square)
            self.phase = "pair"
        elif verdict == "fail":
            self._restart()

    def _pair_move(self) -> Move:
        slot = self._next_slot
        s, y = f"s{slot}", f"y{slot}"
        pair = (
            Combine(s, ((1.0, POINT), (-1.0, BASE))),
            Combine(y, ((1.0, GRADIENT), (-1.0, BASE_GRADIENT))),
        )
        return Move(combine=pair, dots=tuple(self._new_products))

    def _take_pair(self, products: list[float]) -> None:
        slot, asked = self._next_slot, self._new_products
        answers = {_named(*pair): each for pair, each in zip(asked, products, strict=True)}
        s, y = f"s{slot}", f"y{slot}"
        lengths = sqrt(answers[_named(s, s)]) * sqrt(answers[_named(y, y)])
        has_curvature = answers[_named(s, y)] > LEAST_CURVATURE * lengths > 0
        self.slots = (*self._kept, slot) if has_curvature else self._kept
        found, basis = {**self.products, **answers}, {*self._basis}
        self.products = {name: each for name, each in found.items() if basis.issuperset(name.split())}
        self.norm = self.norm_at_trial
        if not all(map(isfinite, [*self.products.values(), *self._coefficients])):
            self._drop_history()
        self.iteration += 1
        self.phase = "turn"
        self._check_norm()

    def _check_norm(self) -> None:
        if self.norm <= self.tolerance * self.first_norm:
            self._end(f"the gradient's norm is {self.norm:.3g}, and was {self.first_norm:.3g}")

    def _restart(self) -> None:
        """Return to the base without the history; if there was no history, no lower value is possible."""
        if not self.slots:
            self.reason = "no step along the negative gradient lowers the value by more than rounding"
        self.slots = ()
        self.phase = "back"

    def _end(self, reason: str) -> None:
        self.phase, self.reason = "done", reason

    def _drop_history(self) -> None:
        self.slots, self.products = (), {f"{GRADIENT} {GRADIENT}": self.norm * self.norm}

    # --- the history -----------------------------------------------------------------------------

    @property
    def _kept(self) -> tuple[int, ...]:
        """Slots that stay when a further pair comes."""
        return self.slots if len(self.slots) < self.history else self.slots[1:]

    @property
    def _next_slot(self) -> int:
        """The slot of the next pair."""
        return next(slot for slot in range(self.history) if slot not in self._kept)

    @property
    def _basis(self) -> list[str]:
        return [*[f"s{slot}" for slot in self.slots], *[f"y{slot}" for slot in self.slots], GRADIENT]

    @property
    def _coefficients(self) -> list[float]:
        """The coefficients of the direction in the basis."""
        basis = self._basis
        return direction([[self.products[_named(a, b)] for b in basis] for a in basis])

    @property
    def _new_products(self) -> list[tuple[str, str]]:
        """The inner products that a new pair and a new gradient bring."""
        old = [f"{letter}{slot}" for letter in "sy" for slot in self._kept]
        new = [f"s{self._next_slot}", f"y{self._next_slot}", GRADIENT]
        return [(a, b) for number, a in enumerate(new) for b in (*old, *new[number:])]


def _named(a: str, b: str) -> str:
    """Return the key of an inner product, which does not depend on the order of its vectors."""
    return f"{min(a, b)} {max(a, b)}"


def direction(products: Sequence[Sequence[float]]) -> list[float]:
    """Return the coefficients of the direction -H g in the basis.

    Args:
        products: Inner products of the basis, 2k + 1 rows of 2k + 1 numbers; each s_i . y_i is positive.
    """
    pairs = len(products) // 2
    sums = [0.0] * (2 * pairs) + [-1.0]

    def times(vector: int) -> float:
        return sum(each * row[vector] for each, row in zip(sums, products, strict=True))

    alphas = [0.0] * pairs
    for s in reversed(range(pairs)):
        y = pairs + s
        alphas[s] = times(s) / products[s][y]
        sums[y] -= alphas[s]
    if pairs:
        last, y = pairs - 1, 2 * pairs - 1
        scale = products[last][y] / products[y][y]
        sums = [scale * each for each in sums]
    for s in range(pairs):
        y = pairs + s
        sums[s] += alphas[s] - times(y) / products[s][y]
    return sums
