"""Pure: a recorded run in memory: the reads of each client, and the order of pushes at each shard.

A *client* is one replica generation with its session: the worker that trained its groups on one copy of the
values. A replica has several clients in a run if the run lost workers, or if workers joined.

Letters: G groups of one client, in the order of its one thread; S shards of the model; T tensors; E pushes at
one shard, in the order in which they were applied; B batches of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError, RecordError
from adam_async.messages.body import Count, Version
from adam_async.run.config import Config
from adam_async.run.counts import SkippedGroups
from adam_async.run.option_sources import make_config

Numbers = NDArray[np.int64]


class RecordedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one epoch, and the versions of the evaluated weights."""

    epoch: Count
    images: Count
    train_loss: float | None
    """Mean loss; None if it was not finite."""
    test_accuracy: float
    versions: tuple[Version, ...]
    """Version of each shard in the evaluated snapshot."""
    skipped_groups: SkippedGroups = ()
    """Ranges of skipped groups, which decide the next epoch's order."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A run: options, model, data, machine and results."""

    config: dict[str, Any]
    spec: dict[str, Any]
    """Description of the model or step, from `ModelSpec.to_dict` or `StepSpec.to_dict`."""
    transforms: tuple[dict[str, Any], ...] = ()
    """Transforms of training images, as for `Recipe.of`."""
    data: dict[str, Any]
    """Name, shape and sizes of the data, from the data server."""
    buckets: tuple[str, ...]
    """Home of each bucket, which determines the shards of one message."""
    kernels: str
    """Implementation of the layers that the workers ran."""
    machine: dict[str, str]
    """Further influences on last bits: versions of libraries, the BLAS and its threads, the processor."""
    epochs: tuple[RecordedEpoch, ...]
    weights: str
    """Digest of the final values, from `run.digest`."""

    def options(self) -> Config:
        """Return the run's options. Raises RecordError: the options of this version differ."""
        try:
            return make_config(self.config)
        except ConfigError as error:
            raise RecordError(
                f"the record has other options than this version: {error}; replay it with the version that "
                f"recorded it ({self.machine.get('adam-async', 'unknown')})"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """The groups of one client: the versions that each group read, and the step of its gradient."""

    replica: int
    epochs: Numbers
    """(G,) epoch of each group."""
    numbers: Numbers
    """(G,) number of each group in its epoch."""
    clocks: Numbers
    """(G,) clock of the push that has the group's gradient; never falls."""
    progress: NDArray[np.float64]
    """(G,) `Lease.progress`, which schedules depend on."""
    versions: Numbers
    """(G, S) version of each shard in its read."""
    steps: Numbers
    """(G, T) number of local steps in the copy of each tensor at its read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """The pushes at one shard, in batches that were applied together."""

    shard: int
    clients: Numbers
    """(E,) client of each push."""
    clocks: Numbers
    """(E,) clock of each push."""
    refused: NDArray[np.bool_]
    """(E,) whether a push left the shard unchanged."""
    skipped: NDArray[np.bool_]
    """(E,) whether a push was refused whatever its gradient, for example because the shard had its groups."""
    bounds: Numbers
    """(B + 1,) bounds of the batches: batch b has the pushes `bounds[b]` to `bounds[b + 1]`."""
    versions: Numbers
    """(B,) version of the shard after each batch."""
    summed: bool = False
    """Whether the pushes of a batch were summed and applied once, as in bsp."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """A recorded run."""

    header: Header
    reads: Mapping[int, Reads]
    """Groups of each client, by its number in this recording."""
    orders: tuple[Order, ...]
