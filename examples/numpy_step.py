"""A user's step in numpy: an MLP with one hidden layer, whose gradients are written by hand.

    adam-async train --data digits --step numpy_step:mlp --step-path examples --step-args '{"hidden": 64}'

Letters: N images, F pixels, H hidden units, K classes.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from adam_async import ArraySpec, Batch, Factors, Gradients, Metrics, StepOutcome, TrainStep

Array = NDArray[np.float32]


class Mlp(TrainStep):
    factors: Collection[str] = ("w1", "w2")

    def __init__(self, pixels: int, hidden: int, classes: int) -> None:
        shapes = {"w1": (hidden, pixels), "b1": (hidden,), "w2": (classes, hidden), "b2": (classes,)}
        self.arrays: Mapping[str, ArraySpec] = {name: ArraySpec(shape) for name, shape in shapes.items()}

    def initial(self, seed: int) -> Mapping[str, Array]:
        random = np.random.default_rng(seed)
        scale = {"w1": 0.15, "w2": 0.15}  # biases begin at 0
        return {
            name: (scale.get(name, 0) * random.standard_normal(spec.shape)).astype(np.float32)
            for name, spec in self.arrays.items()
        }

    def step(self, values: Mapping[str, Array], batch: Batch, out: Gradients) -> StepOutcome:
        pixels, hidden, shares = self._forward(values, batch)  # (N, F), (N, H), (N, K)
        right = (np.arange(len(batch)), batch.labels)
        loss = float(-np.log(shares[right] + 1e-9).mean())
        shares[right] -= 1
        errors = shares / len(batch)
        back = errors @ values["w2"] * (hidden > 0)
        out["w2"], out["b2"] = Factors(hidden, errors), errors.sum(axis=0)  # w2: errors.T @ hidden
        out["w1"], out["b1"] = Factors(pixels, back), back.sum(axis=0)
        return StepOutcome(loss, weight=len(batch))

    def evaluate(self, values: Mapping[str, Array], batch: Batch) -> Metrics:
        _, _, shares = self._forward(values, batch)
        return {"accuracy": float(np.mean(shares.argmax(axis=1) == batch.labels))}

    def _forward(self, values: Mapping[str, Array], batch: Batch) -> tuple[Array, Array, Array]:
        pixels = batch.scaled().reshape(len(batch), -1)
        hidden = np.maximum(pixels @ values["w1"].T + values["b1"], 0)
        scores = hidden @ values["w2"].T + values["b2"]
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return pixels, hidden, shares / shares.sum(axis=1, keepdims=True)


def mlp(*, pixels: int = 64, hidden: int = 32, classes: int = 10) -> TrainStep:
    return Mlp(pixels, hidden, classes)
