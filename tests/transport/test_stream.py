"""Behaviour of sockets only: hostile peers, joined writes, chunks that let other frames pass."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from msgspec.msgpack import decode, encode

from tests.transport.testing import FAR, NEAR, link_pair, open_rules
from transport import (
    BindRefused,
    CallTimeout,
    DialFailed,
    HandshakeRejected,
    Identity,
    Link,
    LinkBroken,
    LinkConfig,
    Listener,
    Message,
    RemoteError,
    RemoteProtocolError,
    RetrySchedule,
    RoleTable,
    TcpNetwork,
)
from transport.entrance import Entrance
from transport.frames import CHECKED, ERROR, head, pack_meta
from transport.greeter import Greeter
from transport.handshake import ClientHandshake
from transport.keys import Secret, derive
from transport.sockets import checks_payloads, is_loopback, parse_tcp_address
from transport.stream import StreamLink

TOKEN = b"a token of tests"
ONCE = RetrySchedule(attempts=1)


def network(
    token: Secret | None = TOKEN, rules: RoleTable | None = None, **config: float | str
) -> TcpNetwork:
    return TcpNetwork(
        token=token,
        entropy=os.urandom,
        rules=rules or open_rules(),
        config=LinkConfig(**config),  # type: ignore[arg-type]
    )


@asynccontextmanager
async def open_listener(net: TcpNetwork) -> AsyncIterator[tuple[Listener, "asyncio.Queue[Link]"]]:
    links: asyncio.Queue[Link] = asyncio.Queue()

    async def on_link(link: Link) -> None:
        links.put_nowait(link)
        await link.wait_closed()

    async with net.listen("tcp://127.0.0.1:0", FAR, on_link) as listener:
        yield listener, links


@asynccontextmanager
async def raw_peer(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*parse_tcp_address(address))
    try:
        yield reader, writer
    finally:
        writer.close()


async def authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Secret | None = TOKEN
) -> None:
    client = ClientHandshake(NEAR, token=token, entropy=os.urandom, rules=open_rules())
    writer.write(client.hello())
    writer.write(client.receive(await reader.readexactly(256)))
    client.receive(await reader.readexactly(256))


async def test_the_text_of_an_error_may_be_any_bytes() -> None:
    async with open_listener(network()) as (listener, links):
        async with raw_peer(listener.address) as (reader, writer):
            await authenticate(reader, writer)
            link = await links.get()
            asked = link.call_nowait(Message(type="ask"), timeout_s=10.0)
            meta = pack_meta(Message(type="odd", meta=b"no \xff"), b"", 1 << 14)
            writer.write(head(ERROR, 1, meta, 0))
            with pytest.raises(RemoteError, match="no \N{REPLACEMENT CHARACTER}"):
                await asked
            assert not link.closed


async def test_a_malformed_frame_closes_only_its_own_link(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        open_listener(network()) as (listener, links),
        network().connect(listener.address, NEAR) as good,
    ):
        good_far = await links.get()
        async with raw_peer(listener.address) as (reader, writer):
            await authenticate(reader, writer)
            bad = await links.get()
            with caplog.at_level(logging.WARNING):
                writer.write(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
                await bad.wait_closed()
            with pytest.raises(RemoteProtocolError, match="magic"):
                await bad.receive()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert "magic" in caplog.text
        assert "Traceback" not in caplog.text
        good_far.serve(lambda request: request.reply(Message(type="answer")))
        await good.call(Message(type="ask"), timeout_s=50)


async def test_a_message_without_a_row_closes_the_link() -> None:
    near_rules, far_rules = open_rules("ask", "secret"), open_rules("ask")
    async with (
        open_listener(network(rules=far_rules)) as (listener, links),
        network(rules=near_rules).connect(listener.address, NEAR) as link,
    ):
        await link.send(Message(type="secret"))
        far = await links.get()
        with pytest.raises(RemoteProtocolError, match="may not send 'secret'"):
            await far.receive()
        with pytest.raises(LinkBroken):
            await link.receive()


async def test_a_client_of_another_protocol_is_disconnected() -> None:
    async with open_listener(network()) as (listener, links), raw_peer(listener.address) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n" * 20)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert links.empty()


async def test_a_silent_client_is_disconnected() -> None:
    async with (
        open_listener(network(handshake_s=0.05)) as (listener, _),
        raw_peer(listener.address) as (reader, _),
    ):
        answer = await reader.read()
        assert b"late" in answer


async def test_a_listener_too_busy_for_a_handshake_is_dialled_again() -> None:
    connects: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connects.append(writer), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(DialFailed, match="late: no handshake within"):
            await network(handshake_s=0.01).dial(f"tcp://127.0.0.1:{port}", NEAR, timeout_s=0.2)
        for writer in connects:
            writer.close()
    assert len(connects) > 1


async def test_the_oldest_of_too_many_silent_connections_makes_room() -> None:
    net = network(max_unauthenticated=2, first_record_s=30, handshake_s=30)
    async with open_listener(net) as (listener, _), raw_peer(listener.address) as (reader, _):
        async with raw_peer(listener.address), raw_peer(listener.address):
            assert b"crowded" in await reader.read()
            async with network().connect(listener.address, NEAR, retry=ONCE):
                pass


async def test_a_connection_given_up_before_it_was_made_is_closed() -> None:
    outcomes: list[object] = []
    handshake = ClientHandshake(NEAR, token=TOKEN, entropy=os.urandom, rules=open_rules())
    greeter = network()._greeter(handshake, outcomes.append)
    greeter.abandon()
    async with open_listener(network()) as (listener, _):
        host, port = parse_tcp_address(listener.address)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: greeter, host, port)
        assert transport.is_closing()
        for _ in range(2):
            greeter.buffer_updated(256)
            assert len(greeter.get_buffer(-1)) == 256
    assert len(outcomes) == 1


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_accepted_as_the_listener_ends_is_closed(turns: int) -> None:
    """Whether the listener has accepted it, has its transport, or its first record by then."""
    async with open_listener(network()) as (listener, _):
        with socket.create_connection(parse_tcp_address(listener.address), timeout=10):
            pass  # the first connection finds the loop idle, in its selector
        client = socket.create_connection(parse_tcp_address(listener.address), timeout=10)
        for _ in range(turns):
            await asyncio.sleep(0)
    with client, suppress(ConnectionResetError):
        assert client.recv(1) == b""


async def test_a_client_with_a_complete_first_record_has_longer_than_a_silent_one() -> None:
    net = network(first_record_s=0.02, handshake_s=0.04)
    client = ClientHandshake(NEAR, token=TOKEN, entropy=os.urandom, rules=open_rules())
    async with open_listener(net) as (listener, _):
        async with raw_peer(listener.address) as (silent, _), raw_peer(listener.address) as (reader, writer):
            writer.write(client.hello())
            assert b"no first record within 0.02 s" in await silent.read()
            await reader.readexactly(256)
            assert b"no handshake within 0.04 s" in await reader.read()


def test_a_dial_that_was_crowded_out_is_repeated_within_two_seconds() -> None:
    waits = RetrySchedule().waits()
    assert sum(next(waits) for _ in range(5)) < 2.0


async def test_a_wrong_token_is_rejected_with_advice() -> None:
    async with open_listener(network()) as (listener, _):
        for token in (b"b token of tests", None):
            with pytest.raises(HandshakeRejected, match="token"):
                await network(token).dial(listener.address, NEAR)


async def test_keys_of_another_role_neither_listen_nor_dial() -> None:
    rules = RoleTable({"push": {("near", "far")}})
    keys = derive(TOKEN, "near", ("near", "far"), rules)
    own, whole = network(keys, rules), network(rules=rules)
    with pytest.raises(HandshakeRejected, match="keys here are those of role near, and this side is a far"):
        async with own.listen("tcp://127.0.0.1:0", FAR, lambda link: link.wait_closed()):
            pass
    async with open_listener(whole) as (listener, _):
        with pytest.raises(HandshakeRejected, match="give it the keys of role far, or the token"):
            await own.dial(listener.address, FAR)
        async with own.connect(listener.address, NEAR) as link:
            assert link.peer == FAR


async def test_roles_that_exchange_no_messages_are_rejected() -> None:
    rules = RoleTable({"push": {("worker", "far")}})
    async with open_listener(network(rules=rules)) as (listener, _):
        with pytest.raises(HandshakeRejected, match="exchange no messages"):
            await network().dial(listener.address, NEAR)


async def test_listening_in_public_needs_a_token() -> None:
    with pytest.raises(BindRefused, match="token"):
        async with network(None).listen("tcp://0.0.0.0:0", FAR, lambda link: link.wait_closed()):
            pass


async def test_a_name_that_means_this_machine_alone_needs_no_token_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with network(None).listen("tcp://LOCALHOST:0", FAR, lambda link: link.wait_closed()) as listener:
        assert is_loopback(parse_tcp_address(listener.address)[0])
    (text,) = caplog.messages
    assert "tcp://LOCALHOST:0 is " in text
    assert "which no other machine can reach" in text


@pytest.mark.parametrize(
    ("address", "hosts", "said"),
    [
        ("tcp://10.0.0.2:0", ["10.0.0.2"], "listen on tcp://10.0.0.2:0 without a token"),
        ("tcp://host:0", ["10.0.0.2"], "listen on tcp://host:0, which is 10.0.0.2, without a token"),
        ("tcp://host:0", ["127.0.1.1", "10.0.0.2"], "which is 10.0.0.2, without a token"),
        ("tcp://localhost:0", ["10.0.0.2"], "which is 10.0.0.2, without a token"),
        ("tcp://host:0", ["::1", "fe80::1"], "which is fe80::1, without a token"),
    ],
)
def test_the_bound_addresses_decide_whether_a_token_is_needed(
    address: str, hosts: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BindRefused, match=said):
        network(None)._check_bound(address, hosts)
    network()._check_bound(address, hosts)
    for loopback in (["127.0.0.1"], ["127.0.1.1", "::1"]):
        network(None)._check_bound("tcp://127.0.0.1:0", loopback)
    assert caplog.messages == []


NO_ADDRESSES = {
    "no port": (
        "tcp://host",
        "tcp://host:",
        "tcp://h:-1",
        "tcp://h:65536",
        "tcp://h:99999",
        "tcp://h:\uff11",
    ),
    "no scheme": ("host:1", "local://x", "TCP://a:1", "", "tcp://"),
    "no host": ("tcp://:1", "tcp://[]:1", "tcp://.:1"),
    "an empty label": ("tcp://a..b:1", "tcp://.a:1", "tcp://a..:1"),
    "a long label": (f"tcp://{'a' * 64}:1", "tcp://" + "\xfc" * 60 + ":1"),
    "a long name": (f"tcp://{'.'.join(['a' * 60] * 5)}:1", f"tcp://{'a' * (1 << 20)}:1"),
    "no name": ("tcp://a\0b:1", "tcp://a b:1", "tcp://a:1\n", "tcp://-a:1", "tcp://a/b:1", "tcp://u:p@h:1"),
    "no Unicode name": ("tcp://\ud800:1", "tcp://\u200d.com:1", "tcp://a\uff0cb:1", "tcp://h\u2028:1"),
    "no IPv6": ("tcp://[::1:7", "tcp://::1:7", "tcp://[1.2.3.4]:1", "tcp://[::1%]:1", "tcp://[::1%a%b]:1"),
}


@pytest.mark.parametrize("lacks", NO_ADDRESSES)
def test_an_address_that_is_none_is_refused(lacks: str) -> None:
    for address in NO_ADDRESSES[lacks]:
        with pytest.raises(ValueError, match=r"address .{,160} is not of the form tcp://host:port"):
            parse_tcp_address(address)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.1:7", "10.0.0.1"),
        ("tcp://*:7", "*"),
        ("tcp://[fe80::1%eth0]:7", "fe80::1%eth0"),
        ("tcp://ps-0.a_b.svc.cluster.local.:7", "ps-0.a_b.svc.cluster.local."),
        ("tcp://b\xfccher.example:7", "b\xfccher.example"),
        (f"tcp://{'a' * 63}:7", "a" * 63),
    ],
)
def test_names_and_addresses_of_hosts_are_read(address: str, host: str) -> None:
    assert parse_tcp_address(address) == (host, 7)


@pytest.mark.parametrize("address", ["tcp://a..b:1", "local://x", f"tcp://{'a' * 300}:1"])
async def test_an_address_of_another_form_cannot_be_reached(address: str) -> None:
    with pytest.raises(DialFailed, match=r"after 1 attempt.*is not of the form"):
        await network().dial(address, NEAR, retry=RetrySchedule(attempts=1))


async def test_a_host_that_the_resolver_refuses_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("a..b", "a" * 300, "a\0b", "\ud800"):
        monkeypatch.setattr("transport.network.parse_tcp_address", lambda _, host=host: (host, 1))
        with pytest.raises(DialFailed, match="after 1 attempt"):
            await network().dial("tcp://host:1", NEAR, retry=RetrySchedule(attempts=1))


def test_loopback_addresses_are_recognised() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4


async def test_a_held_message_stops_after_few_chunks_and_a_small_one_passes_it() -> None:
    small = {"socket_buffer_bytes": 4 << 10, "chunk_bytes": 4 << 10, "gather_bytes": 4 << 10}
    large = np.arange(1 << 16, dtype=np.float32)  # small buffers take seconds for a larger one
    async with link_pair(network(**small)) as (near, far):
        near.send_nowait(Message(type="note", tensors=[large]))
        near.hold_large(True)
        for number in range(100):  # each arrives, so the bytes that the kernel had have arrived, too
            await near.send(Message(type="note", meta=encode(number)))
            assert (await far.receive()).meta == encode(number)
        arrived = far._bytes_moved()  # type: ignore[attr-defined]
        assert arrived < 128 << 10
        near.hold_large(False)
        assert np.array_equal((await far.receive()).tensors[0], large)


async def test_a_link_that_is_closed_sends_a_held_message_first() -> None:
    large = np.arange(1 << 18, dtype=np.float32)
    async with link_pair(network(chunk_bytes=4 << 10, gather_bytes=4 << 10)) as (near, far):
        near.hold_large(True)
        near.send_nowait(Message(type="note", tensors=[large]))
        closing = asyncio.create_task(near.aclose())
        assert np.array_equal((await far.receive()).tensors[0], large)
        await closing


async def test_a_small_call_passes_a_large_one_on_the_way() -> None:
    finished: list[str] = []
    async with link_pair(network()) as (near, far):
        far.serve(lambda request: request.reply(Message(type="answer")))
        array = np.zeros(48 << 20, np.uint8)
        large = near.call_nowait(Message(type="ask", tensors=(array,)), timeout_s=50)
        large.add_done_callback(lambda _: finished.append("large"))
        small = near.call_nowait(Message(type="ask"), timeout_s=50)
        small.add_done_callback(lambda _: finished.append("small"))
        await asyncio.gather(large, small)
    assert finished == ["small", "large"]


class CountingTransport:
    """Counts the writes of a link, and passes them on."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self.writes: list[int] = []
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(len(data))
        self.written.append(bytes(data))
        self.inner.write(data)

    def writelines(self, buffers: Iterable[bytes]) -> None:
        for buffer in buffers:
            self.write(buffer)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


