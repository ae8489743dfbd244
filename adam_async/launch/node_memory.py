"""Pure: the memory that the processes of a run ask of each host, before a role starts."""

from collections.abc import Mapping, Sequence

from adam_async.errors import ConfigError
from adam_async.launch.hosts import Host, Placement
from adam_async.run.addresses import controller_names
from adam_async.run.config import Config
from adam_async.run.role_memory import ROLES, asked_bytes, read_memory

AGENT_BYTES = 256 << 20
"""Memory of the agent of a node, and of `srun` on the first node, in bytes."""


def roles_by_host(config: Config, hosts: Sequence[Host], *, data_servers: int) -> Mapping[str, list[str]]:
    """Return the roles of the processes on each host, by its name, as placed at the start of a launch."""
    placement = Placement(hosts)
    found: dict[str, list[str]] = {host.name: [] for host in hosts}
    nodes = [("controller", node) for node in controller_names(config.controllers)]
    # The order of `ProcessCluster`, on which the places depend.
    for role, count in (("data", data_servers), ("ps", config.servers), ("worker", config.workers)):
        nodes += [(role, f"{role}-{number}") for number in range(count)]
    for role, node in nodes:
        found[placement.place(role, node).name].append(role)
    return found


def memory_of_node(config: Config, nodes: int, *, data_servers: int) -> int:
    """Return the memory of each node of a batch job, in bytes; 0 if the options name none.

    Each node has enough memory for its roles even after the loss of another node, whose roles move to the
    remaining nodes.

    Args:
        config: The run.
        nodes: Number of nodes.
        data_servers: Number of data servers of the job.

    Raises:
        ConfigError: The options name the memory of some roles only.
    """
    memory = read_memory(config.memory)
    if not memory:
        return 0
    needed = [role for role in ROLES if role != "data" or data_servers]
    if missing := [role for role in needed if role not in memory]:
        raise ConfigError(
            f"memory has no size for {', '.join(missing)}, and a job asks for the sum of all roles: add "
            f"{' '.join(f'--memory {role}=SIZE' for role in missing)}, or leave memory out"
        )
    hosts = [Host(name=str(number)) for number in range(max(1, nodes - 1))]
    found = roles_by_host(config, hosts, data_servers=data_servers)
    return AGENT_BYTES + memory["driver"] + max(asked_bytes(memory, roles) for roles in found.values())
