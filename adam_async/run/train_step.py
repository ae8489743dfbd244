"""Pure: a user's step: the code of a run that trains no network of this package.

A step names a run's arrays, draws their first values, computes the gradients of a batch, and evaluates a
batch. The workers' compute threads call `step`, and the driver's threads call `evaluate`. Servers, data,
clocks and checkpoints are as in every run.

    class Logistic(TrainStep):
        arrays = {"w": ArraySpec((10, 64))}

        def initial(self, seed): ...
        def step(self, values, batch, out):
            out["w"] = gradient
            return StepOutcome(loss, weight=len(batch))
        def evaluate(self, values, batch):
            return {"accuracy": share}

Letters: N images of a batch, C channels, H rows, W columns.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.errors import ConfigError, StepFailed
from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.ids import MOST_STEP_NAME
from adam_async.run.store_record import MOST_NAME

MOST_SAMPLE = 1 << 16
"""Maximum number of training images in the sample of a step."""

MOST_SAMPLE_BYTES = 1 << 30
"""Maximum size in bytes of a step's sample, which data servers and the driver hold in memory."""

MOST_CONSTANTS = 1 << 13
"""Maximum number of fingerprints in a step's record (`TrainStep.constants`)."""

Metrics = Mapping[str, float]
"""Results of an evaluation by name. ``accuracy`` is required: the share of right answers, from 0 to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One group of images.

    Attributes:
        images: uint8 of shape (N, C, H, W), read-only.
        labels: int64 of shape (N,), read-only; class 0, 1, ...
        epoch: Epoch of the group, from 1; 0 in an evaluation.
        number: Number of the group in its epoch, from 0. Epoch and number are a key for random values that do
            not depend on the worker.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    epoch: int = 0
    number: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def scaled(self, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return the images as numbers from 0 to 1, shape (N, C, H, W)."""
        return np.divide(self.images, 255, dtype=dtype)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step except its gradients.

    Attributes:
        loss: Mean loss of the batch.
        weight: Number of examples in the gradients' mean, from 1 to N; in bsp also the batch's weight in the
            mean over all replicas.
    """

    loss: float
    weight: int


class Gradients(MutableMapping[str, NDArray[Any]]):
    """The gradients of one batch, which a step fills, each array once.

    ``out["w"]`` is an array of zeros to write into. ``out["w"] = gradient`` copies a dense gradient;
    ``out["w"] = Factors(activations, errors)`` takes a matrix's two factors.

    Args:
        step: Name of the step, for errors.
        arrays: The arrays of the step.
        factored: Names of arrays whose gradients are sent as factors, each with its maximum number of factor
            rows per example.
        examples: Maximum number of examples in a batch.
    """

    def __init__(
        self, step: str, arrays: Mapping[str, ArraySpec], factored: Mapping[str, int], examples: int
    ) -> None:
        self._step = step
        self._arrays = arrays
        self._rows = dict(factored)
        self._examples = examples
        self._dense = {
            name: np.zeros(spec.shape, spec.dtype) for name, spec in arrays.items() if name not in factored
        }
        self._factored = {
            name: (
                np.zeros((examples * rows, arrays[name].shape[1]), arrays[name].dtype),
                np.zeros((examples * rows, arrays[name].shape[0]), arrays[name].dtype),
            )
            for name, rows in factored.items()
        }
        self._given: dict[str, int] = {}
        """Names of filled arrays, with the rows of their factors, or 0."""

    @property
    def factored(self) -> Collection[str]:
        """Names of the arrays that take `Factors` only."""
        return self._factored.keys()

    def begin(self) -> None:
        """Forget the gradients of the batch before."""
        self._given.clear()

    def check(self, weight: int) -> None:
        """Check that a batch has all its gradients.

        Raises:
            StepFailed: A gradient is missing, or has more rows of factors than the batch's weight permits.
        """
        for name in self._arrays:
            rows = self._given.get(name)
            if rows is None:
                raise self._failed(f"the step set no gradient of array {name!r}: fill out[{name!r}]")
            most = self._rows.get(name, 0)
            if rows > weight * most:
                raise self._failed(
                    f"the factors of array {name!r} have {rows} rows and the weight is {weight}: give "
                    f"{_each_example(most)} that counts, and the number of these examples as weight"
                )

    def dense(self, name: str) -> NDArray[Any]:
        """Return the gradient of an array that is not sent as factors."""
        return self._dense[name]

    def factors(self, name: str, examples: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return activations and errors, with rows for this many examples; None for a dense gradient."""
        pair = self._factored.get(name)
        if pair is None:
            return None
        rows = examples * self._rows[name]
        return pair[0][:rows], pair[1][:rows]

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._check_name(name)
        if name in self._factored:
            raise self._failed(
                f"the gradient of array {name!r} travels as factors: set out[{name!r}] = Factors(...), or "
                "leave the name out of `factors`"
            )
        dense = self._dense[name]
        if name not in self._given:
            self._given[name] = 0
            dense.fill(0)
        return dense

    def __setitem__(self, name: str, gradient: NDArray[Any] | Factors) -> None:
        self._check_name(name)
        spec = self._arrays[name]
        if isinstance(gradient, Factors):
            self._set_factors(name, spec, gradient)
            return
        if name in self._factored:
            self[name]  # raises the error
        if gradient is self._dense[name]:  # from `out["w"] += gradient`
            return
        self._check_array(f"the gradient of array {name!r}", gradient, spec.shape, spec.dtype)
        self._dense[name][...] = gradient
        self._given[name] = 0

    def _set_factors(self, name: str, spec: ArraySpec, factors: Factors) -> None:
        if len(spec.shape) != 2:
            raise self._failed(f"array {name!r} has shape {spec.shape}, and only a matrix has factors")
        rows, inputs = spec.shape
        count = len(factors.activations) if np.ndim(factors.activations) else 0
        rows_each = self._rows.get(name, 1)
        most = self._examples * rows_each if name in self._factored else max(count, 1)
        if not 1 <= count <= most:
            raise self._failed(
                f"the factors of array {name!r} have {count} rows: give 1 to {most}, "
                f"{_each_example(rows_each)}"
            )
        what = f"of the factors of array {name!r}"
        self._check_array(f"`activations` {what}", factors.activations, (count, inputs), spec.dtype)
        self._check_array(f"`errors` {what}", factors.errors, (count, rows), spec.dtype)
        pair = self._factored.get(name)
        if pair is None:
            np.matmul(factors.errors.T, factors.activations, out=self._dense[name])
            self._given[name] = 0
            return
        for mine, given in zip(pair, (factors.activations, factors.errors), strict=True):
            mine[:count] = given
            mine[count:] = 0
        self._given[name] = count

    def __delitem__(self, name: str) -> None:
        raise self._failed(f"the gradient of array {name!r} cannot be removed: set it to 0")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def _check_name(self, name: object) -> None:
        if name not in self._arrays:
            some = ", ".join(map(repr, list(self._arrays)[:5]))
            raise self._failed(
                f"the step has no array {str(name)[:80]!r}; it has {len(self._arrays)}: {some}"
            )

    def _check_array(self, what: str, array: object, shape: tuple[int, ...], dtype: str) -> None:
        if problem := array_problem(array, shape, dtype):
            raise self._failed(f"{what} {problem}")

    def _failed(self, what: str) -> StepFailed:
        return StepFailed(self._step, "step", what)


