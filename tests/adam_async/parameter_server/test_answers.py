"""Answers with values that wait for room: each value is the one of its version, also beside batches."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from adam_async.messages import Pull, Pushed, ReadShards, ShardStates, Values, pack, read_state_tables, unpack
from adam_async.model.rules import Sgd
from adam_async.parameter_server import apply, events, service, shard_group
from adam_async.parameter_server.answers import Answers
from adam_async.parameter_server.events import ReplicasChanged, SendValues
from tests.adam_async.parameter_server.test_service import push_of, step_of, talk
from tests.adam_async.parameter_server.timelines import shard_of
from tests.adam_async.runs import NETWORKS, servers_of
from transport import BufferPool

LINK_BYTES = 20_000
"""Budget of a link that has room for one answer at a time."""

PUSHES, PULLS = 8, 4


@pytest.fixture
def short_rounds(monkeypatch):
    """Rounds of the loop that do a small part of a batch each."""
    for module in (apply, events):
        monkeypatch.setattr(module, "PIECE_WORK", 50)
    monkeypatch.setattr(service, "TURN_WORK", 50)
    monkeypatch.setattr(shard_group, "STRIP_VALUES", 50)


def narrow(name):
    network = NETWORKS[name]()
    network.config = replace(network.config, link_budget_bytes=LINK_BYTES)
    return network


def histories(servers, gradients):
    """The values of each shard at each version, if the gradients are applied one after the other."""
    found = {}
    for number, shard in servers.shards().items():
        values = [shard.values.copy()]
        for gradient in gradients:
            values.append(values[-1] - np.float32(gradient))
        found[number] = values
    return found


def check(answer, shards, history):
    """Compare each shard of an answer with its history; return the versions."""
    if answer.type == "Values":
        versions = np.broadcast_to(unpack(answer, Values).versions, len(shards)).tolist()
        sizes = [len(history[number][0]) for number in shards]
        parts = np.split(answer.tensors[0], np.cumsum(sizes)[:-1])
    else:
        unpack(answer, ShardStates)
        states, parts = read_state_tables(answer.tensors, most_shards=len(shards))
        versions = [state.version for state in states]
    for number, version, values in zip(shards, versions, parts, strict=True):
        np.testing.assert_array_equal(values, history[number][version], f"shard {number}, {version}")
    return versions


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_or_reading_that_waits_for_room_has_the_values_of_its_versions(network, short_rounds):
    async with (
        servers_of(narrow(network)) as servers,
        talk(servers) as pushes,
        talk(servers) as pulls,
        servers.network.connect(
            servers.map.nodes["ps-0"].address, servers.identity("driver", 1), timeout_s=10.0
        ) as readings,
    ):
        history = histories(servers, [1.0] * PUSHES)
        every, generation = tuple(servers.shards()), servers.map.generation
        ones = [np.ones(sum(len(values[0]) for values in history.values()), np.float32)]
        pull = pack(Pull(store="run", generation=generation, shards=every))
        read = pack(ReadShards(store="run", generation=generation, shards=every, clock=0))
        asked = []
        for number in range(1, PUSHES + 1):
            push = push_of(servers, every, numbers=(number,) * len(every))
            pushed = pushes.call_nowait(pack(push, ones), timeout_s=10.0)
            asked += [pulls.call_nowait(pull, timeout_s=10.0) for _ in range(PULLS)]
            asked += [readings.call_nowait(read, timeout_s=10.0) for _ in range(PULLS)]
            await pushed
        seen = [check(await answer, every, history) for answer in asked]
    assert len({version for versions in seen for version in versions}) > 2


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_that_waits_for_room_beside_sums_has_the_values_of_its_versions(network, short_rounds):
    bsp = servers_of(narrow(network), consistency="bsp", images_per_group=4)
    async with bsp as servers, talk(servers) as pushes, talk(servers) as pulls:
        for server in servers.servers:
            server.state.handle(ReplicasChanged({0: 1}))
        history = histories(servers, [0.5] * PUSHES)
        every, generation = tuple(servers.shards()), servers.map.generation
        pull = pack(Pull(store="run", generation=generation, shards=every))
        asked = []
        for clock in range(1, PUSHES + 1):
            push, tensors = step_of(servers, 1.0, 0, clock)
            pushed = pushes.call_nowait(pack(push, tensors), timeout_s=10.0)
            asked += [pulls.call_nowait(pull, timeout_s=10.0) for _ in range(PULLS)]
            assert unpack(await pushed, Pushed).problems == ()
            asked += [pulls.call_nowait(pull, timeout_s=10.0) for _ in range(PULLS)]
            ended = Pull(store="run", generation=generation, shards=every, clock=clock, wait_s=10.0)
            check(await pushes.call(pack(ended), timeout_s=10.0), every, history)
        seen = [check(await answer, every, history) for answer in asked]
    assert len({version for versions in seen for version in versions}) > 2


class HeldRequest:
    """A request for which the budgets have no room until the test says so."""

    link = SimpleNamespace(shares=False)

    def charge(self, nbytes, then):
        self.go_on = then

    def reply(self, message, *, lent):
        self.versions = unpack(message, Values).versions

    def fail(self, code, text):
        self.refusal = code, text


def test_an_answer_that_waits_for_room_is_sent_after_the_batch_and_refused_once_its_shards_have_left():
    torn = True
    answers = Answers(BufferPool(), [Sgd()], lambda: None, lambda: torn, lambda *_: None, lambda _: None)
    shards = (shard_of(0),)
    first, second, third = (HeldRequest() for _ in range(3))
    answers.perform([SendValues(request, shards) for request in (first, second, third)], None)
    first.go_on()
    assert not hasattr(first, "versions")
    torn = False
    shards[0].version = 1
    answers.whole()
    assert first.versions == 1
    torn = True
    second.go_on()
    answers.refuse("not-primary", "the shards begin anew")
    third.go_on()
    assert second.refusal == third.refusal == ("not-primary", "the shards begin anew")
