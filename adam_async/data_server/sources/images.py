"""Where the training images of a data set may be: in memory, in a cache, or where they are stored."""

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.image_cache import CachedImages
from adam_async.data_server.lazy_images import StoredImages

Images = NDArray[np.uint8] | CachedImages | StoredImages
"""Images by number: all have ``shape`` (N, C, H, W), ``dtype``, ``len`` and ``take(numbers, axis=0)``."""
