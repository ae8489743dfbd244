"""Pure: what pooling does with the vectors under one square, as vector code.

Each takes the address of a table of where the vectors of a square start, and how many values are left in the
run: if these are fewer than a vector, the others are neither read nor written.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.registers import HOST, Registers
from adam_async.model.fast.vectors import POINTER, Places, Vectors, emit_loop, emit_part, whole


@intrinsic
def best_of(
    typing: Any, like: Any, best: Any, winner: Any, source: Any, table: Any, count: Any, lanes_left: Any
) -> Any:
    """Write the largest of `count` vectors and its number; of equals the first, of all a NaN, the last.

    `table` is the address of where each vector starts, counted from `source`.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_best_of(builder, context.get_value_type(like), arguments[1:], HOST)
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 6)), emit


def emit_best_of(builder: Any, element: Any, arguments: list[Any], registers: Registers) -> None:
    """Emit `best_of`; `arguments` are its own from best on."""
    to, winner_to, start, offsets, number, left = arguments
    one = ir.Constant(element, 1.0)

    def body(vector: Vectors, behind: Any) -> None:
        values = Places(vector, builder.add(start, behind), offsets)

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

        first = [vector.load(values[whole(0)]), vector.zero, ir.Constant(element, 0.0)]
        largest, mark, _ = emit_loop(vector, whole(1), number, first, step)
        vector.store(largest, builder.inttoptr(builder.add(to, behind), POINTER))
        vector.store(mark, builder.inttoptr(builder.add(winner_to, behind), POINTER))

    emit_part(builder, element, left, body, registers)


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
            emit_hand_out(builder, context.get_value_type(like), arguments[1:], HOST, adding=adding)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 8)), emit

    return hand_out


def emit_hand_out(
    builder: Any, element: Any, arguments: list[Any], registers: Registers, *, adding: bool
) -> None:
    """Emit `hand_out`; `arguments` are its own from errors on."""
    error_at, winner_at, output_at, guarded, start, offsets, number, left = arguments
    one = ir.Constant(element, 1.0)

    def body(vector: Vectors, behind: Any) -> None:
        places = Places(vector, builder.add(start, behind), offsets)
        error, mark, guide = (
            vector.load(builder.inttoptr(builder.add(place, behind), POINTER))
            for place in (error_at, winner_at, output_at)
        )
        held_back = builder.and_(
            builder.fcmp_unordered("ule", guide, vector.zero),
            vector.spread(builder.icmp_signed("!=", guarded, whole(0))),
        )
        error = builder.select(held_back, vector.zero, error)

        def step(k: Any, kept: list[Any]) -> list[Any]:
            hit = builder.fcmp_ordered("==", mark, vector.spread(kept[0]))
            share = builder.select(hit, error, vector.zero)
            if adding:
                share = builder.fadd(vector.load(places[k]), share)
            vector.store(share, places[k])
            return [builder.fadd(kept[0], one)]

        emit_loop(vector, whole(0), number, [ir.Constant(element, 0.0)], step)

    emit_part(builder, element, left, body, registers)


hand_out = _make_hand_out(adding=False)
hand_out_adding = _make_hand_out(adding=True)


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
    """Emit `mean_of`; `arguments` are its own from to on."""
    target, start, offsets, number, factor, left = arguments

    def body(vector: Vectors, behind: Any) -> None:
        values = Places(vector, builder.add(start, behind), offsets)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            return [builder.fadd(sums[0], vector.load(values[k]))]

        [total] = emit_loop(vector, whole(0), number, [vector.zero], step)
        mean = builder.fmul(total, vector.spread(factor))
        vector.store(mean, builder.inttoptr(builder.add(target, behind), POINTER))

    emit_part(builder, element, left, body, registers)


def _make_share_out(*, adding: bool) -> Any:
    @intrinsic
    def share_out(
        typing: Any, like: Any, errors: Any, target: Any, table: Any, count: Any, share: Any, lanes_left: Any
    ) -> Any:
        """Write, or add, `share` times each error to `count` vectors."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit_share_out(builder, context.get_value_type(like), arguments[1:], HOST, adding=adding)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 4), like, types.int64), emit

    return share_out


def emit_share_out(
    builder: Any, element: Any, arguments: list[Any], registers: Registers, *, adding: bool
) -> None:
    """Emit `share_out`; `arguments` are its own from errors on."""
    error_at, start, offsets, number, factor, left = arguments

    def body(vector: Vectors, behind: Any) -> None:
        places = Places(vector, builder.add(start, behind), offsets)
        error = vector.load(builder.inttoptr(builder.add(error_at, behind), POINTER))
        part = builder.fmul(error, vector.spread(factor))

        def step(k: Any, kept: list[Any]) -> list[Any]:
            vector.store(builder.fadd(vector.load(places[k]), part) if adding else part, places[k])
            return []

        emit_loop(vector, whole(0), number, [], step)

    emit_part(builder, element, left, body, registers)


share_out = _make_share_out(adding=False)
share_out_adding = _make_share_out(adding=True)
