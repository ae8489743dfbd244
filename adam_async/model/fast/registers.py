"""Pure: the vector registers of a machine, which decide the shape of every innermost loop.

A loop that keeps more sums than there are registers spills them to the stack, and one that keeps fewer waits
for the last product. So the shapes are reckoned from the width and the number of the registers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding

from adam_async.errors import ConfigError
from adam_async.runtime.kernel_cache import AUTO, VECTORS, wanted_vectors

MOST_ROWS = 12
"""More rows of a tile would not be faster, and each number of rows has code of its own."""


@dataclass(frozen=True, slots=True)
class Registers:
    """Vector registers of one kind.

    Attributes:
        width: Bytes of a register.
        number: How many there are.
        masked_loads: Whether reading a part of a vector costs as much as reading a whole one.
        masked_stores: Whether writing a part of a vector does.
        reads_operands: Whether a product may take a factor straight from memory, without a register for it.
    """

    width: int
    number: int
    masked_loads: bool = False
    masked_stores: bool = False
    reads_operands: bool = False

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile of two vectors a row: the sums, two vectors of b and one value of a."""
        return min(MOST_ROWS, (self.number - 3) // 2)

    @property
    def dot_rows(self) -> int:
        """Rows of a and of b in a block of dot products: the sums, the vectors of b and one or all of a."""
        sides = range(1, self.number)
        return max(
            side for side in sides if side * (side + 1) + (1 if self.reads_operands else side) <= self.number
        )


SETS = {
    "avx512": Registers(64, 32, masked_loads=True, masked_stores=True, reads_operands=True),
    "avx2": Registers(32, 16, masked_loads=True, reads_operands=True),
    "neon": Registers(16, 32),
}
"""The kinds that have a name, the widest first."""

FEWEST = Registers(16, 16)
"""What every other machine has at least."""

_FEATURES = {"avx512": "avx512f", "avx2": "avx2", "neon": "neon"}


def registers_of(features: Mapping[str, bool], wanted: str = AUTO) -> Registers:
    """Choose the registers that kernels use.

    Args:
        features: What the processor can do, by LLVM's names.
        wanted: A name of `SETS`, or ``"auto"`` for the widest.

    Raises:
        ConfigError: There is no such set, or the processor does not have it.
    """
    there = [name for name, feature in _FEATURES.items() if features.get(feature, False)]
    if wanted == AUTO:
        return SETS[there[0]] if there else FEWEST
    if wanted not in there:
        problem = "this processor does not have them" if wanted in SETS else "there are none of this name"
        raise ConfigError(f"{VECTORS}={wanted}: {problem}; choose from {', '.join([*there, AUTO])}")
    return SETS[wanted]


HOST = registers_of(llvmlite.binding.get_host_cpu_features(), wanted_vectors())
"""The registers that this process's kernels use."""
