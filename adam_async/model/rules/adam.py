"""Pure: Adam, and Adam with decoupled weight decay."""

import math

import numpy as np

from adam_async.errors import ConfigError
from adam_async.model.rules.rule import Array, Epsilon, Rule, RuleState, blocks_of, decayed
from adam_async.option_types import Amount, Fraction


class Adam(Rule, frozen=True, kw_only=True, tag="adam"):
    """Moments of the gradient, corrected for their start at zero; t counts applications from 1.

    g = gradient + w * p;  mean = b1 * mean + (1 - b1) * g;  square = b2 * square + (1 - b2) * g * g;
    p = p - rate / (1 - b1^t) * mean / (sqrt(square) / sqrt(1 - b2^t) + eps). `betas` is (b1, b2).

    Two threads that train in place may leave the mean of one gradient beside the square of another. A mean
    beside a square of zero would make an unbounded step. After whole applications no mean is larger than
    `largest_mean` times sqrt(square) (the Cauchy-Schwarz inequality), so steps are clipped to this bound.
    """

    rate: Amount = 0.001
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Epsilon = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        beta1, beta2 = self.betas
        if beta1**2 >= beta2 and beta1:
            raise ConfigError(
                f"{type(self).__name__}: betas {self.betas} put no bound on a step: the square of the first "
                "must be below the second, such as in (0.9, 0.95)"
            )

    @property
    def largest_mean(self) -> float:
        """Maximum of ``|mean| / sqrt(square)`` times 1.1, for rounding."""
        beta1, beta2 = self.betas
        left = 1.0 - beta1**2 / beta2 if beta1 else 1.0
        return 1.1 * (1.0 - beta1) / math.sqrt((1.0 - beta2) * left)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Both moments."""
        return ("mean", "square")

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The count of applications."""
        return ("steps",)

    @property
    def decay(self) -> tuple[float, float]:
        """Weight decay added to the gradient, and weight decay subtracted from values per unit of rate."""
        return self.weight_decay, 0.0

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        rate = float(rate)  # a NumPy scalar would drag float32 through float64
        beta1, beta2 = self.betas
        joined, lost = self.decay
        lost *= rate
        state["steps"] += 1
        steps = int(state["steps"][0])
        scaled_rate = rate / (1.0 - beta1**steps)
        root = math.sqrt(1.0 - beta2**steps)
        largest = rate and scaled_rate * root * self.largest_mean
        for p, g, (mean, square), s, t in blocks_of(values, gradient, state, self.state_names, scratch):
            step = decayed(g, p, joined, s)
            np.multiply(step, step, out=t)
            np.multiply(t, 1.0 - beta2, out=t)
            np.multiply(square, beta2, out=square)
            np.add(square, t, out=square)
            np.multiply(step, 1.0 - beta1, out=s)
            np.multiply(mean, beta1, out=mean)
            np.add(mean, s, out=mean)
            np.sqrt(square, out=t)
            np.divide(t, root, out=t)
            np.add(t, self.eps, out=t)
            np.multiply(mean, scaled_rate, out=s)
            np.divide(s, t, out=s)
            np.clip(s, -largest, largest, out=s)
            if lost:
                np.multiply(p, lost, out=t)
                np.subtract(p, t, out=p)
            np.subtract(p, s, out=p)


class AdamW(Adam, frozen=True, kw_only=True, tag="adamw"):
    """Adam with decoupled weight decay: the decay of a value does not depend on its gradients.

    p = p - rate * w * p, then the step of `Adam` without weight decay.
    """

    weight_decay: Amount = 0.01

    @property
    def decay(self) -> tuple[float, float]:
        return 0.0, self.weight_decay
