"""Pure: addresses in options: of one role, of several, and of the controllers of a group.

--bind tcp://10.0.0.1:7070                                                  one
--controller tcp://10.0.0.1:7070,tcp://10.0.0.2:7070,tcp://10.0.0.3:7070    all controllers of a cluster
--peers 1=tcp://10.0.0.1:7070,2=tcp://10.0.0.2:7070,3=tcp://10.0.0.3:7070   the same, each with its id
"""

import re
from collections.abc import Sequence

from adam_async.errors import ConfigError
from adam_async.run.config import CONTROLLERS, CONTROLLERS_WORDS, Config
from transport.sockets import is_loopback, parse_tcp_address

EVERYWHERE = ("0.0.0.0", "::", "*")
"""Hosts that stand for every interface."""

ITS_OWN = {"cache": "auto", "spill": "", "damaged": "error"}
"""Options that belong to the start of a data server, with their defaults."""

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
    """Return addresses with commas and without spaces between them, if other roles can dial all of them.

    Raises:
        ConfigError: An address is invalid (see `check_address`), or is named twice.
    """
    addresses = [check_address(address.strip(), option) for address in text.split(",")]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{option}: {address} is named twice; name each once")
    return ",".join(addresses)


def read_peers(text: str) -> dict[str, str]:
    """Read ``--peers``: the controllers of a group, as node ids such as ``controller-1`` and addresses.

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
    if len(peers) not in CONTROLLERS:
        raise ConfigError(f"--peers: controllers must be {CONTROLLERS_WORDS}, not {len(peers)}")
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
    """Return the node ids of the controllers of a cluster that is started as a whole."""
    return ["controller"] if count == 1 else [f"controller-{number}" for number in range(1, count + 1)]


def addresses_in(data: str) -> tuple[str, ...]:
    """Return the addresses of data hosts in `Config.data`; none if it names a data set.

    Raises:
        ConfigError: An address is invalid, or is named twice.
    """
    return _checked(data.split(",")) if data.startswith("tcp://") else ()


def hosts_of(config: Config, data: Sequence[str], *, starts_own: bool) -> tuple[str, ...]:
    """Return the addresses of the data hosts that a cluster uses; none if it starts its own data servers.

    Args:
        config: The run.
        data: Addresses that the caller names; empty: the addresses in `config.data`.
        starts_own: Whether the caller brings a data set.

    Raises:
        ConfigError: An address is invalid or named twice; or addresses are given together with a data set, a
            number of data servers, or options that belong to the start of a data server.
    """
    if isinstance(data, str):
        raise ConfigError(f"data is a list of addresses, not {data!r}")
    if starts_own and not data:
        return ()
    hosts = _checked(data) if data else addresses_in(config.data)
    if hosts and starts_own:
        raise ConfigError(f"there is a dataset, and data names {', '.join(hosts)}: give one of them")
    if hosts and config.data_servers > 1:
        raise ConfigError(
            f"data_servers={config.data_servers} has no effect with data servers at {', '.join(hosts)}: "
            "leave it out, and give the address of each data server"
        )
    idle = [name for name, usual in ITS_OWN.items() if hosts and getattr(config, name) != usual]
    if idle:
        raise ConfigError(
            f"{' and '.join(idle)}: no force with data servers at {', '.join(hosts)}: give it where these "
            "are started"
        )
    return hosts


def _checked(addresses: Sequence[str]) -> tuple[str, ...]:
    found = tuple(check_address(address.strip(), "data") for address in addresses)
    for address in found:
        if found.count(address) > 1:
            raise ConfigError(f"data: {address} is named twice; name each data server once")
    return found
