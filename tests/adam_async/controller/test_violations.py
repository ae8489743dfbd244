"""A controller survives any message of another one, and refuses an unreadable log."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from adam_async.controller.consensus import Entry, Members, Message, Writer, bootstrapped
from adam_async.controller.consensus.messages import Append, Appended, Chunk, TakeOver
from adam_async.controller.consensus.records import Entries
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import NAME, LogFile
from adam_async.controller.peer_controllers import packed_agree
from adam_async.controller.replicated_state import (
    Lost,
    Open,
    Set,
    command_bytes,
    command_problem,
    first_state,
    log_problem,
    state_problem,
)
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.errors import DataError, first_cause
from adam_async.messages.body import MOST_MAP_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.disk import Disk
from tests.adam_async.controller.simulated_group import record, simulated
from tests.adam_async.runs import entropy_of, local_network
from transport import Identity, TransportError

DEEP = b"[" * 100_000 + b"]" * 100_000
NO_COMMAND = b"\xc1"
UNREADABLE = [
    NO_COMMAND,
    b"",
    msgspec.msgpack.encode({"type": "take-all"}),
    command_bytes(Set(session=1, number=1, key="nodes/x", expected=0, value=b'{"a":' + DEEP + b"}")),
    command_bytes(Set(session=1, number=1, key="nodes/x", expected=0, value=b"{")),
    command_bytes(Set(session=1, number=1, key="nodes/x", expected=0, value=b"[]")),
    command_bytes(Set(session=1, number=1, key="nodes/x", expected=0, value=b'{"a":' + b" " * 65536 + b"1}")),
]


@pytest.mark.parametrize("command", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_command_that_the_machine_cannot_read_is_named(command: bytes) -> None:
    assert command_problem(command)


def test_commands_of_our_own_are_read() -> None:
    sets = Set(session=1, number=1, key="nodes/x", expected=0, value=msgspec.json.encode(record()))
    assert [command_problem(command_bytes(command)) for command in (Open(), Lost("x", 5), sets)] == [""] * 3


def state_with(cluster: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode(["g", {**msgspec.to_builtins(ClusterMap()), **cluster}, []])


@pytest.mark.parametrize(
    "state",
    [
        b"",
        NO_COMMAND,
        state_with({"version": 2**60}),
        state_with({"version": -1}),
        state_with({"results": [{"a": msgspec.msgpack.Ext(1, b"x")}]}),
        state_with({"results": [{"a": msgspec.json.decode(b"[" * 40 + b"]" * 40)}]}),
    ],
    ids=range(6),
)
def test_a_state_that_the_machine_could_not_work_with_is_named(state: bytes) -> None:
    assert state_problem(state)
    assert state_problem(first_state("g")) == ""


Make = Callable[[str, str, int, int], Message]


def append(me: str, to: str, term: int, commit: int, *entries: Entry, prev_term: int = 0) -> Append:
    return Append(
        sender=me, to=to, term=term, prev_index=commit, prev_term=prev_term, entries=entries, commit=commit,
        round=0,
    )  # fmt: skip


LIES: dict[str, Make] = {
    "a rival in the same term": lambda me, to, term, commit: append(me, to, term, commit, prev_term=term),
    "another past": lambda me, to, term, commit: append(me, to, term + 1, commit, prev_term=term + 1),
    "no membership": lambda me, to, term, commit: append(
        me, to, term + 1, commit, Entry(commit + 1, term + 1, None, Members()), prev_term=term
    ),
    "an unreadable command": lambda me, to, term, commit: append(
        me, to, term + 1, commit, Entry(commit + 1, term + 1, NO_COMMAND), prev_term=term
    ),
    "an unreadable state": lambda me, to, term, commit: Chunk(
        sender=me, to=to, term=term + 1, index=commit + 9, index_term=term + 1, members=Members((me, to)),
        size=1, crc=crc32(NO_COMMAND), offset=0, data=NO_COMMAND, round=0,
    ),
    "a state larger than any map": lambda me, to, term, commit: Chunk(
        sender=me, to=to, term=term + 1, index=commit + 9, index_term=term + 1, members=Members((me, to)),
        size=4 * MOST_MAP_BYTES + 1, crc=0, offset=0, data=b"x", round=0,
    ),
    "entries that nobody has": lambda me, to, term, commit: Appended(
        sender=me, to=to, term=term, ok=True, match=commit + 10**6, round=0
    ),
    "a term out of the world": lambda me, to, term, commit: TakeOver(sender=me, to=to, term=2**62),
}  # fmt: skip


def test_a_controller_outlives_the_lies_of_another_and_ends_its_links(caplog) -> None:
    async def scenario(trio):
        leader = await trio.settled()
        liar, other = trio.others(leader)
        me = trio.running[liar].group.introduce().identity
        trio.kill(liar)
        group = trio.running[leader].group
        client, at = await (await trio.client(leader, node="w")).open(), 0
        for number, make in enumerate(LIES.values()):
            assert (await client.set("nodes/w", at, record(number, incarnation=1))).done
            at = (await client.map())[0].nodes["w"].changed
            where = group.statistics()
            false = await trio.client(leader, role="controller", node=liar, incarnation=number + 2)
            lie = make(me, group.introduce().identity, where.term, where.commit)
            with suppress(TransportError):
                await false.link.send(packed_agree(lie, group=""))
            async with asyncio.timeout(1.0):
                await false.link.wait_closed()
            assert group.statistics() == where
        assert (await client.set("nodes/w", at, record(99, incarnation=1))).done
        assert (trio.leaders, set(trio.running)) == ([leader], {leader, other})

    simulated(scenario)
    assert sum("sent an invalid message" in line for line in caplog.messages) == 1


async def test_a_log_with_a_command_that_cannot_be_read_is_named_at_the_start(tmp_path: Path) -> None:
    saved = bootstrapped("controller-1/1", ["controller-1/1"], first_state("g"))
    bad = Entries((Entry(2, 1, command_bytes(Open())), Entry(3, 1, NO_COMMAND)))
    (tmp_path / NAME).write_bytes(Writer().frame((*saved.records(), bad)))
    async with Disk() as disk:
        with pytest.raises((DataError, ExceptionGroup)) as raised:
            async with Controller(
                RoleSettings(
                    network=local_network(),
                    address="local://controller",
                    identity=Identity(role="controller", node="controller-1", incarnation=1),
                    waits=Waits(),
                ),
                ConsensusSetup(entropy=entropy_of("c"), file=LogFile(disk, tmp_path)),
            ) as controller:
                await controller.joined()
                await asyncio.Event().wait()
    said = str(first_cause(raised.value))
    assert f"the log in {tmp_path} cannot be used, entry 3 of term 1: this release cannot read it" in said
    assert "empty its folder and start it again" in said


def test_a_log_whose_state_cannot_be_read_is_named() -> None:
    saved = bootstrapped("a", ["a"], b"nothing that the machine wrote")
    assert log_problem(saved).startswith("the state at entry 1: this release cannot read it")
    assert log_problem(bootstrapped("a", ["a"], first_state("g"))) == ""
