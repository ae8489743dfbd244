"""Linux network namespaces for child processes, joined by a bridge: hosts with a link that can be cut.

Each host has a namespace, and a pair of virtual interfaces that leads to the bridge. This process has an
address on the bridge, too. A cut sets the outer interface of the pair down: connections stay open, and carry
nothing. Namespaces need root and `ip` of iproute2.

Every name has the id of this process, so the namespaces of a killed process can be removed later.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

SUBNET = "198.19.{}"
"""First three bytes of the addresses, within the range that RFC 2544 reserves for benchmarks."""

SUBNETS = 256
"""Number of subnets; each process has one."""

MOST_HOSTS = 250
"""Maximum number of hosts: each has an address in one /24 subnet."""

IP_S = 10.0
"""Maximum time of one call of `ip`, in seconds."""

_ADDRESS = re.compile(r"inet 198\.19\.(\d+)\.")
"""Address of an interface in one of the subnets."""

_OURS = re.compile(r"(\d+: )?(?P<name>(adam-async-|adam)(?P<pid>\d+)-[\w-]+)")
"""Line of a listing with a namespace or interface that this module made, in any process."""


class NamespaceNetwork:
    """The namespaces of this process.

    Args:
        hosts: Names of the hosts, at most `MOST_HOSTS`, of letters, digits and hyphens.

    Attributes:
        address: Address of this process on the bridge, from `make` on.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        assert len(hosts) <= MOST_HOSTS, f"{len(hosts)} hosts"
        pid = os.getpid()
        self._bridge = f"adam{pid}-br"
        self._spaces = {host: f"adam-async-{pid}-{host}" for host in hosts}
        self._links = {host: f"adam{pid}-{number}" for number, host in enumerate(hosts)}
        self._addresses: dict[str, str] = {}
        self.address = ""

    def address_of(self, host: str) -> str:
        """Return the address of a host."""
        return self._addresses[host]

    def within(self, host: str) -> tuple[str, ...]:
        """Return the words before a command that start it on a host; the process id stays the same."""
        return ("ip", "netns", "exec", self._spaces[host])

    async def cut(self, host: str) -> None:
        """Set the link of a host down. Raises OSError: the system refuses."""
        await _ip("link", "set", self._links[host], "down")

    async def heal(self, host: str) -> None:
        """Set the link of a host up again. Raises OSError: the system refuses."""
        await _ip("link", "set", self._links[host], "up")

    async def make(self) -> None:
        """Make the bridge and all hosts. Raises OSError: the system refuses."""
        await _ip("link", "add", self._bridge, "type", "bridge")
        subnet = await self._claim_subnet()
        self.address = f"{subnet}.1"
        self._addresses = {host: f"{subnet}.{number}" for number, host in enumerate(self._spaces, 2)}
        await _ip("link", "set", self._bridge, "up")
        for host, space in self._spaces.items():
            link, peer = self._links[host], ("peer", "name", "veth0", "netns", space)
            await _ip("netns", "add", space)
            await _ip("link", "add", link, "master", self._bridge, "type", "veth", *peer)
            await _ip("-n", space, "addr", "add", f"{self._addresses[host]}/24", "dev", "veth0")
            for each in ("veth0", "lo"):
                await _ip("-n", space, "link", "set", each, "up")
            await self.heal(host)

    async def _claim_subnet(self) -> str:
        """Give the bridge the address of a subnet that no other interface has; returns the subnet.

        Raises:
            OSError: All subnets are taken.
        """
        pid = os.getpid()
        for number in [(pid + each) % SUBNETS for each in range(SUBNETS)]:
            if number in await _subnets():
                continue
            subnet = SUBNET.format(number)
            address = (f"{subnet}.1/24", "dev", self._bridge)
            await _ip("addr", "add", *address)
            # If two processes claim one subnet at a time, the later one finds both addresses here.
            if (await _subnets()).count(number) == 1:
                return subnet
            await _ip("addr", "del", *address)
        raise OSError(
            f"interfaces of this machine have all {SUBNETS} subnets {SUBNET.format('N')}.0/24: end other "
            "drills"
        )


@asynccontextmanager
async def namespace_network(hosts: Sequence[str]) -> AsyncIterator[NamespaceNetwork]:
    """Make namespaces for the length of the block; the block also removes those of ended processes.

    Raises:
        OSError: The system has no `ip`, or refuses a namespace; the message has the reason.
    """
    network = NamespaceNetwork(hosts)
    await _remove(lambda pid: not _is_running(pid))
    try:
        await network.make()
        yield network
    finally:
        await _remove(lambda pid: pid == os.getpid())


async def _remove(is_meant: Callable[[int], bool]) -> None:
    """Remove the interfaces and namespaces of the processes, by process id, for which a condition holds."""
    for kind, listing in (("link", ("-o", "link", "show")), ("netns", ("netns", "list"))):
        for line in (await _ip(*listing)).splitlines():
            found = _OURS.match(line)
            if found is None or not is_meant(int(found["pid"])):
                continue
            try:
                await _ip(kind, "del", found["name"])
            except OSError as error:  # another process removes it now, or a later one will
                logger.debug("%s", error)


async def _subnets() -> list[int]:
    """Return the numbers of the subnets of all interfaces, once for each address."""
    listing = await _ip("-o", "-4", "addr", "show")
    return [int(found[1]) for found in _ADDRESS.finditer(listing)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


async def _ip(*words: str) -> str:
    """Run `ip` and return its output.

    Raises:
        OSError: `ip` is not installed, fails, or takes longer than `IP_S`.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            "ip",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C must not end it halfway
        )
    except FileNotFoundError:
        raise OSError("`ip` of iproute2 is not installed") from None
    try:
        async with asyncio.timeout(IP_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise OSError(f"`ip {' '.join(words)}` takes longer than {IP_S:g} s") from None
    if process.returncode:
        raise OSError(f"`ip {' '.join(words)}`: {errors.decode(errors='replace').strip()}")
    return output.decode(errors="replace")
