"""Pure: Adagrad, the rule of DistBelief (section 4.1)."""

import numpy as np
from numpy.typing import DTypeLike

from adam_async.model.rules.rule import Array, Epsilon, Rule, RuleState, Shape, blocks_of, decayed
from adam_async.option_types import Amount


class Adagrad(Rule, frozen=True, kw_only=True, tag="adagrad"):
    """Rates that shrink as the sum of squared gradients grows.

    g = gradient + w * p;  squares = squares + g * g;  p = p - rate * g / (sqrt(squares) + eps). The sums
    start at `initial_accumulator_value`.
    """

    eps: Epsilon = 1e-10
    initial_accumulator_value: Amount = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """The sum of squares."""
        return ("squares",)

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate the sums at their first value."""
        first = self.initial_accumulator_value
        # Fresh pages of zeros take no memory before their first use.
        return {"squares": np.full(shape, first, dtype) if first else np.zeros(shape, dtype)}

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        rate = float(rate)  # a NumPy scalar would drag float32 through float64
        for p, g, (squares,), s, t in blocks_of(values, gradient, state, self.state_names, scratch):
            step = decayed(g, p, self.weight_decay, s)
            np.multiply(step, step, out=t)
            np.add(squares, t, out=squares)
            np.sqrt(squares, out=t)
            np.add(t, self.eps, out=t)
            np.multiply(step, rate, out=s)
            np.divide(s, t, out=s)
            np.subtract(p, s, out=p)
