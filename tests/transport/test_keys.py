"""Each pair of roles has its own key, and a role has only the keys of its own pairs."""

import itertools

import pytest

from transport.errors import HandshakeRejected
from transport.keys import KEY_BYTES, RoleKeys, derive, hkdf, pair_key
from transport.messages import RoleTable

TOKEN = bytes(range(32))
ROLES = ("controller", "ps", "worker", "ghost")
RULES = RoleTable({"push": {("worker", "ps")}, "agree": {("controller", "controller"), ("ps", "controller")}})


@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            (
                "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
                "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"
            ),
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_the_vectors_of_rfc_5869_come_out(secret: bytes, salt: bytes, info: bytes, expected: str) -> None:
    assert hkdf(secret, salt=salt, info=info, length=len(expected) // 2).hex() == expected


def test_more_than_the_function_can_give_is_refused() -> None:
    assert len(hkdf(TOKEN, salt=b"", info=b"", length=8160)) == 8160
    with pytest.raises(ValueError, match="at most 8160 bytes, not 8161"):
        hkdf(TOKEN, salt=b"", info=b"", length=8161)


def test_each_pair_has_a_key_of_its_own_on_both_sides() -> None:
    pairs = list(itertools.combinations_with_replacement(ROLES, 2))
    keys = {pair: pair_key(TOKEN, *pair) for pair in pairs}
    assert len(set(keys.values())) == len(pairs)
    assert all(pair_key(TOKEN, other, role) == key for (role, other), key in keys.items())
    assert TOKEN not in keys.values()
    assert pair_key(bytes(32), "ps", "worker") != keys["ps", "worker"]


def test_a_role_is_given_the_keys_of_its_own_pairs_alone() -> None:
    keys = derive(TOKEN, "ps", ROLES, RULES)
    assert set(keys.keys) == {"controller", "worker"}
    assert pair_key(keys, "ps", "worker") == pair_key(TOKEN, "worker", "ps")
    assert "001" not in repr(keys)
    assert keys.keys["worker"].hex() not in repr(keys)
    with pytest.raises(HandshakeRejected, match="role ps, and this side is a controller"):
        pair_key(keys, "controller", "ps")


def test_a_role_without_rules_gets_no_keys() -> None:
    with pytest.raises(ValueError, match="role 'ghost' exchanges messages with no other"):
        derive(TOKEN, "ghost", ROLES, RULES)


def test_keys_and_tokens_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=f"has 31 bytes, not {KEY_BYTES}"):
        RoleKeys("ps", {"worker": bytes(31)})
    with pytest.raises(ValueError, match="token of 5 bytes can be guessed"):
        derive(b"short", "ps", ROLES, RULES)
