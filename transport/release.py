"""Pure: calls back a sender when its arrays have no reader any longer.

An event loop has no callback for a buffer that the kernel has taken. But every loop drops its reference to
such a buffer. The link therefore sends a new view of each array, and a weak reference to the view fires when
the loop drops the view. ``numpy.frombuffer`` makes the view: numpy shortens the base of an array's slices to
the oldest array of the chain, and only a frombuffer array has a memoryview as its base instead of the
sender's array. A receiver that keeps a slice keeps the view, and the sender cannot reuse the memory until the
receiver frees the slice.

The callback may run on any thread (a compute thread may drop the last slice), exactly once.
"""

import logging
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np

from transport.tensors import BFLOAT16, Tensor

Release = Callable[[], object]

LENT: Release = partial(bool)
"""Release, without an effect, of tensors that the sender may change once the sending method has returned: the
link copies the bytes that it cannot send at once."""

logger = logging.getLogger(__name__)


class _Watch:
    """Calls back when the last of several views is freed. `_WATCHES` refers to the watch until then."""

    __slots__ = ("_callback", "_references", "_still")

    def __init__(self, views: tuple[Tensor, ...], callback: Release) -> None:
        self._callback = callback
        # One token less than views: the view that finds no token is the last. list.pop is atomic, and a
        # decrement is not.
        self._still = [None] * (len(views) - 1)
        self._references = [weakref.ref(view, self._gone) for view in views]
        _WATCHES.add(self)

    def _gone(self, reference: object) -> None:
        try:
            self._still.pop()
        except IndexError:
            _WATCHES.discard(self)
            self._references.clear()
            try:
                self._callback()
            except Exception:
                logger.exception("a release callback failed")


_WATCHES: set[_Watch] = set()
"""All open watches, because a weak reference that is itself dropped never calls back."""


def watched(tensors: tuple[Tensor, ...], callback: Release) -> tuple[Tensor, ...]:
    """Return new views of ``tensors``; ``callback`` is called once, when all of them are freed.

    If no tensor has an element, the callback is called at once.
    """
    anchors = tuple([_anchor(tensor) for tensor in tensors if tensor.size])
    if not anchors:
        callback()
        return tensors
    _Watch(anchors, callback)
    own = iter(anchors)
    return tuple([next(own).reshape(tensor.shape) if tensor.size else tensor for tensor in tensors])


def _anchor(tensor: Tensor) -> Tensor:
    """View an array in one dimension, over a memoryview."""
    raw = tensor.view(np.uint16) if tensor.dtype == BFLOAT16 else tensor  # refuses to be a memoryview
    return np.frombuffer(raw.data, tensor.dtype)
