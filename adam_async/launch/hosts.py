"""Pure: the hosts of a cluster from a file, and the host of each role.

user = "adam"                                   # these keys are defaults of all hosts
command = ["/opt/adam/bin/adam-async"]

[environment]
ADAM_DATA_DIR = "/data"

[[hosts]]
name = "10.0.0.1"

[[hosts]]
name = "10.0.0.2"
roles = ["ps", "worker"]
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec

from adam_async.errors import ConfigError
from adam_async.launch.settings import FileArgument, LauncherSettings
from adam_async.model.toml_text import read_toml
from adam_async.run.addresses import check_address, controller_names
from adam_async.run.config import Config
from transport.sockets import format_tcp_address

ROLES = ("controller", "data", "ps", "worker")
"""Roles that a host may have; the driver is the launching process."""

PORTS = range(20000, 30000)
"""Range of several controllers' random ports: they need each other's addresses before they listen."""
HEAVY = ("ps", "worker")
"""Roles that need cores and memory."""

MOST_HOSTS = 1000
"""Maximum number of hosts in a file."""


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host. An empty `port`, `user` or `command` means the value in `Hosts`."""

    name: str
    """Name or address that the launching machine dials, as in ``ssh NAME``."""
    address: str = ""
    """Address on which the host's roles listen, and which other roles dial; empty: `name`."""
    copies: str = ""
    """Address on which the host's parameter servers listen for each other; empty: `address`."""
    control: str = ""
    """Address on which the host's controllers listen; empty: `address`."""
    roles: tuple[str, ...] = ROLES
    """Roles that the host may have."""
    port: int = 0
    """Port of the host's SSH server. Without a value here and in `Hosts`, the port in the user's SSH
    configuration, or 22."""
    user: str = ""
    """Login name. Without a value here and in `Hosts`, the name in the user's SSH configuration, or the
    user's own name."""
    command: tuple[str, ...] = ()
    """Words that run `adam-async` on the host."""

    def listens_on(self, port: int, role: str = "") -> str:
        """Return the address of a role on the host."""
        own = self.control if role == "controller" else ""
        return format_tcp_address(own or self.address or self.name, port)

    @property
    def copies_bind(self) -> str:
        """Address on which the host's parameter servers listen for each other; empty if `copies` is empty."""
        return format_tcp_address(self.copies, 0) if self.copies else ""


class Hosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hosts of a cluster."""

    hosts: tuple[Host, ...]
    port: int = 0
    user: str = ""
    command: tuple[str, ...] = ("adam-async",)
    known_hosts: str = ""
    """File with the keys of the hosts; empty: the user's ``~/.ssh/known_hosts``."""
    key: str = ""
    """File with the private key of the user; empty: the keys of the user's agent and ``~/.ssh``."""
    environment: Mapping[str, str] = {}
    """Variables of the roles, in addition to those of their hosts. Other users of a host can read these."""

    def command_of(self, host: Host) -> str:
        """Return the beginning of a command line for the host's shell."""
        return shlex.join(host.command or self.command)


