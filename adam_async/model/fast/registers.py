"""Pure: the vector registers of a machine, which decide the shape of every innermost loop.

A loop with more sums than registers spills sums to the stack, and a loop with few sums waits for its last
product. The width and the number of the registers therefore determine the shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding

from adam_async.errors import ConfigError
from adam_async.runtime.kernel_cache import AUTO, VECTORS, wanted_vectors

MOST_ROWS = 12
"""Maximum number of rows of a tile. More rows are not faster, and each number of rows has its own code."""


@dataclass(frozen=True, slots=True)
class Registers:
    """Vector registers of one kind.

    Attributes:
        width: Bytes of a register.
        number: Number of registers.
        masked_loads: Whether a masked load is as fast as a whole one.
        masked_stores: Whether a masked store is as fast as a whole one.
        reads_operands: Whether a product may read a factor from memory, without a register for it.
    """

    width: int
    number: int
    masked_loads: bool = False
    masked_stores: bool = False
    reads_operands: bool = False

    @property
    def tile_rows(self) -> int:
        """Maximum number of rows of a tile.

        The registers hold two sums per row, two vectors of b and one value of a.
        """
        return min(MOST_ROWS, (self.number - 3) // 2)

    @property
    def dot_rows(self) -> int:
        """Number of rows of a, and of b, in a block of dot products.

        The registers hold the sums, a vector of each row of b, and vectors of one row or of all rows of a.
        """
        # A square block: `side` rows of each factor serve the most products per load.
        sides = range(1, self.number)
        return max(
            side for side in sides if side * (side + 1) + (1 if self.reads_operands else side) <= self.number
        )


SETS = {
    # A masked write is one instruction with AVX-512 and many with AVX2; NEON has no masks.
    "avx512": Registers(64, 32, masked_loads=True, masked_stores=True, reads_operands=True),
    "avx2": Registers(32, 16, masked_loads=True, reads_operands=True),
    # Products of NEON read registers alone; those of AVX can read memory.
    "neon": Registers(16, 32),
}
"""Kinds of registers by name, the widest first."""

FEWEST = Registers(16, 16)
"""Registers for machines without a kind in `SETS`; every machine has at least these."""

_FEATURES = {"avx512": "avx512f", "avx2": "avx2", "neon": "neon"}


def registers_of(features: Mapping[str, bool], wanted: str = AUTO) -> Registers:
    """Choose the registers that kernels use.

    Args:
        features: Features of the processor, by LLVM's names.
        wanted: A name of `SETS`, or ``"auto"`` for the widest.

    Raises:
        ConfigError: The name is unknown, or the processor does not have these registers.
    """
    # In the order of `SETS`: the first is the widest.
    there = [name for name, feature in _FEATURES.items() if features.get(feature, False)]
    if wanted == AUTO:
        return SETS[there[0]] if there else FEWEST
    if wanted not in there:
        problem = "this processor does not have them" if wanted in SETS else "unknown name"
        raise ConfigError(f"{VECTORS}={wanted}: {problem}; choose from {', '.join([*there, AUTO])}")
    return SETS[wanted]


# Chosen once per process, because the shapes are fixed when the loops are emitted.
HOST = registers_of(llvmlite.binding.get_host_cpu_features(), wanted_vectors())
"""Registers that the kernels of this process use."""
