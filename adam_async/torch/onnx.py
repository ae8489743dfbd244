"""Networks as ONNX files for other runtimes. This file needs the extra ``onnx``.

PyTorch's exporter writes the module of `to_module`. An ONNX file computes in float32, even for a network in
float64, because runtimes lack float64 for some layers. The file's one input is ``images``: floats from 0 to
1, (N, C, H, W) or (N, features), for any N. The one output is ``scores``, the input of the network's loss
layer. If the classes have names, the metadata has them as a JSON list under the key ``class_names``.
"""

import json
import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adam_async.checkpoint.trained_model import Model
from adam_async.errors import ConfigError, ModelError, install_command
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.torch.convert import to_module

OPSET = 18
"""Version of the ONNX operators in a file: PyTorch's exporter writes this version without a conversion."""

MAX_PARAMETERS = (1 << 29) - (1 << 20)
"""Maximum number of parameters in one file: 2 GiB of float32, the limit of ONNX, less 4 MiB for the graph."""

TOLERANCE = 1e-5
"""Maximum difference of a runtime's scores from the network's, relative to max(1, largest absolute score)."""

GROUPS = (1, 3)
"""Numbers of images in the check's passes; two numbers find a file with a fixed number of images."""

IMAGES, SCORES, NAMES = "images", "scores", "class_names"
"""Names of the input, of the output, and of the metadata with the class names."""


def make_onnx(model: Model) -> bytes:
    """Return the bytes of an ONNX file that computes a model's scores. The call takes some seconds.

    Equal models give equal bytes with one version of PyTorch.

    Raises:
        ConfigError: A package of the extra ``onnx`` is missing, the model is too large for the format, or it
            cannot be a module (`to_module`).
    """
    for package in ("onnx", "onnxscript"):
        _load(package)
    size = model.network.num_parameters
    if size > MAX_PARAMETERS:
        raise ConfigError(
            f"the network has {size:,} parameters, but an ONNX file holds at most {MAX_PARAMETERS:,}; write "
            "a safetensors file instead (--torch)"
        )
    module = to_module(model).float()
    # Two images: the exporter would make an axis of length one constant.
    example = torch.zeros(2, *model.input_shape, device="cpu")
    program = _quietly(
        lambda: torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            opset_version=OPSET,
            input_names=[IMAGES],
            output_names=[SCORES],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            verbose=False,
        )
    )
    proto = program.model_proto
    # The exporter's metadata names source files of this machine.
    for part in (*proto.graph.node, *proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        part.ClearField("metadata_props")
    proto.graph.ClearField("metadata_props")
    proto.graph.name = model.network.spec.name
    if model.trained_names:
        entry = proto.metadata_props.add()
        entry.key, entry.value = NAMES, json.dumps(list(model.trained_names))
    return bytes(proto.SerializeToString(deterministic=True))


def check_onnx(data: bytes, model: Model) -> float | None:
    """Run an ONNX file in onnxruntime, and compare its scores with the network's in float64.

    Since version 1.29 onnxruntime reports its use to Microsoft, unless the environment variable
    ``ORT_DISABLE_TELEMETRY`` is 1 at its first import. The command `export` sets this variable.

    Returns:
        The largest difference, in units of the scores; None if onnxruntime is not installed.

    Raises:
        ModelError: A score differs by more than `TOLERANCE`, or the scores have another shape.
    """
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    exact = Network(model.network.spec, np.float64)
    worst = 0.0
    for count in GROUPS:
        images = _drawn_images(count, model.input_shape)
        (found,) = session.run([SCORES], {IMAGES: images})
        expected = exact.scores(model.weights, images)
        difference = float(np.abs(found - expected).max(initial=0))
        # `not <=` instead of `>`, so that a score that is not a number fails too.
        if found.shape != expected.shape or not difference <= TOLERANCE * max(1.0, np.abs(expected).max()):
            raise ModelError(
                f"onnxruntime gives scores of shape {list(found.shape)} for {count} images, which differ "
                f"from the network's by up to {difference:.3g}; no file is written"
            )
        worst = max(worst, difference)
    return worst


def _drawn_images(count: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    drawn = Dice(0).uniform(
        "images of the check of an export", keys=(count,), count=count * int(np.prod(shape))
    )
    return np.asarray(drawn, np.float32).reshape(count, *shape)


def _load(package: str) -> Any:
    """Import a package of the extra ``onnx``."""
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(
            f"an ONNX file needs {package}, of the extra `onnx`: {install_command('onnx')}"
        ) from None


def _quietly(work: Callable[[], Any]) -> Any:
    """Do work without PyTorch's warnings, which concern its own code and packages that no network needs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    finally:
        logger.setLevel(level)
