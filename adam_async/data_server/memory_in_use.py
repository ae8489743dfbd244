"""Pure: how many bytes of some arrays somebody still holds, without being told when they are let go."""

import weakref
from collections import deque
from typing import Any

from numpy.typing import NDArray


class Footprint:
    """Bytes of the arrays that it was shown and that are still alive.

    An answer that waits in a link, or a group that a worker of the same process trains on, is a slice of an
    array that lives as long as the slice does. Arrays may die in any thread; all else is for one thread.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}
        self._gone: deque[int] = deque()
        self._bytes = 0

    def watch(self, array: NDArray[Any]) -> None:
        """Count the memory behind an array until nobody reads it any more. An array is shown once."""
        owner = array if array.base is None else array.base
        gone = self._gone
        reference = weakref.ref(owner, lambda reference: gone.append(id(reference)))
        self._watched[id(reference)] = reference, array.nbytes
        self._bytes += array.nbytes

    @property
    def bytes(self) -> int:
        """Of all arrays that are alive."""
        while self._gone:
            _, size = self._watched.pop(self._gone.popleft())
            self._bytes -= size
        return self._bytes

    def __repr__(self) -> str:
        return f"<Footprint of {len(self._watched)} arrays, {self._bytes} bytes>"
