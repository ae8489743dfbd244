"""Pure: what is done to every training image, another variant in each epoch."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.dice import Dice
from adam_async.errors import ConfigError

PURPOSE = "augment"


class Recipe:
    """Steps that make a variant of every training image, a function of (seed, epoch, image).

    Args:
        steps: Kind and options of each step.
        image_shape: (C, H, W) of the images.
    """

    def __init__(self, steps: Sequence[Mapping[str, Any]], image_shape: tuple[int, int, int]) -> None:
        self._steps = [dict(step) for step in steps]
        self.output_shape = image_shape
        """(C', H', W') of what `apply` makes."""

    @classmethod
    def of(
        cls,
        steps: Sequence[Mapping[str, Any]],
        image_shape: tuple[int, int, int],
        *,
        kernels: str = "auto",
        functions: Mapping[str, Callable[..., Any]] = {},
    ) -> "Recipe":
        """Check the steps and make the recipe.

        Raises:
            ConfigError: A step is wrong; names its number, key and value.
        """
        for number, step in enumerate(steps, 1):
            if step.get("kind") not in ("shift", "flip"):
                raise ConfigError(f"step {number} has the unknown kind {step.get('kind')!r}")
        return cls(steps, image_shape)

    def apply(
        self, images: NDArray[np.uint8], numbers: NDArray[np.int64], *, dice: Dice, epoch: int
    ) -> NDArray[np.uint8]:
        """Make the variants of some images.

        Args:
            images: Shape (n, C, H, W).
            numbers: Shape (n,): which images of the data set these are.
            dice: Of the run.
            epoch: From 1.

        Returns:
            New images of shape (n, C', H', W').
        """
        made = np.ascontiguousarray(images).copy()
        for index, step in enumerate(self._steps):
            for at, number in enumerate(numbers):
                drawn = dice.uniform(PURPOSE, keys=(epoch, index), start=4 * int(number), count=2)
                if step["kind"] == "flip":
                    if drawn[0] < 0.5:
                        made[at] = made[at][:, :, ::-1].copy()
                    continue
                most = int(step["pixels"])
                down, right = (int(value * (2 * most + 1)) - most for value in drawn)
                moved = np.zeros_like(made[at])
                rows, columns = moved.shape[1:]
                moved[:, max(down, 0) : rows + min(down, 0), max(right, 0) : columns + min(right, 0)] = made[
                    at, :, max(-down, 0) : rows - max(down, 0), max(-right, 0) : columns - max(right, 0)
                ]
                made[at] = moved
        return made


def read_steps(text: str, origin: str) -> list[dict[str, Any]]:
    """Read the steps of a TOML file: tables ``[[transform]]``, each with a `kind` and its options.

    Raises:
        ConfigError: The text is not of that form; names the origin.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not TOML: {error}") from error
    steps = table.get("transform")
    if not isinstance(steps, list):
        raise ConfigError(f"{origin} has no [[transform]] tables; write one per step, with kind = ...")
    return steps


def default_steps(image_shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Steps for images of this shape when the user names none."""
    return [{"kind": "shift", "pixels": 2}] if image_shape[0] == 1 else [{"kind": "flip"}]
