"""Pure: a step of the user's in the place of a network: checked arrays, contexts, gradients and accuracy.

`StepModel` has a network's interface (`model.network.Trainable`), so workers plan, push and pull as usual:
`forward` runs the whole step, and `backward` does nothing.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from math import isfinite
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError, StepFailed
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import ParameterSpec
from adam_async.model.network import Network
from adam_async.run.arrays import ArraySpec
from adam_async.run.store_record import ArrayRecord, check_arrays
from adam_async.run.train_step import Batch, Gradients, StepOutcome, StepSpec, TrainStep, array_problem

EVALUATE_IMAGES = 256
"""Maximum number of images in a batch that a step evaluates."""

CONSTANTS_TOLERANCE = 1e-3
"""Maximum difference between fingerprints of equal tensors, as a share of the norm. The tolerance is not 0,
because processors round sines and random numbers differently."""

_T = TypeVar("_T")


def arrays_of_step(name: str, step: TrainStep) -> dict[str, ArraySpec]:
    """Return the arrays of a step, checked, and check that it has all methods.

    Args:
        name: Name of the step, for errors.

    Raises:
        ConfigError: The step lacks a method, or an array is invalid; the error names it and the remedy.
        StepFailed: `arrays` raised.
    """
    for method in ("initial", "step", "evaluate"):
        if not callable(getattr(step, method, None)):
            raise ConfigError(
                f"step {name} ({type(step).__name__}) has no method {method}: define arrays, initial, step "
                "and evaluate (docs/how-to/train-your-own-step.md)"
            )
    arrays: object = _call(name, "arrays", lambda: step.arrays)
    if not isinstance(arrays, Mapping) or not arrays:
        raise ConfigError(f"step {name}: arrays is {arrays!r:.80}, expected names with their ArraySpec")
    for array, found in arrays.items():
        if not isinstance(array, str) or not isinstance(found, ArraySpec):
            raise ConfigError(
                f"step {name}: array {array!r:.80} is a {type(found).__name__}, expected an "
                "ArraySpec(shape, dtype)"
            )
        if not found.size:
            raise ConfigError(
                f"step {name}: array {array!r:.80} has shape {found.shape}, so it is empty: leave it out"
            )
    try:
        check_arrays([ArrayRecord(each, it.shape, it.dtype) for each, it in arrays.items()], rules=1)
    except ConfigError as error:
        raise ConfigError(f"step {name}: {error}") from None
    types = {found.dtype: array for array, found in arrays.items()}
    if len(types) > 1:
        (one, first), (other, second) = list(types.items())[:2]
        raise ConfigError(
            f"step {name}: array {first!r:.80} is {one} and {second!r:.80} {other}: give all arrays one type"
        )
    return dict(arrays)


def _call(step: str, method: str, function: Callable[[], _T]) -> _T:
    """Call a method of a step; an error names step and method."""
    try:
        return function()
    except (StepFailed, MemoryError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise StepFailed(step, method, text) from error


class StepContext:
    """The batch and the gradients of one group in flight."""

    def __init__(self, gradients: Gradients, images: int) -> None:
        self.gradients = gradients
        self.batch: Batch | None = None
        self.images = images
        """Weight of the gradients: the number of examples in their mean; at first the maximum."""

    def load(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        *,
        dice: Dice | None = None,
        keys: tuple[int, int] = (0, 0),
    ) -> None:
        """Take a group. Other replicas may share the images and labels, so the step gets read-only views.

        Args:
            dice: Unused, because a step has its own keys.
            keys: Epoch and number of the group.
        """
        self.gradients.begin()
        self.batch = Batch(_read_only(images), _read_only(labels), *keys)
        self.images = len(labels)


class StepModel:
    """A step with its checked arrays, all of which are trained.

    Args:
        step: The step.
        spec: Record of the step.
        keep_going: Whether a loss that is not finite is allowed.

    Raises:
        ConfigError: The step lacks a method, refuses the images, or has an invalid array, factor or constant;
            the error has the remedy.
        StepFailed: `prepare` or `arrays` raised.
    """

    kernels = "step"
    """A word for the kernels, because a step has none of this package."""
    multiply_adds = 0
    """Number of multiply-adds: 0, because it is unknown for a step of the user."""

    def __init__(self, step: TrainStep, spec: StepSpec, *, keep_going: bool = False) -> None:
        self.spec = spec
        self.step = step
        self._keep_going = keep_going
        self._prepare()
        self.arrays = arrays_of_step(spec.name, step)
        self._factored = self._checked_factors()
        self._sample: tuple[NDArray[Any], NDArray[Any]] | None = None
        self.dtype: np.dtype[Any] = np.dtype(next(iter(self.arrays.values())).dtype)
        self.parameters = tuple(
            ParameterSpec(name=name, shape=array.shape, layer=spec.name, kind=name)
            for name, array in self.arrays.items()
        )
        """All arrays, in the step's order."""
        self.trained, self.frozen = self.parameters, frozenset[str]()
        self.num_parameters = sum(array.size for array in self.arrays.values())
        """Number of values in all arrays."""
        self.input_shape = spec.shape

    def _prepare(self) -> None:
        prepare = getattr(self.step, "prepare", None)
        if prepare is not None:
            try:
                _call(self.spec.name, "prepare", lambda: prepare(self.spec.shape, self.spec.classes))
            except StepFailed as error:
                if isinstance(error.__cause__, ConfigError):
                    raise ConfigError(f"step {self.spec.name}: {error.__cause__}") from error
                raise
        here: Mapping[str, tuple[float, float]] = getattr(self.step, "constants", {})
        for name in sorted({*here, *self.spec.constants}):
            mine, given = here.get(name), self.spec.constants.get(name)
            if mine is None or given is None or not _alike(mine, given):
                raise ConfigError(
                    f"step {self.spec.name}: tensor {name!r:.80} differs from that of the run's driver: make "
                    "equal frozen parameters and buffers in every process, from a file or a seed (TorchStep "
                    "sets the seed if it gets a function that makes the module)"
                )

    def check_store(self, arrays: Collection[ArrayRecord]) -> None:
        """Check that the store of the run has the arrays of this step.

        Raises:
            ConfigError: An array is missing, superfluous, or has the wrong shape or type; the error names the
                array.
        """
        there = {array.name: (tuple(array.shape), array.dtype) for array in arrays}
        here = {name: (spec.shape, spec.dtype) for name, spec in self.arrays.items()}
        for name in (*here, *there):
            if here.get(name) != there.get(name):
                mine, given = (
                    f"{found[name][1]}{list(found[name][0])}" if name in found else "absent"
                    for found in (here, there)
                )
                raise ConfigError(
                    f"step {self.spec.name}: array {name!r:.80} is {mine} here, and {given} in the store of "
                    "the run: start this worker with the code and the arguments of the run's driver"
                )

    def _checked_factors(self) -> dict[str, int]:
        """Return the number of factor rows per example, by array name."""
        given = getattr(self.step, "factors", ())
        found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 1)
        for name, rows in sorted(found.items(), key=repr):
            if name not in self.arrays or len(self.arrays[name].shape) != 2:
                raise ConfigError(
                    f"step {self.spec.name}: factors names {name!r:.80}, which is no matrix of its arrays: "
                    "leave it out"
                )
            if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
                raise ConfigError(
                    f"step {self.spec.name}: factors has {rows!r:.80} rows for each example of {name!r:.80}: "
                    "give a whole number of at least 1, or leave the array out"
                )
        return found

    # --- the interface of a network -----------------------------------------------------------------

    def parameter(self, name: str) -> ParameterSpec:
        """Look an array up by its name."""
        return next(parameter for parameter in self.parameters if parameter.name == name)

    def use_ready(self) -> None:
        """Do nothing: a step has no kernels of this package."""

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Do nothing: a step has no kernels of this package."""

    def context(self, group_size: int, factored: Collection[str] | None = None) -> StepContext:
        """Allocate the gradients of one group of up to `group_size` images.

        Args:
            factored: Names of arrays whose gradients are sent as factors; None: all arrays that can have
                factors.
        """
        rows = {name: n for name, n in self._factored.items() if factored is None or name in factored}
        return StepContext(Gradients(self.spec.name, self.arrays, rows, group_size), group_size)

    def forward(self, weights: Mapping[str, NDArray[Any]], context: StepContext) -> float:
        """Run the step on the loaded group, and return its loss.

        Raises:
            StepFailed: The step raised, or its result is wrong.
        """
        batch = context.batch
        assert batch is not None, "a group is loaded before its step"
        values = {name: _read_only(weights[name]) for name in self.arrays}
        outcome = _call(self.spec.name, "step", lambda: self.step.step(values, batch, context.gradients))
        if not isinstance(outcome, StepOutcome):
            raise self._failed(
                "step", f"the step returned {outcome!r:.80}: return StepOutcome(loss, weight=len(batch))"
            )
        context.images = self._weight(outcome.weight, len(batch))
        context.gradients.check(context.images)
        return self._loss(outcome.loss, batch, values)

    def backward(self, weights: Mapping[str, NDArray[Any]], context: StepContext) -> None:
        """Do nothing: `forward` has computed the gradients."""

    def deltas(self, context: StepContext, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the gradients of some arrays into the arrays of `out`, by name."""
        for name, gradient in out.items():
            pair = context.gradients.factors(name, context.images)
            if pair is None:
                gradient[...] = context.gradients.dense(name)
            else:
                np.matmul(pair[1].T, pair[0], out=gradient)

    def factors(self, context: StepContext, name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return activations (K, I) and errors (K, R) of one array; None for a dense gradient.

        K is the weight times the rows for each example.
        """
        return context.gradients.factors(name, context.images)

    # --- the rest of a step --------------------------------------------------------------------

    def initial(self, seed: int) -> dict[str, NDArray[Any]]:
        """Draw the first values of all arrays.

        Raises:
            StepFailed: The step raised, or an array is missing, superfluous, not finite, or has the wrong
                shape or type.
        """
        found = _call(self.spec.name, "initial", lambda: self.step.initial(seed))
        if not isinstance(found, Mapping):
            raise self._failed(
                "initial", f"the step returned {found!r:.80}: return a value for each array by name"
            )
        if missing := [name for name in self.arrays if name not in found]:
            raise self._failed("initial", f"the step returned no value of array {missing[0]!r}")
        if unknown := [name for name in found if name not in self.arrays]:
            raise self._failed("initial", f"the step has no array {unknown[0]!r:.80}: add it to `arrays`")
        for name, spec in self.arrays.items():
            if problem := array_problem(found[name], spec.shape, spec.dtype):
                raise self._failed("initial", f"the value of array {name!r} {problem}")
            if not np.isfinite(found[name]).all():
                raise self._failed("initial", f"the value of array {name!r} has entries that are not finite")
        return dict(found)

    @property
    def lacks_sample(self) -> bool:
        """Whether the step needs a sample of training images, and `take_sample` was not called yet."""
        return bool(self.spec.sample) and self._sample is None

    def take_sample(self, images: NDArray[Any], labels: NDArray[Any]) -> None:
        """Take the sample of training images (N, C, H, W) with labels (N,), for `tensors`."""
        self._sample = _read_only(images), _read_only(labels)

    def tensors(self, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the arrays and the tensors that the step derives from them: all tensors of its model.

        Raises:
            StepFailed: The step raised, or derived something other than NumPy arrays under new names.
        """
        given = {name: _read_only(values[name]) for name in self.arrays}
        derive = getattr(self.step, "derived", None)
        if derive is None:
            return given
        images, labels = self._sample or (np.empty((0, *self.spec.shape), np.uint8), np.empty(0, np.int64))
        # Batches of about equal sizes: normalisation fails on a last batch of one image.
        parts = np.array_split(np.arange(len(labels)), -(-len(labels) // EVALUATE_IMAGES) or 1)
        batches = [
            Batch(images[part[0] : part[-1] + 1], labels[part[0] : part[-1] + 1], number=number)
            for number, part in enumerate(parts)
            if len(part)
        ]
        derived = _call(self.spec.name, "derived", lambda: derive(given, batches))
        for name, tensor in derived.items():
            if name in given or not isinstance(tensor, np.ndarray):
                raise self._failed(
                    "derived",
                    f"tensor {name!r:.80} is a {type(tensor).__name__}, or has the name of an array of the "
                    "step: return NumPy arrays under other names",
                )
        return {**given, **{name: _read_only(tensor) for name, tensor in derived.items()}}

    def count_right(
        self, given: Mapping[str, NDArray[Any]], images: NDArray[Any], labels: NDArray[Any]
    ) -> float:
        """Return the number of right answers for images, by the accuracy of batches.

        Args:
            given: All tensors of the model, from `tensors`.

        Raises:
            StepFailed: The step raised, or returned no accuracy.
        """
        right = 0.0
        for start in range(0, len(labels), EVALUATE_IMAGES):
            part = slice(start, start + EVALUATE_IMAGES)
            batch = Batch(_read_only(images[part]), _read_only(labels[part]), number=start // EVALUATE_IMAGES)
            right += len(batch) * self._accuracy(given, batch)
        return right

    def _accuracy(self, values: Mapping[str, NDArray[Any]], batch: Batch) -> float:
        metrics = _call(self.spec.name, "evaluate", lambda: self.step.evaluate(values, batch))
        if not isinstance(metrics, Mapping) or "accuracy" not in metrics:
            raise self._failed(
                "evaluate",
                f"the step returned {metrics!r:.80}, without accuracy: return {{'accuracy': share}}",
            )
        found = self._number("evaluate", "accuracy", metrics["accuracy"])
        if not 0 <= found <= 1:
            raise self._failed("evaluate", f"the accuracy is {found}: return a share from 0 to 1")
        return found

    def _loss(self, loss: object, batch: Batch, values: Mapping[str, NDArray[Any]]) -> float:
        found = self._number("step", "loss", loss)
        if not isfinite(found) and not self._keep_going:
            bad = next((name for name, array in values.items() if not np.isfinite(array).all()), None)
            cause = "all arrays are finite" if bad is None else f"array {bad!r} is not finite"
            raise self._failed(
                "step",
                f"the loss is {found} in group {batch.number} of epoch {batch.epoch}; {cause}: lower the "
                "rate (--rate), limit the gradient (--clip 1), or train on in any case with --keep-going",
            )
        return found

    def _weight(self, weight: object, images: int) -> int:
        try:
            found = operator.index(weight)  # type: ignore[arg-type]
        except TypeError:
            found = 0
        if not 1 <= found <= images:
            raise self._failed(
                "step",
                f"the weight is {weight!r:.80}: return the number of examples that the gradient is a mean "
                f"over, a whole number from 1 to {images}",
            )
        return found

    def _number(self, method: str, what: str, value: object) -> float:
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self._failed(method, f"the {what} is {value!r:.80}: return a number") from None

    def _failed(self, method: str, what: str) -> StepFailed:
        return StepFailed(self.spec.name, method, what)

    def __repr__(self) -> str:
        return f"<StepModel {self.spec.name} {self.num_parameters} values, {self.dtype}>"


RunModel = Network | StepModel
"""The model of a run: a network, or the step of a user."""


def _alike(mine: tuple[float, float], given: tuple[float, float]) -> bool:
    """Return whether two fingerprints belong to equal tensors."""
    limit = CONSTANTS_TOLERANCE * max(abs(mine[0]), abs(given[0]))
    return all(abs(a - b) <= limit for a, b in zip(mine, given, strict=True))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
