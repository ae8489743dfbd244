"""Data servers by their own commands, each with a folder of its own, that copy one shared source together."""

import ctypes
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.processes.commands import Command, until
from tests.processes.namespaces import hosts

pytestmark = pytest.mark.processes

IN_OPEN, IN_ISDIR = 0x20, 0x40000000
EVENT = struct.Struct("iIII")


def make_source(folder: Path) -> list[str]:
    """Tables of drawn digits, enough of them for several servers."""
    folder.mkdir()
    names = [f"train-{number}.csv" for number in range(9)] + ["test-0.csv"]
    header = ",".join(["label", *(f"pixel{pixel}" for pixel in range(64))])
    for number, name in enumerate(names):
        rows = [",".join(map(str, [row % 10, *[(row * number) % 256] * 64])) for row in range(20)]
        (folder / name).write_text("\n".join([header, *rows]) + "\n")
    return names


@contextmanager
def opened_in(folder: Path) -> Iterator[Callable[[], Counter[str]]]:
    """Count the opens of each file of a folder by any process."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.inotify_init1(os.O_NONBLOCK)
    if handle < 0 or libc.inotify_add_watch(handle, bytes(folder), IN_OPEN) < 0:
        pytest.skip(f"inotify cannot be used: {os.strerror(ctypes.get_errno())}")
    counts: Counter[str] = Counter()

    def look() -> Counter[str]:
        try:
            while data := os.read(handle, 1 << 16):
                at = 0
                while at < len(data):
                    _, mask, _, length = EVENT.unpack_from(data, at)
                    name = data[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0").decode()
                    at += EVENT.size + length
                    if not mask & IN_ISDIR:
                        counts[name] += 1
        except BlockingIOError:
            return counts
        return counts

    try:
        yield look
    finally:
        os.close(handle)


def same(one: Path, other: Path, names: list[str]) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.timeout(120)
async def test_four_hosts_read_each_file_of_a_shared_folder_once(tmp_path: Path) -> None:
    source = tmp_path / "shared"
    names = make_source(source)
    token = tmp_path / "token"
    token.write_text("a token of more than sixteen bytes\n")
    token.chmod(0o600)
    places = ["data", "wrk0", "wrk1", "ps0"]
    async with hosts(places) as network:
        with ExitStack() as stack:
            peers = ",".join(f"tcp://{network.address_of(place)}:7000" for place in places)
            opened = stack.enter_context(opened_in(source))
            shared = ("--data", str(source), "--stage-peers", peers, "--token-file", str(token))
            servers = [
                stack.enter_context(
                    Command("data", *shared, "--stage", str(tmp_path / place), within=network.within(place))
                )
                for place in places
            ]
            for server in servers:
                assert "already here" in server.wait_for("staged 10 files")
                server.wait_for("tcp://")
            assert opened() == dict.fromkeys(names, 1)
            assert all(same(source, tmp_path / place, names) for place in places)


@pytest.mark.timeout(120)
def test_servers_complete_when_one_is_killed_and_it_is_served_when_it_comes_again(
    tmp_path: Path, unused_tcp_port_factory
) -> None:
    source = tmp_path / "shared"
    names = make_source(source)
    peers = ",".join(f"tcp://127.0.0.1:{unused_tcp_port_factory()}" for _ in range(3))
    shared = ("data", "--data", str(source), "--stage-peers", peers, "--stage-wait", "3")

    with ExitStack() as stack:

        def start(folder: str) -> Command:
            return stack.enter_context(Command(*shared, "--stage", str(tmp_path / folder)))

        killed = start("a")
        own = [sorted(names)[number] for number in range(0, len(names), 3)]
        until(lambda: all((tmp_path / "a" / name).exists() for name in own), "its own files")
        killed.signal(signal.SIGKILL)
        killed.process.wait()
        others = [start("b"), start("c")]
        for other in others:
            other.wait_for("staged 10 files")
            other.wait_for("tcp://")
        opened = stack.enter_context(opened_in(source))
        again = start("a")
        line = again.wait_for("staged 10 files")
        assert " 0 read from there" in line
        assert opened() == {}
        assert all(same(source, tmp_path / folder, names) for folder in "abc")


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "copy")
    for words, expected in (
        (("--stage-peers", "tcp://127.0.0.1:7000"), "add --stage FOLDER"),
        (("--stage", folder), "name it with --data"),
        (("--stage", folder, "--data", "x", "--stage-wait", "0"), "must be a number of seconds above 0"),
        (
            ("--stage", folder, "--data", "x", "--stage-peers", "tcp://0.0.0.0:1"),
            "stands for every interface",
        ),
        (("--stage", folder, "--data", "x", "--stage-peers", "tcp://h:1,tcp://h:1"), "more than once"),
    ):
        with Command("data", *words) as command:
            assert command.finish() == 2
            assert expected in command.output
    with Command("data", "--stage", folder, "--data", str(tmp_path / "absent")) as command:
        assert command.finish() == 3
        assert "absent cannot be read" in command.output
