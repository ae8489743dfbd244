"""Addresses that nobody can dial, or that are said wrongly, are refused with what to say instead."""

import pytest

from adam_async.errors import ConfigError
from adam_async.run.addresses import check_address, check_addresses, controller_names, own_peer, read_peers

PEERS = "1=tcp://a:7070,2=tcp://b:7070,3=tcp://c:7070"
THREE = {"controller-1": "tcp://a:7070", "controller-2": "tcp://b:7070", "controller-3": "tcp://c:7070"}


@pytest.mark.parametrize(
    "address", ["127.0.0.1:70", "tcp://127.0.0.1", "tcp://host:port", "tcp://0.0.0.0:7", "tcp://[::]:7", ""]
)
def test_an_address_that_nobody_can_dial_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--bind"):
        check_address(address, "--bind")


def test_every_interface_may_be_listened_on_if_another_address_is_advertised() -> None:
    everywhere = "tcp://0.0.0.0:7070"
    assert check_address(everywhere, "--bind", everywhere=True) == everywhere
    with pytest.raises(ConfigError, match="or add --advertise tcp://HOST:PORT with what they dial"):
        check_address(everywhere, "--bind")


def test_one_address_or_several_are_taken_without_their_spaces() -> None:
    assert check_addresses("tcp://a:1", "--controller") == "tcp://a:1"
    assert check_addresses(" tcp://a:1, tcp://b:1 ,tcp://[::1]:2", "--controller") == (
        "tcp://a:1,tcp://b:1,tcp://[::1]:2"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tcp://a:1,", "--join: address '' is not of the form tcp://host:port"),
        ("tcp://a:1;tcp://b:1", "--join: address 'tcp://a:1;tcp://b:1' is not of the form tcp://host:port"),
        ("tcp://a:1 tcp://b:1", "--join: address 'tcp://a:1 tcp://b:1' is not of the form"),
        ("tcp://a:1,tcp://0.0.0.0:1", "stands for every interface"),
        ("tcp://a:1,tcp://b:1,tcp://a:1", "--join: tcp://a:1 is named twice; name each once"),
    ],
)
def test_one_wrong_address_among_several_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        check_addresses(text, "--join")
    assert said in str(failure.value)


def test_peers_are_nodes_and_addresses() -> None:
    assert read_peers(PEERS) == THREE
    assert read_peers(" 1 = tcp://a:7070 ") == {"controller-1": "tcp://a:7070"}
    assert list(read_peers("9=tcp://a:1,01=tcp://a:2,5=tcp://a:3")) == [
        "controller-9",
        "controller-1",
        "controller-5",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tcp://a:7070", "'tcp://a:7070' is not of the form ID=tcp://HOST:PORT, as in 1=tcp://10.0.0.1:7070"),
        ("one=tcp://a:7070", "'one=tcp://a:7070' is not of the form"),
        (f"{PEERS},", "'' is not of the form ID=tcp://HOST:PORT"),
        ("1=a:7070", "--peers: address 'a:7070' is not of the form tcp://host:port"),
        ("1=tcp://0.0.0.0:7070", "stands for every interface"),
        ("1=tcp://a:0", "tcp://a:0 has no port that others can dial; choose one above 0"),
        ("1=tcp://a:1,1=tcp://b:1,2=tcp://c:1", "there are two controllers 1; give each an id of its own"),
        ("1=tcp://a:1,01=tcp://b:1,2=tcp://c:1", "there are two controllers 1; give each an id of its own"),
        ("1=tcp://a:1,2=tcp://a:1,3=tcp://c:1", "tcp://a:1 is named twice; each controller has an address"),
        ("1=tcp://a:1,2=tcp://b:1", "--peers: controllers must be 1, 3 or 5, of which none, one or two may"),
        (",".join(f"{n}=tcp://a:{n}" for n in range(1, 8)), "controllers must be 1, 3 or 5"),
        (
            "1=tcp://10.0.0.1:1,2=tcp://127.0.0.1:1,3=tcp://10.0.0.3:1",
            "tcp://127.0.0.1:1 can be reached from this machine alone, and other controllers are on other",
        ),
    ],
)
def test_peers_that_could_not_meet_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        read_peers(text)
    assert str(failure.value).startswith("--peers: ")
    assert said in str(failure.value)


def test_a_controller_is_one_of_its_peers_by_number_or_name() -> None:
    assert own_peer(THREE, "2") == own_peer(THREE, "02") == own_peer(THREE, "controller-2") == "controller-2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "--peers names the controllers 1, 2, 3: give --id of this one"),
        ("4", "--id 4 is none of the controllers in --peers, which are 1, 2, 3"),
        ("a", "--id a is none of the controllers in --peers, which are 1, 2, 3"),
    ],
)
def test_a_controller_that_is_none_of_its_peers_is_told_which_there_are(given: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own_peer(THREE, given)


def test_controllers_of_a_whole_cluster_are_counted_from_one_if_there_are_several() -> None:
    assert controller_names(1) == ["controller"]
    assert controller_names(3) == list(THREE)
