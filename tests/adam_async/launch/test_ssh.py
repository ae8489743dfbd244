"""The command of a role is safe in a shell, and controllers keep their hosts and addresses.

tests/processes/test_launch_ssh.py runs roles on real SSH servers.
"""

import subprocess
import sys
from itertools import count

import pytest

from adam_async.cluster.launcher import RoleSpec
from adam_async.errors import ConfigError
from adam_async.launch.hosts import PORTS, Host, Hosts
from adam_async.launch.ssh import SshLauncher, has_peers, require_asyncssh
from adam_async.messages import role_table
from adam_async.run.config import Config
from transport import Identity, LocalNetwork

HOSTS = Hosts(hosts=(Host(name="10.0.0.1"), Host(name="10.0.0.2")), command=("echo", "a b"))
DRIVER = Identity(role="driver", node="driver", incarnation=1)


def launcher() -> SshLauncher:
    numbers = count()
    return SshLauncher(HOSTS, entropy=lambda size: (next(numbers) // 2).to_bytes(size, "little"))


def test_a_shell_passes_every_word_and_variable_of_a_role_unchanged() -> None:
    command = launcher().command(HOSTS.hosts[0], ["$HOME", "it's", "; exit 3"], {"A": "x; y"})

    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)

    assert done.stdout == "a b $HOME it's ; exit 3\n"
    assert command.startswith("exec env 'A=x; y' echo")


async def test_several_controllers_have_different_addresses_on_different_hosts() -> None:
    nodes = ["controller-1", "controller-2", "controller-3"]
    addresses = await launcher().controller_addresses(nodes, LocalNetwork(rules=role_table()), DRIVER)

    assert [address.rpartition(":")[0] for address in addresses] == [
        "tcp://10.0.0.1",
        "tcp://10.0.0.2",
        "tcp://10.0.0.1",
    ]
    assert len(set(addresses)) == 3
    assert all(int(address.rpartition(":")[2]) in PORTS for address in addresses)


async def test_a_single_controller_lets_the_system_choose_its_port() -> None:
    assert await launcher().controller_addresses(
        ["controller"], LocalNetwork(rules=role_table()), DRIVER
    ) == ["tcp://10.0.0.1:0"]


async def test_threads_are_those_of_the_options_or_depend_on_the_host() -> None:
    assert await launcher().prepare(Config(), data_servers=1) == 0
    assert await launcher().prepare(Config(threads=3), data_servers=1) == 3
    assert await launcher().prepare(Config(record=True), data_servers=1) == 1


@pytest.mark.parametrize(("arguments", "expected"), [(("--peers", "1=tcp://h:1"), True), ((), False)])
def test_a_controller_of_several_is_known_by_its_peers(arguments: tuple[str, ...], expected: bool) -> None:
    spec = RoleSpec(role="controller", node="c", arguments=arguments, orders=b"", environment={})

    assert has_peers(spec) is expected


def test_a_missing_asyncssh_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncssh", None)

    with pytest.raises(ConfigError, match=r"of the extra `ssh`: pip install 'adam-async\[ssh\]'"):
        require_asyncssh()
