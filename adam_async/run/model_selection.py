"""Selects a run's model: the wanted model, or one that fits the data; estimates memory for its parameters.

The memory factors come from measured peaks of resident memory, in one process over one epoch with 23 million
parameters. The peaks were 4 times the parameters' size in place with plain SGD, 6.8 times with one replica on
a copy, and 9.8 times with two.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.named import NAMED_MODELS, mlp, named_model, photo_conv
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.run.config import Config
from adam_async.run.image_size import Size, read_image_size
from adam_async.run.step_model import RunModel
from adam_async.run.store_record import sheets_of

COMMON = 4
"""Memory for values at the servers, gradients and copies of an evaluation, in multiples of all parameters."""

OF_STATE = 2
"""Memory for each elementwise array of the rule and its initialization, as a multiple of all parameters."""

OF_REPLICA = 3
"""Memory for a replica's copy, gradients, pushes and pulls, as a multiple of all parameters."""


def parameter_bytes(model: RunModel, config: Config) -> int:
    """Estimate how much of a run's memory on one machine grows with the parameters, in bytes.

    Args:
        config: Options of the run, with `weights` decided: ``copy`` or ``aliased``.
    """
    rule = rule_of(config)
    sizes = COMMON + OF_STATE * len(rule.state_names)
    if config.weights != "aliased":
        sizes += OF_REPLICA * config.replicas
        if config.processes and config.link != "tcp":
            has_log = config.copies_in_force > 1 or config.ack == "durable"
            sizes += sheets_of(logged=has_log, summed=config.synchronous, recorded=config.record)
    return sizes * model.num_parameters * model.dtype.itemsize


def check_memory(model: RunModel, config: Config, available_bytes: int) -> None:
    """Check that the parameters of a run fit the memory of the machine.

    Args:
        config: Options of the run, with `weights` decided: ``copy`` or ``aliased``.

    Raises:
        ConfigError: Less than `parameter_bytes` is available; the error has both sizes and the remedy.
    """
    needed = parameter_bytes(model, config)
    if needed > available_bytes:
        raise ConfigError(
            f"model {model.spec.name!r} for images of {list(model.input_shape)} has {model.num_parameters:,} "
            f"parameters, and its run needs about {needed / 1e9:.1f} GB of memory, but "
            f"{available_bytes / 1e9:.1f} GB are available: take "
            "smaller images (--size ROWSxCOLUMNS), a smaller model, or fewer replicas"
        )


HIDDEN = 256
"""Width of the hidden layer in the model that `auto` makes if no named model fits the data."""

PHOTO_SIDE = 16
"""Side length in pixels from which colour images count as photographs. For photographs `auto` makes a
convolutional model: from three classes of 40 photographs it learns more than a model of dense layers."""

ANY_IMAGE = "mlp"
"""Named model that fits any images and classes."""

MLP_HIDDEN = (256, 128)
"""Widths of the hidden layers in `ANY_IMAGE`."""

LOSS = "softmax_cross_entropy"
"""Kind of the loss layer that reads one score per class."""


