"""Invalid handshakes and frames break the rule of their name, and no other."""

import pytest

from tests.simulation.scenarios.hostile import BREACHES, DEAF, FIRST, HANDSHAKES
from transport import BufferPool, HandshakeRejected, Identity, LinkConfig, RemoteProtocolError, RoleTable
from transport.decoder import FrameDecoder
from transport.handshake import RECORD_BYTES, ServerHandshake

OF_LINKS = {"breach-type", "breach-twice"}
"""Valid frames that the role or the state of the link forbids."""

RULES = RoleTable({"note": [("client", "server")]})


def feed(data: bytes) -> int:
    """Give bytes to a decoder; return the number of complete frames."""
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
        feed(BREACHES[name].data)

    assert caught.value.rule == BREACHES[name].rule


@pytest.mark.parametrize("name", sorted(OF_LINKS))
def test_frames_that_only_a_link_refuses_are_complete(name: str) -> None:
    assert feed(BREACHES[name].data) == (2 if name == "breach-twice" else 1)


def test_requests_of_a_deaf_peer_are_valid_and_half_a_message_is_none() -> None:
    assert feed(DEAF) == 16
    assert feed(FIRST) == 0


@pytest.mark.parametrize("name", HANDSHAKES)
def test_an_invalid_handshake_is_refused_with_its_own_code(name: str) -> None:
    handshake = HANDSHAKES[name]
    server = ServerHandshake(
        Identity(role="server", node="server", incarnation=1), token=bytes(16), entropy=bytes, rules=RULES
    )
    if handshake.code == "late":
        assert len(handshake.data) < RECORD_BYTES
        return

    with pytest.raises((HandshakeRejected, RemoteProtocolError)) as caught:
        for start in range(0, len(handshake.data), RECORD_BYTES):
            server.receive(handshake.data[start : start + RECORD_BYTES])

    refused = caught.value.code if isinstance(caught.value, HandshakeRejected) else ""
    assert refused == handshake.code or name == "knock-refusal"  # a refusal has no answer
