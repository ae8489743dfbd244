"""Pure: pooling of the vectors under one square, as vector code.

Each function takes the address of a table with the starts of a square's vectors, and the number of values
that remain in the run. If fewer values than lanes remain, the other lanes are neither read nor written.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.vectors import (
    HOST,
    POINTER,
    Registers,
    Vectors,
    VectorStarts,
    emit_loop,
    emit_part,
    whole,
)


@intrinsic
def best_of(
    typing: Any, like: Any, best: Any, winner: Any, source: Any, table: Any, count: Any, lanes_left: Any
) -> Any:
    """For each lane, write the largest value in `count` vectors and the number of its vector.

    Among equal values the first wins, among several NaNs the last.

    `table` is the address of a table with the start of each vector, relative to `source`.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_best_of(builder, context.get_value_type(like), arguments[1:], HOST)
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 6)), emit


def emit_best_of(builder: Any, element: Any, arguments: list[Any], registers: Registers) -> None:
    """Emit `best_of`; `arguments` are the function's arguments from `best` on."""
    to, winner_to, start, offsets, number, left = arguments
    one = ir.Constant(element, 1.0)

    def body(vector: Vectors, behind: Any) -> None:
        """Emit the search in one vector of squares, `behind` bytes after the first."""
        values = VectorStarts(vector, builder.add(start, behind), offsets)

        def step(k: Any, kept: list[Any]) -> list[Any]:
            """Emit the comparison of vector `k` with `kept`: largest value, its vector's number, `k - 1`."""
            # The number has the vectors' type, so one mask selects in both; such counts are exact.
            largest, mark, last = kept
            following, value = builder.fadd(last, one), vector.load(values[k])
            # `>` keeps the first of equal values; comparing a NaN gives false, so NaNs have a separate test.
            wins = builder.or_(
                builder.fcmp_ordered(">", value, largest), builder.fcmp_unordered("uno", value, value)
            )
            return [
                builder.select(wins, value, largest),
                builder.select(wins, vector.spread(following), mark),
                following,
            ]

        # The first vector is the start value, so no lower bound is needed.
        first = [vector.load(values[whole(0)]), vector.zero, ir.Constant(element, 0.0)]
        largest, mark, _ = emit_loop(vector, whole(1), number, first, step)
        vector.store(largest, builder.inttoptr(builder.add(to, behind), POINTER))
        vector.store(mark, builder.inttoptr(builder.add(winner_to, behind), POINTER))

    emit_part(builder, element, left, body, registers)


# `adding` is fixed when the code is emitted, so the loop has no branch.
def _make_route(*, adding: bool) -> Any:
    @intrinsic
    def route(
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
        """Write (or add) each error to its maximum's vector, and zeros to the other vectors.

        If `positive` is not 0, an error counts only if the output is positive.
        """

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit_route(builder, context.get_value_type(like), arguments[1:], HOST, adding=adding)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 8)), emit

    return route


def emit_route(
    builder: Any, element: Any, arguments: list[Any], registers: Registers, *, adding: bool
) -> None:
    """Emit `route`; `arguments` are its arguments from `errors` on."""
    error_at, winner_at, output_at, guarded, start, offsets, number, left = arguments
    one = ir.Constant(element, 1.0)

    def body(vector: Vectors, behind: Any) -> None:
        """Emit the routing of one vector of errors, `behind` bytes after the first."""
        starts = VectorStarts(vector, builder.add(start, behind), offsets)
        # The output is read in any case, because a choice of values needs no branch.
        error, mark, guide = (
            vector.load(builder.inttoptr(builder.add(at, behind), POINTER))
            for at in (error_at, winner_at, output_at)
        )
        blocked = builder.and_(
            # The opposite of `output > 0` in `curves.relu_back`: a NaN blocks, too.
            builder.fcmp_unordered("ule", guide, vector.zero),
            vector.spread(builder.icmp_signed("!=", guarded, whole(0))),
        )
        error = builder.select(blocked, vector.zero, error)

        def step(k: Any, kept: list[Any]) -> list[Any]:
            """Emit the write to vector `k`; `kept` is the number `k` in the elements' type."""
            # Write each vector whole, with zeros in the lanes whose maximum is elsewhere.
            hit = builder.fcmp_ordered("==", mark, vector.spread(kept[0]))
            share = builder.select(hit, error, vector.zero)
            if adding:
                # Squares overlap, so another square may have added its error here.
                share = builder.fadd(vector.load(starts[k]), share)
            vector.store(share, starts[k])
            return [builder.fadd(kept[0], one)]

        emit_loop(vector, whole(0), number, [ir.Constant(element, 0.0)], step)

    emit_part(builder, element, left, body, registers)


route = _make_route(adding=False)
route_adding = _make_route(adding=True)


@intrinsic
def mean_of(
    typing: Any, like: Any, to: Any, source: Any, table: Any, count: Any, share: Any, lanes_left: Any
) -> Any:
    """Write the sum of `count` vectors times `share`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_mean_of(builder, context.get_value_type(like), arguments[1:], HOST)
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 4), like, types.int64), emit


def emit_mean_of(builder: Any, element: Any, arguments: list[Any], registers: Registers) -> None:
    """Emit `mean_of`; `arguments` are its arguments from `to` on."""
    target, start, offsets, number, factor, left = arguments

    def body(vector: Vectors, behind: Any) -> None:
        """Emit the mean of one vector of squares, `behind` bytes after the first."""
        values = VectorStarts(vector, builder.add(start, behind), offsets)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            """Emit the addition of vector `k` to the sum."""
            # In the order of the table, for vectors and single values alike.
            return [builder.fadd(sums[0], vector.load(values[k]))]

        [total] = emit_loop(vector, whole(0), number, [vector.zero], step)
        # The sum is scaled once, as in the NumPy layer, instead of each value.
        mean = builder.fmul(total, vector.spread(factor))
        vector.store(mean, builder.inttoptr(builder.add(target, behind), POINTER))

    emit_part(builder, element, left, body, registers)


def _make_spread(*, adding: bool) -> Any:
    @intrinsic
    def spread(
        typing: Any, like: Any, errors: Any, target: Any, table: Any, count: Any, share: Any, lanes_left: Any
    ) -> Any:
        """Write, or add, `share` times each error to `count` vectors."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit_spread(builder, context.get_value_type(like), arguments[1:], HOST, adding=adding)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 4), like, types.int64), emit

    return spread


def emit_spread(
    builder: Any, element: Any, arguments: list[Any], registers: Registers, *, adding: bool
) -> None:
    """Emit `spread`; `arguments` are its arguments from `errors` on."""
    error_at, start, offsets, number, factor, left = arguments

    def body(vector: Vectors, behind: Any) -> None:
        """Emit the writes of one vector of errors, `behind` bytes after the first."""
        starts = VectorStarts(vector, builder.add(start, behind), offsets)
        error = vector.load(builder.inttoptr(builder.add(error_at, behind), POINTER))
        # The part is the same for all vectors, so compute it before the loop.
        part = builder.fmul(error, vector.spread(factor))

        def step(k: Any, kept: list[Any]) -> list[Any]:
            """Emit the write or the addition to vector `k`; the code keeps no value."""
            vector.store(builder.fadd(vector.load(starts[k]), part) if adding else part, starts[k])
            return []

        emit_loop(vector, whole(0), number, [], step)

    emit_part(builder, element, left, body, registers)


spread = _make_spread(adding=False)
spread_adding = _make_spread(adding=True)
