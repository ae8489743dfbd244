"""Pure: the roles of a process in a batch job, from the variables that its engine sets.

Sources, in this order: `ADAM_ROLE`, which names one role; else the rank of the process, in the variables of
torchrun, Open MPI, PMI or Slurm; else the name of a Kubernetes pod, such as ``adam-ps-2``.

Ranks get the roles of the cluster in turn: controllers, servers, data servers, workers. With fewer ranks than
roles, a rank has several roles. Extra ranks have additional workers. Controllers are in the first ranks, so
their addresses follow from these ranks' hosts, as far as the variables name them.

The roles of a pod listen on `POD_IP`, because the name of a pod may not resolve before the pod runs.
"""

import ipaddress
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adam_async.errors import ConfigError
from adam_async.launch.hosts import PORTS
from adam_async.run.addresses import addresses_in, check_addresses, controller_names
from adam_async.run.config import Config
from transport.sockets import format_tcp_address

ROLES = ("controller", "ps", "data", "worker")
"""Roles that a process may have, in the order in which ranks get them."""

RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables with rank and number of ranks: torchrun, Open MPI, PMI, Slurm. Inner engines come first."""

NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
"""Slurm variables with the nodes of a step, whose ranks the processes are, and of its whole job."""

SHARES = {"RANK": "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_LOCAL_SIZE"}
"""Variables with the number of ranks that share a machine, by the variable with the rank."""

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables with a job's number of restarts."""

PORT = 7070
"""Port of the controller if no variable distinguishes the job from others on its host."""

MOST_RANKS = 100_000
"""Maximum number of ranks."""

