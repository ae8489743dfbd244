"""A transform of a user for tests, named by its import path."""

import numpy as np
from numpy.typing import NDArray


def invert(image: NDArray[np.uint8], draws: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Invert an image."""
    return 255 - image
