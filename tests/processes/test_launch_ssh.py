"""Roles over SSH on hosts: they train, outlive a worker and a host, and leave no process or state behind."""

import os
import pwd
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adam_async.launch.ssh import STATE
from tests.processes.commands import ADAM_TOML, PATIENCE_S, RUN_S, Command, command_line, roles_among, watched
from tests.processes.ssh_hosts import SshHost, free_port, hosts_file, make_key, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

COPIES = ("--controllers", "3", "--copies", "2", "--min-in-sync", "1")

MNIST = os.environ.get("ADAM_DATA_DIR", "")


class Site:
    """Hosts, by default two, and the files of a launch."""

    def __init__(self, folder: Path, stack: ExitStack, *, hosts: int = 2) -> None:
        self.folder, self.key = folder, folder / "key"
        public = make_key(self.key)
        addresses = [f"127.0.0.{number}" for number in range(2, 2 + hosts)]
        self.hosts = [stack.enter_context(SshHost(address, folder, public)) for address in addresses]
        self.train = folder / "adam.toml"
        self.train.write_text(ADAM_TOML)

    def file(self, *tables: str, known: str | None = None, **more: Any) -> Path:
        """Write the file of hosts; by default the last host has no controller and no only data server."""
        *others, last = self.hosts
        tables = tables or (*(host.table() for host in others), last.table(roles=["ps", "worker"]))
        known = "".join(host.known() for host in self.hosts) if known is None else known
        return hosts_file(self.folder, *tables, key=self.key, known=known, **more)

    def roles(self, *hosts: SshHost) -> dict[str, int]:
        """Return the process ids of the roles on some hosts, by default on all, by node id."""
        return roles_among(pid for host in hosts or self.hosts for pid in host.processes())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def launch(site: Site, *words: str, hosts: Path | None = None) -> Command:
    return Command("launch", "ssh", str(hosts or site.file()), str(site.train), *words)


def outlive_a_worker_and_a_host(site: Site, *words: str, seconds: float, **more: Any) -> str:
    """Kill a worker after the first epoch, then the host without the only data server; returns the output."""
    hosts = site.file(**more)
    with launch(site, *words, *COPIES, hosts=hosts) as command:
        command.wait_for("epoch 1/")
        roles = site.roles()
        nodes = [f"controller-{number}" for number in (1, 2, 3)]
        assert sorted(roles) == [*nodes, "data-0", "ps-0", "ps-1", "worker-0", "worker-1"]
        with watched(list(roles.values())) as all_end:
            os.kill(roles["worker-0"], signal.SIGKILL)
            command.wait_for("worker-0 died: killed by signal 9; starting it again")
            site.hosts[1].kill()
            command.wait_for("died: the connection to its host 127.0.0.3 broke")
            command.wait_for("ps-0 came back as a new incarnation")
            command.ends(0, seconds=seconds)
            all_end(PATIENCE_S)
        assert site.roles() == {}

    assert "Traceback" not in command.output
    return command.output


@pytest.mark.timeout(240)
def test_a_run_outlives_a_worker_and_a_host_and_leaves_no_process(site: Site) -> None:
    output = outlive_a_worker_and_a_host(site, "--epochs", "60", seconds=150)

    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", output), output


