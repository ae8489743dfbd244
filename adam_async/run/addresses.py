"""Pure: addresses in options: of one role, of several, and of a group's controllers.

--bind tcp://10.0.0.1:7070                                                  one
--controller tcp://10.0.0.1:7070,tcp://10.0.0.2:7070,tcp://10.0.0.3:7070    all controllers of a cluster
--peers 1=tcp://10.0.0.1:7070,2=tcp://10.0.0.2:7070,3=tcp://10.0.0.3:7070   the same, each with its id
"""

import re
from collections.abc import Sequence

from adam_async.errors import ConfigError
from transport.sockets import is_loopback, parse_tcp_address

EVERYWHERE = ("0.0.0.0", "::", "*")
"""Hosts that stand for every interface."""

CONTROLLERS = (1, 3, 5)
CONTROLLERS_WORDS = (
    "1, 3 or 5, of which none, one or two may be lost (an even number survives no more losses)"
)
"""Valid numbers of controllers, as numbers and in words for errors."""

PEER = re.compile(r"\s*(\d{1,9})\s*=(.*)")


def check_address(address: str, option: str, *, everywhere: bool = False) -> str:
    """Return the address if other roles can dial it.

    Args:
        everywhere: Whether the host may mean every interface, because another address is advertised.

    Raises:
        ConfigError: The address is not ``tcp://host:port``, or its host means every interface.
    """
    try:
        host, _ = parse_tcp_address(address)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if host in EVERYWHERE and not everywhere:
        advertised = ", or add --advertise tcp://HOST:PORT with what they dial" if option == "--bind" else ""
        raise ConfigError(
            f"{option}: {address} stands for every interface and is no address that others can dial; "
            f"name the address of one interface{advertised}"
        )
    return address


def check_addresses(text: str, option: str) -> str:
    """Return addresses with commas and without spaces between them. See `named_once`."""
    return ",".join(named_once(text.split(","), option))


def named_once(texts: Sequence[str], option: str) -> tuple[str, ...]:
    """Return addresses without spaces around them, if other roles can dial all of them.

    Raises:
        ConfigError: An address is invalid (see `check_address`), or is named twice.
    """
    addresses = tuple(check_address(text.strip(), option) for text in texts)
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{option}: {address} is named twice; name each once")
    return addresses


def check_controllers(option: str, number: int) -> None:
    """Check a number of controllers. Raises ConfigError: no group has this number."""
    if number not in CONTROLLERS:
        raise ConfigError(f"{option} must be {CONTROLLERS_WORDS}, not {number}")


def read_peers(text: str) -> dict[str, str]:
    """Read ``--peers``: a group's controllers, as node ids such as ``controller-1`` with addresses.

    Raises:
        ConfigError: A controller has no id or an address that others cannot dial, an id or address is
            repeated, or the number is not 1, 3 or 5.
    """
    peers: dict[str, str] = {}
    for part in text.split(","):
        found = PEER.fullmatch(part)
        if found is None:
            raise ConfigError(
                f"--peers: {part.strip()!r} is not of the form ID=tcp://HOST:PORT, as in 1=tcp://10.0.0.1:7070"
            )
        number, address = found[1], check_address(found[2].strip(), "--peers")
        if not parse_tcp_address(address)[1]:
            raise ConfigError(f"--peers: {address} has no port that others can dial; choose one above 0")
        if address in peers.values():
            raise ConfigError(f"--peers: {address} is named twice; each controller has an address of its own")
        node = peer_name(number)
        if node in peers:
            raise ConfigError(f"--peers: there are two controllers {int(number)}; give each an id of its own")
        peers[node] = address
    check_controllers("--peers: controllers", len(peers))
    here = [address for address in peers.values() if is_loopback(parse_tcp_address(address)[0])]
    if here and len(here) < len(peers):
        raise ConfigError(
            f"--peers: {here[0]} can be reached from this machine alone, and other controllers are on other "
            "machines; name the address of an interface that they reach"
        )
    return peers


def own_peer(peers: dict[str, str], given: str | None) -> str:
    """Return the node id of this controller, from ``--id``.

    Raises:
        ConfigError: ``--id`` is missing, or names none of the controllers.
    """
    known = ", ".join(node.removeprefix("controller-") for node in peers)
    if given is None:
        raise ConfigError(f"--peers names the controllers {known}: give --id of this one")
    node = peer_name(given) if given.isdecimal() else given
    if node not in peers:
        raise ConfigError(f"--id {given} is none of the controllers in --peers, which are {known}")
    return node


def peer_name(number: str) -> str:
    """Return the node id of one of several controllers."""
    return f"controller-{int(number)}"


def controller_names(count: int) -> list[str]:
    """Return the node ids of the controllers of a cluster that starts as a whole."""
    return ["controller"] if count == 1 else [f"controller-{number}" for number in range(1, count + 1)]


def addresses_in(data: str) -> tuple[str, ...]:
    """Return the data hosts' addresses in `Config.data`; none if it names a data set.

    Raises:
        ConfigError: An address is invalid, or is named twice.
    """
    return named_once(data.split(","), "data") if data.startswith("tcp://") else ()
