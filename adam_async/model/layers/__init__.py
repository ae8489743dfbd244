"""Pure: the built-in layers, by their kind in a spec.

Each layer implements `Layer` (`adam_async/model/layer.py`) with NumPy.

    dense.py                     `Dense`: fully connected, with the factors of its weight gradient
    sliding.py                   `Conv2d`: convolution as one matrix product (GEMM); `LocallyConnected`: one
                                 without shared weights; their columns under the kernel (im2col)
    pool.py                      `MaxPool`, `AveragePool`
    activations.py               `Relu`, `Sigmoid`, `Tanh`; `Dropout`, by seed, group and layer alone
    response_norm.py             `LocalResponseNorm`: across channels
    joins.py                     `Flatten`, `Add`, `Concatenate`
    losses.py                    `SoftmaxCrossEntropy`, `MeanSquaredError`
"""

from collections.abc import Mapping
from types import MappingProxyType

from adam_async.model.layer import Layer
from adam_async.model.layers.activations import Dropout, Relu, Sigmoid, Tanh
from adam_async.model.layers.dense import Dense
from adam_async.model.layers.joins import Add, Concatenate, Flatten
from adam_async.model.layers.losses import MeanSquaredError, SoftmaxCrossEntropy
from adam_async.model.layers.pool import AveragePool, MaxPool
from adam_async.model.layers.response_norm import LocalResponseNorm
from adam_async.model.layers.sliding import Conv2d, LocallyConnected

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
