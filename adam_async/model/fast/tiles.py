"""Pure: the two innermost loops of all products, written as vector code.

A compiler does not keep a block of sums in registers when it is given three nested loops, and a product
runs at a tenth of the machine's speed without. So these loops are emitted as LLVM vectors, with one
register per vector of sums:

    tile    c[m, n] (+)= sum over k of a[m, k] * b[k, n]     n along the vectors, a broadcast
    dots    c[m, k]  += sum over n of a[m, n] * b[k, n]      n along the vectors, added up at the end

Neither packs its operands: any b whose rows are runs of memory will do. That makes a convolution a product
without columns, for a row of output pixels of all images reads one run of the input per position in the
kernel; where the runs start is told by a table. Addresses are bytes, strides and tables count values.

Products are added in the order of k, whatever the number of vectors: results do not depend on where a tile
ends. Rows of fewer values than a vector are read and written under a mask.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

VECTOR_BYTES = 64 if llvmlite.binding.get_host_cpu_features().get("avx512f", False) else 32
"""Width of a vector register. A narrower machine splits the vectors, and spills some of the sums."""

TILE_ROWS = 12
"""Most rows of a tile: with two vectors a row, 24 of 32 registers hold sums."""

_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()


class _Vectors:
    """Vector instructions for one element type, at the builder's place."""

    def __init__(self, builder: Any, element: Any, lanes_left: Any = None) -> None:
        self.builder = builder
        self.element = element
        self.bytes = 4 if isinstance(element, ir.FloatType) else 8
        self.lanes = VECTOR_BYTES // self.bytes
        self.type = ir.VectorType(element, self.lanes)
        self.zero = ir.Constant(self.type, None)
        self.mask = None
        if lanes_left is not None:
            numbers = ir.VectorType(_I64, self.lanes)
            counted = ir.Constant(numbers, [ir.Constant(_I64, lane) for lane in range(self.lanes)])
            self.mask = builder.icmp_signed("<", counted, self._spread(lanes_left, numbers))

    def spread(self, scalar: Any) -> Any:
        """A vector of one value."""
        return self._spread(scalar, ir.VectorType(scalar.type, self.lanes))

    def _spread(self, scalar: Any, vector_type: Any) -> Any:
        first = self.builder.insert_element(
            ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_I32, 0)
        )
        order = ir.Constant(ir.VectorType(_I32, self.lanes), [ir.Constant(_I32, 0)] * self.lanes)
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
        function = self._masked("load", self.type, [_POINTER, _I32, self.mask.type, self.type])
        return self.builder.call(function, [pointer, ir.Constant(_I32, self.bytes), self.mask, self.zero])

    def store(self, vector: Any, pointer: Any) -> None:
        """Write a vector, except under the mask."""
        if self.mask is None:
            self.builder.store(vector, pointer, align=self.bytes)
            return
        function = self._masked("store", ir.VoidType(), [self.type, _POINTER, _I32, self.mask.type])
        self.builder.call(function, [vector, pointer, ir.Constant(_I32, self.bytes), self.mask])

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
                        ir.VectorType(_I32, lanes), [ir.Constant(_I32, start + i) for i in range(lanes)]
                    ),
                )
                for start in (0, lanes)
            ]
            vector = self.builder.fadd(*halves)
        return self.builder.extract_element(vector, ir.Constant(_I32, 0))


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _make_tile(*, vectors: int, masked: bool, access: str) -> Any:
    @intrinsic
    def tile(
        typing: Any,
        like: Any,
        rows: Any,
        c: Any,
        c_row: Any,
        a: Any,
        a_step: Any,
        a_table: Any,
        b: Any,
        b_step: Any,
        depth: Any,
        add: Any,
        lanes_left: Any,
    ) -> Any:
        """Fill `rows` rows of c.

        Access to a is by ``"rows"``, of `a_step` values each; by ``"columns"``, `a_step` apart along k; or
        by ``"table"``, rows of which are `a_step` apart, `a_table` and `b_step` being addresses of tables.
        """

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            count, *rest, left = arguments[1:]
            vector = _Vectors(builder, context.get_value_type(like), left if masked else None)
            end = builder.append_basic_block("tile.end")
            nowhere = builder.append_basic_block("tile.nowhere")
            choice = builder.switch(count, nowhere)
            for number in range(1, TILE_ROWS + 1):
                block = builder.append_basic_block(f"tile.{number}")
                choice.add_case(_int(number), block)
                builder.position_at_end(block)
                _emit_tile(vector, number, vectors, access, rest)
                builder.branch(end)
            builder.position_at_end(nowhere)
            builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 11)), emit

    return tile


