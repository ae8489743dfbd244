"""Pure: the specification of a store's array, and the factors of its gradient.

Letters: K rows of a batch, I inputs, R outputs.
"""

from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError, check_flags
from adam_async.run.store_record import DTYPES


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape and type of an array in a store.

    Attributes:
        shape: Lengths of the array's axes; empty for a scalar.
        dtype: ``float32`` or ``float64``.
        split: Whether several servers may have parts of the array, cut into shards along its first axis.

    Raises:
        ConfigError: The shape is not a sequence of whole numbers, or the type is not supported.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    split: bool = True

    def __post_init__(self) -> None:
        try:
            shape = tuple(index(length) for length in self.shape)
        except TypeError:
            raise ConfigError(f"shape is a tuple of whole numbers, not {self.shape!r}") from None
        try:
            dtype = np.dtype(self.dtype).name
        except TypeError:
            dtype = str(self.dtype)
        check_flags(split=self.split)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {' or '.join(DTYPES)}, not {self.dtype!r}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype)

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The gradient of a weight matrix (R, I) as two factors: the sum over K rows of errors^T activations.

    Messages carry factors instead of the gradient (Adam, section 3.5.2), which saves bytes if K * (R + I) is
    less than R * I. The gradient is a sum; divide one factor by K for a mean.

    Attributes:
        activations: (K, I).
        errors: (K, R).
    """

    activations: NDArray[Any]
    errors: NDArray[Any]
