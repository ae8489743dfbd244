"""Links within a host: what they choose, what their payloads take, and what a hostile process can do."""

import asyncio
import gc
import os
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.msgpack import encode

from tests.transport.testing import FAR, NEAR, link_pair, open_rules
from transport import (
    DialFailed,
    HandshakeRejected,
    Link,
    LinkBroken,
    LinkConfig,
    Message,
    Placed,
    Region,
    RemoteProtocolError,
    Request,
    RetrySchedule,
    TcpNetwork,
    unix,
)
from transport.frames import DROPPED, FREED, MESSAGE, PLACE, PLACED, REQUEST, head
from transport.regions import IDLE_S, region_of
from transport.shared import SharedLink, user_of
from transport.sockets import resolved
from transport.stream import StreamLink
from transport.unix import LEAST_FREE, has_free_descriptors, is_of_this_host, unix_name

TOKEN = b"a token of tests"
ONCE = RetrySchedule(attempts=1)
MIB = 1 << 20


def network(token: bytes | None = TOKEN, **config: float | str) -> TcpNetwork:
    fields = {"link": "shared", **config}
    return TcpNetwork(
        token=token,
        entropy=os.urandom,
        rules=open_rules(),
        config=LinkConfig(**fields),  # type: ignore[arg-type]
    )


def echo(request: Request) -> None:
    request.charge(
        sum(each.nbytes for each in request.message.tensors),
        lambda: request.reply(Message(type="answer", tensors=request.message.tensors)),
    )


def ask(values: np.ndarray) -> Message:
    return Message(type="ask", tensors=(values,))


@asynccontextmanager
async def pair(**config: float | str) -> AsyncIterator[tuple[SharedLink, SharedLink]]:
    async with link_pair(network(**config)) as (near, far):
        assert isinstance(near, SharedLink)
        assert isinstance(far, SharedLink)
        yield near, far


async def descriptors() -> int:
    """Number of open descriptors, after those that the loop closes in its next iterations."""
    gc.collect()
    for _ in range(5):
        await asyncio.sleep(0)
    return len(os.listdir("/proc/self/fd"))


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def shared_bytes(link: SharedLink) -> int:
    return link._outbound.held_bytes


@pytest.mark.parametrize("kind", ["auto", "shared"])
async def test_processes_of_a_host_share_memory(kind: str) -> None:
    async with link_pair(network(link=kind)) as (near, far):
        assert type(near) is type(far) is SharedLink


async def test_tcp_on_either_side_means_tcp() -> None:
    async def on_link(link: Link) -> None:
        assert type(link) is StreamLink
        await link.wait_closed()

    async with network(link="tcp").listen("tcp://127.0.0.1:0", FAR, on_link) as listener:
        async with network(link="auto").connect(listener.address, NEAR) as link:
            assert type(link) is StreamLink
        with pytest.raises(
            DialFailed, match=r"no process of this host offers shared memory.*'auto' would try TCP"
        ):
            await network(link="shared").dial(listener.address, NEAR, retry=ONCE)
    async with (
        network(link="auto").listen("tcp://127.0.0.1:0", FAR, on_link) as listener,
        network(link="tcp").connect(listener.address, NEAR) as link,
    ):
        assert type(link) is StreamLink


async def test_each_spelling_of_an_address_shares_memory() -> None:
    assert await resolved("0:0:0:0:0:0:0:1", 1) == [(socket.AF_INET6, "::1")]
    assert await resolved("127.0.0.1", 1) == [(socket.AF_INET, "127.0.0.1")]


async def test_a_name_of_this_host_shares_memory() -> None:
    async with network().listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        port = listener.address.rpartition(":")[2]
        async with network().connect(f"tcp://localhost:{port}", NEAR) as link:
            assert type(link) is SharedLink


async def test_a_listener_on_every_interface_is_found_by_each_address() -> None:
    async with (
        network().listen("tcp://0.0.0.0:0", FAR, Link.wait_closed) as listener,
        network().connect(listener.address.replace("0.0.0.0", "127.0.0.1"), NEAR) as link,
    ):
        assert type(link) is SharedLink


