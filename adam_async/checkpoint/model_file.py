"""A trained model as one file: tensors by name, with the spec and the class names in the metadata.

The file has the safetensors format, which other libraries can read. The file does not depend on time or
machine: equal weights, specs and class names give equal bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from adam_async.checkpoint.model_head import FORMAT, METADATA_KEY, SavedModelError, read_head
from adam_async.checkpoint.names import FILE_NAME
from adam_async.errors import ConfigError, SpecError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.spec import ModelSpec
from adam_async.run.step_model import RunModel, StepModel
from adam_async.runtime.disk import Disk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedModel:
    """The contents of a model file."""

    spec: ModelSpec
    weights: dict[str, NDArray[Any]]
    """Values by tensor, each in its shape."""
    class_names: tuple[str, ...]
    """Name of class 0, 1, ...; empty if the training data had numbers only."""


def dump_model(
    network: RunModel, weights: Mapping[str, NDArray[Any]], class_names: Sequence[str] = ()
) -> bytes:
    """Write a model as the bytes of its file. The file of a step has its arrays and derived tensors, and no
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
    # One entry, because the library writes several in an order that changes from process to process.
    ours: dict[str, Any] = {"format_version": FORMAT, "spec": network.spec.to_dict()}
    if class_names:
        ours["class_names"] = list(class_names)
    return bytes(save_tensors(tensors, metadata={METADATA_KEY: json.dumps(ours)}))


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
) -> SavedModel:
    """Read the bytes of a model file.

    Raises:
        SavedModelError: The file is truncated, has another format than safetensors, was written by another
            package, or its tensors do not match its spec.
    """
    spec, class_names = read_head(data, len(data), origin)
    try:
        weights = dict(load_tensors(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise SavedModelError(f"{origin} is damaged: {error}; save it again") from None
    try:
        network = Network(spec, layers=layers)
    except SpecError as error:
        raise SavedModelError(f"{origin} holds a model that cannot be built: {error}") from None
    _check(network, weights, origin)
    outputs = prod(network.layers[-1].input_shapes[0])
    if len(class_names) > outputs:
        raise SavedModelError(
            f"{origin} names {len(class_names)} classes, but its model has {outputs} outputs"
        )
    return SavedModel(spec=spec, weights=weights, class_names=class_names)


def _check(network: RunModel, weights: Mapping[str, NDArray[Any]], origin: str) -> None:
    """Check that weights are those of a model.

    Raises:
        SavedModelError: A name is missing or unknown, or a tensor has another shape or is no float.
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
        if weights[name].dtype not in (np.float32, np.float64):
            raise SavedModelError(f"{origin}: {name} holds {weights[name].dtype}, not float32 or float64")
