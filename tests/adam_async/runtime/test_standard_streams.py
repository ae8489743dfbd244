"""Processes that start with closed standard streams, and streams that cannot write every character."""

import os
import subprocess
import sys

import pytest

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