async def test_another_host_is_dialled_by_tcp() -> None:
    assert not is_of_this_host(socket.AF_INET, "192.0.2.1")
    with pytest.raises(DialFailed, match=r"192\.0\.2\.1 is no address of this host"):
        await network().dial("tcp://192.0.2.1:9", NEAR, retry=ONCE)


def test_an_address_that_can_be_bound_may_be_of_another_host() -> None:
    script = (
        "import socket; from transport.unix import is_of_this_host as its; "
        "print(its(socket.AF_INET, '192.0.2.1'), its(socket.AF_INET, '127.0.0.2'))"
    )
    setting = "ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind"
    ran = subprocess.run(
        ["unshare", "-rn", "sh", "-c", f'{setting} || exit 77; exec "$0" -c "$1"', sys.executable, script],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode == 77 or "unshare" in ran.stderr:
        pytest.skip(f"no network namespace of its own: {ran.stderr}")
    assert ran.stdout.split() == ["False", "True"], ran.stderr


async def test_another_user_is_dialled_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(link="auto").listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        monkeypatch.setattr("transport.unix.user_of", lambda _: os.geteuid() + 1)
        async with network(link="auto").connect(listener.address, NEAR) as link:
            assert type(link) is StreamLink
        with pytest.raises(DialFailed, match="belongs to another user"):
            await network().dial(listener.address, NEAR, retry=ONCE)


STRANGER = """
import asyncio, ctypes, os, sys
from tests.transport.test_shared import NEAR, ONCE, network
from transport import DialFailed

address, server, how = sys.argv[1:]
"loads the codec".encode("idna")

async def main():
    try:
        async with network().connect(address, NEAR, retry=ONCE):
            print("shared")
    except DialFailed as error:
        print(error)
    if how == "user":
        try:
            print(os.listdir(f"/proc/{server}/fd"))
        except PermissionError:
            print("no descriptors")
        async with network(link="auto").connect(address, NEAR) as link:
            print(link.shares)

if how == "user":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
elif ctypes.CDLL(None).unshare(0x40000000):  # a network of its own
    sys.exit(77)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("user", ["belongs to another user", "no descriptors", "False"]),
        ("network", ["no process of this host offers shared memory"]),
    ],
)
async def test_a_process_of_another_user_or_another_network_gets_no_memory(
    how: str, lines: list[str]
) -> None:
    async with network(link="auto").listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STRANGER, listener.address, str(os.getpid()), how, stdout=subprocess.PIPE
        )
        out, _ = await child.communicate()
    if child.returncode == 77:
        pytest.skip("no network namespace of its own")
    found = out.decode().splitlines()
    assert len(found) == len(lines)
    assert all(line in text for line, text in zip(lines, found, strict=True)), found


async def test_a_process_without_free_descriptors_uses_the_stream_until_it_has_some() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = np.arange(1 << 18, dtype=np.float32)
    async with pair() as (near, far):
        far.serve(echo)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            answer = await near.call(ask(values), timeout_s=20.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (answer.tensors[0] == values).all()
        assert shared_bytes(near) == shared_bytes(far) == 0
        await near.call(ask(values), timeout_s=20.0)
        assert shared_bytes(near) == shared_bytes(far) == values.nbytes


@pytest.mark.parametrize("few_at", ["the dialling end", "the listener"])
async def test_a_process_with_few_free_descriptors_makes_its_next_links_over_tcp(
    monkeypatch: pytest.MonkeyPatch, few_at: str
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = np.arange(1 << 18, dtype=np.float32)
    lowest = os.dup(0)
    os.close(lowest)
    looks = []

    def look(sock: socket.socket) -> bool:
        looks.append(sock)
        if len(looks) == 1 and few_at == "the listener":
            return True
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + LEAST_FREE, hard))
            return has_free_descriptors(sock)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(unix, "has_free_descriptors", look)
    async with link_pair(network(link="auto")) as (near, far):
        assert len(looks) == (1 if few_at == "the dialling end" else 2)
        assert type(near) is type(far) is StreamLink
        far.serve(echo)
        assert ((await near.call(ask(values), timeout_s=20.0)).tensors[0] == values).all()


async def test_a_shared_link_needs_free_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with network().listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        monkeypatch.setattr(unix, "has_free_descriptors", lambda sock: False)
        with pytest.raises(DialFailed, match=r"fewer than 16 descriptors are free.*'auto' would try TCP"):
            await network().dial(listener.address, NEAR, retry=ONCE)


def test_the_kernel_names_the_user_of_a_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert user_of(ours) == os.geteuid()


def pid_of(descriptor: int) -> int:
    """The process behind a descriptor, which is closed."""
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    os.close(descriptor)
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pid:")))


DIALS = """
import asyncio, os, sys
from tests.transport.test_shared import NEAR, network

async def main():
    async with network().connect(sys.argv[1], NEAR) as link:
        await link.wait_closed()

asyncio.run(main())
"""


async def test_the_kernel_names_the_process_that_dialled() -> None:
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def on_link(link: Link) -> None:
        found.set_result(pid_of(link.peer_process()))

    async with network().listen("tcp://127.0.0.1:0", FAR, on_link) as listener:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", DIALS, listener.address)
        assert await found == child.pid
        await child.wait()


async def test_a_process_of_another_container_and_this_one_are_no_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (_, far):
        with pytest.raises(OSError, match="near-1 is in this process"):
            far.peer_process()
        monkeypatch.setattr("transport.shared.credentials_of", lambda sock: (0, os.geteuid(), 0))
        with pytest.raises(OSError, match="the process of near-1 is in another container"):
            far.peer_process()


async def test_a_taken_name_leaves_tcp(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(unix_name("127.0.0.1", port))
        async with (
            network(link="auto").listen(f"tcp://127.0.0.1:{port}", FAR, Link.wait_closed) as listener,
            network(link="auto").connect(listener.address, NEAR) as link,
        ):
            assert type(link) is StreamLink
        assert "the Unix socket cannot listen" in caplog.text
        with pytest.raises(OSError, match="the Unix socket beside the listener: Address already in use"):
            async with network().listen(f"tcp://127.0.0.1:{port}", FAR, Link.wait_closed):
                pass


async def test_another_process_under_the_name_leaves_tcp() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(unix_name("127.0.0.1", port))
        squatter.listen()
        async with (
            network(link="auto").listen(f"tcp://127.0.0.1:{port}", FAR, Link.wait_closed) as listener,
            network(link="auto", handshake_s=0.05).connect(listener.address, NEAR, retry=ONCE) as link,
        ):
            assert type(link) is StreamLink


async def test_connections_without_a_first_byte_keep_no_other_out() -> None:
    async with unix_peer(max_unauthenticated=2) as first:
        port = int(first.getpeername().rpartition(b"/")[2])
        idle = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in idle:
            each.connect(first.getpeername())
            await asyncio.sleep(0.01)
        async with network().connect(f"tcp://127.0.0.1:{port}", NEAR, retry=ONCE) as link:
            assert type(link) is SharedLink
        for each in idle:
            each.close()


async def test_the_name_of_a_client_is_not_read() -> None:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with network().listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        port = int(listener.address.rpartition(":")[2])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as peer:
            peer.bind(f"\0a name of {port}")
            peer.connect(unix_name("127.0.0.1", port))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                socket.send_fds(peer, [b"\1"], [theirs.fileno()])
                peer.send(bytes(256))  # no valid record
                assert await ends(peer)
    assert not raised


async def test_a_wrong_token_is_refused_as_over_tcp() -> None:
    async with network().listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        with pytest.raises(HandshakeRejected, match="the tokens differ"):
            await network(b"another token here").dial(listener.address, NEAR)


async def test_large_payloads_go_round_in_one_block_of_each_side() -> None:
    async with pair() as (near, far):
        far.serve(echo)
        for number in range(30):
            values = np.full(MIB // 4, number, np.float32)
            answer = await near.call(ask(values), timeout_s=10)
            np.testing.assert_array_equal(answer.tensors[0], values)
        # The last answer is still held while the next one is written.
        del answer
        assert shared_bytes(near) == MIB
        assert shared_bytes(far) <= 2 * MIB


async def test_the_peer_can_read_a_large_payload_while_this_side_goes_on() -> None:
    async with pair() as (near, far):
        sizes: list[int] = []

        def answer(request: Request) -> None:
            sizes.append(sum(each.nbytes for each in request.message.tensors))
            echo(request)

        far.serve(answer)
        calls = []
        for number in range(4):
            # In one iteration of the loop: the peer gets the large ones at once, behind the small ones.
            calls.append(near.call_nowait(ask(np.full(8, number, np.uint8)), timeout_s=10))
            calls.append(near.call_nowait(ask(np.full(MIB, number, np.uint8)), timeout_s=10))
            assert not near._turn
            assert near.unsent_bytes == 0
            assert readable(far._descriptor)
        for number, found in enumerate(await asyncio.gather(*calls)):
            assert (found.tensors[0] == number // 2).all()
        assert sizes == [8, MIB] * 4


async def test_a_large_payload_on_a_closing_connection_breaks_its_call_as_a_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (near, _):
        # As asyncio's from Python 3.12 on, which a link calls there.
        def writelines(transport: asyncio.Transport, buffers: object) -> None:
            assert not transport.is_closing(), "asyncio calls a method that it has set to None"

        if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            monkeypatch.setattr(type(near._transport), "writelines", writelines)
        near._gathers = True
        near._transport.close()  # as after the peer's end; the link learns of it in the next iteration
        calls = [near.call_nowait(ask(np.zeros(size, np.uint8)), timeout_s=10) for size in (8, MIB, MIB)]
        for found in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(found, LinkBroken)


async def test_a_small_payload_stays_in_the_stream() -> None:
    async with pair() as (near, far):
        far.serve(echo)
        await near.call(ask(np.zeros(100, np.float32)), timeout_s=10)
        assert shared_bytes(near) == shared_bytes(far) == 0


async def test_registered_arrays_get_the_values() -> None:
    async with pair() as (near, far):
        far.serve(echo)
        into = np.zeros(MIB // 4, np.float32)
        answer = await near.call(ask(np.full(MIB // 4, 7, np.float32)), timeout_s=10, into=(into,))
        assert answer.tensors[0] is into
        assert (into == 7).all()


async def test_a_request_is_a_copy_that_its_sender_cannot_change() -> None:
    async with pair() as (near, far):
        arrived: asyncio.Queue[Request] = asyncio.Queue()
        far.serve(arrived.put_nowait)
        asked = near.call_nowait(ask(np.ones(MIB, np.uint8)), timeout_s=10)
        request = await arrived.get()
        near._outbound._blocks[1].memory[:] = bytes(MIB)
        assert request.message.tensors[0].all()
        assert request.message.tensors[0].flags.writeable
        request.reply(Message(type="answer"))
        await asked


async def test_a_handler_that_reads_in_place_sees_what_the_sender_writes() -> None:
    async with pair() as (near, far):
        arrived: asyncio.Queue[Request] = asyncio.Queue()
        far.serve(arrived.put_nowait, in_place=("ask",))
        for memory in (Region.allocate(MIB), np.zeros(MIB, np.uint8)):
            asked = near.call_nowait(ask(memory), timeout_s=10)
            request = await arrived.get()
            assert type(request.message) is Placed
            assert not request.message.tensors[0].flags.writeable
            shown = memory if near._outbound.held_bytes == 0 else near._outbound._blocks[2].memory
            shown[:4] = b"\7\7\7\7" if isinstance(shown, memoryview) else 7
            assert request.message.tensors[0][0] == 7
            request.copy_out()
            shown[:4] = b"\1\1\1\1" if isinstance(shown, memoryview) else 1
            assert type(request.message) is Message
            assert request.message.tensors[0][0] == 7
            request.reply(Message(type="answer"))
            await asked


async def test_a_request_that_is_read_in_place_returns_its_block_with_its_answer() -> None:
    async with pair() as (near, far):
        far.serve(lambda request: request.reply(Message(type="answer")), in_place=("ask",))
        values = np.zeros(MIB, np.uint8)
        for _ in range(20):
            await near.call(ask(values), timeout_s=10)
            assert not near._outbound._taken
        assert shared_bytes(near) == MIB
        assert far.statistics().bytes_moved == 0


async def test_requests_in_a_region_of_the_program_take_no_memory_of_the_link() -> None:
    net = network()
    async with link_pair(net) as (near, far):
        assert isinstance(near, SharedLink)
        far.serve(lambda request: request.reply(Message(type="answer")), in_place=("ask",))
        memory = Region.allocate(4 * MIB)
        for _ in range(20):
            await near.call(ask(memory[MIB : 2 * MIB]), timeout_s=10)
        assert shared_bytes(near) == net._allowance.held_bytes == 0
        assert net.pool.statistics().created == 0


async def test_an_idle_link_gives_its_memory_back() -> None:
    net = network()
    async with link_pair(net) as (near, far):
        assert isinstance(near, SharedLink)
        assert isinstance(far, SharedLink)
        far.serve(echo)
        await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)
        await near.call(Message(type="ask"), timeout_s=10)  # the answer before it is freed now
        for later_s in (0.0, IDLE_S):
            for link in (near, far):
                link._tick(asyncio.get_running_loop().time() + later_s)
            await near.call(Message(type="ask"), timeout_s=10)  # behind the frames of the checks
        assert net._allowance.held_bytes == 0
        assert not near._inbound._regions
        assert not far._inbound._regions
        await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)


@pytest.mark.parametrize("in_place", [(), ("ask",)])
async def test_a_region_that_is_freed_with_a_request_on_its_way_ends_no_link(
    in_place: tuple[str, ...],
) -> None:
    async with pair() as (near, far):
        seen = []

        def handle(request: Request) -> None:
            seen.append(int(request.message.tensors[0][0]))
            request.reply(Message(type="answer"))

        far.serve(handle, in_place=in_place)
        memory = Region.allocate(MIB)
        memory[:] = 1
        near.call_nowait(ask(memory), timeout_s=20).cancel()
        del memory
        gc.collect()
        memory = Region.allocate(MIB)
        memory[:] = 2
        # Its handover drops the first region, and the peer reads both frames at once.
        await near.call(ask(memory), timeout_s=20)
        assert seen == [1, 2]
        assert list(far._inbound._regions) == [2]
        assert not far._inbound._unread


async def test_other_requests_in_a_region_are_copies() -> None:
    async with pair() as (near, far):
        arrived: asyncio.Queue[Request] = asyncio.Queue()
        far.serve(arrived.put_nowait)
        memory = Region.allocate(MIB)
        asked = near.call_nowait(ask(memory), timeout_s=10)
        request = await arrived.get()
        memory[:] = 1
        assert not request.message.tensors[0].any()
        request.reply(Message(type="answer"))
        await asked


async def test_a_message_without_an_answer_is_copied_out_of_a_region() -> None:
    async with pair() as (near, far):
        memory = Region.allocate(MIB)
        await near.send(Message(type="note", tensors=(memory,)))
        memory[:] = 1
        assert not (await far.receive()).tensors[0].any()
        assert shared_bytes(near) == MIB


async def test_requests_wait_in_the_memory_of_their_sender_until_they_are_charged() -> None:
    net = network(shared_bytes=128 * MIB)
    async with link_pair(net) as (near, far):
        arrived: asyncio.Queue[Request] = asyncio.Queue()
        far.serve(arrived.put_nowait)
        limit = net.config.link_budget_bytes
        calls = [near.call_nowait(ask(np.full(8 * MIB, n, np.uint8)), timeout_s=10) for n in range(16)]
        requests = [await arrived.get() for _ in range(limit // (8 * MIB))]
        assert net.pool.statistics().outstanding_bytes == limit
        for number in range(16):
            request = requests.pop(0) if requests else await arrived.get()
            assert request.message.tensors[0][-1] == number
            request.reply(Message(type="answer"))
        await asyncio.gather(*calls)


async def test_the_last_message_of_a_peer_that_ends_arrives() -> None:
    async with pair() as (near, far):
        far.send_nowait(Message(type="note", tensors=(np.ones(MIB, np.uint8),)))
        near.send_nowait(Message(type="note", tensors=(np.full(MIB, 7, np.uint8),)))
        near._flush()
        near._transport.abort()
        near._side.close()  # as a killed process: it has not read the handover of the other side
        assert (await far.receive()).tensors[0].all()


async def test_an_ended_link_writes_nothing_more() -> None:
    async with pair() as (near, far):
        far.serve(echo)
        await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)
        near._inbound.returned.append(1)
        near.abort()
        await near.aclose()
        assert not near._returned


async def test_a_reader_that_keeps_all_answers_gets_the_next_ones_by_the_stream() -> None:
    async with pair(shared_bytes=4 * MIB) as (near, far):
        far.serve(echo)
        kept = []
        for number in range(12):
            answer = await near.call(ask(np.full(MIB, number, np.uint8)), timeout_s=10)
            kept.append(answer.tensors[0])
        assert [int(each[0]) for each in kept] == list(range(12))
        assert shared_bytes(far) == 4 * MIB
        assert not kept[0].flags.writeable
        assert kept[-1].flags.writeable
        kept.clear()
        del answer
        gc.collect()
        answer = await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)
        answer = await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)
        assert not answer.tensors[0].flags.writeable


async def test_messages_without_answers_return_their_blocks() -> None:
    async with pair() as (near, far):
        for number in range(100):
            await near.send(Message(type="note", tensors=(np.full(MIB, number, np.uint8),)))
            note = await far.receive()
            assert note.tensors[0][0] == number
        assert shared_bytes(near) <= 16 * MIB


async def test_a_large_message_in_memory_does_not_pass_one_in_the_stream() -> None:
    async with pair(shared_bytes=MIB, socket_buffer_bytes=16 << 10) as (near, far):
        for number in range(3):  # the first takes the only block, the second the stream
            near.send_nowait(Message(type="note", tensors=(np.full(MIB, number, np.uint8),)))
            if number == 1:
                assert near._conversation.queuing
                near._outbound.freed(struct.pack("<Q", 1))
        assert [(await far.receive()).tensors[0][0] for _ in range(3)] == [0, 1, 2]


async def test_an_ended_link_leaves_no_descriptor_and_no_memory() -> None:
    net = network()
    async with link_pair(net) as (near, far):
        far.serve(echo)
        await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)
    before = await descriptors()
    for _ in range(20):
        async with link_pair(net) as (near, far):
            far.serve(echo)
            await near.call(ask(np.zeros(MIB, np.uint8)), timeout_s=10)
            near.abort()
    assert await descriptors() == before
    assert net._allowance.held_bytes == 0


async def test_a_closed_listener_leaves_no_descriptor() -> None:
    async with unix_peer():  # the loop keeps a descriptor of its own
        pass
    before = await descriptors()
    async with network().listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        port = int(listener.address.rpartition(":")[2])
        idle = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in idle:
            each.connect(unix_name("127.0.0.1", port))
        await asyncio.sleep(0)
    for each in idle:
        each.close()
    assert await descriptors() == before


async def test_dials_at_the_end_of_a_listener_close_no_descriptor_of_others() -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    net = network()
    for steps in range(30):
        async with net.listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
            dials = [asyncio.create_task(net.dial(listener.address, NEAR, retry=ONCE)) for _ in range(4)]
            for _ in range(steps % 10):
                await asyncio.sleep(0)
        for outcome in await asyncio.gather(*dials, return_exceptions=True):
            if isinstance(outcome, Link):
                await outcome.aclose()
            else:
                assert "Bad file descriptor" not in str(outcome)
    assert not faults


@asynccontextmanager
async def unix_peer(**config: float | str) -> AsyncIterator[socket.socket]:
    """Connect to the Unix socket of a listener, and send nothing."""
    async with network(**config).listen("tcp://127.0.0.1:0", FAR, Link.wait_closed) as listener:
        port = int(listener.address.rpartition(":")[2])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as peer:
            peer.connect(unix_name("127.0.0.1", port))
            yield peer


async def ends(peer: socket.socket) -> bool:
    async with asyncio.timeout(5):
        try:
            return await asyncio.get_running_loop().sock_recv(peer, 1) == b""
        except ConnectionResetError:
            return True


async def test_a_connection_without_a_first_byte_ends() -> None:
    async with unix_peer(first_record_s=0.05) as peer:
        assert await ends(peer)


@pytest.mark.parametrize("case", ["no descriptor", "another byte", "a file", "a stream", "two"])
async def test_a_false_first_byte_ends_the_connection(case: str) -> None:
    async with unix_peer():  # the loop keeps a descriptor of its own
        pass
    before = await descriptors()
    async with unix_peer() as peer:
        ours, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_STREAM if case == "a stream" else socket.SOCK_SEQPACKET
        )
        file = os.open(os.devnull, os.O_RDONLY)
        sent = {
            "no descriptor": [],
            "another byte": [theirs.fileno()],
            "a file": [file],
            "a stream": [theirs.fileno()],
            "two": [theirs.fileno(), ours.fileno()],
        }[case]
        first = b"\2" if case == "another byte" else b"\1"
        if sent:
            socket.send_fds(peer, [first], sent)
        else:
            peer.send(first)
        os.close(file)
        with ours, theirs:
            assert await ends(peer)
    assert await descriptors() == before


def placed(kind: int, block: int, start: int = 0, described: bytes = b"\x09\x01\x00\x40\x00\x00") -> bytes:
    meta = encode(("ask" if kind == REQUEST else "note", b"", described))
    return head(kind, 1, meta + PLACE.pack(block, start), 0, PLACED)


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (placed(REQUEST, 1), "not handed over"),
        (placed(MESSAGE, 1), "not handed over"),
        (placed(REQUEST, 0), "not handed over"),
        (placed(REQUEST, 1, 1 << 31), "not handed over"),
        (placed(REQUEST, 1, 1, b"\x04\x01\x01\x00\x00\x00"), "not aligned"),
        (head(REQUEST, 1, encode(("ask", b"", b"")), 4, PLACED) + b"abcd", "nothing is shared"),
        (head(REQUEST, 1, b"ab", 0, PLACED), "nothing is shared"),
        (head(FREED, 0, struct.pack("<Q", 1), 0), "was not lent"),
        (head(FREED, 0, b"abc", 0), "no numbers of blocks"),
        (head(DROPPED, 0, struct.pack("<I", 1), 0), "not handed over"),
    ],
)
async def test_a_false_frame_ends_the_link(wire: bytes, text: str) -> None:
    async with pair() as (near, far):
        far.serve(echo)
        near._transport.write(wire)
        await far.wait_closed()
        with pytest.raises(RemoteProtocolError, match=text):
            far.send_nowait(Message(type="note"))


async def test_a_region_that_no_frame_named_is_dropped_at_both() -> None:
    async with pair(shared_bytes=16 << 10, chunk_bytes=64 << 10) as (near, far):
        long, regions = np.ones(16 * MIB, np.uint8), [Region.allocate(MIB, is_published=True)]

        def answer(request: Request) -> None:
            assert far.lends(regions[0])
            request.reply(Message(type="answer", tensors=(regions[0],)), lent=True)

        def serve(request: Request) -> None:
            if request.message.meta:
                request.charge(long.nbytes, lambda: request.reply(Message(type="answer", tensors=(long,))))
            else:
                request.charge(MIB, lambda: answer(request))

        far.serve(serve)
        await asyncio.gather(
            near.call(Message(type="ask", meta=encode("long")), timeout_s=20.0),
            near.call(Message(type="ask"), timeout_s=20.0),
        )
        assert far._outbound._kept, "the answer did not wait behind a long one"
        assert not far._outbound._lent
        regions.clear()
        gc.collect()
        far._tick(asyncio.get_running_loop().time())
        await near.call(Message(type="ask", meta=encode("long")), timeout_s=20.0)
        assert not near._inbound._regions
        assert not far._outbound._kept


async def test_frames_of_shared_memory_end_a_link_over_tcp() -> None:
    for wire in (placed(REQUEST, 1), head(FREED, 0, b"", 0)):
        async with link_pair(network(link="tcp")) as (near, far):
            assert isinstance(near, StreamLink)
            near._transport.write(wire)
            await far.wait_closed()
            with pytest.raises(RemoteProtocolError):
                far.send_nowait(Message(type="note"))


async def test_a_reader_returns_more_loans_at_once_than_a_frame_has_room_for() -> None:
    async with pair() as (near, far):
        assert isinstance(far, SharedLink)
        memory = far.publish(MIB)
        found = region_of(memory.data)
        assert found is not None
        part = memory[: 32 << 10]
        far.serve(lambda request: request.reply(Message(type="answer", tensors=(part,)), lent=True))
        count = near._config.max_meta_bytes // 8 + 100
        kept = [(await near.call(Message(type="ask"), timeout_s=10)).tensors[0] for _ in range(count)]
        assert found[0].loans == {(0, part.nbytes): count}
        kept.clear()
        await near.call(Message(type="ask"), timeout_s=10)
        assert found[0].loans[0, part.nbytes] <= 2
