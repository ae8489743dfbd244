"""A file of hosts is read strictly, and roles are spread over the hosts that may have them."""

import pytest

from adam_async.errors import ConfigError
from adam_async.launch.hosts import Host, Hosts, Placement, read_hosts, roles_by_host
from adam_async.run.config import Config

TWO = """
user = "adam"
[[hosts]]
name = "10.0.0.1"
[[hosts]]
name = "10.0.0.2"
roles = ["ps", "worker"]
command = ["/opt/my adam/bin/adam-async"]
"""


def two() -> Hosts:
    return read_hosts(TWO, source="hosts.toml")


def test_a_host_has_the_values_of_the_file_except_its_own() -> None:
    hosts = two()
    first, second = hosts.hosts

    assert hosts.user == "adam"
    assert hosts.command_of(first) == "adam-async"
    assert hosts.command_of(second) == "'/opt/my adam/bin/adam-async'"
    assert first.roles == ("controller", "data", "ps", "worker")


def test_roles_listen_on_the_address_of_their_host() -> None:
    text = '[[hosts]]\nname = "a"\naddress = "fd00::1"\n'
    (host,) = read_hosts(text, source="hosts.toml").hosts

    assert host.listens_on(7070) == "tcp://[fd00::1]:7070"
    assert two().hosts[0].listens_on(0) == "tcp://10.0.0.1:0"


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("[[hosts]", "hosts.toml is not TOML: "),
        ('hosts = "a"', "Expected `array`"),
        ("hosts = []", "hosts.toml has 0 hosts; give 1 to 1000"),
        ('[[hosts]]\naddress = "a"', "missing required field `name`"),
        ('[[hosts]]\nname = "a"\nprot = 22', "unknown field `prot`"),
        ('[[hosts]]\nname = "a"\nport = 70000', "port 70000 is none"),
        ('port = -1\n[[hosts]]\nname = "a"', "port -1 is none"),
        ('[[hosts]]\nname = ""', "host '' is empty"),
        ('[[hosts]]\nname = "-oProxyCommand=x"', "host '-oProxyCommand=x' is empty, an option"),
        ('[[hosts]]\nname = "a"\n[[hosts]]\nname = "a"', "host 'a' is empty, an option, or named twice"),
        ('[[hosts]]\nname = "a"\nroles = ["driver"]', "host a has role 'driver'; known: controller, data"),
        ('[[hosts]]\nname = "a"\naddress = "0.0.0.0"', "address of host a: .* stands for every interface"),
        ('[[hosts]]\nname = "a"\ncopies = "0.0.0.0"', "copies of host a: .* stands for every interface"),
        ('[[hosts]]\nname = "a"\ncontrol = "0.0.0.0"', "control of host a: .* stands for every interface"),
        ('[environment]\n-S = "x"\n[[hosts]]\nname = "a"', "environment: '-S' names no variable"),
        ('[environment]\nA = "\\u0000"\n[[hosts]]\nname = "a"', "its value has a null"),
        ('[environment]\nADAM_TOKEN = "x"\n[[hosts]]\nname = "a"', "other users .* read ADAM_TOKEN"),
        ('[[hosts]]\nname = "a"\nroles = ["ps", "data", "controller"]', "no host may have role worker"),
    ],
)
def test_a_wrong_file_of_hosts_is_refused_with_the_value_and_the_remedy(text: str, claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        read_hosts(text, source="hosts.toml")


def test_each_kind_of_role_is_spread_over_the_hosts_that_may_have_it() -> None:
    placement = Placement(two().hosts)
    nodes = ["controller", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    places = {node: placement.place(node.partition("-")[0], node).name[-1] for node in nodes}

    assert places == {
        "controller": "1",
        "data-0": "1",
        "ps-0": "2",
        "ps-1": "1",
        "worker-0": "2",
        "worker-1": "1",
    }
    assert placement.workers_on(two().hosts[0]) == 1


def test_a_role_stays_on_its_host_until_that_is_silent_and_may_return_there() -> None:
    first, second = two().hosts
    placement = Placement([first, second])
    assert placement.place("ps", "ps-0") == first
    assert placement.place("ps", "ps-0") == first

    placement.note(first, answers=False)
    assert placement.place("ps", "ps-0") == second
    placement.note(second, answers=False)
    placement.note(first, answers=True)
    assert placement.place("ps", "ps-0") == first


def test_a_role_whose_hosts_are_all_silent_tries_one_again_and_a_fixed_role_never_moves() -> None:
    first, second = two().hosts
    placement = Placement([first, second])
    assert placement.place("data", "data-0") == first
    assert placement.place("ps", "ps-0", moves=False) == second
    for host in (first, second):
        placement.note(host, answers=False)

    assert placement.place("data", "data-0") == first
    placement.note(first, answers=True)
    assert placement.place("ps", "ps-0", moves=False) == second


def test_roles_are_counted_where_a_launch_places_them() -> None:
    hosts = [Host(name="a"), Host(name="b", roles=("ps", "worker"))]
    found = roles_by_host(Config(servers=2, replicas=2), hosts, data_servers=1)

    assert found == {"a": ["controller", "data", "ps", "worker"], "b": ["ps", "worker"]}
