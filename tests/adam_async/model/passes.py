"""Gradients of whole networks after a backward pass, and the memory that steps take."""

import gc
import tracemalloc

import numpy as np


def gradients_of(network, context):
    """The gradients of all trained tensors, by name."""
    found = {p.name: np.full(p.shape, np.nan, network.dtype) for p in network.trained}
    network.deltas(context, found)
    return found


def output_of(network, context, name):
    """A view of the output of a layer, batch first."""
    return np.moveaxis(_slots_of(network, context, name).output, -1, 0)


def error_of(network, context, name):
    """A view of the error gradient of a layer's output, batch first."""
    return np.moveaxis(_slots_of(network, context, name).output_error, -1, 0)


def _slots_of(network, context, name):
    return context.slots([layer.name for layer in network.layers].index(name))


def peak_growth(step, counts):
    """Bytes above the memory after a first step, at the peak of further steps of these numbers of images."""
    gc.collect()
    tracemalloc.start()
    try:
        step(counts[0])
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for count in counts[1:]:
            step(count)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
