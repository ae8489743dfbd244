"""Pure: the roles of a process of a batch job, from the variables that its engine sets.

Sources, in this order: `ADAM_ROLE`, which names one role; else the rank of the process, in the variables of
torchrun, Open MPI, PMI or Slurm; else the name of a Kubernetes pod, such as ``adam-ps-2``.

Ranks get the roles of the cluster in turn: controllers, servers, data servers, workers. With fewer ranks than
roles, a rank has several roles. Extra ranks have additional workers.

The roles of a pod listen on `POD_IP`, because the name of a pod may not resolve before the pod runs.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from adam_async.errors import ConfigError
from adam_async.run.addresses import check_addresses, controller_names
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
"""Variables of Slurm with the nodes of a step, whose ranks the processes are, and of its whole job."""

PORT = 7070
"""Default port of the controller."""

MOST_RANKS = 100_000
"""Maximum number of ranks."""

_POD = re.compile(r"(?:.*-)?(controller|ps|data|worker)-([a-z0-9-]+)")
_FIRST_HOST = re.compile(r"((?:[^,\[\]]|\[\d[^\[\]]*\])+)(?:,.*)?")
_RANGES = re.compile(r"\[(\d+)[^\[\]]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of the roles of a cluster."""

    controllers: int
    servers: int
    data_servers: int
    workers: int

    @classmethod
    def of(cls, config: Config) -> "Layout":
        """Return the layout of a configuration."""
        return cls(
            controllers=config.controllers,
            servers=config.servers,
            data_servers=config.data_servers,
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
        controllers: Addresses of all controllers, in the order of their node ids.
        pod: Address to listen on in a pod, with port `PORT`; empty elsewhere.
    """

    roles: tuple[tuple[str, str], ...]
    controllers: tuple[str, ...]
    pod: str = ""

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
    roles, engine = _roles(environment, layout)
    controllers = _controllers(environment, engine)
    if len(controllers) != layout.controllers:
        raise ConfigError(
            f"controllers={layout.controllers}, and there are addresses of {len(controllers)}: "
            f"{','.join(controllers)}; set ADAM_CONTROLLER to the addresses of all, with commas between them"
        )
    return Assignment(roles=roles, controllers=controllers, pod=_pod_address(environment))


def _roles(environment: Mapping[str, str], layout: Layout) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the roles of this process, and the variable that names them."""
    if role := environment.get("ADAM_ROLE", ""):
        return (_named(role, environment.get("ADAM_NODE", ""), layout),), "ADAM_ROLE"
    for variable, size in RANKS:
        if variable in environment:
            ranks = number_in(environment, size, 1, MOST_RANKS)
            rank = number_in(environment, variable, 0, ranks - 1)
            return _roles_of_rank(rank, ranks, layout), variable
    if pod := environment.get("POD_NAME", ""):
        return (_role_of_pod(pod, layout),), "POD_NAME"
    known = ", ".join(("ADAM_ROLE", *(variable for variable, _ in RANKS), "POD_NAME"))
    raise ConfigError(f"no variable names the role of this process: set one of {known}")


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


def _roles_of_rank(rank: int, ranks: int, layout: Layout) -> tuple[tuple[str, str], ...]:
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


def _controllers(environment: Mapping[str, str], engine: str) -> tuple[str, ...]:
    """Return the addresses of the controllers: those of ADAM_CONTROLLER, or one on the host of rank 0."""
    if named := environment.get("ADAM_CONTROLLER", ""):
        return tuple(check_addresses(named, "ADAM_CONTROLLER").split(","))
    if engine == "RANK" and environment.get("MASTER_ADDR"):
        # The port itself belongs to the rendezvous of torchrun.
        port = number_in(environment, "MASTER_PORT", 1, 65534) + 1
        return (check_addresses(address_at(environment["MASTER_ADDR"], port), "MASTER_ADDR"),)
    for variable in NODE_LISTS:
        if engine == "SLURM_PROCID" and (names := environment.get(variable)):
            return (check_addresses(address_at(_first_host(names, variable), PORT), variable),)
    raise ConfigError(
        f"{engine} names the role, and no variable the controller: set ADAM_CONTROLLER=tcp://HOST:{PORT}"
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


def _first_host(names: str, variable: str) -> str:
    """Return the first host of a list of Slurm, such as ``node[01-03,07],other`` or ``r[0-3]n[0-7]``."""
    found = _FIRST_HOST.fullmatch(names)
    first = _RANGES.sub(r"\1", found[1]) if found is not None else ""
    if not re.fullmatch(r"[\w.-]+", first):
        raise ConfigError(
            f"{variable}={names[:80]} begins with no host; set ADAM_CONTROLLER=tcp://HOST:{PORT}"
        )
    return first


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
