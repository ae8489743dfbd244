"""Every role by its own command on a host of its own: network namespaces joined by a bridge, with a token.

Needs root and iproute2's namespaces; without them a test is skipped with the reason.
`ADAM_TEST_DATA` and `ADAM_TEST_EPOCHS` make the first test the real thing (a folder with MNIST, 3 epochs).
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.drill.network_namespaces import CONGESTION, NamespaceNetwork
from tests.processes.commands import Command, address_of
from tests.processes.namespaces import hosts, listed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


class Hosts:
    """Commands on hosts, which share a token.

    Args:
        stack: Ends the commands.
        folder: Folder for the token, and for the state of the controllers.
    """

    def __init__(self, network: NamespaceNetwork, stack: ExitStack, folder: Path) -> None:
        self._network = network
        self._stack = stack
        self._folder = folder
        token = folder / "token"
        token.write_text("a token of more than sixteen bytes\n")
        token.chmod(0o600)
        self._token = ("--token-file", str(token))

    def start(self, host: str, *words: str) -> Command:
        command = Command(*words, *self._token, within=self._network.within(host))
        return self._stack.enter_context(command)

    def controllers(self, names: Sequence[str]) -> str:
        """Start a controller on each of these hosts; return their addresses."""
        addresses = [f"tcp://{self._network.address_of(host)}:7070" for host in names]
        if len(names) == 1:
            assert address_of(self.start(names[0], "controller", "--bind", addresses[0])) == addresses[0]
            return addresses[0]
        peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
        started = [
            self.start(
                host, "controller", "--peers", peers, "--id", str(number), "--dir", str(self._folder / host)
            )
            for number, host in enumerate(names, 1)
        ]
        assert [address_of(each) for each in started] == addresses
        return ",".join(addresses)

    def join(self, host: str, role: str, *words: str, controllers: str) -> Command:
        """Start a role on a host, and wait until it has joined with the address of its host."""
        command = self.start(host, role, *words, "--controller", controllers)
        assert address_of(command).startswith(f"tcp://{self._network.address_of(host)}:")
        return command


async def test_roles_on_seven_hosts_train_with_a_token(tmp_path: Path) -> None:
    data = os.environ.get("ADAM_TEST_DATA", "digits")
    epochs = os.environ.get("ADAM_TEST_EPOCHS", "2")
    async with hosts(("ctl", "ps0", "ps1", "data", "wrk0", "wrk1", "user")) as network:
        with ExitStack() as stack:
            on = Hosts(network, stack, tmp_path)
            controllers = on.controllers(("ctl",))
            on.join("ps0", "ps", "--id", "ps-0", controllers=controllers)
            on.join("ps1", "ps", "--id", "ps-1", controllers=controllers)
            on.join("data", "data", "--data", data, controllers=controllers)
            on.join("wrk0", "worker", "--id", "worker-0", "--threads", "1", controllers=controllers)
            on.join("wrk1", "worker", "--id", "worker-1", "--threads", "1", controllers=controllers)
            rule = ("--rate", "0.003", "--momentum", "0.9")
            counts = ("--epochs", epochs, "--replicas", "2", "--servers", "2")
            training = on.start("user", "train", *counts, *rule, "--controller", controllers)
            assert training.finish(seconds=280) == 0, training.output

    assert f"after {epochs} epochs" in training.output
    print(training.output)  # noqa: T201 - the curve, shown with -s


@pytest.mark.slow
async def test_training_goes_on_after_the_host_of_a_primary_has_lost_its_network(tmp_path: Path) -> None:
    controller_hosts = ("ctl1", "ctl2", "ctl3")
    servers = ("ps-0", "ps-1", "ps-2")
    async with hosts((*controller_hosts, *servers, "work")) as network:
        with ExitStack() as stack:
            on = Hosts(network, stack, tmp_path)
            controllers = on.controllers(controller_hosts)
            roles = {host: on.join(host, "ps", "--id", host, controllers=controllers) for host in servers}
            on.join("work", "data", "--data", "digits", controllers=controllers)
            on.join("work", "worker", "--threads", "1", controllers=controllers)
            counts = ("--epochs", "80", "--servers", "3", "--copies", "3")
            training = on.start("work", "train", *counts, "--controller", controllers)
            training.wait_for("epoch 1/80")
            await network.cut("ps-1")
            moved = training.wait_for("primary of the shards of ps-1 moved from ps-1 to ps-")
            ended = roles["ps-1"].process.poll()
            training.ends(0, seconds=200)

    assert "after 80 epochs" in training.output
    assert moved[-4:] in ("ps-0", "ps-2")
    assert ended is None  # the process lived on: only its link was down
    assert "Traceback" not in training.output


LISTENER = """
import socket, sys
with socket.create_server((sys.argv[1], 9999)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


async def test_both_ends_of_a_connection_have_the_congestion_control_of_the_network() -> None:
    async with hosts(("one",), paths=2) as network:
        assert _congestion_controls(network, "one", 0) == (CONGESTION, CONGESTION)
        assert _congestion_controls(network, "one", 1) == (CONGESTION, CONGESTION)


def _congestion_controls(network: NamespaceNetwork, host: str, path: int) -> tuple[str, str]:
    """Return that of this process and that of the host, for a connection between them."""
    address = network.address_of(host, path)
    command = [*network.within(host), sys.executable, "-c", LISTENER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "ready\n"
            with socket.create_connection((address, 9999), timeout=10) as connection:
                mine = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return mine.rstrip(bytes(1)).decode(), listener.stdout.readline().strip()
        finally:
            listener.kill()  # after a failure it would wait for a connection


async def test_a_later_network_removes_namespaces_of_ended_processes_and_no_others() -> None:
    ended, running = _ended_process(), os.getppid()
    async with hosts(("one",)):
        pass
    with _left_by(ended), _left_by(running):
        async with hosts(("one",)):
            within = listed()

    assert {f"adam-async-{running}-host", f"adam{running}-0"} <= within
    assert not {f"adam-async-{ended}-host", f"adam{ended}-0"} & within
    assert f"adam-async-{os.getpid()}-one" in within
    assert not any(str(os.getpid()) in name for name in listed())


def _ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@contextmanager
def _left_by(pid: int) -> Iterator[None]:
    """Make the namespace and the interface of another process; remove them, if they are there, at the end."""
    space, link = f"adam-async-{pid}-host", f"adam{pid}-0"
    peer = ("peer", "name", "veth0", "netns", space)
    subprocess.run(["ip", "netns", "add", space], check=True)
    subprocess.run(["ip", "link", "add", link, "type", "veth", *peer], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
