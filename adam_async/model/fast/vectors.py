"""Pure: vector instructions, for loops that are emitted instead of compiled.

A vector fills one register. The last values of a run, fewer than a vector, are read and written under a mask
if the processor does that fast, otherwise one by one. Addresses are bytes; strides and tables count values.

The width and number of registers decide the shape of every innermost loop. A loop with more sums than
registers spills sums to the stack, and a loop with few sums waits for its last product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir

from adam_async.errors import ConfigError
from adam_async.runtime.kernel_cache import AUTO, VECTORS, wanted_vectors

MOST_ROWS = 12
"""Maximum number of rows in a tile. More rows are not faster, and each number of rows needs separate code."""


@dataclass(frozen=True, slots=True)
class Registers:
    """Vector registers of one kind.

    Attributes:
        width: Bytes of a register.
        number: Number of registers.
        masked_loads: Whether a masked load is as fast as a whole one.
        masked_stores: Whether a masked store is as fast as a whole one.
        reads_operands: Whether a product may read a factor from memory instead of a register.
    """

    width: int
    number: int
    masked_loads: bool = False
    masked_stores: bool = False
    reads_operands: bool = False

    @property
    def tile_rows(self) -> int:
        """Maximum number of rows in a tile.

        The registers hold two sums per row, two vectors of b and one value of a.
        """
        return min(MOST_ROWS, (self.number - 3) // 2)

    @property
    def dot_rows(self) -> int:
        """Number of rows of a and of b in a block of dot products.

        The registers hold the sums, one vector per row of b, and vectors of one row or of all rows of a.
        """
        # A square block: `side` rows of each factor serve the most products per load.
        sides = range(1, self.number)
        return max(
            side for side in sides if side * (side + 1) + (1 if self.reads_operands else side) <= self.number
        )


SETS = {
    # A masked write is one instruction with AVX-512 but many with AVX2; NEON has no masks.
    "avx512": Registers(64, 32, masked_loads=True, masked_stores=True, reads_operands=True),
    "avx2": Registers(32, 16, masked_loads=True, reads_operands=True),
    # NEON products read only registers; AVX products can read memory.
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


VECTOR_BYTES = HOST.width
"""Width of a vector register, in bytes."""

I32, I64, POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()


class Vectors:
    """Vector instructions for one element type, emitted at the builder's position.

    Attributes:
        lanes: Number of values in a vector; by default as many as fill a register.
        mask: Lanes to read and write: the first `lanes_left`, or all without a mask. Other lanes are zero.
    """

    def __init__(
        self,
        builder: Any,
        element: Any,
        *,
        registers: Registers,
        lanes: int | None = None,
        lanes_left: Any = None,
    ) -> None:
        self.builder = builder
        self.element = element
        self.bytes = 4 if isinstance(element, ir.FloatType) else 8
        self.lanes = lanes or registers.width // self.bytes
        self.type = ir.VectorType(element, self.lanes)
        self.zero = ir.Constant(self.type, None)
        self.mask = None
        if lanes_left is not None:
            # The number is known only at run time, so the mask compares it with the number of each lane.
            numbers = ir.VectorType(I64, self.lanes)
            counted = ir.Constant(numbers, [ir.Constant(I64, lane) for lane in range(self.lanes)])
            self.mask = builder.icmp_signed("<", counted, self._spread(lanes_left, numbers))

    def spread(self, scalar: Any) -> Any:
        """Return a vector with one value in every lane."""
        return self._spread(scalar, ir.VectorType(scalar.type, self.lanes))

    def _spread(self, scalar: Any, vector_type: Any) -> Any:
        # LLVM has no broadcast; it merges an insert and a shuffle of lane 0 into one.
        first = self.builder.insert_element(
            ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0)
        )
        order = ir.Constant(ir.VectorType(I32, self.lanes), [ir.Constant(I32, 0)] * self.lanes)
        return self.builder.shuffle_vector(first, first, order)

    def _masked(self, name: str, result: Any, parameters: list[Any]) -> Any:
        letter = "f32" if self.bytes == 4 else "f64"
        return self.builder.module.declare_intrinsic(
            f"llvm.masked.{name}.v{self.lanes}{letter}.p0", (), ir.FunctionType(result, parameters)
        )

    def at(self, base: Any, offset: Any) -> Any:
        """Return the pointer `offset` values after `base`."""
        return self.builder.gep(base, [offset], source_etype=self.element)

    def load(self, pointer: Any) -> Any:
        """Read a vector; lanes outside the mask are zero."""
        if self.mask is None:
            # A run may start at any value, so only the alignment of a value is certain.
            return self.builder.load(pointer, align=self.bytes, typ=self.type)
        # The other lanes get zeros, because sums and maxima use all lanes.
        function = self._masked("load", self.type, [POINTER, I32, self.mask.type, self.type])
        return self.builder.call(function, [pointer, ir.Constant(I32, self.bytes), self.mask, self.zero])

    def store(self, vector: Any, pointer: Any) -> None:
        """Write the lanes of a vector that are in the mask."""
        if self.mask is None:
            self.builder.store(vector, pointer, align=self.bytes)
            return
        function = self._masked("store", ir.VoidType(), [self.type, POINTER, I32, self.mask.type])
        self.builder.call(function, [vector, pointer, ir.Constant(I32, self.bytes), self.mask])

    def broadcast(self, pointer: Any) -> Any:
        """Read one value into every lane."""
        return self._spread(self.builder.load(pointer, align=self.bytes, typ=self.element), self.type)

    def multiply_add(self, total: Any, a: Any, b: Any) -> Any:
        """Return ``total + a * b``; one fused instruction if the machine has it."""
        # `contract` allows only the fusion: the order of sums stays.
        product = self.builder.fmul(a, b, flags=["contract"])
        return self.builder.fadd(total, product, flags=["contract"])

    def sum(self, vector: Any) -> Any:
        """Return the sum of the lanes: add halves of the vector until one lane is left."""
        # LLVM's own reduction, without permission to reorder, adds one lane after the other.
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            halves = [
                self.builder.shuffle_vector(
                    vector,
                    vector,
                    ir.Constant(
                        ir.VectorType(I32, lanes), [ir.Constant(I32, start + i) for i in range(lanes)]
                    ),
                )
                for start in (0, lanes)
            ]
            vector = self.builder.fadd(*halves)
        return self.builder.extract_element(vector, ir.Constant(I32, 0))


def whole(value: int) -> Any:
    """Return a 64-bit integer constant."""
    return ir.Constant(I64, value)


def emit_loop(
    vector: Vectors, start: Any, stop: Any, values: list[Any], step: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit ``for k in range(start, stop): values = step(k, values)``; returns the last values."""
    builder, before = vector.builder, vector.builder.block
    check, body, done = (builder.append_basic_block(f"loop.{name}") for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    k = builder.phi(I64)
    k.add_incoming(start, before)
    # Values pass from round to round as phis, so they stay in registers.
    phis = [builder.phi(value.type) for value in values]
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", k, stop), body, done)
    builder.position_at_end(body)
    stepped = step(k, phis)
    # `step` may have opened blocks, so the loop continues from the builder's block and not from `body`.
    k.add_incoming(builder.add(k, whole(1)), builder.block)
    for phi, value in zip(phis, stepped, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(check)
    builder.position_at_end(done)
    return phis


def emit_part(
    builder: Any, element: Any, left: Any, body: Callable[[Vectors, Any], None], registers: Registers
) -> None:
    """Emit ``body(vector, offset)`` for the next values of a run with `left` more values.

    `body` gets a whole vector if there are enough values. Otherwise it gets a masked vector, or each value
    alone with its offset in bytes.
    """
    if registers.masked_stores:
        # A mask costs nothing here, so whole vectors share its code.
        body(Vectors(builder, element, registers=registers, lanes_left=left), whole(0))
        return
    # A write under a mask takes as long here as many single values.
    vector = Vectors(builder, element, registers=registers)
    single = Vectors(builder, element, registers=registers, lanes=1)

    def alone(number: Any, values: list[Any]) -> list[Any]:
        body(single, builder.mul(number, whole(single.bytes)))
        return []

    with builder.if_else(builder.icmp_signed(">=", left, whole(vector.lanes))) as (enough, too_few):
        with enough:
            body(vector, whole(0))
        with too_few:
            emit_loop(single, whole(0), left, [], alone)


class VectorStarts:
    """Pointers to the starts of vectors, by vector number."""

    def __init__(self, vector: Vectors, start: Any, table: Any) -> None:
        self._vector = vector
        self._start = vector.builder.inttoptr(start, POINTER)
        self._table = vector.builder.inttoptr(table, POINTER)

    def __getitem__(self, number: Any) -> Any:
        builder = self._vector.builder
        entry = builder.gep(self._table, [number], source_etype=I64)
        return self._vector.at(self._start, builder.load(entry, typ=I64, align=8))
