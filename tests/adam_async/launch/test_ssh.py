"""The command of a role is safe in a shell, and controllers keep their hosts and addresses.

tests/processes/test_launch_ssh.py runs roles on real SSH servers.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from adam_async.cluster.launcher import RoleSpec
from adam_async.errors import ConfigError, RoleUnreachable
from adam_async.launch import ssh
from adam_async.launch.hosts import PORTS, Host, Hosts
from adam_async.launch.ssh import STATE, SshLauncher, has_peers, require_asyncssh
from adam_async.messages import role_table
from adam_async.run.config import Config
from transport import Identity, LocalNetwork

HOSTS = Hosts(hosts=(Host(name="10.0.0.1"), Host(name="10.0.0.2")), command=("echo", "a b"))
DRIVER = Identity(role="driver", node="driver", incarnation=1)


@pytest.fixture(autouse=True)
def with_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the user a home folder, which tests of a user without one lack."""
    monkeypatch.setenv("HOME", str(tmp_path))


def launcher() -> SshLauncher:
    numbers = count()
    return SshLauncher(
        HOSTS, records=Path("/nowhere"), entropy=lambda size: (next(numbers) // 2).to_bytes(size, "little")
    )


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


async def test_roles_that_ask_for_more_memory_than_their_host_has_are_refused() -> None:
    mine = launcher()
    mine.memory = {"10.0.0.1": 4 << 30, "10.0.0.2": 0}  # the second host has no figure
    await mine.prepare(Config(servers=2, memory=("ps=4G",)), data_servers=1)

    with pytest.raises(
        ConfigError, match=r"on host 10\.0\.0\.1 ask for 5\.0 GiB of memory, and it has 4\.0 GiB"
    ):
        await mine.prepare(Config(servers=2, memory=("ps=5G",)), data_servers=1)


@pytest.mark.parametrize(("arguments", "expected"), [(("--peers", "1=tcp://h:1"), True), ((), False)])
def test_a_controller_of_several_is_known_by_its_peers(arguments: tuple[str, ...], expected: bool) -> None:
    spec = RoleSpec(role="controller", node="c", arguments=arguments, orders=b"", environment={})

    assert has_peers(spec) is expected


def test_a_user_without_a_home_is_told_what_ssh_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("asyncssh")
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(ConfigError, match=r"launch ssh reads ~/\.ssh, .* no home folder: set HOME"):
        require_asyncssh()


def test_a_missing_asyncssh_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncssh", None)

    with pytest.raises(ConfigError, match=r"of the extra `ssh`: .*pip install .*\[ssh\]"):
        require_asyncssh()


class Server:
    """An SSH server of asyncssh on loopback, with a fault: ``silent``, ``refuses``, ``breaks`` or none.

    Without a fault it runs each command in a shell whose working folder is `home`.
    """

    def __init__(self, folder: Path, *, fault: str = "") -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.fault = fault
        self._folder = folder

    @asynccontextmanager
    async def launcher(self) -> AsyncIterator[SshLauncher]:
        """Listen; yields a launcher whose only host is this server."""
        asyncssh = pytest.importorskip("asyncssh", reason="asyncssh is not installed")
        fault, home = self.fault, self.home
        silent: list[asyncio.Future[bool]] = []

        class Login(asyncssh.SSHServer):  # type: ignore[misc, name-defined]
            def connection_made(self, conn: Any) -> None:
                self.connection = conn

            def begin_auth(self, username: str) -> bool:
                return False

            def session_requested(self) -> Any:
                if fault == "silent":
                    silent.append(asyncio.get_running_loop().create_future())
                    return silent[-1]
                if fault == "breaks":
                    self.connection.abort()
                return asyncssh.SSHServerProcess(serve, None, 3, False) if not fault else False

        async def serve(process: Any) -> None:
            child = await asyncio.create_subprocess_shell(process.command, cwd=home)
            process.exit(await child.wait())

        key = asyncssh.generate_private_key("ssh-ed25519")
        async with asyncssh.listen("127.0.0.1", 0, server_factory=Login, server_host_keys=[key]) as server:
            known = self._folder / "known_hosts"
            known.write_text(f"[127.0.0.1]:{server.get_port()} {key.export_public_key().decode()}")
            host = Host(name="127.0.0.1", port=server.get_port())
            hosts = Hosts(hosts=(host,), user="adam", known_hosts=str(known), command=("adam-async",))
            yield SshLauncher(hosts, records=self._folder / "records", entropy=bytes)
            for opening in silent:
                opening.set_result(False)


FAULTS = {"silent": "within 0.2 s", "refuses": "Session refused", "breaks": "connection closed"}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for deadline in ("CHECK_S", "START_S", "REMOVE_S"):
        monkeypatch.setattr(ssh, deadline, 0.2)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_host_that_does_not_run_the_check_is_named_with_the_remedy(
    fault: str, tmp_path: Path
) -> None:
    async with Server(tmp_path, fault=fault).launcher() as launcher:
        with pytest.raises(RoleUnreachable, match=r"try `ssh 127\.0\.0\.1`") as raised:
            async with launcher:
                pass

    assert "it did not run 'adam-async'" in str(raised.value)
    assert FAULTS[fault] in str(raised.value)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_role_whose_host_does_not_start_it_ends_with_the_reason(fault: str, tmp_path: Path) -> None:
    spec = RoleSpec(role="ps", node="ps-0", arguments=(), orders=b"", environment={})
    async with Server(tmp_path, fault=fault).launcher() as launcher, asyncio.TaskGroup() as group:
        role = launcher.start(spec, group, lambda line: None)
        await role.ended.wait()

    assert "it did not start ps-0" in role.how
    assert FAULTS[fault] in role.how
    assert "try `ssh 127.0.0.1`" in role.how


@pytest.mark.parametrize("fault", FAULTS)
async def test_state_on_a_host_that_does_not_answer_goes_with_the_next_launch(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "home" / STATE / ("0" * 16)
    left.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(ssh, "REMOVE_S", 0.2)
        async with Server(tmp_path, fault=fault).launcher() as launcher, launcher.state_folder("0" * 16):
            pass
    assert left.exists()

    async with Server(tmp_path).launcher() as launcher, launcher.state_folder("1" * 16) as folder:
        assert folder == f"{STATE}/{'1' * 16}"
        assert not left.exists()
    assert [*(tmp_path / "records").iterdir()] == []


async def test_a_launch_leaves_the_state_of_a_running_one(tmp_path: Path) -> None:
    kept = tmp_path / "home" / STATE / ("0" * 16)
    kept.mkdir(parents=True)
    async with Server(tmp_path).launcher() as launcher, launcher.state_folder("0" * 16):
        async with launcher.state_folder("1" * 16):
            pass
        assert kept.exists()
    assert not kept.exists()
