"""Two sides prove the token to each other, or the refusal has the remedy."""

import hashlib
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import HandshakeRejected, ProtocolError
from transport.handshake import RECORD_BYTES, ClientHandshake, ServerHandshake, reject_record
from transport.keys import RoleKeys, Secret, derive
from transport.messages import ANY_ROLE, Identity, RoleTable

RULES = RoleTable({"push": {("worker", "ps")}})
WORKER = Identity(role="worker", node="worker-1", incarnation=2**64 - 1, run="run-7")
SERVER = Identity(role="ps", node="ps-é", incarnation=0)
TOKEN = b"sixteen bytes at least"


def entropy(seed: bytes) -> Callable[[int], bytes]:
    return lambda count: hashlib.shake_128(seed).digest(count)


def client(
    token: Secret | None = TOKEN, me: Identity = WORKER, peer_role: str | None = None
) -> ClientHandshake:
    return ClientHandshake(me, token=token, entropy=entropy(b"c"), rules=RULES, peer_role=peer_role)


def server(token: Secret | None = TOKEN) -> ServerHandshake:
    return ServerHandshake(SERVER, token=token, entropy=entropy(b"s"), rules=RULES)


def shake(one: ClientHandshake, other: ServerHandshake) -> None:
    challenge = other.receive(one.hello())
    proof = one.receive(challenge)
    accept = other.receive(proof)
    assert {len(record) for record in (challenge, proof, accept)} == {RECORD_BYTES}
    assert one.receive(accept) == b""


@pytest.mark.parametrize("token", [TOKEN, None])
def test_both_sides_learn_the_identity_of_the_other(token: bytes | None) -> None:
    one, other = client(token), server(token)
    shake(one, other)
    assert one.peer == SERVER
    assert other.peer == WORKER


def test_a_wrong_token_is_refused_by_the_server_before_it_proves_anything() -> None:
    one, other = client(b"another token 123"), server()
    proof = one.receive(other.receive(one.hello()))
    with pytest.raises(HandshakeRejected, match="same token"):
        other.receive(proof)
    assert other.peer is None


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    one, other = client(), server(b"another token 123")
    one.receive(other.receive(one.hello()))
    impostor = ServerHandshake(SERVER, token=b"another token 123", entropy=entropy(b"s"), rules=RULES)
    fellow = client(b"another token 123")
    accept = impostor.receive(fellow.receive(impostor.receive(fellow.hello())))
    with pytest.raises(HandshakeRejected, match="token"):
        one.receive(accept)


@pytest.mark.parametrize(("mine", "theirs"), [(TOKEN, None), (None, TOKEN)])
def test_a_missing_token_is_named(mine: bytes | None, theirs: bytes | None) -> None:
    one = client(mine)
    with pytest.raises(HandshakeRejected) as refusal:
        server(theirs).receive(one.hello())
    with pytest.raises(HandshakeRejected) as received:
        one.receive(reject_record(refusal.value))
    lacking, having = (refusal, received) if theirs is None else (received, refusal)
    assert "the other side has a token and this side has none: give it the same" in str(lacking.value)
    assert "this side has a token and the other side has none: give both the same" in str(having.value)


def test_a_proof_of_another_conversation_is_refused() -> None:
    one, other = client(), server()
    proof = one.receive(other.receive(one.hello()))
    later = ServerHandshake(SERVER, token=TOKEN, entropy=entropy(b"later"), rules=RULES)
    later.receive(one.hello())
    with pytest.raises(HandshakeRejected):
        later.receive(proof)


def test_roles_without_a_row_are_refused() -> None:
    other = client(me=Identity(role="data", node="d", incarnation=1))
    with pytest.raises(HandshakeRejected, match="exchange no messages"):
        server().receive(other.hello())


def test_the_dialling_side_refuses_an_unexpected_role() -> None:
    one = client(peer_role="controller")
    with pytest.raises(HandshakeRejected, match="check the address"):
        one.receive(server().receive(one.hello()))


def test_the_refusal_of_another_version_has_the_remedy() -> None:
    hello = bytearray(client().hello())
    hello[8:10] = (9).to_bytes(2, "little")
    with pytest.raises(HandshakeRejected, match="same release"):
        server().receive(bytes(hello))


def test_a_refusal_reaches_the_other_side_with_its_reason() -> None:
    one = client()
    one.hello()
    with pytest.raises(HandshakeRejected, match=r"the peer refused: tokens differ") as caught:
        one.receive(reject_record(HandshakeRejected("token", "tokens differ")))
    assert caught.value.code == "token"


ROLES = ("controller", "data", "ps", "worker")


def keys_of(role: str) -> RoleKeys:
    return derive(TOKEN, role, ROLES, RULES)


@pytest.mark.parametrize("mine", [TOKEN, keys_of("worker")])
@pytest.mark.parametrize("theirs", [TOKEN, keys_of("ps")])
def test_keys_of_a_role_prove_the_same_as_the_token_they_come_from(mine: Secret, theirs: Secret) -> None:
    one, other = client(mine), server(theirs)
    shake(one, other)
    assert (one.peer, other.peer) == (SERVER, WORKER)


def test_with_the_keys_of_one_role_no_other_can_be_claimed() -> None:
    one, other = client(keys_of("ps"), me=WORKER), server()
    with pytest.raises(
        HandshakeRejected, match="those of role ps, and this side is a worker: give it the keys"
    ):
        one.receive(other.receive(one.hello()))

    class Liar(ClientHandshake):
        """Proves with its key for the server's role, regardless of the role that it claims."""

        def _proof(self, label: bytes, client: bytes, server: bytes) -> bytes:
            self.identity = SERVER
            return super()._proof(label, client, server)

    rules = RoleTable({"push": {("worker", "ps"), ("ps", "ps")}})
    keys = derive(TOKEN, "ps", ROLES, rules)
    liar, other = Liar(WORKER, token=keys, entropy=entropy(b"l"), rules=rules), server()
    proof = liar.receive(other.receive(liar.hello()))
    with pytest.raises(HandshakeRejected, match="the tokens differ"):
        other.receive(proof)
    assert other.peer is None


def test_a_pair_without_a_key_is_named() -> None:
    wider = RoleTable({"push": {("worker", "ps")}, "ask": {("worker", "data")}})
    keys = keys_of("worker")  # derived without a row for data servers
    one = ClientHandshake(WORKER, token=keys, entropy=entropy(b"c"), rules=wider)
    data = Identity(role="data", node="d", incarnation=1)
    other = ServerHandshake(data, token=TOKEN, entropy=entropy(b"s"), rules=wider)
    with pytest.raises(HandshakeRejected, match="have none for role data: derive them again") as raised:
        one.receive(other.receive(one.hello()))
    assert "a worker, has no key for role data" in raised.value.peer_text


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES), st.booleans())
def test_only_named_errors_leave_a_handshake(record: bytes, plausible: bool) -> None:
    if plausible:
        record = client().hello()[:12] + record[12:]
    with suppress(ProtocolError, HandshakeRejected):
        server().receive(record)


def test_a_table_keeps_nothing_of_an_unknown_role():
    rules = RoleTable({"push": {("worker", "ps")}, "hello": {(ANY_ROLE, "ps")}})
    for number in range(1000):
        assert rules.may_talk(f"unknown-{number}", "ps")
        assert not rules.may_talk(f"unknown-{number}", "worker")
    assert len(rules._sendable) <= 9
    assert rules.sendable("worker", "ps") == {"push", "hello"}
