"""Training on a copy: waits for pulls, local steps, planned protocols."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Lease
from adam_async.run.config import Config
from adam_async.worker.copy_mode import CopyMode
from tests.adam_async.runs import NETWORKS, PATIENT, servers_of
from tests.adam_async.worker.setups import mode_setup
from transport import BufferPool


def mode_of(servers, client, *, in_flight=1, **options):
    config = msgspec.structs.replace(servers.config, weights="copy", images_per_group=4, **options)
    return CopyMode(
        mode_setup(servers, client, config),
        model=servers.model,
        session=client._session,
        buffers=BufferPool(),
        in_flight=in_flight,
    )


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


async def test_it_is_prepared_when_every_tensor_is_there(network):
    async with servers_of(network, waits=PATIENT) as servers:
        mode = mode_of(servers, servers.client(is_live=True).client)
        await mode.prepare()
        arrays = mode._weights.snapshot().arrays
        for name, specs in servers.table.by_tensor.items():
            values = np.concatenate([servers.shards()[spec.id].values for spec in specs])
            np.testing.assert_array_equal(arrays[name].reshape(-1), values)


async def test_only_the_one_group_in_flight_waits_for_its_pull(network):
    async with servers_of(network) as servers:
        client = servers.client(is_live=True).client
        assert mode_of(servers, client).graph().inputs == ("group", "landed")
        assert mode_of(servers, client, in_flight=2).graph().inputs == ("group",)


async def test_the_groups_of_a_thread_share_its_context_and_threads_share_none(network):
    async with servers_of(network) as servers:
        mode = mode_of(servers, servers.client(is_live=True).client, in_flight=4)
        await mode.prepare()
        threads = [mode.new_scratch() for _ in range(2)]
        assert mode.new_context() is None
        assert threads[0].context is not threads[1].context
        images = np.zeros((4, *servers.model.input_shape), np.uint8)
        for number in range(2):
            group = ImageGroup(Lease(1, number, 1, 4), images, np.full(4, number))
            for thread in threads:
                mode._trainer.train(SimpleNamespace(tag=None, scratch=thread), group)
        last = servers.model.context(4)
        last.load(images, np.full(4, 1))
        for thread in threads:
            np.testing.assert_array_equal(thread.context.targets, last.targets)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"pull_every": 1}, False),
        ({"pull_every": 4}, True),
        ({"pull_every": 4, "consistency": "ssp:2"}, True),
        ({"pull_every": 4, "rule": "adam"}, False),
        ({"pull_every": 4, "rule": "adagrad"}, False),
    ],
    ids=str,
)
async def test_local_steps_are_made_between_pulls_under_sgd_and_never_else(network, options, made):
    async with servers_of(network) as servers:
        mode = mode_of(servers, servers.client(is_live=True).client, rate=0.25, **options)
        assert mode._trainer._local == made


@pytest.mark.parametrize("push_every", [1, 3])
async def test_the_report_has_each_tensor_with_the_bytes_of_a_full_step(network, push_every):
    async with servers_of(network) as servers:
        counts = mode_of(servers, servers.client(is_live=True).client, push_every=push_every).statistics()
    rows = {row.tensor: row for row in counts.protocols}
    assert rows.keys() == {p.name for p in servers.model.parameters}
    images = 4 * push_every
    assert rows["fc1.weight"].factor_bytes == images * (256 + 64) * 4
    assert rows["conv1.weight"].factor_bytes is None
    assert counts.push_buffers == (3 if push_every == 1 else 6)


def test_the_default_in_other_processes_is_a_copy():
    assert Config().weights_in("there is none") == "copy"
