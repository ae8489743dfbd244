"""Steps of a user for tests: softmax regression in float64, which notes its batches, and one that fails."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.train_step import Batch, Gradients, Metrics, StepOutcome, TrainStep

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Noted:
    """One call of `Softmax.step`."""

    read: bytes
    """Values of all arrays that it read."""
    gradient: dict[str, Array]
    weight: int


class Softmax(TrainStep):
    """Softmax regression on images of 8 x 8."""

    arrays: Mapping[str, ArraySpec] = {
        "w": ArraySpec((10, 64), "float64"),
        "b": ArraySpec((10,), "float64", split=False),
        "scale": ArraySpec((), "float64"),
    }

    def __init__(self, factors: Collection[str] = ()) -> None:
        self.factors = factors
        self.noted: list[Noted] = []
        self._lock = Lock()

    def initial(self, seed: int) -> Mapping[str, Array]:
        random = np.random.default_rng(seed)
        return {"w": 0.1 * random.standard_normal((10, 64)), "b": np.zeros(10), "scale": np.array(1.0)}

    def step(self, values: Mapping[str, Array], batch: Batch, out: Gradients) -> StepOutcome:
        pixels, shares = self._shares(values, batch)
        right = (np.arange(len(batch)), batch.labels)
        loss = float(-np.log(shares[right]).mean())
        shares[right] -= 1
        errors = shares * values["scale"] / len(batch)
        out["w"] = Factors(pixels, errors) if self.factors else errors.T @ pixels
        out["b"][...] = errors.sum(axis=0)
        out["scale"] += np.array(0.25)
        gradient = {"w": errors.T @ pixels, "b": errors.sum(axis=0), "scale": np.array(0.25)}
        with self._lock:
            self.noted.append(Noted(text_of(values), gradient, len(batch)))
        return StepOutcome(loss, weight=len(batch))

    def evaluate(self, values: Mapping[str, Array], batch: Batch) -> Metrics:
        _, shares = self._shares(values, batch)
        return {"accuracy": float(np.mean(shares.argmax(axis=1) == batch.labels))}

    def _shares(self, values: Mapping[str, Array], batch: Batch) -> tuple[Array, Array]:
        pixels = batch.scaled(np.float64).reshape(len(batch), -1)
        scores = values["scale"] * (pixels @ values["w"].T + values["b"])
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return pixels, shares / shares.sum(axis=1, keepdims=True)


def text_of(values: Mapping[str, Array]) -> bytes:
    """The bytes of all arrays of `Softmax`."""
    return b"".join(np.ascontiguousarray(values[name]).tobytes() for name in Softmax.arrays)


class Wrong(TrainStep):
    """A step with one mistake, which `how` names."""

    arrays: Mapping[str, ArraySpec] = {"w": ArraySpec((10, 64)), "b": ArraySpec((10,))}

    def __init__(self, how: str = "") -> None:
        self.how = how

    def initial(self, seed: int) -> Mapping[str, NDArray[np.float32]]:
        values = {name: np.zeros(spec.shape, np.float32) for name, spec in self.arrays.items()}
        match self.how:
            case "no value":
                del values["b"]
            case "value of another shape":
                values["b"] = np.zeros(11, np.float32)
            case "value that is not finite":
                values["b"][3] = np.inf
        return values

    def step(self, values: Mapping[str, NDArray[np.float32]], batch: Batch, out: Gradients) -> StepOutcome:
        loss, weight = 1.0, len(batch)
        match self.how:
            case "raises":
                try:
                    {}["scale"]
                except KeyError as error:
                    raise ValueError("no scale") from error
            case "loss":
                loss = float("nan")
            case "weight":
                weight = 0
            case "unset":
                return StepOutcome(loss, weight)
            case "nothing":
                return None  # type: ignore[return-value]
            case "shape":
                out["b"] = np.zeros(11, np.float32)
            case "type":
                out["b"] = np.zeros(10)
            case "name":
                out["c"] = np.zeros(10, np.float32)
            case "writes":
                values["w"][0] = 1
        out["w"][...] = 0.01
        out["b"] = np.zeros(10, np.float32)
        return StepOutcome(loss, weight)

    def evaluate(self, values: Mapping[str, NDArray[np.float32]], batch: Batch) -> Metrics:
        return {} if self.how == "accuracy" else {"accuracy": 0.5}


def softmax(*, factors: list[str] | None = None) -> TrainStep:
    """Make a step for `--step`."""
    return Softmax(factors or ())


def wrong(*, how: str) -> TrainStep:
    """Make a step with a mistake for `--step`."""
    return Wrong(how)
