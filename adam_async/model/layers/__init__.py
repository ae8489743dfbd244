"""Pure: the built-in layers, by their kind in a spec."""

from collections.abc import Mapping
from types import MappingProxyType

from adam_async.model.layer import Layer
from adam_async.model.layers.activations import Relu, Sigmoid, Tanh
from adam_async.model.layers.conv2d import Conv2d
from adam_async.model.layers.dense import Dense
from adam_async.model.layers.dropout import Dropout
from adam_async.model.layers.joins import Add, Concatenate, Flatten
from adam_async.model.layers.locally_connected import LocallyConnected
from adam_async.model.layers.losses import MeanSquaredError, SoftmaxCrossEntropy
from adam_async.model.layers.pool import AveragePool, MaxPool
from adam_async.model.layers.response_norm import LocalResponseNorm

__all__ = [
    "BUILTIN_LAYERS",
    "Add",
    "AveragePool",
    "Concatenate",
    "Conv2d",
    "Dense",
    "Dropout",
    "Flatten",
    "LocalResponseNorm",
    "LocallyConnected",
    "MaxPool",
    "MeanSquaredError",
    "Relu",
    "Sigmoid",
    "SoftmaxCrossEntropy",
    "Tanh",
]

BUILTIN_LAYERS: Mapping[str, type[Layer]] = MappingProxyType(
    {
        "conv2d": Conv2d,
        "locally_connected": LocallyConnected,
        "max_pool": MaxPool,
        "average_pool": AveragePool,
        "dense": Dense,
        "relu": Relu,
        "sigmoid": Sigmoid,
        "tanh": Tanh,
        "dropout": Dropout,
        "local_response_norm": LocalResponseNorm,
        "flatten": Flatten,
        "add": Add,
        "concatenate": Concatenate,
        "softmax_cross_entropy": SoftmaxCrossEntropy,
        "mean_squared_error": MeanSquaredError,
    }
)
"""Kinds of layers that a `Network` accepts by default. To add one: ``{**BUILTIN_LAYERS, "mine": Mine}``."""
