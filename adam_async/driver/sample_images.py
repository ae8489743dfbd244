"""Pure: sample images with their predictions, for a page that shows a run: first ones, and mistakes."""

import numpy as np
from numpy.typing import NDArray

from adam_async.run.events import Predicted, PredictedImage

MOST_LOOKED_AT = 1000
"""Maximum number of test images among which the mistakes are."""

SHOWN = 12
"""Maximum number of first images, and of mistakes."""

MOST_SIDE = 32
"""Maximum height and width of an image, in pixels; a larger one keeps every second pixel, or fewer."""


def sample_images(
    epoch: int, images: NDArray[np.uint8], labels: NDArray[np.int64], scores: NDArray[np.float32]
) -> Predicted | None:
    """Return the first images and the most confident mistakes; None without images that a page can show.

    Args:
        images: Pixels (N, C, H, W), with one channel or three; those beyond the scores are not shown.
        labels: Classes (N,).
        scores: Scores (n, classes) of the first images, before the softmax.
    """
    images, labels = images[: len(scores)], labels[: len(scores)]
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
