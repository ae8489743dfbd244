"""Processes with closed standard streams, those that cannot write every character, and idle readers."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adam_async.checkpoint.names import FILE_NAME
from adam_async.runtime.standard_streams import MOST_UNREAD_BYTES
from tests.processes.commands import RUN_S, Command, until

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"]


def run(program: str, closed: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    words = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    return subprocess.run(words, capture_output=True, timeout=30, check=False, env=os.environ | environment)


@pytest.mark.parametrize("closed", CLOSED)
def test_a_loop_gets_no_standard_descriptor(closed: str) -> None:
    done = run(
        """
import asyncio, os
from adam_async.runtime.standard_streams import hold_descriptors
hold_descriptors()
import uvloop
async def main():
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    out, _ = await child.communicate(b"through pipes")
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    assert out == b"through pipes" and server.sockets[0].fileno() > 2
    server.close()
uvloop.run(main())
assert all(os.get_inheritable(descriptor) for descriptor in (0, 1, 2))
os._exit(0)
""",
        closed,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_has_streams_that_lead_nowhere(closed: str) -> None:
    done = run(
        """
import sys
from adam_async.runtime.standard_streams import hold_streams
hold_streams()
print("text", file=sys.stdout)
print("text", file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
assert not sys.stdout.isatty() and sys.stdout.fileno() == 1
""",
        f"{closed} {'' if '<' in closed else '</dev/null'}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ([] if "1>" in closed or " >&-" in f" {closed}" else [b"text"])


def test_streams_that_are_open_stay() -> None:
    done = run(
        """
import os, sys
from adam_async.runtime.standard_streams import hold_streams
def facts():
    out = sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.line_buffering
    return [os.fstat(each) for each in (0, 1, 2)], sys.stdin, out, sys.stderr
before = facts()
hold_streams()
assert before == facts()
""",
        "",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_a_character_that_the_terminal_lacks_is_written_as_an_escape(encoding: str) -> None:
    program = """
from adam_async.runtime.standard_streams import hold_streams
hold_streams()
print("100 \\u6f22 \\u2013 end")
"""
    done = run(program, "", PYTHONIOENCODING=encoding)
    assert done.stdout == b"100 \\u6f22 \\u2013 end\n", done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_does_not_read_holds_up_nobody_and_hears_how_much_it_lost(unbuffered: str) -> None:
    lines = 4 * MOST_UNREAD_BYTES // 64
    program = f"""
import sys
from adam_async.runtime.standard_streams import hold_streams, unblocked_streams
hold_streams()
with unblocked_streams(lambda: False):
    for number in range({lines}):
        print(f"{{number:063}}", flush=True)
    print("went on", file=sys.stderr)
"""
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    with started:
        assert started.stderr is not None
        assert started.stderr.readline() == b"went on\n", "before anybody has read a line"
        out, err = started.communicate(timeout=60)
    told = [line for line in out.splitlines() if not line.isdigit()]
    assert (started.returncode, err) == (0, b"")
    assert told
    assert sum(int(line[1:].split()[0]) for line in told) == lines - len(out.splitlines()) + len(told)
    assert out.splitlines()[-1] == b"%063d" % (lines - 1)


def test_lines_of_both_streams_to_one_pipe_keep_their_order() -> None:
    program = """
import sys
from adam_async.runtime.standard_streams import hold_streams, unblocked_streams
hold_streams()
with unblocked_streams(lambda: False):
    for number in range(1000):
        print(number, file=(sys.stdout, sys.stderr)[number % 2], flush=True)
"""
    done = run(program, "2>&1")
    assert done.stdout.split() == [b"%d" % number for number in range(1000)]


def test_a_pipe_that_another_program_has_set_not_to_block_gets_all_lines() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    program = """
from adam_async.runtime.standard_streams import hold_streams, unblocked_streams
hold_streams()
with unblocked_streams(lambda: False):
    for number in range(50_000):
        print(number, flush=True)
"""
    started = subprocess.Popen([sys.executable, "-c", program], stdout=writing)
    os.close(writing)
    with started, os.fdopen(reading, "rb") as reader:
        assert reader.read().split() == [b"%d" % number for number in range(50_000)]
    assert started.returncode == 0


def test_an_interrupted_command_does_not_wait_for_a_reader_that_does_not_read() -> None:
    program = """
import sys
from adam_async.runtime.standard_streams import hold_streams, unblocked_streams
hold_streams()
with unblocked_streams(lambda: True):
    print("x" * 500_000, flush=True)
"""
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert started.wait(timeout=60) == 0
    assert started.stdout is not None
    started.stdout.close()


@pytest.mark.parametrize(
    ("out", "error"), [("/dev/full", "ConfigError: standard output"), ("", "BrokenPipe")]
)
def test_output_that_cannot_be_written_is_an_error_at_the_end_at_the_latest(out: str, error: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = """
from adam_async.runtime.standard_streams import hold_streams, unblocked_streams
hold_streams()
with unblocked_streams(lambda: False):
    print("only line")
"""
    where = os.open(out, os.O_WRONLY) if out else os.dup(writing)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=where, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(where)
    os.close(writing)
    assert error in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("closed", CLOSED)
def test_a_program_that_embeds_a_store_or_a_cluster_is_not_aborted(closed: str) -> None:
    done = run(
        """
import os
import numpy as np
from adam_async import Config, sync
with sync.ParameterStore.open("local", {"w": np.zeros(2)}) as store:
    store.push({"w": np.ones(2)})
with sync.LocalCluster(Config(data="digits", epochs=1, threads=1)) as cluster:
    cluster.train()
""",
        closed,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("roles", ["", "--processes"])
def test_a_training_with_closed_streams_ends_well(closed: str, roles: str) -> None:
    words = f'exec "$0" -m adam_async train --data digits --epochs 1 --quiet {roles} {closed}'
    done = subprocess.run(["sh", "-c", words, sys.executable], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.processes
@pytest.mark.timeout(RUN_S + 30)
def test_a_training_whose_lines_nobody_reads_trains_to_its_end(tmp_path: Path) -> None:
    model = tmp_path / FILE_NAME  # written after the last epoch
    with Command("train", "--data", "digits", "--epochs", "80", "--out", str(tmp_path)) as command:
        assert command.process.stdout is not None
        fcntl.fcntl(command.process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # the lines of about 40 epochs
        until(lambda: model.exists() or command.process.poll() is not None, "the model", seconds=RUN_S)
        command.ends(0)
    lines = command.output.splitlines()
    assert any(line.startswith("epoch 80/80") for line in lines)
    assert lines[-1].startswith("test accuracy ")