def read_hosts(text: str, source: str) -> Hosts:
    """Read a file of hosts.

    Raises:
        ConfigError: The text is not TOML, or has an unknown key, a wrong value, or no host for a role.
    """
    try:
        hosts = msgspec.convert(read_toml(text, source), Hosts)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source}: {error}; a host is a table [[hosts]] with name, and perhaps address, copies, "
            "control, roles, port, user and command"
        ) from None
    if not 1 <= len(hosts.hosts) <= MOST_HOSTS:
        raise ConfigError(f"{source} has {len(hosts.hosts)} hosts; give 1 to {MOST_HOSTS} tables [[hosts]]")
    names = [host.name for host in hosts.hosts]
    for host in hosts.hosts:
        if not host.name or host.name.startswith("-") or names.count(host.name) > 1:
            raise ConfigError(f"{source}: host {host.name!r} is empty, an option, or named twice")
        for role in host.roles:
            if role not in ROLES:
                raise ConfigError(f"{source}: host {host.name} has role {role!r}; known: {', '.join(ROLES)}")
        check_address(host.listens_on(0), f"{source}: address of host {host.name}")
        check_address(host.listens_on(0, "controller"), f"{source}: control of host {host.name}")
        if host.copies:
            check_address(host.copies_bind, f"{source}: copies of host {host.name}")
    for port in (hosts.port, *(host.port for host in hosts.hosts)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{source}: port {port} is none; ports are 1 to 65535")
    for name, value in hosts.environment.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in value:
            raise ConfigError(f"{source}: environment: {name!r} names no variable or its value has a null")
        if name == "ADAM_TOKEN":
            raise ConfigError(
                f"{source}: environment: other users of a host could read ADAM_TOKEN; set it here only, "
                "and each role gets its keys over SSH"
            )
    for role in ROLES:
        if not any(role in host.roles for host in hosts.hosts):
            raise ConfigError(f"{source}: no host may have role {role}; add it to the roles of one")
    return hosts


class SshSettings(LauncherSettings, frozen=True, kw_only=True):
    """Train with the roles on hosts, over SSH, and the driver in this process; needs the extra `ssh`.

    Args:
        hosts: TOML file with the hosts (docs/how-to/launch-ssh.md).
    """

    hosts: Annotated[Hosts, FileArgument("the file of hosts", read_hosts)]


def random_port(entropy: Callable[[int], bytes]) -> int:
    """Return a port for a controller, from random bytes."""
    return PORTS[int.from_bytes(entropy(4), "little") % len(PORTS)]


class Placement:
    """The host of each role. Roles of one kind are spread, and roles of a silent host move to other hosts.

    Args:
        hosts: All hosts, in the order of preference.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)
        self._silent: set[str] = set()
        self._of: dict[str, tuple[str, Host]] = {}

    def place(self, role: str, node: str, *, moves: bool = True) -> Host:
        """Return the previous host of a role unless that host is silent; else the host with the fewest roles.

        Args:
            role: Kind of the role.
            node: Node id.
            moves: Whether the role may leave a silent host; one of several controllers may not, because its
                address is fixed.
        """
        if node in self._of:
            host = self._of[node][1]
            if host.name not in self._silent or not moves:
                return host
        permitted = [host for host in self._hosts if role in host.roles]
        # If all permitted hosts are silent, one of them may be back.
        live = [host for host in permitted if host.name not in self._silent]
        host = min(live or permitted, key=self._load(role))
        self._of[node] = (role, host)
        return host

    def controller_addresses(self, nodes: Sequence[str], entropy: Callable[[int], bytes]) -> list[str]:
        """Return an address for each controller: port 0 for the only one, random ports for several.

        Args:
            nodes: Node ids of the controllers.
            entropy: Random bytes.
        """
        several = len(nodes) > 1
        addresses: list[str] = []
        for node in nodes:
            host = self.place("controller", node)
            address = host.listens_on(random_port(entropy) if several else 0, "controller")
            while address in addresses:
                address = host.listens_on(random_port(entropy), "controller")
            addresses.append(address)
        return addresses

    def workers_on(self, host: Host) -> int:
        """Return the number of workers that are placed on a host."""
        return sum(role == "worker" and one.name == host.name for role, one in self._of.values())

    def note(self, host: Host, *, answers: bool) -> None:
        """Note whether a host answers."""
        if answers:
            self._silent.discard(host.name)
        else:
            self._silent.add(host.name)

    def _load(self, role: str) -> Callable[[Host], tuple[int, int]]:
        """Return a function that counts the roles of a host: first those of this kind, then all.

        Controllers and data servers need few resources, and many runs have one of each. For controllers and
        data servers the number of all roles counts as 0, so the first role is on the first host.
        """
        placed = list(self._of.values())

        def load(host: Host) -> tuple[int, int]:
            here = [kind for kind, one in placed if one.name == host.name]
            return here.count(role), len(here) if role in HEAVY else 0

        return load


def roles_by_host(config: Config, hosts: Sequence[Host], *, data_servers: int) -> Mapping[str, list[str]]:
    """By host name, return the roles of each host's processes, as placed at the start of a launch."""
    placement = Placement(hosts)
    found: dict[str, list[str]] = {host.name: [] for host in hosts}
    nodes = [("controller", node) for node in controller_names(config.controllers)]
    # The order of `ProcessCluster`, on which the places depend.
    for role, count in (("data", data_servers), ("ps", config.servers), ("worker", config.workers)):
        nodes += [(role, f"{role}-{number}") for number in range(count)]
    for role, node in nodes:
        found[placement.place(role, node).name].append(role)
    return found
