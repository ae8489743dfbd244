"""Pure: from the tensors of a push to the gradients of its shards, without a copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Push, check_tensor
from adam_async.parameter_server.gradients import (
    DeltaPart,
    FactorPart,
    PushGradients,
    is_surely_finite,
    product_bound,
)
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.run.shard_table import ShardSpec
from transport import RemoteProtocolError


def read_gradients(
    push: Push,
    tensors: Sequence[NDArray[Any]],
    table: Sequence[ShardSpec],
    dtype: np.dtype[Any],
    group: ShardGroup | None = None,
) -> PushGradients:
    """Decode the gradients of a push, without copying.

    Args:
        table: All shards of the store, by number.
        group: The shards of the push, if they are known.

    Raises:
        RemoteProtocolError: Counts, shapes or types do not fit the shards named.
    """
    if not len(push.shards) == len(push.numbers) == len(push.versions) == len(push.own_applied):
        raise RemoteProtocolError(
            "push", "shards, numbers, versions and own_applied of a Push differ in length"
        )
    if push.weight < 1:
        raise RemoteProtocolError("push", f"a Push has a weight of at least 1, not {push.weight}")
    parts: list[DeltaPart | FactorPart] = []
    rest = iter(tensors)
    at = 0
    try:
        for part in push.parts:
            if group is not None and part.count == len(group) and not part.factors:
                at += part.count
                parts.append(_read_deltas(group.sizes, group.size, next(rest), push.rate, dtype))
                continue
            shards = [_spec(table, number) for number in push.shards[at : at + part.count]]
            at += part.count
            if part.factors:
                parts.append(_read_factors(shards, next(rest), next(rest), push.rate, dtype))
            else:
                sizes = tuple([shard.size for shard in shards])
                parts.append(_read_deltas(sizes, sum(sizes), next(rest), push.rate, dtype))
    except StopIteration:
        raise RemoteProtocolError("push", "a Push carries fewer tensors than its parts need") from None
    if at != len(push.shards) or next(rest, None) is not None:
        raise RemoteProtocolError("push", "the parts of a Push do not cover its shards and tensors")
    return PushGradients(tuple(parts))


def _spec(table: Sequence[ShardSpec], number: int) -> ShardSpec:
    if not 0 <= number < len(table):
        raise RemoteProtocolError("push", f"the model has no shard {number}")
    return table[number]


def _read_deltas(
    sizes: tuple[int, ...], size: int, flat: NDArray[Any], rate: float, dtype: np.dtype[Any]
) -> DeltaPart:
    check_tensor(flat, "deltas", (size,), dtype)
    return DeltaPart(flat, sizes, rate, is_surely_finite(flat, rate))


def _read_factors(
    shards: Sequence[ShardSpec],
    x_IK: NDArray[Any],
    errors_RK: NDArray[Any],
    rate: float,
    dtype: np.dtype[Any],
) -> FactorPart:
    if not shards:
        raise RemoteProtocolError("push", "factors need at least one shard")
    row = shards[0].row_size
    what = f"factors of {shards[0].tensor}"
    if x_IK.ndim != 2 or any(not s.whole_rows or s.row_size != row for s in shards):
        raise RemoteProtocolError("push", f"{what}: need activations ({row}, K) and shards of whole rows")
    images = x_IK.shape[1]
    rows = tuple([shard.size // row for shard in shards])
    check_tensor(x_IK, what, (row, images), dtype)
    check_tensor(errors_RK, what, (sum(rows), images), dtype)
    return FactorPart(x_IK, errors_RK, rows, rate, product_bound(x_IK, errors_RK))
