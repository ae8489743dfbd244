"""Layers alone: the kind, options and input shapes of each case, and the layers of each set of kernels."""

import numpy as np
import pytest
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS
from adam_async.model.keyed_random import Dice

IMAGE = (3, 7, 6)

CASES = [
    ("conv2d", {"filters": 4, "kernel": 3}, (IMAGE,)),
    ("conv2d", {"filters": 4, "kernel": 3, "stride": 2}, (IMAGE,)),
    ("conv2d", {"filters": 2, "kernel": 3, "stride": 2, "padding": 1}, (IMAGE,)),
    ("conv2d", {"filters": 2, "kernel": 2, "stride": 3, "padding": 2}, (IMAGE,)),
    ("conv2d", {"filters": 5, "kernel": 1}, (IMAGE,)),
    ("conv2d", {"filters": 13, "kernel": 1}, (IMAGE,)),
    ("max_pool", {"kernel": 2}, ((3, 6, 8),)),
    ("max_pool", {"kernel": 2}, (IMAGE,)),
    ("max_pool", {"kernel": 3, "stride": 2}, (IMAGE,)),
    ("max_pool", {"kernel": 2, "stride": 3}, (IMAGE,)),
    ("max_pool", {"kernel": 1}, (IMAGE,)),
    ("locally_connected", {"filters": 4, "kernel": 3}, (IMAGE,)),
    ("locally_connected", {"filters": 2, "kernel": 3, "stride": 2, "padding": 1}, (IMAGE,)),
    ("locally_connected", {"filters": 2, "kernel": 2, "stride": 3, "padding": 2}, (IMAGE,)),
    ("locally_connected", {"filters": 1, "kernel": 1}, (IMAGE,)),
    ("locally_connected", {"filters": 13, "kernel": 2, "stride": 2, "padding": 1}, (IMAGE,)),
    ("average_pool", {"kernel": 2}, ((3, 6, 8),)),
    ("average_pool", {"kernel": 3, "stride": 2}, (IMAGE,)),
    ("average_pool", {"kernel": 2, "stride": 3}, (IMAGE,)),
    ("average_pool", {"kernel": 1}, (IMAGE,)),
    ("average_pool", {"kernel": 2}, (IMAGE,)),
    ("dropout", {"rate": 0.3}, (IMAGE,)),
    ("dropout", {"rate": 0.0}, ((9,),)),
    ("dropout", {"rate": 0.4}, (IMAGE,)),
    ("local_response_norm", {"size": 3, "alpha": 0.5}, ((5, 4, 3),)),
    ("local_response_norm", {"size": 4, "alpha": 2, "beta": 0.5, "k": 2.0}, ((6, 2, 3),)),
    ("local_response_norm", {"size": 9, "alpha": 1.0}, (IMAGE,)),
    ("local_response_norm", {"alpha": 0.5}, ((7, 3, 2),)),
    ("local_response_norm", {"size": 2, "alpha": 0.5, "beta": 1.5, "k": 2.0}, (IMAGE,)),
    ("local_response_norm", {"size": 9, "alpha": 0.5, "beta": 0.3}, (IMAGE,)),
    ("dense", {"outputs": 5}, ((7,),)),
    ("dense", {"outputs": 13}, ((300,),)),
    ("relu", {}, (IMAGE,)),
    ("relu", {}, ((9,),)),
    ("sigmoid", {}, (IMAGE,)),
    ("tanh", {}, ((9,),)),
    ("tanh", {}, (IMAGE,)),
    ("flatten", {}, (IMAGE,)),
    ("add", {}, (IMAGE, IMAGE, IMAGE)),
    ("concatenate", {}, (IMAGE, (1, 7, 6), IMAGE)),
    ("concatenate", {}, ((4,), (3,))),
    ("concatenate", {}, ((9,), (2,))),
    ("softmax_cross_entropy", {}, ((5,),)),
    ("softmax_cross_entropy", {"class_weights": (0.5, 2, 0, 1.0, 3)}, ((5,),)),
    ("mean_squared_error", {}, ((5,),)),
    ("mean_squared_error", {}, (IMAGE,)),
]


SQUARES = st.fixed_dictionaries({"kernel": st.integers(1, 4)}, optional={"stride": st.integers(0, 4)})
"""Options of pools."""


def windows(filters, padding):
    """Options of convolutions with up to this many filters and this much padding."""
    return st.fixed_dictionaries(
        {"filters": st.integers(1, filters), "kernel": st.integers(1, 4)},
        optional={"stride": st.integers(1, 4), "padding": st.integers(0, padding)},
    )


def labels_of(kind, shape, images):
    """Class numbers, or values if the loss takes values; None for a layer that is no loss."""
    if kind == "softmax_cross_entropy":
        return np.arange(images) % shape[0]
    if kind == "mean_squared_error":
        values = Dice(2).normal("labels", count=images * int(np.prod(shape)), dtype=float)
        return values.reshape(images, *shape)
    return None


def kinds_of(kernels):
    """Layers of a set of kernels; a layer without a compiled version is NumPy's in both sets."""
    if kernels == "numpy":
        return BUILTIN_LAYERS
    pytest.importorskip("numba", reason="compiled kernels need numba")
    from adam_async.model.fast.engine import fast_kinds

    return fast_kinds(BUILTIN_LAYERS)
