"""A step of your own in numpy: an MLP with one hidden layer, its gradients written by hand.

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
        self.arrays: Mapping[str, ArraySpec] = {
            "w1": ArraySpec((hidden, pixels)),
            "b1": ArraySpec((hidden,)),
            "w2": ArraySpec((classes, hidden)),
            "b2": ArraySpec((classes,)),
        }

    def initial(self, seed: int) -> Mapping[str, Array]:
        random = np.random.default_rng(seed)
        return {
            name: random.normal(0, (2 / spec.shape[-1]) ** 0.5, spec.shape).astype(np.float32)
            if len(spec.shape) == 2
            else np.zeros(spec.shape, np.float32)
            for name, spec in self.arrays.items()
        }

    def step(self, values: Mapping[str, Array], batch: Batch, out: Gradients) -> StepOutcome:
        pixels, hidden, shares = self._forward(values, batch)
        right = shares[np.arange(len(batch)), batch.labels]
        errors = shares.copy()
        errors[np.arange(len(batch)), batch.labels] -= 1
        errors /= len(batch)
        back = errors @ values["w2"] * (hidden > 0)
        out["w2"] = Factors(hidden, errors)  # the gradient is errors.T @ hidden
        out["b2"] = errors.sum(axis=0)
        out["w1"] = Factors(pixels, back)
        out["b1"] = back.sum(axis=0)
        return StepOutcome(loss=float(-np.log(right + 1e-9).mean()), weight=len(batch))

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