def _emit_tile(vector: _Vectors, rows: int, vectors: int, access: str, arguments: list[Any]) -> None:
    c, c_row, a, a_step, a_table, b, b_step, depth, add = arguments
    builder = vector.builder
    a_start, b_start = builder.inttoptr(a, _POINTER), builder.inttoptr(b, _POINTER)
    # Addresses of rows fill more registers than there are; where the rows' values of one k are neighbours,
    # one address does for all.
    starts = [vector.at(a_start, builder.mul(a_step, _int(row))) for row in range(rows)]

    def entry(table: Any, k: Any) -> Any:
        place = builder.gep(builder.inttoptr(table, _POINTER), [k], source_etype=_I64)
        return builder.load(place, typ=_I64, align=8)

    def step(k: Any, sums: list[Any]) -> list[Any]:
        if access == "table":
            a_at, b_at = entry(a_table, k), entry(b_step, k)
            factors = [vector.at(start, a_at) for start in starts]
        elif access == "rows":
            b_at = builder.mul(k, b_step)
            factors = [vector.at(start, k) for start in starts]
        else:
            b_at = builder.mul(k, b_step)
            column = vector.at(a_start, builder.mul(k, a_step))
            factors = [vector.at(column, _int(row)) for row in range(rows)]
        b_row = vector.at(b_start, b_at)
        values = [vector.load(vector.at(b_row, _int(vector.lanes * place))) for place in range(vectors)]
        totals = []
        for row, factor in enumerate(factors):
            spread = vector.broadcast(factor)
            totals += [
                vector.multiply_add(sums[row * vectors + place], spread, value)
                for place, value in enumerate(values)
            ]
        return totals

    sums = _emit_loop(vector, _int(0), depth, [vector.zero] * (rows * vectors), step)
    c_start = builder.inttoptr(c, _POINTER)
    places = [
        vector.at(vector.at(c_start, builder.mul(c_row, _int(row))), _int(vector.lanes * place))
        for row in range(rows)
        for place in range(vectors)
    ]
    with builder.if_else(builder.icmp_signed("!=", add, _int(0))) as (adding, replacing):
        with adding:
            for total, place in zip(sums, places, strict=True):
                vector.store(builder.fadd(total, vector.load(place)), place)
        with replacing:
            for total, place in zip(sums, places, strict=True):
                vector.store(total, place)


