"""Pure: is every value finite?"""

import math

import numpy as np

from adam_async.model.layer import Array


@np.errstate(over="ignore", invalid="ignore")
def is_finite(values: Array) -> bool:
    """Whether no value is infinite or no number. Allocates nothing while all is well.

    A finite sum of squares proves it, at the speed of a dot product; a sum that overflowed proves nothing,
    and only then every value is looked at.
    """
    flat = values.reshape(-1)
    return math.isfinite(float(np.dot(flat, flat))) or bool(np.isfinite(values).all())
