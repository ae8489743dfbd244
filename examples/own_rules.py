"""Update rules of a user in NumPy: Lion (Chen et al., 2023), and the sign of the gradient.

adam-async train --data digits --rule own_rules:Lion --step-path examples --rule-args '{"decay": 0.01}'
adam-async ps --controller tcp://HOST:PORT --allow-rule own_rules:Lion --step-path examples
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from adam_async import UserRule

Array = NDArray[Any]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]


class Lion(UserRule):
    """p = p - rate * (sign(b1 * mean + (1 - b1) * g) + decay * p);  mean = b2 * mean + (1 - b2) * g."""

    rate: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.001
    betas: tuple[Share, Share] = (0.9, 0.99)
    decay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0

    @property
    def arrays(self) -> Mapping[str, float]:
        return {"mean": 0.0}

    def step(
        self, values: Array, gradient: Array, state: Mapping[str, Array], *, rate: float
    ) -> tuple[Array, Mapping[str, Array]]:
        beta1, beta2 = self.betas
        mean = state["mean"]
        step = np.sign(beta1 * mean + (1.0 - beta1) * gradient) + self.decay * values
        return values - rate * step, {"mean": beta2 * mean + (1.0 - beta2) * gradient}


class SignSgd(UserRule):
    """p = p - rate * sign(g)."""

    rate: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.001

    def step(
        self, values: Array, gradient: Array, state: Mapping[str, Array], *, rate: float
    ) -> tuple[Array, Mapping[str, Array]]:
        return values - rate * np.sign(gradient), state
