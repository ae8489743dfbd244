"""Pure: the resources that a run's roles ask of Ray, and the launcher's description.

Every parameter server, data server and worker is an actor in a bundle of a placement group, one group for
each kind of role. Controllers stay on their nodes, and by default ask for no CPU.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from adam_async.errors import ConfigError
from adam_async.launch.settings import LauncherSettings, Typed, check_variables_of_roles
from adam_async.option_types import SECONDS, Check

KINDS = ("ps", "data", "worker")
"""Roles in placement groups, in the order in which their groups are placed."""

ROLES = (*KINDS, "controller")

Ask = Mapping[str, float]
"""Amounts by the name of the resource, as in a bundle of Ray: ``{"CPU": 2, "ssd": 1}``; memory in bytes."""


def check_ask(role: str, name: str, amount: float) -> None:
    """Check an amount of a resource.

    Raises:
        ConfigError: The role is unknown, or the amount is not above 0, not finite, or a fraction above 1 of
            CPUs.
    """
    if role not in ROLES:
        raise ConfigError(f"--ask {role[:40]}:{name[:40]} names no role; roles are {', '.join(ROLES)}")
    if not name or not 0 < amount < math.inf or (name == "CPU" and amount > 1 and amount % 1):
        raise ConfigError(
            f"--ask {role}:{name[:40]}={amount:g} is no amount: give one above 0, and whole CPUs above 1"
        )


def read_asks(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Read texts such as ``worker:CPU=4`` or ``ps:memory=2e9``, one per resource of a kind of role.

    Raises:
        ConfigError: A text has another form, or a wrong role or amount.
    """
    asks: dict[str, dict[str, float]] = {}
    for text in texts:
        named, equals, value = text.rpartition("=")
        role, colon, name = named.partition(":")
        try:
            amount = float(value)
        except ValueError:
            amount = math.nan
        if not equals or not colon:
            raise ConfigError(
                f"--ask {text[:80]!r} has another form than ROLE:RESOURCE=AMOUNT, as worker:CPU=4"
            )
        check_ask(role, name, amount)
        asks.setdefault(role, {})[name] = amount
    return asks


def read_variables(texts: Iterable[str]) -> dict[str, str]:
    """Read texts such as ``ADAM_DATA_DIR=/data``.

    Raises:
        ConfigError: A text has no name or no ``=``, or a null.
    """
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not name.isascii() or "\0" in value:
            raise ConfigError(f"--env {text[:80]!r} has another form than NAME=VALUE")
        variables[name] = value
    return variables


def _check_asks(_: str, asks: Mapping[str, Ask]) -> None:
    for role, ask in asks.items():
        for name, amount in ask.items():
            check_ask(role, name, amount)


def _check_address(name: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    number = int(port) if port.isdecimal() and port.isascii() else 0
    if address not in ("auto", "local") and not (colon and host and 1 <= number <= 65535):
        raise ConfigError(
            f"{name} {address[:80]!r} is no Ray cluster: give auto, local, or the HOST:PORT that "
            "`ray start --head` prints; a ray:// address of a Ray client has no actors of this process"
        )


class RaySettings(LauncherSettings, frozen=True, kw_only=True):
    """Train with the roles as actors of Ray, and the driver in this process; needs the extra `ray`.

    Args:
        address: HOST:PORT of the Ray cluster; auto, the cluster of RAY_ADDRESS or of this machine; or local,
            a cluster that the launch starts on this machine.
        asks: Resources that each role of a kind asks of Ray, ROLE:RESOURCE=AMOUNT such as worker:CPU=4; roles
            are ps, data, worker and controller. By default servers and data servers ask for at most one CPU,
            and workers share the rest.
        pack: Place the workers on few nodes; by default they are spread over all.
        wait_s: Maximum wait for room on Ray, such as 60s or 5m; an autoscaler needs time to start nodes.
        environment: Variables of the roles, NAME=VALUE, such as ADAM_DATA_DIR=/data.
    """

    address: Annotated[str, Check(_check_address)] = "auto"
    asks: Annotated[Mapping[str, Ask], Check(_check_asks), Typed("ask", tuple[str, ...], (), read_asks)] = {}
    pack: bool = False
    wait_s: Annotated[float, Meta(gt=0.0), SECONDS, Typed("room_wait", float, 60.0, float, "60s")] = 60.0
    environment: Annotated[
        Mapping[str, str], Check(check_variables_of_roles), Typed("env", tuple[str, ...], (), read_variables)
    ] = {}

    @property
    def strategies(self) -> dict[str, str]:
        """The strategy of each placement group, by kind of role."""
        return {"ps": "SPREAD", "data": "SPREAD", "worker": "PACK" if self.pack else "SPREAD"}


def largest_share(cpus: Sequence[float], roles: int) -> float:
    """Return the largest number of CPUs that each role can have: a whole number, or hundredths below 1.

    Args:
        cpus: Free CPUs of each node.
        roles: Number of the roles, each on one node.
    """
    whole = [int(one) for one in cpus]
    for share in range(max(whole, default=0), 0, -1):
        if sum(one // share for one in whole) >= roles:
            return share
    hundredths = [int(one * 100) for one in cpus]
    for share in range(99, 1, -1):
        if sum(one // share for one in hundredths) >= roles:
            return share / 100
    return 0.01


def without(cpus: Iterable[float], taken: Iterable[float]) -> list[float]:
    """Return the free CPUs of each node after each role has taken its CPUs from the node with the most."""
    left = list(cpus)
    for amount in sorted(taken, reverse=True):
        most = max(range(len(left)), key=left.__getitem__)
        left[most] = max(0.0, left[most] - amount)
    return left


def full_ask(asks: Mapping[str, Ask], role: str, cpus: float) -> dict[str, float]:
    """Return a role's resources, with a number of CPUs unless the settings have one."""
    return {"CPU": cpus, **asks.get(role, {})}


def with_memory(ask: Ask, memory_bytes: int) -> dict[str, float]:
    """Return resources, with the options' memory (0: none) added if the resources name no memory."""
    return {**({"memory": memory_bytes} if memory_bytes else {}), **ask}


def actor_options(ask: Ask) -> dict[str, Any]:
    """Return the options of an actor that asks for resources."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {own[name]: amount for name, amount in ask.items() if name in own}
    return {**options, "resources": {name: amount for name, amount in ask.items() if name not in own}}


def ask_text(ask: Ask) -> str:
    """Return resources in words."""
    return ", ".join(f"{name} {amount:g}" for name, amount in ask.items())


def shortage_text(role: str, count: int, ask: Ask, free: Ask, nodes: int) -> str:
    """Return the reason that a placement group finds no room, with the remedy."""
    here = {name: free.get(name, 0.0) for name in ask}
    named = "CPU" if "CPU" in ask else next(iter(ask))
    return (
        f"room on Ray for {count} x {role}, each with {ask_text(ask)}; the {nodes} nodes have "
        f"{ask_text(here)} free: ask for less with --ask {role}:{named}=N or fewer roles, add nodes, or give "
        "an autoscaler more time with --room-wait"
    )
