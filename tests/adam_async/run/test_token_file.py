"""A token file holds a root token or the keys of one role, and its reader can tell which."""

import pytest

from adam_async.errors import ConfigError
from adam_async.messages import role_table
from adam_async.messages.body import ROLES
from adam_async.run.token_file import check_token_is_for, derived_text, keys_text, read_token_text, root_token
from transport import RoleKeys
from transport.keys import pair_key

TOKEN = "a token that nobody guesses"
WORKER = derived_text(TOKEN, "worker")


@pytest.mark.parametrize("role", ROLES)
def test_the_keys_of_a_role_come_back_from_their_line(role: str) -> None:
    line = derived_text(TOKEN, role)
    keys = read_token_text(line)
    assert isinstance(keys, RoleKeys)
    assert keys_text(keys) == line
    assert "\n" not in line
    assert TOKEN not in line
    talks = {other for other in ROLES if role_table().may_talk(role, other)}
    assert set(keys.keys) == talks
    for other in talks:
        assert pair_key(keys, role, other) == pair_key(TOKEN.encode(), role, other)


def test_a_worker_has_no_key_of_controllers_among_themselves() -> None:
    keys = read_token_text(WORKER)
    assert isinstance(keys, RoleKeys)
    others = {pair_key(TOKEN.encode(), "controller", role) for role in ROLES if role != "worker"}
    assert not others & set(keys.keys.values())


def test_any_other_text_is_a_root_token() -> None:
    assert read_token_text(TOKEN) == root_token(TOKEN) == TOKEN.encode()
    check_token_is_for(TOKEN, "ps", origin="x")


@pytest.mark.parametrize(
    ("line", "claim"),
    [
        (WORKER.replace("/1 ", "/2 "), "keys in format '2', and this release reads '1'"),
        (WORKER.replace("/1 worker", "/1 wroker"), "keys of role 'wroker'; roles are controller, ps, data"),
        ("adam-async-keys/1", "keys of role ''"),
        ("adam-async-keys/1 worker", "exchanges messages with no other role"),
        (WORKER.replace(" ps=", " px="), "a key for role 'px', unknown or twice"),
        (WORKER.replace(" ps=", " data="), "a key for role 'data', unknown or twice"),
        (WORKER[:-9], "x: the key for role"),
        (WORKER[:-8], "bytes, not 32"),
        (WORKER + "!", "is not base64"),
        (WORKER + "é", "is not base64"),
    ],
)
def test_a_damaged_line_is_named_for_its_fault(line: str, claim: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_token_text(line, origin="x")
    assert claim in str(raised.value)
    assert str(raised.value).startswith("x")


def test_keys_of_another_role_are_refused_with_the_command_that_writes_the_right_ones() -> None:
    check_token_is_for(WORKER, "worker", origin="--token-file w")
    with pytest.raises(ConfigError) as raised:
        check_token_is_for(WORKER, "ps", origin="--token-file w")
    assert str(raised.value) == (
        "--token-file w holds the keys of role worker, and this is a ps: give it those that "
        "`adam-async token derive --role ps` writes, or the token"
    )


def test_no_keys_follow_from_keys_and_none_for_unknown_roles() -> None:
    with pytest.raises(ConfigError, match="keys of role worker alone, from which no others follow"):
        derived_text(WORKER, "ps")
    with pytest.raises(ConfigError, match="there is no role 'server'; roles are controller, ps"):
        derived_text(TOKEN, "server")
    with pytest.raises(ConfigError, match="token of 5 bytes can be guessed"):
        derived_text("short", "ps")