_POD = re.compile(r"(?:.*-)?(controller|ps|data|worker)-([a-z0-9-]+)")
_RANGE = r"\d{1,9}(?:-\d{1,9})?"
_HOST = rf"(?:[\w.-]|\[{_RANGE}(?:,{_RANGE})*\])+"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of a cluster's roles."""

    controllers: int
    servers: int
    data_servers: int
    workers: int

    @classmethod
    def of(cls, config: Config) -> "Layout":
        return cls(
            controllers=config.controllers,
            servers=config.servers,
            data_servers=0 if addresses_in(config.data) else config.data_servers,
            workers=config.workers,
        )

    def nodes(self) -> list[tuple[str, str]]:
        """Return role and node id of each role, in the order in which ranks get them."""
        counts = (("ps", self.servers), ("data", self.data_servers), ("worker", self.workers))
        return [
            *(("controller", node) for node in controller_names(self.controllers)),
            *((role, f"{role}-{number}") for role, count in counts for number in range(count)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The roles of one process.

    Attributes:
        roles: Role and node id of each.
        controllers: Addresses of all controllers, by node id.
        pod: Address to listen on in a pod, with port `PORT`; empty elsewhere.
        rank: Rank of the process; -1 if its roles do not follow from a rank.
    """

    roles: tuple[tuple[str, str], ...]
    controllers: tuple[str, ...]
    pod: str = ""
    rank: int = -1

    def bind_of(self, node: str) -> str:
        """Return the address of a controller."""
        number = node.removeprefix("controller").removeprefix("-")
        return self.controllers[int(number) - 1 if number else 0]


def assigned_roles(environment: Mapping[str, str], layout: Layout) -> Assignment:
    """Return the roles of this process.

    Raises:
        ConfigError: No variable names a role or rank; a variable has a wrong value; or no variable has the
            addresses of the controllers.
    """
    rank, ranks, engine = -1, 0, ""
    roles: tuple[tuple[str, str], ...]
    if named := environment.get("ADAM_ROLE", ""):
        engine = "ADAM_ROLE"
        roles = (_named(named, environment.get("ADAM_NODE", ""), layout),)
    elif engine := rank_variable(environment):
        ranks = number_in(environment, dict(RANKS)[engine], 1, MOST_RANKS)
        rank = number_in(environment, engine, 0, ranks - 1)
        roles = roles_of_rank(rank, ranks, layout)
    elif pod := environment.get("POD_NAME", ""):
        engine = "POD_NAME"
        roles = (_role_of_pod(pod, layout),)
    else:
        known = ", ".join(("ADAM_ROLE", *(variable for variable, _ in RANKS), "POD_NAME"))
        raise ConfigError(f"no variable names the role of this process: set one of {known}")
    controllers = _controllers(environment, engine, ranks, layout)
    if len(controllers) != layout.controllers:
        raise ConfigError(
            f"controllers={layout.controllers}, and there are addresses of {len(controllers)}: "
            f"{','.join(controllers)}; set ADAM_CONTROLLER to the addresses of all, with commas between them"
        )
    return Assignment(roles=roles, controllers=controllers, pod=_pod_address(environment), rank=rank)


def rank_variable(environment: Mapping[str, str]) -> str:
    """Return the variable with this process's rank; empty without one."""
    return next((variable for variable, _ in RANKS if variable in environment), "")


def cores_of_rank(environment: Mapping[str, str], cores: int) -> int:
    """Return the number of cores for this process's roles: its share of its machine's cores.

    Raises:
        ConfigError: A variable has no whole number.
    """
    if (variable := SHARES.get(rank_variable(environment), "")) in environment:
        return max(1, cores // number_in(environment, variable, 1, MOST_RANKS))
    if environment.get("SLURM_CPUS_PER_TASK"):
        return min(cores, number_in(environment, "SLURM_CPUS_PER_TASK", 1, 10**6))
    return cores


def restarts_in(environment: Mapping[str, str]) -> int:
    """Return the number of restarts of a job; 0 without a variable. Raises ConfigError: no number in it."""
    counted = (number_in(environment, name, 0, 10**9) for name in RESTARTS if environment.get(name))
    return max(counted, default=0)


def _named(role: str, node: str, layout: Layout) -> tuple[str, str]:
    if role not in ROLES:
        raise ConfigError(f"ADAM_ROLE={role[:40]} is no role; roles are {', '.join(ROLES)}")
    names = controller_names(layout.controllers)
    if role == "controller":
        if not node and len(names) > 1:
            raise ConfigError(f"ADAM_ROLE=controller needs ADAM_NODE, one of {', '.join(names)}")
        if node and node not in names:
            raise ConfigError(f"ADAM_NODE={node[:40]} is no controller of this layout: {', '.join(names)}")
        return role, node or names[0]
    return role, node


def roles_of_rank(rank: int, ranks: int, layout: Layout) -> tuple[tuple[str, str], ...]:
    """Return role and node id of each role in a rank."""
    nodes = layout.nodes()
    more = range(layout.workers, layout.workers + max(0, ranks - len(nodes)))
    nodes += [("worker", f"worker-{number}") for number in more]
    return tuple(nodes[rank::ranks])


def _role_of_pod(pod: str, layout: Layout) -> tuple[str, str]:
    found = _POD.fullmatch(pod)
    if found is None:
        raise ConfigError(
            f"POD_NAME={pod[:80]} names no role: it ends in ROLE-NUMBER, such as adam-ps-2, or set ADAM_ROLE"
        )
    role, ordinal = found.groups()
    if role != "controller":
        return role, f"{role}-{ordinal}"
    names = controller_names(layout.controllers)
    if not ordinal.isdecimal() or int(ordinal) >= len(names):
        raise ConfigError(
            f"POD_NAME={pod[:80]} is controller {ordinal[:20]}, counted from 0, of controllers={len(names)}: "
            "start as many pods as controllers"
        )
    return role, names[int(ordinal)]


def _controllers(environment: Mapping[str, str], engine: str, ranks: int, layout: Layout) -> tuple[str, ...]:
    """Return the controllers' addresses: those of ADAM_CONTROLLER, or on the hosts of their ranks."""
    if named := environment.get("ADAM_CONTROLLER", ""):
        return tuple(check_addresses(named, "ADAM_CONTROLLER").split(","))
    if engine == "RANK" and environment.get("MASTER_ADDR"):
        # The port itself belongs to the rendezvous of torchrun.
        port = number_in(environment, "MASTER_PORT", 1, 65534) + 1
        is_one_node = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
        hosts = [environment["MASTER_ADDR"]] * (ranks if is_one_node else 1)
        return _addresses(hosts, ranks, layout, port, "MASTER_ADDR")
    for variable in NODE_LISTS:
        if engine == "SLURM_PROCID" and (names := environment.get(variable)):
            port = PORT
            if environment.get("SLURM_JOB_ID"):  # two jobs may share a host
                port = PORTS[number_in(environment, "SLURM_JOB_ID", 1, 10**9 - 1) % len(PORTS)]
            hosts = _hosts_in(names, variable)
            return _addresses(hosts if hosts[1:] else hosts * ranks, ranks, layout, port, variable)
    raise ConfigError(
        f"{engine} names the role, and no variable the controller: set ADAM_CONTROLLER=tcp://HOST:{PORT}"
    )


def _addresses(hosts: Sequence[str], ranks: int, layout: Layout, port: int, variable: str) -> tuple[str, ...]:
    """Return the controllers' addresses; only the first one if the other controllers' hosts are unknown.

    Args:
        hosts: Hosts of the ranks, in order; of all ranks, if each host has one rank.
        port: Port of the first controller. Each further controller has the next port, because it may share
            the host.
        variable: Origin of the hosts, for errors.
    """
    count = layout.controllers if len(hosts) == ranks else 1
    return tuple(
        check_addresses(address_at(hosts[number % ranks], port + number), variable) for number in range(count)
    )


def _pod_address(environment: Mapping[str, str]) -> str:
    host = environment.get("POD_IP", "")
    try:
        return format_tcp_address(str(ipaddress.ip_address(host)), PORT) if host else ""
    except ValueError:
        raise ConfigError(
            f"POD_IP={host[:60]!r} is no address: set it from the field status.podIP, or unset it"
        ) from None


def address_at(host: str, port: int) -> str:
    """Return ``tcp://host:port``; an IPv6 host gets brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _hosts_in(names: str, variable: str) -> list[str]:
    """Return the hosts in a Slurm list, such as ``node[01-03,07],other`` or ``r[0-3]n[0-7]``."""
    if not _HOSTS.fullmatch(names):
        raise ConfigError(
            f"{variable}={names[:80]} is no list of hosts; set ADAM_CONTROLLER=tcp://HOST:{PORT}"
        )
    hosts: list[str] = []
    for word in re.findall(_HOST, names):
        # Texts are at even places, and the ranges between them at odd ones.
        parts = re.split(r"\[([^\]]*)\]", word)
        choices = (_numbers(part) if place % 2 else (part,) for place, part in enumerate(parts))
        found = map("".join, itertools.product(*choices))
        hosts += itertools.islice(found, MOST_RANKS - len(hosts))
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Return the numbers in ranges such as ``01-03,07``, with their leading zeros."""
    numbers: list[str] = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        more = min(int(last or first) - int(first), MOST_RANKS)
        numbers += (f"{int(first) + number:0{len(first)}}" for number in range(max(more, 0) + 1))
    return numbers


def number_in(environment: Mapping[str, str], variable: str, least: int, most: int) -> int:
    """Return the whole number in a variable.

    Raises:
        ConfigError: The variable has no whole number within the bounds.
    """
    text = environment.get(variable, "")
    if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
        found = f"={text[:40]!r}" if variable in environment else " is not set, and"
        raise ConfigError(
            f"{variable}{found} must be a whole number within {least} and {most}; the engine that "
            "starts the ranks sets it, or set ADAM_ROLE"
        )
    return int(text)
