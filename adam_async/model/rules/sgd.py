"""Pure: gradient descent, with momentum and Nesterov's momentum."""

import numpy as np

from adam_async.errors import ConfigError
from adam_async.model.rules.rule import Array, Rule, RuleState, blocks_of, decayed
from adam_async.option_types import Fraction


class Sgd(Rule, frozen=True, kw_only=True, tag="sgd"):
    """Gradient descent with momentum m and weight decay w.

    g = gradient + w * p;  buffer = m * buffer + g;  p = p - rate * buffer. The buffer starts at zero.
    With `nesterov` the step looks ahead (Nesterov's momentum): p = p - rate * (g + m * buffer).

    Raises:
        ConfigError: A constant is out of range, or `nesterov` has no momentum.
    """

    momentum: Fraction = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("Sgd: nesterov needs a momentum above 0: set momentum, or leave nesterov out")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum buffer, if the rule has momentum."""
        return ("momentum",) if self.momentum else ()

    @property
    def is_plain(self) -> bool:
        """See `Rule.is_plain`."""
        return not (self.momentum or self.weight_decay)

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        rate = float(rate)  # a NumPy scalar would drag float32 through float64
        if self.is_plain:
            plain_step(values, gradient, rate=rate, scratch=scratch)
            return
        for p, g, kept, s, t in blocks_of(values, gradient, state, self.state_names, scratch):
            step = decayed(g, p, self.weight_decay, s)
            if self.momentum:
                (buffer,) = kept
                np.multiply(buffer, self.momentum, out=buffer)
                np.add(buffer, step, out=buffer)
                if self.nesterov:
                    np.multiply(buffer, self.momentum, out=t)
                    step = np.add(t, step, out=t)
                else:
                    step = buffer
            np.multiply(step, rate, out=s)
            np.subtract(p, s, out=p)


def plain_step(values: Array, gradient: Array, *, rate: float, scratch: Array) -> None:
    """Subtract ``rate * gradient`` in place: `Sgd` without momentum or decay, and a worker's local step."""
    rate = float(rate)
    for p, g, _, s, _ in blocks_of(values, gradient, {}, (), scratch):
        np.multiply(g, rate, out=s)
        np.subtract(p, s, out=p)
