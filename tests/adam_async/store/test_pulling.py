"""The collection of pulled values: answers that do not fit are refused, and arrays keep their order."""

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from adam_async.run.shard_table import shard_table
from adam_async.run.store_record import NUM_BUCKETS, ArrayRecord
from adam_async.store.calls import Call
from adam_async.store.layout import MESSAGE_SHARDS, StoreLayout
from tests.adam_async.store.servers import servers
from transport import RemoteProtocolError


class Future:
    """A future without a loop."""

    is_set = False

    def done(self):
        return self.is_set

    def set_result(self, _):
        self.is_set = True


def pull_of(names=("a", "b"), shard_bytes=1 << 20):
    """Return a pull of a (2, 3) and of b (4,), both float32, its messages, and the list of ended calls."""
    arrays = [ArrayRecord("a", (2, 3), "float32", 0, "auto"), ArrayRecord("b", (4,), "float32", 0, "auto")]
    layout = StoreLayout(arrays, shard_table(arrays, shard_bytes=shard_bytes), ["ps-0"] * NUM_BUCKETS)
    ended, plan = [], layout.plan(names)
    calls = SimpleNamespace(
        layout=layout,
        store=SimpleNamespace(id="s"),
        bound=0,
        note_versions=lambda index, versions: versions,
        ended=ended.append,
    )
    return Call(calls=calls, done=Future(), plan=plan, targets={}), plan.messages, ended


@pytest.mark.parametrize(
    ("versions", "size", "dtype"),
    [((1,), 10, "float32"), ((1, 1, 1), 10, "float32"), ((1, 1), 9, "float32"), ((1, 1), 10, "float64")],
)
def test_an_answer_that_does_not_fit_its_message_is_refused_whole(versions, size, dtype):
    pull, _, _ = pull_of()
    with pytest.raises(RemoteProtocolError, match="do not fit 2 shards of 10 values float32"):
        pull.take(0, versions, 0, np.zeros(size, dtype))
    pull.take(0, (7, 8), 0, np.arange(10, dtype=np.float32))
    assert pull.values().read.of_shards.tolist() == [7, 8]


def test_values_keep_the_order_of_the_names():
    pull, messages, _ = pull_of(("b", "a"), shard_bytes=8)  # each array is cut into several ranges
    pull.prepare()
    for number, message in enumerate(messages):
        pull.take(number, 1, 0, np.zeros(message.size, np.float32))
        pull.freed()
    assert pull.done.done()
    values = pull.values()
    assert list(values) == ["b", "a"]
    assert values["a"].shape == (2, 3)
    assert not values["a"].flags.writeable


def test_a_call_without_messages_ends_once():
    pull, _, ended = pull_of(())
    pull.send()
    assert pull.done.done()
    assert ended == [pull]
    assert dict(pull.values()) == {}


@pytest.mark.slow
async def test_two_hundred_megabytes_pulled_beside_pushes_have_the_values_of_their_versions():
    arrays = {f"a{number:03}": np.zeros(1 << 18, np.float32) for number in range(200)}
    ones = {name: np.ones(1 << 18, np.float32) for name in arrays}
    async with servers(1) as where:
        opened = partial(ParameterStore.open, where, name="large", rule=Sgd(rate=1.0))
        async with opened(arrays) as store, opened(arrays) as other:

            async def push_all() -> None:
                while True:
                    await other.push(ones)

            async with asyncio.TaskGroup() as group:
                pushing = group.create_task(push_all())
                versions = set()
                for _ in range(4):
                    values = await store.pull()
                    for name, array in values.items():
                        (shard,) = store._calls.layout.table.by_tensor[name]
                        version = values.read.of_shards[shard.id]
                        assert (array == -version).all(), (name, version)
                        versions.add(version)
                pushing.cancel()
            assert len(versions) > 2


async def test_many_arrays_travel_in_one_message_also_if_their_numbers_and_versions_differ():
    names = [f"a{number}" for number in range(MESSAGE_SHARDS)]
    ones = {name: np.ones(2, np.float32) for name in names}
    async with servers(1) as where:
        zeros = {name: np.zeros(2, np.float32) for name in names}
        async with ParameterStore.open(where, zeros, name="many", rule=Sgd(rate=1.0)) as store:
            assert len(store._calls.layout.everything) == 1
            await store.push_pull(ones)
            for names_pushed in (names[::2], names[::3]):
                await store.push({name: ones[name] for name in names_pushed})
            values = await store.push_pull(ones)
            outcome = await store.push(ones)
    pushes = [2 + (number % 2 == 0) + (number % 3 == 0) for number in range(MESSAGE_SHARDS)]
    assert [int(-values[name][0]) for name in names] == pushes
    assert [outcome.versions[name] for name in names] == [number + 1 for number in pushes]
