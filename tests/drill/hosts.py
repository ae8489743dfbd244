"""A launcher of child processes that puts parameter servers on separate hosts, whose links can be cut."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from adam_async.cluster.launcher import LocalLauncher, RoleSpec, free_addresses
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.machine import usable_cores
from tests.drill.network_namespaces import NamespaceNetwork
from transport import Identity, Network


class HostLauncher(LocalLauncher):
    """Starts parameter servers on hosts, and the other roles at the address of this process.

    Args:
        environment: Environment of this process.
        network: Hosts of the parameter servers, by node id.
    """

    def __init__(self, environment: Mapping[str, str], network: NamespaceNetwork) -> None:
        super().__init__(environment)
        self._network = network

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> ChildProcess:
        """Start a parameter server on its host, or another role. See `Launcher.start`."""
        if spec.role != "ps":
            return super().start(spec, group, on_line)
        bind = f"tcp://{self._network.address_of(spec.node)}:0"
        child = ChildProcess(
            spec.node,
            spec.words(bind=bind, threads=usable_cores()),
            orders=spec.orders,
            environment=spec.environment,
            on_line=on_line,
            within=self._network.within(spec.node),
        )
        group.create_task(child.run(), name=f"processes/{spec.node}/run")
        return child

    async def controller_addresses(
        self, nodes: Sequence[str], network: Network, driver: Identity
    ) -> list[str]:
        """Return addresses that the hosts reach. See `Launcher.controller_addresses`."""
        bind = f"tcp://{self._network.address}:0"
        return [bind] if len(nodes) == 1 else await free_addresses(network, driver, bind, count=len(nodes))


def launcher_of(environment: Mapping[str, str], network: NamespaceNetwork | None) -> LocalLauncher:
    """Return the launcher of a drill: with hosts for the servers, or without on the loopback interface."""
    return LocalLauncher(environment) if network is None else HostLauncher(environment, network)