def _emit_loop(
    vector: _Vectors,
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
    k = builder.phi(_I64)
    k.add_incoming(start, before)
    phis = [builder.phi(value.type) for value in values]
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", k, stop), body, done)
    builder.position_at_end(body)
    stepped = step(k, phis)
    k.add_incoming(builder.add(k, _int(1)), builder.block)
    for phi, value in zip(phis, stepped, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(check)
    builder.position_at_end(done)
    return phis


rows_pair = _make_tile(vectors=2, masked=False, access="rows")
rows_rest = _make_tile(vectors=1, masked=True, access="rows")
columns_pair = _make_tile(vectors=2, masked=False, access="columns")
columns_rest = _make_tile(vectors=1, masked=True, access="columns")
table_pair = _make_tile(vectors=2, masked=False, access="table")
table_rest = _make_tile(vectors=1, masked=True, access="table")


@intrinsic
def best_of(
    typing: Any, like: Any, best: Any, winner: Any, source: Any, table: Any, count: Any, lanes_left: Any
) -> Any:
    """Write the largest of `count` vectors and its number; of equals the first, of all a NaN, the last.

    `table` is the address of where each vector starts, counted from `source`.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, winner_to, start, offsets, number, left = arguments[1:]
        vector = _Vectors(builder, context.get_value_type(like), left)
        values = _Places(vector, start, offsets)
        one = ir.Constant(vector.element, 1.0)

        def step(k: Any, kept: list[Any]) -> list[Any]:
            largest, mark, last = kept
            following, value = builder.fadd(last, one), vector.load(values[k])
            wins = builder.or_(
                builder.fcmp_ordered(">", value, largest), builder.fcmp_unordered("uno", value, value)
            )
            return [
                builder.select(wins, value, largest),
                builder.select(wins, vector.spread(following), mark),
                following,
            ]

        first = [vector.load(values[_int(0)]), vector.zero, ir.Constant(vector.element, 0.0)]
        largest, mark, _ = _emit_loop(vector, _int(1), number, first, step)
        vector.store(largest, builder.inttoptr(to, _POINTER))
        vector.store(mark, builder.inttoptr(winner_to, _POINTER))
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 6)), emit


def _make_hand_out(*, adding: bool) -> Any:
    @intrinsic
    def hand_out(
        typing: Any,
        like: Any,
        errors: Any,
        winner: Any,
        output: Any,
        positive: Any,
        target: Any,
        table: Any,
        count: Any,
        lanes_left: Any,
    ) -> Any:
        """Write, or add, each error to the vector that won, and zeros to the others.

        With `positive` not 0 an error counts only where the output is positive.
        """

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            error_at, winner_at, output_at, guarded, start, offsets, number, left = arguments[1:]
            vector = _Vectors(builder, context.get_value_type(like), left)
            places = _Places(vector, start, offsets)
            error, mark, guide = (
                vector.load(builder.inttoptr(place, _POINTER)) for place in (error_at, winner_at, output_at)
            )
            held_back = builder.and_(
                builder.fcmp_unordered("ule", guide, vector.zero),
                vector.spread(builder.icmp_signed("!=", guarded, _int(0))),
            )
            error = builder.select(held_back, vector.zero, error)
            one = ir.Constant(vector.element, 1.0)

            def step(k: Any, kept: list[Any]) -> list[Any]:
                hit = builder.fcmp_ordered("==", mark, vector.spread(kept[0]))
                share = builder.select(hit, error, vector.zero)
                if adding:
                    share = builder.fadd(vector.load(places[k]), share)
                vector.store(share, places[k])
                return [builder.fadd(kept[0], one)]

            _emit_loop(vector, _int(0), number, [ir.Constant(vector.element, 0.0)], step)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 8)), emit

    return hand_out


hand_out = _make_hand_out(adding=False)
hand_out_adding = _make_hand_out(adding=True)


class _Places:
    """Pointers to where vectors start, by their number."""

    def __init__(self, vector: _Vectors, start: Any, table: Any) -> None:
        self._vector = vector
        self._start = vector.builder.inttoptr(start, _POINTER)
        self._table = vector.builder.inttoptr(table, _POINTER)

    def __getitem__(self, number: Any) -> Any:
        builder = self._vector.builder
        entry = builder.gep(self._table, [number], source_etype=_I64)
        return self._vector.at(self._start, builder.load(entry, typ=_I64, align=8))


DOT_ROWS = 5
"""Rows of a and of b in one block of dot products: 25 of 32 registers hold sums."""


@intrinsic
def dots(
    typing: Any,
    like: Any,
    out: Any,
    a: Any,
    a_rows: Any,
    a_line: Any,
    b: Any,
    b_rows: Any,
    b_line: Any,
    lines: Any,
    length: Any,
) -> Any:
    """Write `DOT_ROWS` times `DOT_ROWS` dot products to `out`, over `lines` runs of `length` values.

    `a_rows` and `b_rows` are addresses of tables of where each row starts; `a_line` and `b_line` lead from
    one run to the next.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_dots(context, builder, context.get_value_type(like), arguments[1:])
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 9)), emit


