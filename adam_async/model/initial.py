"""Pure: how wide the start values of weights are.

Start values are uniform, because uniform draws are the same bits on every machine.
"""

import math

INITS = ("he", "lecun", "zero")
"""`he` keeps the variance through a ReLU, `lecun` through a linear layer; `zero` is all zeros."""


def uniform_bound(init: str, fan_in: int) -> float:
    """Half-width of the uniform distribution from which a weight with `fan_in` inputs starts."""
    return {"he": math.sqrt(6 / fan_in), "lecun": math.sqrt(3 / fan_in), "zero": 0.0}[init]
