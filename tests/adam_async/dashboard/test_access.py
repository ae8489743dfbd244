"""The token gives a session, a session proves its operations, and other hosts are refused."""

import itertools

import pytest

from adam_async.dashboard.access import MOST_SESSIONS, SESSION_S, Access, is_loopback
from adam_async.errors import ConfigError

TOKEN = "a token of visitors"


def access(host: str = "127.0.0.1") -> Access:
    numbers = itertools.count()
    return Access(TOKEN, host=host, entropy=lambda size: next(numbers).to_bytes(size, "big"))


def test_only_the_token_gives_a_session() -> None:
    mine = access()
    assert [mine.begin(wrong, 0.0) for wrong in ("", TOKEN[:-1], f"{TOKEN} ", "\ud800")] == [None] * 4
    cookie = mine.begin(TOKEN, 0.0)
    assert cookie is not None
    session = mine.session(cookie, 1.0)
    assert session is not None
    assert session.proof != cookie
    assert mine.proves(session, session.proof)
    assert not mine.proves(session, "")
    assert not mine.proves(session, cookie)
    assert mine.session("", 1.0) is None
    assert mine.session("f" * 48, 1.0) is None


def test_a_session_ends_after_its_time_without_requests() -> None:
    mine = access()
    cookie = mine.begin(TOKEN, 0.0) or ""
    assert mine.session(cookie, SESSION_S) is not None
    assert mine.session(cookie, 2 * SESSION_S) is not None
    assert mine.session(cookie, 3 * SESSION_S + 1) is None
    assert mine.session(cookie, 3 * SESSION_S + 1) is None


def test_a_further_session_ends_the_one_that_was_used_longest_ago() -> None:
    mine = access()
    first, second, *_ = [mine.begin(TOKEN, 0.0) or "" for _ in range(MOST_SESSIONS)]
    assert mine.session(first, 1.0) is not None
    mine.begin(TOKEN, 2.0)
    assert mine.session(second, 3.0) is None
    assert mine.session(first, 3.0) is not None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost:9", "[::1]:9", "10.0.0.7:1", "Box.lan"]
)
def test_addresses_localhost_and_the_host_of_the_option_are_named(host: str) -> None:
    assert access("box.lan").names_host(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:80", "127.0.0.1.evil.example:1", "localhost.evil", ":80"]
)
def test_other_names_are_refused_because_a_name_server_may_point_them_here(host: str) -> None:
    assert not access().names_host(host)


def test_a_short_token_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="15 characters; 16 or more are needed"):
        Access("x" * 15, host="localhost", entropy=bytes)


def test_loopback_hosts() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.3.0.9", "::1")))
    assert not any(map(is_loopback, ("", "*", "0.0.0.0", "::", "10.0.0.1", "example.org")))
