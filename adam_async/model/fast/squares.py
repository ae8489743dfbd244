"""Pure: what pooling does with the vectors under one square, as vector code.

Each takes the address of a table of where the vectors of a square start, and how many values of a vector
count; the others are neither read nor written.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.vectors import POINTER, Places, Vectors, emit_loop, whole


@intrinsic
def best_of(
    typing: Any, like: Any, best: Any, winner: Any, source: Any, table: Any, count: Any, lanes_left: Any
) -> Any:
    """Write the largest of `count` vectors and its number; of equals the first, of all a NaN, the last.

    `table` is the address of where each vector starts, counted from `source`.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, winner_to, start, offsets, number, left = arguments[1:]
        vector = Vectors(builder, context.get_value_type(like), left)
        values = Places(vector, start, offsets)
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

        first = [vector.load(values[whole(0)]), vector.zero, ir.Constant(vector.element, 0.0)]
        largest, mark, _ = emit_loop(vector, whole(1), number, first, step)
        vector.store(largest, builder.inttoptr(to, POINTER))
        vector.store(mark, builder.inttoptr(winner_to, POINTER))
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
            vector = Vectors(builder, context.get_value_type(like), left)
            places = Places(vector, start, offsets)
            error, mark, guide = (
                vector.load(builder.inttoptr(place, POINTER)) for place in (error_at, winner_at, output_at)
            )
            held_back = builder.and_(
                builder.fcmp_unordered("ule", guide, vector.zero),
                vector.spread(builder.icmp_signed("!=", guarded, whole(0))),
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

            emit_loop(vector, whole(0), number, [ir.Constant(vector.element, 0.0)], step)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 8)), emit

    return hand_out


hand_out = _make_hand_out(adding=False)
hand_out_adding = _make_hand_out(adding=True)


@intrinsic
def mean_of(
    typing: Any, like: Any, to: Any, source: Any, table: Any, count: Any, share: Any, lanes_left: Any
) -> Any:
    """Write the sum of `count` vectors times `share`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, start, offsets, number, factor, left = arguments[1:]
        vector = Vectors(builder, context.get_value_type(like), left)
        values = Places(vector, start, offsets)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            return [builder.fadd(sums[0], vector.load(values[k]))]

        [total] = emit_loop(vector, whole(0), number, [vector.zero], step)
        vector.store(builder.fmul(total, vector.spread(factor)), builder.inttoptr(target, POINTER))
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 4), like, types.int64), emit


def _make_share_out(*, adding: bool) -> Any:
    @intrinsic
    def share_out(
        typing: Any, like: Any, errors: Any, target: Any, table: Any, count: Any, share: Any, lanes_left: Any
    ) -> Any:
        """Write, or add, `share` times each error to `count` vectors."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            error_at, start, offsets, number, factor, left = arguments[1:]
            vector = Vectors(builder, context.get_value_type(like), left)
            places = Places(vector, start, offsets)
            part = builder.fmul(vector.load(builder.inttoptr(error_at, POINTER)), vector.spread(factor))

            def step(k: Any, kept: list[Any]) -> list[Any]:
                whole_part = builder.fadd(vector.load(places[k]), part) if adding else part
                vector.store(whole_part, places[k])
                return []

            emit_loop(vector, whole(0), number, [], step)
            return context.get_dummy_value()

        return types.void(like, *([types.int64] * 4), like, types.int64), emit

    return share_out


share_out = _make_share_out(adding=False)
share_out_adding = _make_share_out(adding=True)
