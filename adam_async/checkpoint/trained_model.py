"""A trained model in a program, which classifies images.

    model = Model.load("out/model.safetensors")
    found = model.predict(images)
    print(found.names[0], found.probabilities[0])

Letters: N images, K classes, C channels, H rows, W columns.

A model's file has the tensors by name, with the spec and the class names in the metadata. The file has the
safetensors format, which other libraries can read. The file does not depend on time or machine: equal
weights, specs and class names give equal bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from adam_async.checkpoint.export import check_sums, file_of
from adam_async.checkpoint.model_head import (
    FORMAT,
    METADATA_KEY,
    SavedModelError,
    cannot_read,
    read_head,
    sums_of_model,
    values_alone,
)
from adam_async.checkpoint.names import FILE_NAME
from adam_async.data_server.dataset import Dataset
from adam_async.errors import ConfigError, ModelError, SpecError, failing_as
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import PREDICT_BATCH, Network
from adam_async.report.evaluate import Evaluation, Exam
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.store_record import DTYPES
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes
from adam_async.runtime.ordinary_files import read_ordinary

if TYPE_CHECKING:
    from adam_async.run.result import RunResult


def dump_model(
    network: RunModel, weights: Mapping[str, NDArray[Any]], class_names: Sequence[str] = ()
) -> bytes:
    """Write a model as the bytes of its file. A step's file has its arrays and derived tensors, and no
    metadata.

    Args:
        weights: Tensors by name, converted to the network's dtype.
        class_names: Name of class 0, 1, ... of the training data; empty if classes have only numbers.

    Raises:
        SavedModelError: A tensor is missing or superfluous, or has the wrong shape or type.
        StepFailed: The model is a step that did not return its derived tensors.
    """
    _check(network, weights, "the weights")
    # `np.ascontiguousarray` would make a scalar a vector.
    tensors = {p.name: np.asarray(weights[p.name], network.dtype, order="C") for p in network.parameters}
    if isinstance(network, StepModel):
        return dump_arrays(network.tensors(tensors))
    return file_of(tensors, metadata_of(network, class_names))


def metadata_of(network: Network, class_names: Sequence[str]) -> dict[str, str]:
    """Return the texts in the head of a model's file."""
    ours: dict[str, Any] = {"format_version": FORMAT, "spec": network.spec.to_dict()}
    if class_names:
        ours["class_names"] = list(class_names)
    return {METADATA_KEY: json.dumps(ours)}


def dump_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Write arrays by name as the bytes of a safetensors file without metadata."""
    return bytes(save_tensors({name: np.asarray(each, order="C") for name, each in arrays.items()}))


def check_finite(name: str, value: NDArray[Any]) -> None:
    """Check that a tensor of a model for other programs is finite. Raises ConfigError: it is not."""
    bad = value.size - int(np.count_nonzero(np.isfinite(value)))
    if bad:
        raise ConfigError(
            f"{bad} of {value.size} values of {name!r} are not finite; the training diverged: train again "
            "with a lower rate, or take an earlier model"
        )


async def save_model(
    network: RunModel,
    weights: Mapping[str, NDArray[Any]],
    folder: Path,
    disk: Disk,
    *,
    class_names: Sequence[str] = (),
) -> Path:
    """Write ``model.safetensors`` into a folder, all or nothing, and return its path.

    A cancellation leaves the old file or the new one.

    Raises:
        SavedModelError: The model has other tensors.
        StepFailed: See `dump_model`.
        OSError: The file cannot be written.
    """
    path = folder / FILE_NAME
    # On a thread, because a step may compute its derived tensors.
    data = await disk.run(lambda: dump_model(network, weights, class_names))
    await disk.write_atomic(path, [data])
    return path


def load_model(
    data: bytes, *, origin: str = "the model file", layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS
) -> "Model":
    """Read the bytes of a model file, without any state of update rules.

    Raises:
        SavedModelError: The file is truncated, is not safetensors, was written by another package, or has
            tensors that do not match its spec.
    """
    spec, class_names = read_head(data, len(data), origin)
    try:
        weights = dict(load_tensors(values_alone(data, origin)))
    except (SafetensorError, ValueError, KeyError) as error:
        raise SavedModelError(f"{origin} is damaged: {error}; save it again") from None
    dtype = next((each.dtype for each in weights.values() if each.dtype.name in DTYPES), np.dtype(np.float32))
    try:
        network = Network(spec, dtype, kernels="auto", layers=layers)
    except SpecError as error:
        raise SavedModelError(f"{origin} holds a model that cannot be built: {error}") from None
    check_model(network, weights, class_names, origin)
    try:
        check_sums(weights, sums_of_model(data, origin))
    except ValueError as error:
        raise SavedModelError(f"{origin} is damaged: {error}; save it again") from None
    return Model(network, weights, class_names)


class Described(Protocol):
    """An array, or its description."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        ...

    @property
    def dtype(self) -> DTypeLike:
        """Type of its values."""
        ...


