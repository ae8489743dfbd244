"""Every role by its own command on a host of its own: network namespaces joined by a bridge, with a token.

Needs root and iproute2's namespaces; without them the test is skipped with the missing one.
`ADAM_TEST_DATA` and `ADAM_TEST_EPOCHS` make it the real thing (a folder with MNIST, 3 epochs).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.processes.commands import Command, address_of

pytestmark = pytest.mark.processes

HOSTS = ("ctl", "ps0", "ps1", "data", "wrk0", "wrk1", "user")
BRIDGE = "adamt0"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def missing() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        ip("netns", "add", "adamt-probe")
        ip("netns", "del", "adamt-probe")
    except subprocess.SubprocessError as error:
        return f"network namespaces cannot be made: {error}"
    return ""


@contextmanager
def hosts() -> Iterator[dict[str, str]]:
    """One namespace per host on one bridge; gives each host's address."""
    with ExitStack() as stack:
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "del", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        addresses = {}
        for number, host in enumerate(HOSTS, start=1):
            space, outside, inside = f"adamt-{host}", f"at-{host}", f"ai-{host}"
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            ip("link", "set", inside, "netns", space)
            ip("link", "set", outside, "master", BRIDGE, "up")
            ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", space, "link", "set", "lo", "up")
            addresses[host] = f"10.77.0.{number}"
        yield addresses


@pytest.mark.timeout(300)
def test_roles_on_seven_hosts_train_with_a_token(tmp_path: Path) -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    token = tmp_path / "token"
    token.write_text("a token of more than sixteen bytes\n")
    token.chmod(0o600)
    shared = ("--token-file", str(token))
    data = os.environ.get("ADAM_TEST_DATA", "digits")
    epochs = os.environ.get("ADAM_TEST_EPOCHS", "2")
    with ExitStack() as stack:
        addresses = stack.enter_context(hosts())

        def start(host: str, *words: str) -> Command:
            return stack.enter_context(
                Command(*words, *shared, within=("ip", "netns", "exec", f"adamt-{host}"))
            )

        controller = start("ctl", "controller", "--bind", f"tcp://{addresses['ctl']}:7070")
        join = ("--controller", address_of(controller))
        roles = {
            "ps0": start("ps0", "ps", "--id", "ps-0", *join),
            "ps1": start("ps1", "ps", "--id", "ps-1", *join),
            "data": start("data", "data", "--data", data, *join),
            "wrk0": start("wrk0", "worker", "--id", "worker-0", "--threads", "1", *join),
            "wrk1": start("wrk1", "worker", "--id", "worker-1", "--threads", "1", *join),
        }
        for host, role in roles.items():
            assert address_of(role).startswith(f"tcp://{addresses[host]}:")
        words = (
            "--epochs",
            epochs,
            "--replicas",
            "2",
            "--servers",
            "2",
            "--rate",
            "0.003",
            "--momentum",
            "0.9",
        )
        training = start("user", "train", *words, *join)
        assert training.finish(seconds=280) == 0, training.output
        assert f"after {epochs} epochs" in training.output
        print(training.output)  # noqa: T201 - the curve, shown with -s
