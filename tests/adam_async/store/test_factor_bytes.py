"""A push of factors travels as their product if that has fewer bytes, also with several servers."""

import numpy as np
import pytest

from adam_async.run.arrays import Factors
from adam_async.run.shard_table import assign_buckets, shard_table
from adam_async.run.store_record import ArrayRecord
from adam_async.store.layout import FactorMessage, StoreLayout
from adam_async.store.pushing import PushMessages

ROWS, INPUTS = 32, 16


@pytest.mark.parametrize(("servers", "most"), [(1, 10), (2, 8), (4, 5)])
def test_factors_travel_up_to_the_number_of_rows_with_the_bytes_of_the_product(servers, most):
    # Shards of two rows, and all activations to each server: K * (servers * 16 + 32) values against 512.
    arrays = [ArrayRecord("w", (ROWS, INPUTS), "float64", 0, "auto")]
    table = shard_table(arrays, shard_bytes=2 * INPUTS * 8)
    layout = StoreLayout(arrays, table, assign_buckets(table, [f"ps-{n}" for n in range(servers)]))
    random = np.random.default_rng(0)
    for count in (most, most + 1):
        factors = Factors(random.normal(size=(count, INPUTS)), random.normal(size=(count, ROWS)))
        _, found = PushMessages(layout, (0.1,), is_summed=False).messages({"w": factors}, None, 1, False)
        assert len({message.shards.server for message in found}) == servers
        is_factors = {isinstance(message.shards, FactorMessage) for message in found}
        assert is_factors == {count == most}
        assert sum(tensor.nbytes for message in found for tensor in message.tensors) <= ROWS * INPUTS * 8
