"""Pure: data server and parameter server: the groups of an epoch that the shards of a bundle have.

The answer ends with two int64 tensors: `every`, the groups that all trainable shards of the bundle have, and
`some`, the other groups that at least one of these shards has. Both fields are ranges as in
`run/group_ranges.py`.

Shards count losses in the order in which pushes arrive, and a floating-point sum depends on the order. So a
`LossSum` counts in units of 2^-64, as one integer: every order has the same bits. A term is rounded to a
unit, 5e-20, which is below the rounding of a float64 for losses above 5e-4.
"""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adam_async.messages.body import Body, Clock, Count, Epoch, Loss, NodeId, Rows, StoreId, Version
from transport import RemoteProtocolError

UNITS = 1 << 64
"""Number of units in a loss of 1."""

MOST_LOSS = 2.0**128
"""Largest absolute value of a term, a float32's; a larger one counts as not finite."""

MOST_IMAGES = (1 << 53) - 1
"""Largest number of images in a sum; a worker that claims more does not raise it further."""

UNIT_BYTES = 40
"""Maximum length of `LossSum.packed`, in bytes: 192 bits for the largest term, more for their number."""


class LossSum(NamedTuple):
    """Sum of the losses of some images."""

    images: int = 0
    units: int | None = 0
    """The sum in units; None if a term was not finite."""

    @property
    def total(self) -> float:
        """The sum, rounded once; NaN if a term was not finite."""
        return nan if self.units is None else self.units / UNITS

    @property
    def packed(self) -> bytes:
        """The units for a message, whose integers have 64 bits; empty for None."""
        return b"" if self.units is None else self.units.to_bytes(UNIT_BYTES, "little", signed=True)

    @classmethod
    def read(cls, images: int, packed: bytes) -> "LossSum":
        """Return a sum from its number of images, and from `packed`."""
        return cls(images, int.from_bytes(packed, "little", signed=True) if packed else None)

    @property
    def fault(self) -> str:
        """Why no images have this sum; empty if some may have it."""
        most = self.images * int(MOST_LOSS) * UNITS
        if 0 <= self.images <= MOST_IMAGES and abs(self.units or 0) <= most:
            return ""
        return f"losses: {self.images} images have none of this sum"


LossSums = Mapping[int, LossSum]
"""Losses that a shard has counted, by epoch; never changed in place."""


KEPT_EPOCHS = 3
"""Number of the newest named epochs whose sets a shard keeps: the one before, the present and the next."""

MOST_BOUNDS = 1 << 14
"""Number of range bounds in one set above which a server takes no further groups of the epoch; a correct set
has a few ranges per replica."""

MOST_SETS_BOUNDS = 1 << 20
"""Maximum total number of range bounds over all different sets of a bundle that a server answers with or
loads. Correct sets have a few ranges for each replica, and only few of them differ."""

MOST_SENT_BOUNDS = 1 << 18
"""Maximum number of range bounds in one tensor; correct tensors have a few ranges per replica."""

MOST_GROUP = 1 << 32
"""Largest bound of a range: one past the last possible number of a group."""


class ReadGroupSets(Body, frozen=True, kw_only=True):
    """Request to a bundle's primary for the groups of the epoch that its shards have.

    A primary that follows an older map than `map_version` refuses the question (``busy``). The answer waits
    until the groups of all pushes that the primary had ordered are counted. From that version on the bundle
    takes no groups of a generation that the map does not name. So the answer is final for the generations
    that have ended at this version.
    """

    store: StoreId
    generation: Version
    """Version of the store's assignment of buckets."""
    home: NodeId
    """Name of the bundle."""
    epoch: Epoch
    map_version: Version


class BundleSets(Body, frozen=True, kw_only=True):
    """Groups that the shards of a bundle have. Tensors: `every`, `some`."""

    trainable: bool
    """Whether the bundle has shards that pushes of the run name. Without trainable shards, both tensors are
    empty, and the bundle restricts nothing."""
    clock: Clock
    """Highest clock of all pushes and ticks that the bundle has counted, over all generations; 0 in asp."""
    images: Count = 0
    """Number of images in the epoch whose losses one shard has: the bundle's shard with the most."""
    loss_sum: Loss = 0.0
    """Sum of the losses of these images; NaN if one is not finite."""


def read_group_sets(tensors: Sequence[NDArray[Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `every` and `some` from the tensors of `BundleSets`.

    Raises:
        RemoteProtocolError: The tensors are not two sets of ranges without common groups.
    """
    if len(tensors) != 2:
        raise RemoteProtocolError("tensors", f"BundleSets must carry 2 tensors, got {len(tensors)}")
    for name, ranges in zip(("every", "some"), tensors, strict=True):
        if ranges.dtype != np.int64 or ranges.ndim != 1 or len(ranges) % 2 or len(ranges) > MOST_SENT_BOUNDS:
            found = f"{ranges.dtype}{ranges.shape}"
            raise RemoteProtocolError("tensors", f"{name}: expected pairs of int64, got {found}")
        check_ascending(ranges, name)
    every, some = tensors
    # A range of `some` lies between two neighbours in `every`: both its ends have the same even index there.
    starts, stops = every.searchsorted(some[::2], "right"), every.searchsorted(some[1::2], "left")
    if (starts % 2).any() or (starts != stops).any():
        raise RemoteProtocolError("tensors", "a group is in `every` and in `some`")
    return tuple(every.tolist()), tuple(some.tolist())


def check_ascending(ranges: NDArray[np.int64], name: str) -> None:
    """Raise RemoteProtocolError if range bounds do not ascend, or are not group numbers."""
    if len(ranges) and (ranges[0] < 0 or ranges[-1] > MOST_GROUP or (ranges[1:] <= ranges[:-1]).any()):
        raise RemoteProtocolError("tensors", f"{name}: bounds of ranges ascend from 0 to {MOST_GROUP}")


ROWS: Rows = {ReadGroupSets: frozenset({("data", "ps")}), BundleSets: frozenset({("ps", "data")})}
