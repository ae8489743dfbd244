"""Pure: tells a sender when nobody looks at its arrays any more.

Nothing in an event loop says when the kernel has taken a buffer. But every one of them drops its reference
then, so each array travels as a fresh view of it, and a weak reference on the view fires at that moment.
The view is made by ``numpy.frombuffer``: numpy shortens the base of an array's slices down to the oldest
array of the chain, and only what frombuffer makes stands on a memoryview instead of on the sender's array.
A receiver that keeps a slice keeps the view, and the sender's memory stays untouched for as long.

The callback may run on any thread (a compute thread may drop the last slice), exactly once.
"""

import logging
import weakref
from collections.abc import Callable

import numpy as np

from transport.tensors import BFLOAT16, Tensor

__all__ = ["watched"]

Release = Callable[[], object]

logger = logging.getLogger(__name__)


class _Watch:
    """Calls back when the last of several views is gone. Lives in `_WATCHES` until then."""

    __slots__ = ("_callback", "_references", "_still")

    def __init__(self, views: tuple[Tensor, ...], callback: Release) -> None:
        self._callback = callback
        # One token less than views: whoever finds no token was the last. list.pop is atomic, a count is not.
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
"""A weak reference that is itself dropped never calls back, so something must hold on to the watches."""


def watched(tensors: tuple[Tensor, ...], callback: Release) -> tuple[Tensor, ...]:
    """Return fresh views of ``tensors``; ``callback`` is called once, when all of them are gone.

    Without any elements it is called at once.
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