def check_model(
    network: Network, weights: Mapping[str, Described], class_names: Sequence[str], origin: str
) -> None:
    """Check that weights and class names belong to a model.

    Raises:
        SavedModelError: See `_check`; or the model has fewer outputs than classes.
    """
    _check(network, weights, origin)
    outputs = prod(network.layers[-1].input_shapes[0])
    if len(class_names) > outputs:
        raise SavedModelError(
            f"{origin} names {len(class_names)} classes, but its model has {outputs} outputs"
        )


def _check(network: RunModel, weights: Mapping[str, Described], origin: str) -> None:
    """Check that weights fit a model.

    Raises:
        SavedModelError: A name is missing or unknown, or a tensor has another shape or is not floating-point.
    """
    wanted = {parameter.name: parameter.shape for parameter in network.parameters}
    missing = sorted(wanted.keys() - weights.keys())
    unknown = sorted(weights.keys() - wanted.keys())
    if missing:
        raise SavedModelError(f"{origin} lacks {', '.join(missing)}, which model {network.spec.name!r} has")
    if unknown:
        raise SavedModelError(
            f"{origin} has {', '.join(unknown)}, which model {network.spec.name!r} does not have"
        )
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise SavedModelError(
                f"{origin}: {name} has shape {list(weights[name].shape)}, "
                f"but model {network.spec.name!r} needs {list(shape)}"
            )
        if np.dtype(weights[name].dtype).name not in DTYPES:
            raise SavedModelError(f"{origin}: {name} holds {weights[name].dtype}, not float32 or float64")


SOFTMAX = "softmax_cross_entropy"
"""Kind of the loss layer whose inputs become probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Classes of some images."""

    numbers: NDArray[np.int64]
    """Shape (N,): the class with the highest probability."""
    probabilities: NDArray[np.float64]
    """Shape (N, K), each row with the sum 1."""
    class_names: tuple[str, ...]
    """Name of class 0, 1, ..., K - 1."""

    @property
    def names(self) -> list[str]:
        """Name of the class with the highest probability, for each image."""
        return [self.class_names[number] for number in self.numbers]

    def best(self, image: int, count: int) -> Iterator[tuple[str, float]]:
        """Yield name and probability of one image's `count` likeliest classes, in descending order."""
        row = self.probabilities[image]
        for number in np.argsort(-row, kind="stable")[:count]:
            yield self.class_names[number], float(row[number])

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"<Predictions {len(self)} images {len(self.class_names)} classes>"


