"""The transforms of the training images of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adam_async.checkpoint.manifest import Manifest, resumed_transforms
from adam_async.data_server.transforms.recipe import Recipe, default_steps
from adam_async.run.config import Config
from adam_async.run.user_code import functions_for, imported_functions


async def transforms_of(
    config: Config,
    resumed: Manifest | None,
    asked: Sequence[Mapping[str, Any]] | None,
    image_shape: Sequence[int],
    functions: Mapping[str, Callable[..., Any]] = {},
) -> tuple[dict[str, Any], ...]:
    """Choose the transforms of a run that may continue another run; imports run outside the event loop.

    Args:
        resumed: Manifest of the checkpoint that the run continues; None for a new run.
        asked: See `steps_for`. With `resumed`, the steps come from the checkpoint, and `asked` only lists
            functions that the run may import.

    Raises:
        ConfigError: See `steps_for` and `resumed_transforms`.
        DeadlineExceeded: An import took too long.
    """
    if not config.augment:
        return ()
    if resumed is not None:
        steps = resumed_transforms(resumed, asked, functions)
        # Data servers import the functions: refuse here a function that this process cannot find.
        await imported_functions(steps, functions)
        return steps
    return steps_for(asked, image_shape, await imported_functions(asked or (), functions))


def steps_for(
    asked: Sequence[Mapping[str, Any]] | None,
    image_shape: Sequence[int],
    functions: Mapping[str, Callable[..., Any]] = {},
) -> tuple[dict[str, Any], ...]:
    """Choose the transforms of a run, and check that they fit the images.

    Args:
        asked: Steps of the caller; None: defaults for the images.
        image_shape: (C, H, W) of every image.

    Raises:
        ConfigError: A step is invalid, or the steps change the shape of images, which must stay that of test
            images.
    """
    channels, rows, columns = image_shape
    shape = (int(channels), int(rows), int(columns))
    steps = default_steps(shape) if asked is None else [dict(step) for step in asked]
    recipe = Recipe.of(steps, shape, kernels="numpy", functions=functions_for(steps, functions))
    recipe.check_shape_kept()
    return tuple(steps)
