"""What breaks a rule of the wire breaks the one that it is named for, and no other."""

import pytest

from adam_async.simulation.scenarios.hostile import BREACHES, DEAF, FIRST, HANDSHAKES
from transport import BufferPool, HandshakeRejected, Identity, LinkConfig, RemoteProtocolError, RoleTable
from transport.frames import FrameDecoder
from transport.handshake import RECORD_BYTES, ServerHandshake

OF_LINKS = {"breach-type", "breach-twice"}
"""Frames that are in order, and may not be said here or now."""

RULES = RoleTable({"note": [("client", "server")]})


def feed(data: bytes) -> int:
    """Give bytes to a decoder; returns how many frames they complete."""
    decoder = FrameDecoder(LinkConfig(), BufferPool())
    frames = 0
    while data:
        room = decoder.get_buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        frames += len(decoder.updated(count))
    return frames


@pytest.mark.parametrize("name", [name for name in BREACHES if name not in OF_LINKS])
def test_a_breach_breaks_its_rule(name: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        feed(BREACHES[name].says)

    assert caught.value.rule == BREACHES[name].rule


@pytest.mark.parametrize("name", sorted(OF_LINKS))
def test_what_only_a_link_refuses_are_whole_frames(name: str) -> None:
    assert feed(BREACHES[name].says) == (2 if name == "breach-twice" else 1)


def test_what_the_deaf_ask_is_in_order_and_half_a_message_is_none() -> None:
    assert feed(DEAF) == 16
    assert feed(FIRST) == 0


@pytest.mark.parametrize("name", HANDSHAKES)
def test_a_knock_is_refused_for_what_it_is_named_for(name: str) -> None:
    connect = HANDSHAKES[name]
    server = ServerHandshake(
        Identity(role="server", node="server", incarnation=1), token=bytes(16), entropy=bytes, rules=RULES
    )
    if connect.code == "late":
        assert len(connect.says) < RECORD_BYTES
        return

    with pytest.raises((HandshakeRejected, RemoteProtocolError)) as caught:
        for start in range(0, len(connect.says), RECORD_BYTES):
            server.receive(connect.says[start : start + RECORD_BYTES])

    refused = caught.value.code if isinstance(caught.value, HandshakeRejected) else ""
    assert refused == connect.code or name == "knock-refusal"  # to a refusal nobody answers