def _emit_dots(context: Any, builder: Any, element: Any, arguments: list[Any]) -> None:
    out, a, a_rows, a_line, b, b_rows, b_line, lines, length = arguments
    vector = _Vectors(builder, element)

    def starts(base: Any, table: Any) -> list[Any]:
        entries = builder.inttoptr(table, _POINTER)
        return [
            vector.at(
                builder.inttoptr(base, _POINTER),
                builder.load(builder.gep(entries, [_int(row)], source_etype=_I64), typ=_I64, align=8),
            )
            for row in range(DOT_ROWS)
        ]

    a_starts, b_starts, before = starts(a, a_rows), starts(b, b_rows), builder.block
    whole = builder.sub(length, builder.urem(length, _int(vector.lanes)))
    line_block, check, body, after, rest, next_line, done = (
        builder.append_basic_block(f"dots.{name}")
        for name in ("line", "check", "body", "after", "rest", "next", "done")
    )
    builder.branch(line_block)
    cells = range(DOT_ROWS * DOT_ROWS)

    def phis(*sources: tuple[Any, Any]) -> list[Any]:
        made = [builder.phi(vector.type) for _ in cells]
        for values, block in sources:
            for phi, value in zip(made, values, strict=True):
                phi.add_incoming(value, block)
        return made

    def step(vectors: _Vectors, sums: list[Any], a_at: Any, b_at: Any) -> list[Any]:
        left = [vectors.load(vector.at(start, a_at)) for start in a_starts]
        right = [vectors.load(vector.at(start, b_at)) for start in b_starts]
        return [
            vector.multiply_add(sums[cell], left[cell // DOT_ROWS], right[cell % DOT_ROWS]) for cell in cells
        ]

    builder.position_at_end(line_block)
    line = builder.phi(_I64)
    line.add_incoming(_int(0), before)
    line_sums = phis(([vector.zero] * len(cells), before))
    a_base, b_base = builder.mul(line, a_line), builder.mul(line, b_line)
    builder.branch(check)

    builder.position_at_end(check)
    at = builder.phi(_I64)
    at.add_incoming(_int(0), line_block)
    sums = phis((line_sums, line_block))
    builder.cbranch(builder.icmp_signed("<", at, whole), body, after)

    builder.position_at_end(body)
    stepped = step(vector, sums, builder.add(a_base, at), builder.add(b_base, at))
    at.add_incoming(builder.add(at, _int(vector.lanes)), body)
    for phi, value in zip(sums, stepped, strict=True):
        phi.add_incoming(value, body)
    builder.branch(check)

    builder.position_at_end(after)
    builder.cbranch(builder.icmp_signed("<", whole, length), rest, next_line)

    builder.position_at_end(rest)
    masked = _Vectors(builder, element, builder.sub(length, whole))
    ended = step(masked, sums, builder.add(a_base, whole), builder.add(b_base, whole))
    builder.branch(next_line)

    builder.position_at_end(next_line)
    found = phis((sums, after), (ended, rest))
    following = builder.add(line, _int(1))
    line.add_incoming(following, next_line)
    for phi, value in zip(line_sums, found, strict=True):
        phi.add_incoming(value, next_line)
    builder.cbranch(builder.icmp_signed("<", following, lines), line_block, done)

    builder.position_at_end(done)
    target = builder.inttoptr(out, _POINTER)
    for cell in cells:
        builder.store(vector.sum(found[cell]), vector.at(target, _int(cell)), align=vector.bytes)
