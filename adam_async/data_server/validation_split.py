"""Pure: the validation split (images that a run holds back from training), and the sample of a step.

The split depends only on the labels, the seed and the count, so each data server of a run holds back the same
images. The split is stratified: each class gives images in proportion to its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice

PURPOSE = "validation-split"
SAMPLE_PURPOSE = "sample-of-a-step"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidationSplit:
    """Numbers of training images, ascending."""

    trained: NDArray[np.int64]
    held_back: NDArray[np.int64]

    @classmethod
    def of(cls, labels: NDArray[np.int64], *, count: int, seed: int) -> "ValidationSplit":
        """Hold `count` images back, in proportion from each class, rounded by the largest remainders.

        Args:
            labels: The class of each training image, shape (N,).
        """
        classes, sizes = np.unique(labels, return_counts=True)
        shares = sizes * count / len(labels)
        taken = np.floor(shares).astype(np.int64)
        # A class gives its last image only if no other class has an image to give.
        largest = np.lexsort((taken - shares, taken + 1 >= sizes))
        taken[largest[: count - int(taken.sum())]] += 1
        dice = Dice(seed)
        held = np.zeros(len(labels), np.bool_)
        for label, size, number in zip(classes.tolist(), sizes.tolist(), taken.tolist(), strict=True):
            order = dice.permutation(PURPOSE, size, keys=(int(label),))
            held[np.flatnonzero(labels == label)[order[:number]]] = True
        return cls(trained=np.flatnonzero(~held), held_back=np.flatnonzero(held))


def sample_of(trained: NDArray[np.int64], count: int, *, seed: int) -> NDArray[np.int64]:
    """Return the images from which a step derives statistics (`StepSpec.sample`), ascending.

    Args:
        trained: Numbers of the images to train on.
        count: Maximum number of images.
        seed: Seed of the run.
    """
    order = Dice(seed).permutation(SAMPLE_PURPOSE, len(trained))
    return np.sort(trained[order[:count]])


def check_validation(validation: int, data: Mapping[str, Any]) -> None:
    """Refuse a split that leaves no image to train on.

    Raises:
        ConfigError: The split leaves no image.
    """
    if validation >= int(data["train_images"]):
        raise ConfigError(
            f"validation={validation:,} leaves nothing of the {data['train_images']:,} training images of "
            f"{data['name']}: lower validation"
        )