def choose_model(
    wanted: str,
    data: Mapping[str, Any],
    *,
    text: str | None = None,
    init: ModelSpec | None = None,
    layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
) -> ModelSpec:
    """Return the spec of the wanted model, and check that it fits the data.

    Args:
        wanted: ``auto``, a named model, or the name of a TOML file.
        data: Description of the data by their server: ``name``, ``shape``, ``classes``.
        text: Contents of the TOML file if `wanted` names a file; the caller has read it.
        init: Saved model that has the run's first values; ``auto`` chooses this model, with an output per
            class.
        layers: Kinds of layers that the model may use.

    Raises:
        ConfigError: The model is unknown, or does not fit the data's shape or classes.
    """
    shape = tuple(int(n) for n in data["shape"])
    if text is not None:
        spec = ModelSpec.from_toml(text)
    elif wanted == "auto" and init is not None:
        if tuple(init.input_shape) != shape:
            raise ConfigError(
                f"the saved model {init.name!r} takes images of {tuple(init.input_shape)} (channels, rows, "
                f"columns), but {data['name']} has {shape}; give data that fit, or name another --model"
            )
        spec = with_outputs(init, int(data["classes"]))
    elif wanted == "auto":
        return _fitting(shape, int(data["classes"]))
    elif wanted == ANY_IMAGE:
        spec = mlp((prod(shape), *MLP_HIDDEN, int(data["classes"])), input_shape=shape)
    elif wanted in NAMED_MODELS:
        spec = with_outputs(named_model(wanted), int(data["classes"]))
    else:
        known = ", ".join(NAMED_MODELS)
        hint = " (the file was not read)" if Path(wanted).suffix == ".toml" else ""
        raise ConfigError(
            f"unknown model {wanted!r}{hint}; known: auto, {known}, or a .toml file with a spec"
        )
    check_fits(spec, data, layers=layers)
    return spec


def image_size(
    size: str,
    wanted: str,
    *,
    text: str | None = None,
    spec: ModelSpec | None = None,
    init: ModelSpec | None = None,
) -> Size | None:
    """Return columns and rows of a run's encoded images. For the arguments see `choose_model`.

    Returns:
        The wanted size, otherwise the model's; None if the images decide both.

    Raises:
        ConfigError: `size` or `text` is wrong.
    """
    if size:
        return read_image_size(size)
    if spec is None and text is not None:
        spec = ModelSpec.from_toml(text)
    elif spec is None and wanted in NAMED_MODELS and wanted != ANY_IMAGE:
        spec = named_model(wanted)
    elif spec is None and wanted == "auto":
        spec = init
    if spec is None or len(spec.input_shape) != 3:
        return None
    _, rows, columns = spec.input_shape
    return columns, rows


def check_size(size: str, data: Mapping[str, Any]) -> None:
    """Check that data have the wanted size.

    Raises:
        ConfigError: The images have another size, and are arrays or come from a running data server.
    """
    shape = data["shape"]
    if size and read_image_size(size) != (shape[2], shape[1]):
        raise ConfigError(
            f"size={size} does not fit {data['name']}, whose images are {shape[1]}x{shape[2]}: arrays, and "
            "the data of a running data server, keep their size; leave size out"
        )


def with_outputs(spec: ModelSpec, classes: int) -> ModelSpec:
    """Return a model with one output per class, by changing its last dense layer.

    If the number of outputs changes, the model has no class weights in its loss. A model stays unchanged if
    its loss is not `LOSS`, or if its scores do not come from a dense layer.
    """
    *body, loss = spec.layers
    layers = {layer.name: layer for layer in body}
    head = layers[loss.inputs[0]]
    if head.kind != "dense" or dict(head.options)["outputs"] == classes or loss.kind != LOSS:
        return spec
    layers[head.name] = replace(
        head, options=tuple(sorted({**dict(head.options), "outputs": classes}.items()))
    )
    plain = replace(loss, options=tuple(pair for pair in loss.options if pair[0] != "class_weights"))
    return replace(spec, layers=(*layers.values(), plain))


def check_fits(
    spec: ModelSpec, data: Mapping[str, Any], *, layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS
) -> None:
    """Check that a model can be trained on data.

    Raises:
        ConfigError: The spec cannot be built, has no parameters to train, needs another image shape, or has
            too few outputs.
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
            f"choose --model auto, or data that fits, or give its last dense layer {classes} outputs"
        )


def _fitting(shape: tuple[int, ...], classes: int) -> ModelSpec:
    for name in ("mnist-adam", "digits", "cifar-conv"):
        spec = named_model(name)
        if tuple(spec.input_shape) == shape and classes <= 10:
            return with_outputs(spec, classes)
    channels, *sides = shape
    if channels == 3 and min(sides) >= PHOTO_SIDE:
        return photo_conv(shape, classes)
    return mlp((prod(shape), HIDDEN, classes), input_shape=shape)