class Model:
    """A network with its weights and the names of its classes.

    Any number of threads may use one model. `predict` and `evaluate` block their thread; in an event loop,
    call them with `asyncio.to_thread`.

    Args:
        network: The network.
        weights: Values by tensor name; not copied.
        class_names: Name of class 0, 1, ...; a class without a name has its number as name.
    """

    def __init__(
        self, network: Network, weights: Mapping[str, NDArray[Any]], class_names: Sequence[str] = ()
    ) -> None:
        self.network = network
        self.weights = weights
        self.trained_names = tuple(class_names)
        """Names of the training data's classes; empty if these have only numbers."""

    @classmethod
    def load(cls, path: str | Path, *, layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS) -> "Model":
        """Read a model that `train --out` wrote. Blocks.

        Args:
            path: The file, or the folder with a file ``model.safetensors``.
            layers: Kinds of layers that the model may use; ``{**BUILTIN_LAYERS, "mine": Mine}`` adds one.

        Raises:
            SavedModelError: The file is damaged, or is no model.
            ConfigError: The file cannot be read.
        """
        path = Path(path)
        try:
            path = path / FILE_NAME if path.is_dir() else path
            data = read_ordinary(path, available_bytes())
        except OSError as error:
            raise cannot_read("model", path, error) from None
        return load_model(data, origin=str(path), layers=layers)

    @classmethod
    def of(cls, result: "RunResult") -> Self:
        """Make a model from the result of a training.

        Raises:
            ConfigError: The run trained a user's step, which has only arrays.
        """
        if isinstance(result.model, StepModel):
            raise ConfigError(
                f"step {result.model.spec.name} is no network, so that no Model can be made of it: use "
                "result.weights, its arrays by name"
            )
        return cls(result.model, result.weights, result.class_names)

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors`` into a folder atomically, and return its path. Blocks.

        Raises:
            ConfigError: The file cannot be written there.
        """
        path = Path(folder) / FILE_NAME
        aside = path.with_name(f".{FILE_NAME}.part")
        with failing_as(ConfigError, f"model {path} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(dump_model(self.network, self.weights, self.trained_names))
            aside.replace(path)
        return path

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image."""
        return self.network.input_shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of class 0, 1, ..., K - 1; a class without a name has its number as the name."""
        outputs = prod(self.network.layers[-1].input_shapes[0])
        return (*self.trained_names, *map(str, range(len(self.trained_names), outputs)))

    def predict(self, images: NDArray[Any], *, batch: int = PREDICT_BATCH) -> Predictions:
        """Classify images.

        Compiled kernels compute the classes if they are ready on this machine, otherwise NumPy.

        Args:
            images: Shape (N, C, H, W) or, with one channel, (N, H, W): uint8 from 0 to 255, or floats from 0
                to 1. N may be 0.
            batch: Number of images computed together.

        Raises:
            ModelError: The images have another layout, type or range.
            ConfigError: The model's last layer is not softmax cross-entropy, so the model gives no
                probabilities.
        """
        spec = self.network.spec
        if spec.layers[-1].kind != SOFTMAX:
            raise ConfigError(
                f"model {spec.name!r} ends in {spec.layers[-1].kind}, so its outputs are not probabilities; "
                "read them with model.network.scores(model.weights, images)"
            )
        images = self._as_array(images)
        self.network.use_ready()
        scores = self.network.scores(self.weights, images, batch).astype(np.float64)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        shares /= shares.sum(axis=1, keepdims=True)
        return Predictions(
            numbers=scores.argmax(axis=1).astype(np.int64), probabilities=shares, class_names=self.class_names
        )

    def _as_array(self, images: NDArray[Any]) -> NDArray[Any]:
        """Convert to an array, and refuse a single image, whose rows would be read as images."""
        try:
            array = np.asarray(images)
        except ValueError as error:
            raise ModelError(f"images must be one array, (N, C, H, W): {error}") from None
        # With one channel, (1, H, W) is valid: one image of (N, H, W).
        single = self.input_shape[1:] if self.input_shape[0] == 1 else self.input_shape
        if array.shape == single:
            raise ModelError(
                f"images have shape {list(array.shape)}, which is one image; give several: images[np.newaxis]"
            )
        return array

    def evaluate(self, dataset: Dataset) -> Evaluation:
        """Evaluate the model on a data set's test images, with classes matched by name.

        Raises:
            ConfigError: The model needs other images, or lacks the class of a test image.
            DataError: The data set has no test images.
        """
        self.network.use_ready()
        exam = Exam(self.network, self.weights, dataset, self.trained_names)
        context = exam.context()
        return exam.result(exam.mark(context, first) for first in exam.batches)

    def __repr__(self) -> str:
        return f"<Model {self.network.spec.name} {len(self.class_names)} classes>"


def check_init(init: object) -> None:
    """Refuse a value that is neither a `Model` nor None, such as a model's path.

    Raises:
        ConfigError: The value has another type.
    """
    if init is not None and not isinstance(init, Model):
        example = f"Model.load({str(init)!r})" if isinstance(init, str | PurePath) else "Model.load(path)"
        raise ConfigError(f"init is a {type(init).__name__}, expected a model: give init={example}")
