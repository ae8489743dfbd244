"""Pure: memory that a run would take on a data server, counted before any of it is allocated.

A driver gives the sizes of a run. A data server refuses a run whose sizes do not fit, and can serve the next
run.
"""

from math import prod

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError
from adam_async.run.cache_size import CacheLimits
from adam_async.run.config import Config
from adam_async.run.train_step import StepSpec
from transport import LinkConfig

SHARE_OF_AVAILABLE = 2
"""Divisor of the available memory that gives the maximum memory of a run beside its cache."""

GROUPS_AT_ONCE = 3
"""Number of copies of a group that are in memory at a time: gathered, transformed, and in an answer."""

LABEL_BYTES = 8
"""Size of a label, in bytes."""


def check_run_memory(
    config: Config, step: StepSpec | None, recipe: Recipe | None, dataset: Dataset, *, available_bytes: int
) -> None:
    """Check that the images of a run fit into the memory of a data server.

    Raises:
        ConfigError: The images do not fit, or a group of images is larger than a message.
    """
    count, image_bytes = len(dataset.train_labels), prod(dataset.image_shape)
    group = min(config.images_per_group, count)
    group_bytes, most_bytes = group * (image_bytes + LABEL_BYTES), LinkConfig().max_message_bytes
    # Workers that each train a part of the model get only some rows of the images.
    if config.partitions == 1 and group_bytes > most_bytes:
        raise ConfigError(
            f"a group of {group:,} images has {group_bytes:,} bytes, above the {most_bytes:,} of a message: "
            f"images_per_group may be {most_bytes // (image_bytes + LABEL_BYTES):,} at most"
        )
    sample = step.sample if step is not None else 0
    parts = {
        f"images_per_group={config.images_per_group}": GROUPS_AT_ONCE * group_bytes,
        f"validation={config.validation}": config.validation * image_bytes,
        f"the sample of {sample} images of its step": min(sample, count) * image_bytes,
        "its transforms": recipe.work_bytes if recipe is not None else 0,
    }
    room, needed = available_bytes // SHARE_OF_AVAILABLE, sum(parts.values())
    if needed > room:
        largest = max(parts, key=parts.__getitem__)
        raise ConfigError(
            f"the run needs {needed:,} bytes of memory on a data server, {parts[largest]:,} of them for "
            f"{largest}, and this one has {room:,} for a run: make that smaller"
        )


def check_cache(limits: CacheLimits, *, available_bytes: int) -> None:
    """Check the size of the cache that a run asks for on a data server.

    Args:
        available_bytes: Memory available to the server plus the memory of its images, in bytes.

    Raises:
        ConfigError: The cache is larger.
    """
    if limits.asked and limits.size_bytes > available_bytes:
        raise ConfigError(
            f"the run asks for a cache of {limits.size_bytes:,} bytes, and this data server has "
            f"{available_bytes:,}: give --cache auto or a smaller size, or start the data server with its own"
        )