class TrainStep(Protocol):
    """A step of the user's. Derive from this class, or define the same names.

    Several threads call one object's `step` at once, with different arguments, and all replicas in a process
    share the object. So keep no state of a batch in it.
    """

    arrays: Mapping[str, ArraySpec]
    """The arrays, all of one type."""

    factors: Collection[str] = ()
    """Names of matrices whose gradients `step` can return as `Factors`; or a mapping from these names to the
    maximum number of rows per example (default 1). Messages contain the factors if these have fewer bytes,
    and `Gradients.factored` then names the matrix. For other matrices the worker multiplies the factors."""

    sample: int = 0
    """Maximum number of training images that `derived` gets; they are the same throughout the run."""

    constants: Mapping[str, tuple[float, float]] = {}
    """Fingerprint of each tensor that is not an array, such as a frozen parameter: its norm, and another
    number of this magnitude. A worker refuses a run if its numbers differ from the driver's by more than
    1/1000 of the norm."""

    deterministic: bool = False
    """Whether `step` gives equal bits for equal arguments, which a record requires; read after `prepare`."""

    def prepare(self, shape: tuple[int, int, int], classes: int) -> None:
        """Take the shape of an image and the number of classes, before the arrays and factors are read.

        Raises:
            ConfigError: The step cannot train on such images.
        """

    def check_group(self, images: int) -> None:
        """Check that the step can train on a group of this many images, the smallest one of the run.

        The driver calls this method once, after `prepare` and before training.

        Raises:
            ConfigError: The step fails on such a group.
        """

    def initial(self, seed: int) -> Mapping[str, NDArray[Any]]:
        """Return all arrays' first values; the same seed gives the same values.

        Raises:
            Exception: Any error ends the run with `StepFailed`, in all methods.
        """

    def step(self, values: Mapping[str, NDArray[Any]], batch: Batch, out: Gradients) -> StepOutcome:
        """Fill `out` with the gradients of a batch's mean loss, and return the loss and the weight.

        Args:
            values: Values by name, read-only.
            batch: Images and labels.
            out: Takes the gradient of each array.

        Raises:
            StepFailed: A gradient's name, shape or type differs from its array's.
            Exception: Any error ends the run with `StepFailed`.
        """

    def evaluate(self, values: Mapping[str, NDArray[Any]], batch: Batch) -> Metrics:
        """Return the results on a batch, with ``accuracy``.

        Args:
            values: Values by name, read-only, with the tensors of `derived`.
            batch: Images and labels.

        Raises:
            Exception: Any error ends the run with `StepFailed`.
        """

    def derived(
        self, values: Mapping[str, NDArray[Any]], batches: Sequence[Batch]
    ) -> Mapping[str, NDArray[Any]]:
        """Return further tensors of the model, for `evaluate` and the model file.

        Args:
            values: Values by name, read-only.
            batches: The sample of training images.

        Raises:
            Exception: Any error ends the run with `StepFailed`.
        """
        return {}


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A step in a run's record, in place of a network's spec."""

    name: str
    """Import path, ``package.module:factory``; or the class of a step that only this process has."""
    args: dict[str, Any] = {}
    """Arguments of the factory."""
    shape: tuple[int, int, int]
    """Shape of an image: channels, rows, columns."""
    classes: int
    """Number of classes among the labels."""
    sample: int = 0
    """Maximum number of training images that the driver reads for `TrainStep.derived`."""
    constants: dict[str, tuple[float, float]] = {}
    """Fingerprints of tensors that are no arrays; see `TrainStep.constants`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the step as the `spec` of a `TrainingProgram`."""
        return {"step": msgspec.to_builtins(self)}

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> Self | None:
        """Read the `spec` of a `TrainingProgram`; None if it describes a network.

        Raises:
            ConfigError: A field is missing or out of bounds.
        """
        if "step" not in spec:
            return None
        try:
            found = msgspec.convert(spec["step"], cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the record of a step is invalid: {error}") from None
        if (
            len(found.name) > MOST_STEP_NAME
            or not all(length > 0 for length in (*found.shape, found.classes))
            or found.sample < 0
        ):
            raise ConfigError(
                f"the record of step {found.name[:80]!r} is invalid: images {found.shape}, "
                f"{found.classes} classes, a sample of {found.sample}"
            )
        if problem := found.excess():
            raise ConfigError(f"the record of step {found.name[:80]!r} is invalid: {problem}")
        return found

    def excess(self) -> str:
        """Return which part of the step exceeds its bound, and the remedy; empty if no part does."""
        nbytes = self.sample * prod(self.shape)
        if self.sample > MOST_SAMPLE:
            return f"a sample of {self.sample} images, {MOST_SAMPLE} are the most: take a smaller sample"
        if nbytes > MOST_SAMPLE_BYTES:
            return (
                f"a sample of {self.sample} images of {list(self.shape)} has {nbytes} bytes, "
                f"{MOST_SAMPLE_BYTES} are the most: take a sample of {MOST_SAMPLE_BYTES // prod(self.shape)}"
            )
        if len(self.constants) > MOST_CONSTANTS:
            return (
                f"fingerprints of {len(self.constants)} tensors, {MOST_CONSTANTS} are the most: join frozen "
                "parameters and buffers into fewer tensors"
            )
        for name, numbers in self.constants.items():
            if len(name.encode()) > MOST_NAME:
                return f"tensor {name[:80]!r}... has a name of over {MOST_NAME} bytes: give it a shorter one"
            if not all(map(isfinite, numbers)):  # a fingerprint that is infinite would equal every other
                return f"the fingerprint of {name[:80]!r} is {numbers}, expected finite numbers"
        return ""


def array_problem(array: object, shape: tuple[int, ...], dtype: str) -> str:
    """Return what is wrong with an array, and the remedy; empty if it has this shape and type."""
    if not isinstance(array, np.ndarray):
        return f"is a {type(array).__name__}: give a numpy array of shape {shape}"
    if array.dtype.name != dtype:
        return f"has values of type {array.dtype}, the array {dtype}: convert it with .astype({dtype!r})"
    if array.shape != shape:
        return f"has shape {array.shape}, expected {shape}"
    return ""


def _each_example(rows: int) -> str:
    return "one for each example" if rows == 1 else f"at most {rows} for each example"
