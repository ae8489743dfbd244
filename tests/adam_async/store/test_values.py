"""Messages of a push have the values in the order of their shards, and factors if these have fewer bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.run.arrays import Factors
from adam_async.run.shard_table import assign_buckets, shard_table
from adam_async.run.store_record import NUM_BUCKETS, ArrayRecord
from adam_async.store.layout import FactorMessage, StoreLayout
from adam_async.store.values import MOST_BUFFERS, PushMessages

SHAPES = {"scalar": (), "row": (7,), "wide": (3, 5), "split": (9, 4), "deep": (2, 3, 2)}
ARRAYS = [ArrayRecord(name, shape, "float32", 0) for name, shape in SHAPES.items()]
TABLE = shard_table(ARRAYS, shard_bytes=64)


def values_of(name: str, order: str) -> np.ndarray:
    first = 100 * list(SHAPES).index(name)
    values = np.arange(first, first + int(np.prod(SHAPES[name])), dtype=np.float32).reshape(SHAPES[name])
    return {"C": values, "F": np.asfortranarray(values), "strided": np.repeat(values, 2, -1)[..., ::2]}[
        order if values.ndim else "C"
    ]


@settings(deadline=None)
@given(
    names=st.lists(st.sampled_from(list(SHAPES)), unique=True, min_size=1),
    orders=st.lists(st.sampled_from(["C", "F", "strided"]), min_size=5, max_size=5),
    rates=st.dictionaries(st.sampled_from(list(SHAPES)), st.sampled_from([0.5, 2.0])),
    servers=st.integers(1, 2),
    is_subclass=st.booleans(),
)
def test_each_shard_of_a_push_has_its_values_and_its_rate(names, orders, rates, servers, is_subclass):
    layout = StoreLayout(ARRAYS, TABLE, [f"ps-{number % servers}" for number in range(NUM_BUCKETS)])
    gradients = {name: values_of(name, order) for name, order in zip(names, orders, strict=False)}
    if is_subclass:
        gradients[names[0]] = np.ma.getdata(gradients[names[0]]).view(type("Own", (np.ndarray,), {}))
    rates = {name: rate for name, rate in rates.items() if name in gradients}
    plan, messages = PushMessages(layout, (0.1,), is_summed=False).messages(
        gradients, rates or None, 1, False
    )
    assert plan.messages == tuple(message.shards for message in messages)
    found = {}
    for message in messages:
        (flat,) = message.tensors
        at = 0
        for shard in message.shards.shards:
            spec = TABLE.shards[shard]
            found[shard] = spec.tensor, flat[at : at + spec.size].tolist(), message.rate
            at += spec.size
        assert at == flat.size
    assert found == {
        spec.id: (
            name,
            values_of(name, "C").reshape(-1)[spec.start : spec.stop].tolist(),
            rates.get(name, 0.1),
        )
        for name in names
        for spec in TABLE.by_tensor[name]
    }


def test_memory_of_messages_is_reused_after_their_last_view_and_never_before():
    layout = StoreLayout(ARRAYS, TABLE, ["ps-0"] * NUM_BUCKETS)
    maker = PushMessages(layout, (0.1,), is_summed=False)

    def gathered(value):
        gradients = {name: np.full(SHAPES[name], value, np.float32) for name in ("row", "deep", "scalar")}
        (message,) = maker.messages(gradients, None, 1, False)[1]
        return message.tensors[0]

    open_pushes = [gathered(number) for number in range(MOST_BUFFERS + 2)]
    for number, values in enumerate(open_pushes):
        assert (values == number).all()
    memory = {values.ctypes.data for values in open_pushes[:MOST_BUFFERS]}
    open_pushes.clear()
    again = [gathered(number) for number in range(MOST_BUFFERS)]
    assert {values.ctypes.data for values in again} == memory


@pytest.mark.parametrize("weight", [1, 3])
def test_the_weight_of_a_push_scales_summed_gradients_and_leaves_the_callers_alone(weight):
    layout = StoreLayout(ARRAYS, TABLE, ["ps-0"] * NUM_BUCKETS)
    gradients = {name: values_of(name, "C") for name in SHAPES}
    _, messages = PushMessages(layout, (0.1,), is_summed=True).messages(gradients, None, weight, False)
    sums = sum(float(message.tensors[0].sum()) for message in messages)
    assert sums == weight * sum(float(values_of(name, "C").sum()) for name in SHAPES)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, values_of(name, "C"))


@pytest.mark.parametrize(("servers", "most"), [(1, 10), (2, 8), (4, 5)])
def test_factors_travel_up_to_the_number_of_rows_with_the_bytes_of_the_product(servers, most):
    # Shards of two rows, and all activations to each server: K * (servers * 16 + 32) values against 512.
    arrays = [ArrayRecord("w", (32, 16), "float64", 0, "auto")]
    table = shard_table(arrays, shard_bytes=256)
    layout = StoreLayout(arrays, table, assign_buckets(table, [f"ps-{n}" for n in range(servers)]))
    random = np.random.default_rng(0)
    for count in (most, most + 1):
        factors = Factors(random.normal(size=(count, 16)), random.normal(size=(count, 32)))
        _, found = PushMessages(layout, (0.1,), is_summed=False).messages({"w": factors}, None, 1, False)
        assert len({message.shards.server for message in found}) == servers
        is_factors = {isinstance(message.shards, FactorMessage) for message in found}
        assert is_factors == {count == most}
        assert sum(tensor.nbytes for message in found for tensor in message.tensors) <= 32 * 16 * 8
