"""Which model a run trains: the one asked for, or the one that fits the data."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.named import NAMED_MODELS, mlp, named_model
from adam_async.model.network import Network
from adam_async.model.spec import ModelSpec

HIDDEN = 256
"""Width of the hidden layer of the model that `auto` makes for data that no named model fits."""


def choose_model(wanted: str, data: Mapping[str, Any], *, text: str | None = None) -> ModelSpec:
    """Find the spec for what the user asked for, and check that it fits the data.

    Args:
        wanted: ``auto``, a named model, or the name of a TOML file.
        data: What the data server says of its data: ``name``, ``shape``, ``classes``.
        text: The contents of the TOML file, when `wanted` names one; the caller has read it.

    Raises:
        ConfigError: There is no such model, or it does not fit the data's shape or classes.
    """
    shape = tuple(int(n) for n in data["shape"])
    if text is not None:
        spec = ModelSpec.from_toml(text)
    elif wanted == "auto":
        return _fitting(shape, int(data["classes"]))
    elif wanted in NAMED_MODELS:
        spec = named_model(wanted)
    else:
        known = ", ".join(NAMED_MODELS)
        hint = " (the file was not read)" if Path(wanted).suffix == ".toml" else ""
        raise ConfigError(
            f"unknown model {wanted!r}{hint}; known: auto, {known}, or a .toml file with a spec"
        )
    check_fits(spec, data)
    return spec


def check_fits(
    spec: ModelSpec, data: Mapping[str, Any], *, layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS
) -> None:
    """Refuse a model that cannot be trained on the data.

    Args:
        spec: The model.
        data: What the data server says of its data.
        layers: Kinds of layers that the model may use.

    Raises:
        ConfigError: The spec cannot be built, has nothing to train, takes images of another shape, or tells
            fewer classes apart.
    """
    shape, classes = tuple(int(n) for n in data["shape"]), int(data["classes"])
    if tuple(spec.input_shape) != shape:
        raise ConfigError(
            f"model {spec.name!r} takes images of {tuple(spec.input_shape)} (channels, rows, columns), but "
            f"{data['name']} has {shape}; choose --model auto, or data that fits"
        )
    network = Network(spec, layers=layers)
    if not network.trained:
        raise ConfigError(f"model {spec.name!r} has nothing to train: none of its layers has parameters")
    outputs = prod(network.layers[-1].input_shapes[0])
    if outputs < classes:
        raise ConfigError(
            f"model {spec.name!r} tells {outputs} classes apart, but {data['name']} has {classes}; "
            "choose --model auto, or data that fits"
        )


def _fitting(shape: tuple[int, ...], classes: int) -> ModelSpec:
    for name in ("mnist-adam", "digits", "cifar-conv"):
        spec = named_model(name)
        if tuple(spec.input_shape) == shape and classes <= 10:
            return spec
    return mlp((prod(shape), HIDDEN, classes), input_shape=shape)
