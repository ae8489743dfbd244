"""Each node of a job has memory for its roles, and for those of another node that is lost."""

import pytest

from adam_async.errors import ConfigError
from adam_async.launch.hosts import Host
from adam_async.launch.node_memory import AGENT_BYTES, memory_of_node, roles_by_host
from adam_async.run.config import Config

G = 1 << 30
ALL = ("controller=1G", "ps=4G", "data=2G", "worker=3G", "driver=1G")


def test_roles_are_counted_where_a_launch_places_them() -> None:
    hosts = [Host(name="a"), Host(name="b", roles=("ps", "worker"))]
    found = roles_by_host(Config(servers=2, replicas=2), hosts, data_servers=1)

    assert found == {"a": ["controller", "data", "ps", "worker"], "b": ["ps", "worker"]}


def test_one_node_has_the_sum_of_all_roles() -> None:
    found = memory_of_node(Config(servers=2, replicas=2, memory=ALL), 1, data_servers=1)

    assert found == AGENT_BYTES + (1 + 2 * 4 + 2 + 2 * 3 + 1) * G


def test_a_node_has_room_for_the_roles_of_a_lost_one() -> None:
    config = Config(servers=2, replicas=2, memory=ALL)
    alone = memory_of_node(config, 1, data_servers=1)

    assert memory_of_node(config, 2, data_servers=1) == alone
    # The first of the two that are left has the driver, a controller and the data server.
    assert memory_of_node(config, 3, data_servers=1) == AGENT_BYTES + (1 + 1 + 2 + 4 + 3) * G


def test_without_sizes_a_job_asks_for_no_memory() -> None:
    assert memory_of_node(Config(), 4, data_servers=1) == 0


def test_a_job_needs_the_size_of_every_role() -> None:
    with pytest.raises(
        ConfigError, match=r"no size for controller, data, driver, .* --memory controller=SIZE"
    ):
        memory_of_node(Config(memory=("ps=4G", "worker=3G")), 2, data_servers=1)
    config = Config(memory=("controller=1G", "ps=4G", "worker=3G", "driver=1G"))
    assert memory_of_node(config, 1, data_servers=0) == AGENT_BYTES + 9 * G
