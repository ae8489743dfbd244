"""Pure: bounds of a recipe's sizes, checked before its passes are made, and the memory of its work.

A recipe of a run comes from a driver: without bounds, one step such as a huge pad would take all memory of a
data server.
"""

from dataclasses import dataclass
from math import prod
from typing import Self

from adam_async.data_server.transforms.pipeline import Shape
from adam_async.data_server.transforms.steps import LARGEST, Step
from adam_async.errors import ConfigError

MOST_STEPS = 64
"""Maximum number of steps of a recipe."""

MOST_VALUES = 1 << 22
"""Maximum number of values (channels x rows x columns) of an image between two steps, for small images."""

MOST_WORDS = 1 << 20
"""Maximum number of random words that all steps together draw for an image, for small images."""

GROWTH = 4
"""Maximum size of an image between two steps, as a multiple of an image of the data set, for large images."""

VALUE_BYTES = 160
"""Upper bound of a pass's memory for each value of an image, in bytes."""

WORD_BYTES = 96
"""Upper bound of the memory of drawing and using a random word, in bytes."""

WORK_BYTES = 1 << 26
"""Maximum memory for the images that are transformed at a time, in bytes; a single image may take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBounds:
    """Bounds of a recipe for images of one shape."""

    values: int
    words: int
    side: int
    """Maximum number of rows, and of columns."""

    @classmethod
    def of(cls, image_shape: Shape) -> Self:
        """Return the bounds for images of shape (C, H, W)."""
        values = GROWTH * prod(image_shape)
        return cls(
            values=max(MOST_VALUES, values),
            words=max(MOST_WORDS, values),
            side=max(LARGEST, *image_shape[1:]),
        )

    def check_shape(self, step: Step, shape: Shape) -> None:
        """Check the shape of the images that a step makes.

        Raises:
            ConfigError: The images are too large.
        """
        if prod(shape) > self.values or max(shape[1:]) > self.side:
            raise ConfigError(
                f"{step.where} ({step.kind}) makes images of {shape} (channels, rows, columns), expected at "
                f"most {self.values:,} values and {self.side:,} rows or columns: pad less, or crop before"
            )

    def check_words(self, step: Step, words: int) -> None:
        """Check the number of random words that a recipe draws for an image, up to a step.

        Raises:
            ConfigError: There are too many.
        """
        if words > self.words:
            raise ConfigError(
                f"{step.where} ({step.kind}): the steps up to it draw {words:,} random values for an image, "
                f"expected at most {self.words:,}: take fewer steps, or a smaller grid or draws"
            )


def work_bytes(values: int, words: int) -> int:
    """Return the upper bound of the memory in which an image is transformed, in bytes.

    Args:
        values: Number of values of the largest image between two steps.
        words: Number of random words of all steps.
    """
    return VALUE_BYTES * values + WORD_BYTES * words
