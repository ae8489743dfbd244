"""The messages of a push have the caller's values in the order of their shards, in any memory layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.run.shard_table import NUM_BUCKETS, shard_table
from adam_async.run.store_record import ArrayRecord
from adam_async.store.layout import StoreLayout
from adam_async.store.pushing import PushMessages

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


@pytest.mark.parametrize("weight", [1, 3])
def test_the_weight_of_a_push_scales_summed_gradients_and_leaves_the_callers_alone(weight):
    layout = StoreLayout(ARRAYS, TABLE, ["ps-0"] * NUM_BUCKETS)
    gradients = {name: values_of(name, "C") for name in SHAPES}
    _, messages = PushMessages(layout, (0.1,), is_summed=True).messages(gradients, None, weight, False)
    sums = sum(float(message.tensors[0].sum()) for message in messages)
    assert sums == weight * sum(float(values_of(name, "C").sum()) for name in SHAPES)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, values_of(name, "C"))