@pytest.mark.convergence
@pytest.mark.timeout(600)
@pytest.mark.skipif(not MNIST, reason="ADAM_DATA_DIR names no folder with MNIST")
def test_mnist_outlives_a_worker_and_a_host(site: Site) -> None:
    words, data = ("--data", "mnist", "--epochs", "8"), {"ADAM_DATA_DIR": MNIST}
    output = outlive_a_worker_and_a_host(site, *words, seconds=500, environment=data)

    accuracy = re.search(r"test accuracy (\d+\.\d+)% after 8 epochs", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 98.5, output


@pytest.mark.timeout(300)
def test_a_run_outlives_a_worker_and_a_host_with_each_kind_of_role(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = Site(tmp_path, stack, hosts=3)
        file = site.file(*(host.table() for host in site.hosts))
        # Three of each kind but the servers, so that every host has each kind of role.
        words = ("--data-servers", "3", "--replicas", "3", "--epochs", "60", *COPIES)
        command = stack.enter_context(launch(site, *words, hosts=file))
        command.wait_for("epoch 1/60")
        roles, lost = site.roles(), site.roles(site.hosts[1])
        assert len(roles) == 11
        assert sorted(node.split("-")[0] for node in lost) == ["controller", "data", "ps", "worker"]
        left = next(node for node in roles if node.startswith("worker-") and node not in lost)
        with watched(list(roles.values())) as all_end:
            os.kill(roles[left], signal.SIGKILL)
            command.wait_for(f"{left} died: killed by signal 9; starting it again")
            command.wait_for(f"{left} came back as a new incarnation")
            site.hosts[1].kill()
            command.wait_for("died: the connection to its host 127.0.0.3 broke")
            command.ends(0, seconds=200)
            all_end(PATIENCE_S)
        assert site.roles() == {}

    assert "Traceback" not in command.output
    for node in lost:
        if not node.startswith("controller"):  # the other controllers know its address, so it never moves
            assert f"{node} came back as a new incarnation" in command.output, command.output
    assert re.search(r"test accuracy 9[5-9]\.\d+% after 60 epochs", command.output), command.output


def test_a_launch_removes_the_state_that_a_killed_one_left_on_hosts(site: Site) -> None:
    records = Path.home() / ".cache/adam-async/launches"
    state = Path(pwd.getpwuid(os.getuid()).pw_dir) / STATE  # a login ignores the HOME of this process
    with launch(site, "--epochs", "100000", *COPIES) as command:
        command.wait_for("epoch 1/")
        (killed,) = [path.name for path in records.iterdir()]
        assert (state / killed).is_dir()
        with watched(list(site.roles().values())) as all_end:
            command.signal(signal.SIGKILL)
            all_end(PATIENCE_S)
    assert (state / killed).is_dir()

    with launch(site, "--epochs", "100000", *COPIES) as command:
        command.wait_for("epoch 1/")
        assert not (state / killed).exists()
        (running,) = [path.name for path in records.iterdir()]
        with launch(site, "--epochs", "1", *COPIES) as other:
            assert other.finish(seconds=RUN_S) == 0, other.output
        assert (state / running).is_dir()
        command.signal(signal.SIGINT)
        assert command.finish() == 130, command.output
    assert not (state / running).exists()
    assert [*records.iterdir()] == []


def test_orders_are_on_stdin_and_lines_have_the_name_of_their_node(site: Site) -> None:
    with launch(site, "--epochs", "100000") as command:
        command.wait_for("epoch 1/")
        roles = site.roles()
        for pid in roles.values():
            assert "adam-async-keys" not in command_line(pid)
            assert b"adam-async-keys" not in Path(f"/proc/{pid}/environ").read_bytes()
        addresses = {re.findall(r"--bind tcp://(\S+):0", command_line(pid))[0] for pid in roles.values()}
        assert addresses == {"127.0.0.2", "127.0.0.3"}
        # A worker that is stopped on purpose writes a line of its own at its end.
        os.kill(roles["worker-0"], signal.SIGTERM)
        command.wait_for("worker-0 died: ")
        with watched(list(site.roles().values())) as all_end:
            command.signal(signal.SIGINT)
            assert command.finish() == 130, command.output
            all_end(PATIENCE_S)


def test_roles_end_when_the_launching_process_is_killed(site: Site) -> None:
    with launch(site, "--epochs", "100000") as command:
        command.wait_for("epoch 1/")
        roles = site.roles()
        assert len(roles) == 6
        with watched(list(roles.values())) as all_end:
            command.signal(signal.SIGKILL)
            all_end(PATIENCE_S)


def test_the_output_of_a_role_that_cannot_start_is_forwarded_and_ends_the_launch(site: Site) -> None:
    with launch(site, "--data", "/no/such/folder") as command:
        command.ends(3, seconds=60)

    assert "data-0 | adam-async: /no/such/folder does not exist" in command.output
    assert "data-0 died: ended with exit code 3" in command.output
    assert site.roles() == {}


def test_another_key_than_the_known_one_is_refused_with_the_cure(site: Site) -> None:
    first, second = site.hosts
    wrong = first.known() + second.known().replace(second.public_key, first.public_key)
    with launch(site, hosts=site.file(known=wrong)) as command:
        command.ends(2, seconds=60)

    assert f"the key of host 127.0.0.3 is not one that {site.folder}/known_hosts has for it" in command.output
    assert f"ssh-keygen -R '[127.0.0.3]:{second.port}'" in command.output
    assert command.output.count("\n") == 1, command.output
    assert site.roles() == {}


def test_a_host_that_does_not_answer_is_named(site: Site) -> None:
    silent = f'[[hosts]]\nname = "127.0.0.4"\nport = {free_port("127.0.0.4")}\n'
    with launch(site, hosts=site.file(site.hosts[0].table(), silent)) as command:
        command.ends(4, seconds=60)

    assert "cannot reach host 127.0.0.4 at 127.0.0.4:" in command.output
    assert "connect" in command.output
    assert site.roles() == {}


def test_a_host_without_the_package_is_named_with_the_cure(site: Site) -> None:
    first, second = site.hosts
    tables = (first.table(), second.table(command=["/no/such/adam-async"]))
    with launch(site, hosts=site.file(*tables)) as command:
        command.ends(2, seconds=60)

    assert "host 127.0.0.3 cannot run '/no/such/adam-async'" in command.output
    assert "install adam-async there, or give its path as command" in command.output
    assert site.roles() == {}


def test_a_login_that_the_host_refuses_is_named(site: Site) -> None:
    site.key = site.folder / "stranger"
    make_key(site.key)
    with launch(site) as command:
        command.ends(2, seconds=60)

    assert "refuses the login: " in command.output
    assert site.roles() == {}
