"""Pure: what a replay needs of a run, in memory: what each worker read, and in which order servers applied.

Letters: G groups that one worker trained, in the order in which its one thread did; S shards of the model;
T tensors; E pushes that reached one shard, in the order in which they were applied; B batches of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError, RecordError
from adam_async.run.config import Config
from adam_async.run.option_sources import make_config

Numbers = NDArray[np.int64]


class RecordedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one epoch, and which values were evaluated."""

    epoch: int
    images: int
    train_loss: float | None
    """None where it was not finite."""
    test_accuracy: float
    versions: tuple[int, ...]
    """Version of each shard in the snapshot that was evaluated."""
    skipped_groups: tuple[tuple[int, int], ...] = ()
    """Ranges of groups that were not trained; the order of the next epoch depends on them."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, on what, and what came of it."""

    config: dict[str, Any]
    spec: dict[str, Any]
    """The model, as `ModelSpec.to_dict` gives it."""
    transforms: tuple[dict[str, Any], ...] = ()
    """What data servers made of training images, as `Recipe.of` takes it."""
    data: dict[str, Any]
    """Name, shape and sizes of the data, as the data server said them."""
    buckets: tuple[str, ...]
    """Primary of each bucket: it decides which shards travel in one message."""
    kernels: str
    """Which implementation of the layers the workers ran."""
    machine: dict[str, str]
    """What else decides last bits: versions of libraries, the BLAS and its threads, the processor."""
    epochs: tuple[RecordedEpoch, ...]
    weights: str
    """Digest of the final values, as `run.digest` makes it."""

    def options(self) -> Config:
        """The run's options.

        Raises:
            RecordError: They are not those of this version.
        """
        try:
            return make_config(self.config)
        except ConfigError as error:
            raise RecordError(
                f"the record has other options than this version: {error}; replay it with the version that "
                f"recorded it ({self.machine.get('adam-async', 'unknown')})"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What one worker did: for each group what it read, and in which step its gradient left."""

    replica: int
    epochs: Numbers
    """(G,) epoch of each group."""
    numbers: Numbers
    """(G,) its number in the epoch."""
    clocks: Numbers
    """(G,) clock of the push that carried its gradient; never falls."""
    progress: NDArray[np.float64]
    """(G,) `Lease.progress`, by which schedules go."""
    versions: Numbers
    """(G, S) version of each shard that it read."""
    steps: Numbers
    """(G, T) local steps that were in the copy of each tensor when it was read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """What one shard went through: pushes in batches, as they were applied together."""

    shard: int
    replicas: Numbers
    """(E,) whose push it was."""
    clocks: Numbers
    """(E,) and which of them."""
    refused: NDArray[np.bool_]
    """(E,) whether it was not finite and left the shard as it was."""
    bounds: Numbers
    """(B + 1,) where batches begin: batch b holds the pushes `bounds[b]` to `bounds[b + 1]`."""
    versions: Numbers
    """(B,) version of the shard after each batch."""
    summed: bool = False
    """Whether the pushes of a batch were added up and applied once, as in bsp."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """One run, as far as its replay needs it."""

    header: Header
    reads: Mapping[int, Reads]
    """By replica."""
    orders: tuple[Order, ...]
    """By shard."""
