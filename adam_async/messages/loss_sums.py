"""Pure: sums of the losses of images, which are equal in any order.

Shards count losses in the order in which pushes arrive, and a sum of floating-point numbers depends on their
order. So a `LossSum` counts in units of 2^-64, as one integer: every order has the same bits. A term is
rounded to a unit, 5e-20, which is below the rounding of a float64 for losses above 5e-4.
"""

from collections.abc import Mapping
from math import nan
from typing import NamedTuple

UNITS = 1 << 64
"""Number of units in a loss of 1."""

MOST_LOSS = 2.0**128
"""Largest absolute value of a term, that of a float32; a larger one counts as not finite."""

MOST_IMAGES = (1 << 53) - 1
"""Largest number of images of a sum; a worker that claims more does not raise it further."""

UNIT_BYTES = 40
"""Maximum length of `LossSum.packed`: 192 bits for the largest term, and more for the number of terms."""


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
