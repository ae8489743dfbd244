"""Pure: vector instructions, for loops that are emitted instead of compiled.

One register per vector. The last values of a run, fewer than a vector, are read and written under a mask
where the processor does that well, else one by one. Addresses are bytes, strides and tables count values.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from adam_async.model.fast.registers import HOST, Registers

VECTOR_BYTES = HOST.width
"""Width of a vector register."""

I32, I64, POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()


class Vectors:
    """Vector instructions for one element type, at the builder's place.

    Attributes:
        lanes: Values of a vector: as many as a register holds, unless a number is given.
        mask: With `lanes_left`, which lanes are read and written; the others are zero.
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
            numbers = ir.VectorType(I64, self.lanes)
            counted = ir.Constant(numbers, [ir.Constant(I64, lane) for lane in range(self.lanes)])
            self.mask = builder.icmp_signed("<", counted, self._spread(lanes_left, numbers))

    def spread(self, scalar: Any) -> Any:
        """A vector of one value."""
        return self._spread(scalar, ir.VectorType(scalar.type, self.lanes))

    def _spread(self, scalar: Any, vector_type: Any) -> Any:
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
        """The pointer `offset` values behind `base`."""
        return self.builder.gep(base, [offset], source_etype=self.element)

    def load(self, pointer: Any) -> Any:
        """Read a vector; lanes under the mask are zero."""
        if self.mask is None:
            return self.builder.load(pointer, align=self.bytes, typ=self.type)
        function = self._masked("load", self.type, [POINTER, I32, self.mask.type, self.type])
        return self.builder.call(function, [pointer, ir.Constant(I32, self.bytes), self.mask, self.zero])

    def store(self, vector: Any, pointer: Any) -> None:
        """Write a vector, except under the mask."""
        if self.mask is None:
            self.builder.store(vector, pointer, align=self.bytes)
            return
        function = self._masked("store", ir.VoidType(), [self.type, POINTER, I32, self.mask.type])
        self.builder.call(function, [vector, pointer, ir.Constant(I32, self.bytes), self.mask])

    def broadcast(self, pointer: Any) -> Any:
        """Read one value into every lane."""
        return self._spread(self.builder.load(pointer, align=self.bytes, typ=self.element), self.type)

    def multiply_add(self, total: Any, a: Any, b: Any) -> Any:
        """One fused instruction where the machine has it."""
        product = self.builder.fmul(a, b, flags=["contract"])
        return self.builder.fadd(total, product, flags=["contract"])

    def sum(self, vector: Any) -> Any:
        """Add the lanes up, halves first."""
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
    """A 64-bit whole number."""
    return ir.Constant(I64, value)


def emit_loop(
    vector: Vectors,
    start: Any,
    stop: Any,
    values: list[Any],
    step: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Emit ``for k in range(start, stop): values = step(k, values)``; returns the last values."""
    builder, before = vector.builder, vector.builder.block
    check, body, done = (builder.append_basic_block(f"loop.{name}") for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    k = builder.phi(I64)
    k.add_incoming(start, before)
    phis = [builder.phi(value.type) for value in values]
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", k, stop), body, done)
    builder.position_at_end(body)
    stepped = step(k, phis)
    k.add_incoming(builder.add(k, whole(1)), builder.block)
    for phi, value in zip(phis, stepped, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(check)
    builder.position_at_end(done)
    return phis


def emit_part(
    builder: Any, element: Any, left: Any, body: Callable[[Vectors, Any], None], registers: Registers
) -> None:
    """Emit ``body(vector, offset)`` for the next values of a run of which `left` are to come.

    `body` is given a whole vector where there are enough values; else a masked one, or every value alone with
    its offset in bytes, where writing under a mask takes as long as many single values.
    """
    if registers.masked_stores:
        body(Vectors(builder, element, registers=registers, lanes_left=left), whole(0))
        return
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


class Places:
    """Pointers to where vectors start, by their number."""

    def __init__(self, vector: Vectors, start: Any, table: Any) -> None:
        self._vector = vector
        self._start = vector.builder.inttoptr(start, POINTER)
        self._table = vector.builder.inttoptr(table, POINTER)

    def __getitem__(self, number: Any) -> Any:
        builder = self._vector.builder
        entry = builder.gep(self._table, [number], source_etype=I64)
        return self._vector.at(self._start, builder.load(entry, typ=I64, align=8))