async def test_small_frames_of_one_iteration_leave_in_one_write() -> None:
    async with link_pair(network()) as (near, far):
        assert isinstance(near, StreamLink)
        assert isinstance(far, StreamLink)
        counting = near._transport = CountingTransport(near._transport)  # type: ignore[assignment]
        for number in range(20):
            near.send_nowait(Message(type="note", meta=encode(number)))
        for number in range(20):
            assert decode((await far.receive()).meta) == number
        assert len(counting.writes) == 1  # type: ignore[attr-defined]

        answers = far._transport = CountingTransport(far._transport)  # type: ignore[assignment]
        far.serve(lambda request: request.reply(Message(type="answer")))
        calls = [near.call_nowait(Message(type="ask"), timeout_s=50) for _ in range(20)]
        await asyncio.gather(*calls)
        # The first call of an idle link does not wait for the others of its iteration.
        assert len(counting.writes) == 3  # type: ignore[attr-defined]
        assert len(answers.writes) <= 2  # type: ignore[attr-defined]


async def test_frames_waiting_for_the_end_of_the_iteration_end_with_the_connection() -> None:
    loop, errors = asyncio.get_running_loop(), list[dict[str, object]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with link_pair(network()) as (near, _):
        assert isinstance(near, StreamLink)
        near._transport.abort()
        near.send_nowait(Message(type="note"))
        assert near._turn, "it leaves at once: nothing is tested"
        await near.wait_closed()
        await asyncio.sleep(0)
    assert errors == []


async def test_a_deadline_wakes_a_link_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are finer than the clock of a loop, which rounds them."""
    woken: list[float] = []
    on_timer = StreamLink._on_timer

    def counted(link: StreamLink) -> None:
        woken.append(link._timer_at)
        on_timer(link)

    monkeypatch.setattr(StreamLink, "_on_timer", counted)
    async with link_pair(network()) as (near, _):
        for number in range(10):
            with pytest.raises(CallTimeout):
                await near.call(Message(type="ask"), timeout_s=0.0023 + number * 0.00011)
    assert len(woken) == 10


async def test_a_silent_peer_ends_the_link() -> None:
    net = network(ping_every_s=0.02, dead_after_s=0.06)
    async with open_listener(net) as (listener, links), raw_peer(listener.address) as (reader, writer):
        await authenticate(reader, writer)
        link = await links.get()
        with pytest.raises(LinkBroken, match="the peer sent nothing"):
            await link.receive()


async def test_pings_bring_an_idle_link_one_sign_of_life_after_the_other() -> None:
    async with link_pair(network(ping_every_s=0.02)) as (near, far):
        for link in (near, far):
            assert isinstance(link, StreamLink)
            for _ in range(3):
                heard = link._conversation.last_heard
                while link._conversation.last_heard == heard:  # noqa: ASYNC110 - bytes have no event
                    await asyncio.sleep(0)
        assert not near.closed
        assert not far.closed


async def test_a_peer_that_never_reads_is_given_up() -> None:
    net = network(ping_every_s=0.02, dead_after_s=10, stalled_after_s=0.1)
    async with open_listener(net) as (listener, links), raw_peer(listener.address) as (reader, writer):
        await authenticate(reader, writer)
        link = await links.get()
        writer.transport.pause_reading()
        fired: list[int] = []
        array = np.zeros(4 << 20, np.uint8)
        sent: list[int] = []

        async def pour() -> None:
            while True:
                await link.send(Message(type="note", tensors=(array,)), lambda: fired.append(1))
                sent.append(1)

        with pytest.raises(LinkBroken, match="took none of"):
            await pour()
        await link.aclose()
        assert len(fired) == len(sent) > 0


@pytest.mark.parametrize(("checksum", "flags"), [("auto", 0), ("on", CHECKED), ("off", 0)])
async def test_payloads_have_a_checksum_as_configured_and_on_one_host_none(checksum: str, flags: int) -> None:
    async with link_pair(network(checksum=checksum)) as (near, far):
        assert isinstance(near, StreamLink)
        counting = near._transport = CountingTransport(near._transport)  # type: ignore[assignment]
        near._descriptor = -1  # large frames, too, pass the transport
        for size in (7, 100_000, 1 << 20):
            await near.send(Message(type="note", tensors=(np.arange(size).astype(np.uint8),)))
            (got,) = (await far.receive()).tensors
            assert np.array_equal(got, np.arange(size).astype(np.uint8))
        heads = [data for data in counting.written if data[:4] == b"TLNK"]  # type: ignore[attr-defined]
        assert len(heads) == 4
        assert {head[6] & CHECKED for head in heads} == {flags}


@pytest.mark.parametrize(
    ("ours", "theirs", "checked"),
    [
        ("10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("fe80::1", "fe80::2", True),
        ("::1", "::1", False),
        (None, None, True),
    ],
)
def test_payloads_between_hosts_have_a_checksum(ours: str | None, theirs: str | None, checked: bool) -> None:
    names = {"sockname": ours and (ours, 1), "peername": theirs and (theirs, 2)}

    class Between(asyncio.Transport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return names[name]

    assert checks_payloads(LinkConfig(), Between()) is checked
    assert checks_payloads(LinkConfig(checksum="on"), Between())
    assert not checks_payloads(LinkConfig(checksum="off"), Between())


async def test_the_kernel_probes_the_machine_of_a_peer() -> None:
    net = network(probe_after_s=7, probe_every_s=2, unacknowledged_s=0.5)
    async with link_pair(net) as links:
        for link in links:
            assert isinstance(link, StreamLink)
            sock = link._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            kept = [
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert kept == [7, 2, 3]
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500


async def test_the_listener_knows_its_links() -> None:
    async with open_listener(network()) as (listener, links):
        assert listener.links == ()
        async with network().connect(listener.address, NEAR) as near:
            far = await links.get()
            assert listener.links == (far,)
            assert (near.peer, far.peer) == (FAR, NEAR)
            assert far.identity == FAR == Identity(role="far", node="far-1", incarnation=1)
            assert "open" in repr(near)
        await far.wait_closed()


async def test_a_refused_handshake_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    rules = RoleTable({"ask": {("near", "far")}})
    other = Identity(role="other", node="other-1", incarnation=1)

    async with open_listener(network(rules=rules)) as (listener, _):
        for token in (b"another token of tests", b"a third token of tests", None):
            with pytest.raises(HandshakeRejected, match="token"):
                await network(token).dial(listener.address, NEAR)
        with pytest.raises(HandshakeRejected, match="exchange no messages"):
            await network().dial(listener.address, other)

    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [warning.partition(":")[0] for warning in warnings] == ["no link with 127.0.0.1"] * 2
    assert "token: the tokens differ: start both sides with the same token" in warnings[0]
    assert "role: far and other exchange no messages" in warnings[1]


async def test_a_log_line_counts_the_refusals_since_the_last_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrance = Entrance(4)
    times = iter([0.0, 1.0, 9.0, 10.0])

    async with open_listener(network()) as (listener, _):
        monkeypatch.setattr(Entrance, "refused", lambda _, *refusal: refusals.append(refusal))
        refusals: list[tuple[Greeter, HandshakeRejected]] = []
        with pytest.raises(HandshakeRejected):
            await network(b"another token of tests").dial(listener.address, NEAR)
        monkeypatch.undo()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: next(times), raising=False)
    for _ in range(4):
        entrance.refused(*refusals[0])
    monkeypatch.undo()

    first, second = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert second == f"{first} (2 more since the last such line)"
