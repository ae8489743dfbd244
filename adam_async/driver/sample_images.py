"""Pure: sample images with their predictions, for a page that shows a run: first ones, and mistakes."""

import numpy as np
from numpy.typing import NDArray

from adam_async.run.events import Predicted, PredictedImage

SHARE = 10
"""Divisor of the number of test images; the quotient is the number of images that are predicted again."""

LEAST_IMAGES = 64
"""Minimum number of images that are predicted again, if there are so many."""

SHOWN = 12
"""Maximum number of first images, and of mistakes."""

MOST_SIDE = 32
"""Maximum height and width of an image, in pixels; a larger one keeps every second pixel, or fewer."""


def looked_at(images: int) -> int:
    """Return the number of test images that are predicted again."""
    return min(max(images // SHARE, LEAST_IMAGES), images)


def sample_images(
    epoch: int, images: NDArray[np.uint8], labels: NDArray[np.int64], scores: NDArray[np.float32]
) -> Predicted | None:
    """Return the first images and the most confident mistakes; None without images that a page can show.

    Args:
        images: Pixels (N, C, H, W), with one channel or three.
        labels: Classes (N,).
        scores: Scores (N, classes), before the softmax.
    """
    if not len(images) or images.shape[1] not in (1, 3) or scores.shape[1] < 2:
        return None
    stretched = np.exp(scores - scores.max(axis=1, keepdims=True), dtype=np.float64)
    shares = stretched / stretched.sum(axis=1, keepdims=True)
    guesses = shares.argmax(axis=1)
    confidence = np.nan_to_num(shares.max(axis=1))
    wrong = np.flatnonzero(guesses != labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][:SHOWN]
    step = -(-max(images.shape[2:]) // MOST_SIDE)
    small = images[:, :, ::step, ::step]

    def image(n: int) -> PredictedImage:
        """Return one image."""
        return PredictedImage(
            pixels=np.ascontiguousarray(small[n].transpose(1, 2, 0)).tobytes(),
            label=int(labels[n]),
            predicted=int(guesses[n]),
            confidence=round(float(confidence[n]), 4),
        )

    _, channels, height, width = small.shape
    return Predicted(
        epoch=epoch,
        height=height,
        width=width,
        channels=channels,
        first=tuple(image(n) for n in range(min(SHOWN, len(images)))),
        mistakes=tuple(image(int(n)) for n in wrong),
    )
