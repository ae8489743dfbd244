"""Pure: the two innermost loops of all products, as vector code.

A compiler does not keep the sums of three nested loops in registers, so a compiled product reaches a tenth of
the machine's speed. So this module emits the loops as LLVM vectors, with one register per vector of sums:

    tile    c[m, n] (+)= sum over k of a[m, k] * b[k, n]     n along the vectors, a broadcast
    dots    c[m, k]  += sum over n of a[m, n] * b[k, n]      n along the vectors, added up at the end

Both loops read unpacked operands: each row of b need only be one run of memory. So a convolution is a product
without columns. A row of output pixels of all images reads one run of the input per kernel position, and a
table has the start of each run. Addresses are bytes; strides and tables count values.

Products are added in the order of k for any number of vectors, so results do not depend on where tiles end.
The machine's registers decide how many rows a tile has. The last values of a row, fewer than a vector, are
read and written under a mask, or one by one if the machine has no masks.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.vectors import HOST, I64, POINTER, Registers, Vectors, emit_loop, whole

TILE_ROWS = HOST.tile_rows
"""Maximum number of rows in a tile with two vectors a row: 12 with 32 registers, 6 with 16."""

ONE, TWO, REST = "one vector", "two vectors", "rest"
"""Widths of a tile: the length of its rows. The width of `REST` is at most one vector, with some lanes
masked, or one value if the machine has no masks."""

WHOLE_VECTORS_ALONE = not HOST.masked_stores
"""Whether a last whole vector has separate code without a mask."""

REST_IS_ONE_VALUE = not HOST.masked_loads
"""Whether a `REST` tile fills one value instead of a masked vector."""


def _make_tile(width: str, access: str) -> Any:
    # Width and access are fixed when the code is emitted, so the loop over k has no branches.
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

        With access by ``"rows"``, rows of a are `a_step` values apart; with access by ``"columns"``, columns
        along k are. With access by ``"table"``, `a_step` is the step from row to row, and `a_table` and
        `b_step` are addresses of tables.
        """

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Emit a switch on the number of rows, with the loop of each number."""
            count, *rest, left = arguments[1:]
            vector = tile_vectors(builder, context.get_value_type(like), width, left, HOST)
            end = builder.append_basic_block("tile.end")
            nowhere = builder.append_basic_block("tile.nowhere")
            # Each number of rows has straight code with all its sums in registers; the number is known only
            # at run time. A switch needs a default, though no caller passes more rows.
            choice = builder.switch(count, nowhere)
            for number in range(1, TILE_ROWS + 1):
                block = builder.append_basic_block(f"tile.{number}")
                choice.add_case(whole(number), block)
                builder.position_at_end(block)
                emit_tile(vector, number, 2 if width == TWO else 1, access, rest)
                builder.branch(end)
            builder.position_at_end(nowhere)
            builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 11)), emit

    return tile


def tile_vectors(builder: Any, element: Any, width: str, left: Any, registers: Registers) -> Vectors:
    """Return the vectors for a tile of this width; a tile of width `REST` has `left` values."""
    # Only on some machines is a masked load as fast as a whole one; others load value by value.
    if width == REST and registers.masked_loads:
        return Vectors(builder, element, registers=registers, lanes_left=left)
    return Vectors(builder, element, registers=registers, lanes=1 if width == REST else None)


def emit_tile(vector: Vectors, rows: int, vectors: int, access: str, arguments: list[Any]) -> None:
    """Emit a tile of `rows` rows of `vectors` vectors; `arguments` are those of a tile, `c` to `add`."""
    c, c_row, a, a_step, a_table, b, b_step, depth, add = arguments
    builder = vector.builder
    a_start, b_start = builder.inttoptr(a, POINTER), builder.inttoptr(b, POINTER)
    # Addresses of all rows need more registers than the machine has. Only every fourth row has an address;
    # the next three are multiples of one step away, and load instructions add the step.
    four_rows = builder.mul(a_step, whole(4))

    def entry(table: Any, k: Any) -> Any:
        """Load entry `k` of a table of 64-bit offsets, counted in values."""
        at = builder.gep(builder.inttoptr(table, POINTER), [k], source_etype=I64)
        return builder.load(at, typ=I64, align=8)

    def row_factors(first: Any) -> list[Any]:
        """Return the addresses of one value of a in each row."""
        factors = []
        for row in range(rows):
            if row and row % 4 == 0:
                first = vector.at(first, four_rows)
            factors.append(vector.at(first, builder.mul(a_step, whole(row % 4))))
        return factors

    def step(k: Any, sums: list[Any]) -> list[Any]:
        """Emit step `k` of all rows * vectors sums, by row."""
        # A convolution reads the factors in the order of its kernel positions, so a has a table as b has.
        b_at = entry(b_step, k) if access == "table" else builder.mul(k, b_step)
        if access == "table":
            factors = row_factors(vector.at(a_start, entry(a_table, k)))
        elif access == "rows":
            factors = row_factors(vector.at(a_start, k))
        else:
            column = vector.at(a_start, builder.mul(k, a_step))
            factors = [vector.at(column, whole(row)) for row in range(rows)]
        # Load the vectors of b once for all rows of a; each value of a serves all vectors of its row.
        b_row = vector.at(b_start, b_at)
        values = [vector.load(vector.at(b_row, whole(vector.lanes * place))) for place in range(vectors)]
        totals = []
        for row, factor in enumerate(factors):
            spread = vector.broadcast(factor)
            totals += [
                vector.multiply_add(sums[row * vectors + place], spread, value)
                for place, value in enumerate(values)
            ]
        return totals

    sums = emit_loop(vector, whole(0), depth, [vector.zero] * (rows * vectors), step)
    # The addresses of c come after the loop, so they take no registers in it.
    c_start = builder.inttoptr(c, POINTER)
    places = [
        vector.at(vector.at(c_start, builder.mul(c_row, whole(row))), whole(vector.lanes * place))
        for row in range(rows)
        for place in range(vectors)
    ]
    # The first part of a long depth replaces c, so c needs no zeros; later parts add to c.
    with builder.if_else(builder.icmp_signed("!=", add, whole(0))) as (adding, replacing):
        with adding:
            for total, place in zip(sums, places, strict=True):
                vector.store(builder.fadd(total, vector.load(place)), place)
        with replacing:
            for total, place in zip(sums, places, strict=True):
                vector.store(total, place)


rows_pair, rows_one, rows_rest = (_make_tile(width, "rows") for width in (TWO, ONE, REST))
columns_pair, columns_one, columns_rest = (_make_tile(width, "columns") for width in (TWO, ONE, REST))
table_pair, table_one, table_rest = (_make_tile(width, "table") for width in (TWO, ONE, REST))


DOT_ROWS = HOST.dot_rows
"""Number of rows of a and of b in a block of dot products: 5 with AVX-512, 4 with NEON, otherwise 3."""


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

    `a_rows` and `b_rows` are addresses of tables with each row's start; `a_line` and `b_line` are the steps
    from one run to the next.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_dots(builder, context.get_value_type(like), arguments[1:], HOST)
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 9)), emit


class DotBlock:
    """A square block of dot products: its rows' starts, and one step of all its sums.

    Args:
        vector: Vectors for the starts.
        side: Number of rows of a and of b.
        a: Base address to which the starts of a's rows are relative.
        a_rows: Address of the table with the starts of a's rows.
        b: Base address to which the starts of b's rows are relative.
        b_rows: Address of the table with the starts of b's rows.
    """

    def __init__(self, vector: Vectors, side: int, a: Any, a_rows: Any, b: Any, b_rows: Any) -> None:
        self.cells = range(side * side)
        self._side = side
        # Rows start at the same offset in each line, so read their addresses once.
        self._a_starts = self._starts(vector, a, a_rows)
        self._b_starts = self._starts(vector, b, b_rows)

    def _starts(self, vector: Vectors, base: Any, table: Any) -> list[Any]:
        builder = vector.builder
        entries = builder.inttoptr(table, POINTER)
        return [
            vector.at(
                builder.inttoptr(base, POINTER),
                builder.load(builder.gep(entries, [whole(row)], source_etype=I64), typ=I64, align=8),
            )
            for row in range(self._side)
        ]

    def step(self, vectors: Vectors, sums: list[Any], a_at: Any, b_at: Any) -> list[Any]:
        """Add the products of the vectors that begin `a_at` and `b_at` values after the rows' starts."""
        # Twice `side` loads serve `side` squared products, so the block is a square.
        left = [vectors.load(vectors.at(start, a_at)) for start in self._a_starts]
        right = [vectors.load(vectors.at(start, b_at)) for start in self._b_starts]
        side = self._side
        return [
            vectors.multiply_add(sums[cell], left[cell // side], right[cell % side]) for cell in self.cells
        ]

    def phis(self, vector: Vectors, *sources: tuple[Any, Any]) -> list[Any]:
        """Return a phi per sum; a source is a pair: all sums' values, and the block that they come from."""
        made = [vector.builder.phi(vector.type) for _ in self.cells]
        for values, block in sources:
            for phi, value in zip(made, values, strict=True):
                phi.add_incoming(value, block)
        return made


def emit_dots(builder: Any, element: Any, arguments: list[Any], registers: Registers) -> None:
    """Emit a block of dot products; `arguments` are those of `dots` from `out` on."""
    out, a, a_rows, a_line, b, b_rows, b_line, lines, length = arguments
    vector = Vectors(builder, element, registers=registers)
    dot_block = DotBlock(vector, registers.dot_rows, a, a_rows, b, b_rows)
    before = builder.block
    # Whole vectors come first, without a mask; only the rest of a line needs a mask.
    even = builder.sub(length, builder.urem(length, whole(vector.lanes)))
    line_block, check, body, after, rest, next_line, done = (
        builder.append_basic_block(f"dots.{name}")
        for name in ("line", "check", "body", "after", "rest", "next", "done")
    )
    builder.branch(line_block)

    # Both loops pass their sums on as phi nodes, so the sums stay in registers from the first line to the
    # last.
    builder.position_at_end(line_block)
    line = builder.phi(I64)
    line.add_incoming(whole(0), before)
    line_sums = dot_block.phis(vector, ([vector.zero] * len(dot_block.cells), before))
    a_base, b_base = builder.mul(line, a_line), builder.mul(line, b_line)
    builder.branch(check)

    builder.position_at_end(check)
    at = builder.phi(I64)
    at.add_incoming(whole(0), line_block)
    sums = dot_block.phis(vector, (line_sums, line_block))
    builder.cbranch(builder.icmp_signed("<", at, even), body, after)

    builder.position_at_end(body)
    stepped = dot_block.step(vector, sums, builder.add(a_base, at), builder.add(b_base, at))
    at.add_incoming(builder.add(at, whole(vector.lanes)), body)
    for phi, value in zip(sums, stepped, strict=True):
        phi.add_incoming(value, body)
    builder.branch(check)

    builder.position_at_end(after)
    builder.cbranch(builder.icmp_signed("<", even, length), rest, next_line)

    # Lanes under the mask load zeros, which add nothing to the sums.
    builder.position_at_end(rest)
    left = builder.sub(length, even)
    masked = Vectors(builder, element, registers=registers, lanes_left=left)
    ended = dot_block.step(masked, sums, builder.add(a_base, even), builder.add(b_base, even))
    builder.branch(next_line)

    builder.position_at_end(next_line)
    found = dot_block.phis(vector, (sums, after), (ended, rest))
    following = builder.add(line, whole(1))
    line.add_incoming(following, next_line)
    for phi, value in zip(line_sums, found, strict=True):
        phi.add_incoming(value, next_line)
    builder.cbranch(builder.icmp_signed("<", following, lines), line_block, done)

    # A sum over the lanes takes several instructions, so it comes only here, after all lines.
    builder.position_at_end(done)
    target = builder.inttoptr(out, POINTER)
    for cell in dot_block.cells:
        builder.store(vector.sum(found[cell]), vector.at(target, whole(cell)), align=vector.bytes)
