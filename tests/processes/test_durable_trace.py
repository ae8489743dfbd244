"""A durable push is acknowledged after an fdatasync of its entry on each server: system calls show it."""

import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from adam_async import ParameterStore, Sgd
from tests.processes.commands import Command, address_of, started_by_hand
from tests.processes.system_calls import events_of, traced, unproved

PUSHES = 30
NODES = ("ps-0", "ps-1")

ENTRY = "/disk/ps-0/store-1/entries-00000001.segment"
WRITE = f'7 10.0 writev(9<{ENTRY}>, [{{iov_base="..", iov_len=9}}], 1) = 9 <0.1>'
SYNC = f"7 10.2 fdatasync(9<{ENTRY}>) = 0 <0.1>"
SENT = (
    '6 10.5 sendmsg(5<socket:[42]>, {msg_iov=[{iov_base="TLNK\\223\\246Pushed"..., iov_len=70}]}) = 70 <0.01>'
)


def judged(*lines: str) -> tuple[int, int]:
    """Numbers of acknowledgements in a trace, and of those without proof."""
    found, problems = unproved([events_of("\n".join(lines))], since=0.0, until=100.0)
    return found, len(problems)


def test_a_trace_with_the_sync_of_an_entry_proves_its_acknowledgement():
    assert judged(WRITE, SYNC, SENT) == (1, 0)
    begin, end = f"7 10.2 fdatasync(9<{ENTRY}> <unfinished ...>", "7 10.3 <... fdatasync resumed>) = 0 <0.1>"
    assert judged(WRITE, begin, end, SENT) == (1, 0)


@pytest.mark.parametrize(
    "lines",
    [
        (WRITE, SENT),
        (SYNC, SENT),
        (WRITE, SYNC.replace("= 0", "= -1 EIO (Input/output error)"), SENT),
        (WRITE, SYNC.replace("entries", "states"), SENT),
        (WRITE, SYNC.replace("00001", "00002"), SENT),
        (WRITE, SYNC.replace("10.2", "10.05"), SENT),
        (WRITE, SYNC.replace("<0.1>", "<0.4>"), SENT),
        (WRITE, SENT, SYNC.replace("10.2", "10.6")),
    ],
    ids=["none", "without a write", "failed", "of states", "of another file", "too early", "longer", "later"],
)
def test_a_trace_without_the_sync_of_an_entry_proves_no_acknowledgement(lines):
    assert judged(*lines) == (1, 1)


def test_one_sync_proves_one_acknowledgement():
    assert judged(WRITE, SYNC, SENT, SENT.replace("10.5", "10.7")) == (2, 1)


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_each_server_syncs_an_entry_before_its_durable_push_is_acknowledged(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt-get install strace")
    with ExitStack() as stack:
        where, _ = started_by_hand(stack)
        started, times = [], []
        for node in NODES:
            options = ("--id", node, "--dir", str(tmp_path / node), "--controller", where)
            command = Command("ps", *options, within=traced(tmp_path / f"{node}.trace"))
            started.append(stack.enter_context(command))
            address_of(command)
        for durable in (True, False):
            async with ParameterStore.open(
                where,
                {"w": np.zeros(64)},
                name=f"durable-{durable}",
                rule=Sgd(rate=1.0),
                copies=2,
                min_in_sync=2,
                servers=2,
                durable=durable,
            ) as store:
                await store.push({"w": np.ones(64)})
                begin = time.time()
                for _ in range(PUSHES):
                    await store.push({"w": np.ones(64)})
                times.append((begin, time.time()))
        for command in started:
            command.signal(signal.SIGTERM)
            assert command.finish() == 143, command.output
    servers = [events_of((tmp_path / f"{node}.trace").read_text()) for node in NODES]
    acknowledged, problems = unproved(servers, *times[0])
    assert acknowledged == PUSHES
    assert problems == []
    # The same judgement of pushes that are not durable must find no proof.
    acknowledged, problems = unproved(servers, *times[1])
    assert acknowledged == PUSHES
    assert len(problems) == 2 * PUSHES
